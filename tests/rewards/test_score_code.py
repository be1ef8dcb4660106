from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rewards_support import SHARED_DATA, children, cut_off_once

from strop.cli.main import main
from strop.errors import ConfigError
from strop.prepare import prepare
from strop.process_tree import descendants
from strop.rewards.arguments import Sample
from strop.rewards.manager import RewardManager
from strop.rewards.router import BuiltInScorer, Router, default_compute_score
from strop.rewards.sandbox import Limits
from strop.rewards.score.code import compute_score, extract_program, judge, with_opening_fence
from strop.rewards.scorer import Scorer, run
from strop.rewards.worker.pool import RewardProcess

from messages import naming
from outside import needs_sandbox

pytestmark = needs_sandbox

PATIENT = Limits(wall_s=30.0)
DOUBLE = {
    "kind": "assert",
    "tests": ["assert double(2) == 4", "assert double(3) == 6"],
    "entry_point": "double",
}


STDIN = {"kind": "stdin", "tests": [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "6"}]}


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("def double(x): return 2 * x", DOUBLE, 1.0),
        ("def double(x): return x + 2", DOUBLE, 0.0),
        ("I do not know.", DOUBLE, 0.0),
        (" \n", DOUBLE, 0.0),
        ("Like so:\n```python\nprint(int(input()) * 2)\n```", STDIN, 1.0),
        ("print(int(input()) + 2)", STDIN, 0.0),
        (
            "```python\ndef double(x): return 2 * x\n```\nFor example:\n```python\nprint(double(2))\n```",
            DOUBLE,
            1.0,
        ),
    ],
)
def test_all_tests_must_pass(response: str, truth: dict[str, Any], score: float):
    assert compute_score(response, json.dumps(truth), timeout_s=30) == score
    assert compute_score(response, truth, score=0.5, timeout_s=30) == score / 2


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1\n", "x = 1\n"),
        ("Look:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python3\r\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nor better\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n", "```python\nx = 1\n"),
        (
            "Install:\n```bash\npip install x\n```\nThen:\n```python\ndef f(): return 1\n```\n",
            "def f(): return 1\n",
        ),
        ("```python\nx = 1\n```\nRun\n```bash\npython a.py\n```\nIt prints\n```text\n1\n```\n", "x = 1\n"),
        ("```python\nprint(1)\n```\nprints\n```\n1\n```\n", "print(1)\n"),
        ("```text\nx\n```\n```\nx = 1\n```\n```c++\nint x;\n```", "x = 1\n"),
        ('```python title="a.py"\nx = 1\n```\n```{.python .numberLines}\nx = 2\n```', "x = 2\n"),
        ("Call ```f()``` as in\n```Python\nx = 1\n```\n```pycon\n>>> x\n```", "x = 1\n"),
        ("````markdown\n```python\nx = 0\n```\n````\n```py\nx = 1\n```", "x = 1\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("1. So:\n\n   ```python\n   if x:\n       y = 1\n\n   ```\n", "if x:\n    y = 1\n\n"),
        ("- ```python\n  x = 1\n  ```\n10. ```py\n    y = 1\n    ```", "y = 1\n"),
        ("\t```python\n\tif x:\n\t\ty = 1\n\t```", "if x:\n\ty = 1\n"),
        ("  ```python\n      x = 1\n y = 1\nz = 1\n  ```", "    x = 1\ny = 1\nz = 1\n"),
        ("```python\n    return x\n```", "    return x\n"),
    ],
)
def test_the_last_fenced_block_of_python_is_the_program(response: str, program: str):
    assert extract_program(response) == program


@pytest.mark.parametrize(
    ("blocks", "number"),
    [
        (["def f(): return 1\n", "print(f())\n"], 0),
        (["async def f(): return 1\n", "assert f\n"], 0),
        (["import math\n\nclass f:\n    pass\n", "class g:\n    def f(self): pass\n"], 0),
        (["f = max\n", "f == max\n", "def test_f(): f()\n"], 0),
        (["def f(): return 1\n", "def f(): return 2\n", "print(f())\n"], 1),
        (["def g(): return 1\n", "print(f)\n"], 1),
    ],
)
def test_a_block_that_uses_the_function_is_not_the_program(blocks: list[str], number: int):
    response = "\nor\n".join(f"```python\n{block}```" for block in blocks)
    assert extract_program(response, entry_point="f") == blocks[number]
    assert extract_program(response) == blocks[-1]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("<think>\n```python\nx = 1\n```\n</think>\n```\nx = 2\n```", "x = 2\n"),
        ("<think>\n```python\nx = 1\n</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>\n```python\nx = 1\n```\n</think>\nDone.", "x = 1\n"),
    ],
)
def test_blocks_after_the_thoughts_have_precedence(response: str, program: str):
    assert extract_program(response) == program


@pytest.mark.parametrize(
    ("prefix", "response", "program"),
    [
        ("```python\n", "x = 1\n```\nDone.", "x = 1\n"),
        ("So:\n```python\n", "x = 1", "x = 1\n"),  # ended by a stop string, or the end token
        ("```python", "\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n", "y = 1\n```\n", "x = 1\ny = 1\n"),
        ("```\nan example\n```\n```py\n", "x = 1\n```\n", "x = 1\n"),
        ("```python\n", "x = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```python\n", "```python\nx = 1\n```", "x = 1\n"),
        ("```python\n", "```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 0\n```\n", "x = 1\n", "x = 1\n"),
        ("<think>\n", "x = 1\n", "x = 1\n"),
        ("", "x = 1\n", "x = 1\n"),
    ],
)
def test_the_prompt_may_open_the_block(prefix: str, response: str, program: str):
    assert extract_program(with_opening_fence(prefix, response)) == program


def test_the_scorer_of_code_reads_what_the_prompt_wrote_of_the_response(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, response = "openai/openai_humaneval", "def double(x): return 2 * x\n```\nDone."
    sample = Sample(source, response, DOUBLE, named={"response_prefix": "```python\n"})
    for function in (BuiltInScorer("code", {"timeout_s": 30.0}), Router({source: {"timeout_s": 30.0}})):
        scorer = Scorer.of(function)
        assert "response_prefix" in scorer.wanted
        assert run(scorer.score(sample)).score == 1.0
        assert run(scorer.score(sample._replace(named={}))).score == 0.0
    chat = [{"role": "user", "content": "Double it."}, {"role": "assistant", "content": "```python\n"}]
    row = {"data_source": source, "prompt": chat, "response": response, "ground_truth": json.dumps(DOUBLE)}
    (tmp_path / "answers.jsonl").write_text(json.dumps(row))
    assert main(["score", str(tmp_path / "answers.jsonl")]) == 0
    assert "1.0000" in capsys.readouterr().out


def test_the_rest_of_a_function_or_all_of_it_may_follow_the_prefix():
    prefix = 'import math\n\ndef area(r):\n    """The area of a circle."""\n'
    tests = ["def check(candidate):\n    assert abs(candidate(2) - 12.56637) < 1e-4"]
    truth = {"kind": "assert", "prefix": prefix, "entry_point": "area", "tests": tests}
    assert judge("    return math.pi * r * r\n", truth, limits=PATIENT).passed
    assert judge("```python\ndef area(r):\n    return math.pi * r ** 2\n```", truth, limits=PATIENT).passed
    assert judge("    ```python\n    return math.pi * r ** 2\n    ```", truth, limits=PATIENT).passed
    assert not judge("    return math.pi * r\n", truth, limits=PATIENT).passed


@pytest.mark.parametrize(
    "truth",
    [
        "7",
        "not JSON",
        {"tests": ["assert True"]},
        {"kind": "shell", "tests": ["true"]},
        {"kind": "assert", "tests": []},
        {"kind": "assert", "tests": "assert f()"},
        {"kind": "stdin", "tests": [{"input": "1"}]},
    ],
)
def test_a_ground_truth_without_tests_is_an_error_of_the_data(truth: Any):
    with pytest.raises(ValueError):
        compute_score("x = 1", truth)


def test_both_data_sources_are_known_and_take_options():
    for source in ("openai/openai_humaneval", "google-research-datasets/mbpp"):
        assert default_compute_score(source, "def double(x): return 2 * x", json.dumps(DOUBLE)) == 1.0
        Router({source: {"timeout_s": 2.0}})
        with pytest.raises(ConfigError, match=naming("unexpected keyword")):
            Router({source: {"timeout": 2.0}})


def test_a_program_must_have_less_time_than_its_sample(tokenizer: Any):
    source = "openai/openai_humaneval"

    def make(timeout_s: float, **options: Any) -> RewardManager:
        return RewardManager(tokenizer, 0, timeout_s=timeout_s, **options)

    make(7.0).validate_sources([source, "openai/gsm8k"])
    make(5.0).validate_sources(["openai/gsm8k"])
    both = rf"'{source}': .*timeout_s=6, .*reward_model\.timeout_s=5, .* to 7 or more"
    with pytest.raises(ConfigError, match=both):
        make(5.0).validate_sources([source])
    with pytest.raises(ConfigError, match=both):
        make(5.0).validate_sources([source], has_reward_model=True)  # a rule is scored beside it
    make(5.0, scorer_kwargs={source: {"timeout_s": 3.0}}).validate_sources([source])
    with pytest.raises(ConfigError, match=naming("timeout_s=9.5", "reward_model.timeout_s=10")):
        make(10.0, scorer_kwargs={source: {"timeout_s": 9.5}}).validate_sources([source])
    tests = {"scorer": "code", "kwargs": {"timeout_s": 20.0}}
    with pytest.raises(ConfigError, match=naming("reward_model.parts.tests.kwargs", "timeout_s=20")):
        make(10.0, parts={"tests": tests}).validate_sources(["openai/gsm8k"])


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_a_run_with_code_does_not_start(tokenizer: Any):
    manager = RewardManager(tokenizer, 0)
    manager.validate_sources(["openai/gsm8k"])
    with pytest.raises(ConfigError, match=naming("google-research-datasets/mbpp", "bubblewrap")):
        manager.validate_sources(["google-research-datasets/mbpp", "openai/gsm8k"])


def test_a_scoring_process_that_is_cut_off_takes_its_sandboxes_along(monkeypatch: pytest.MonkeyPatch):
    sample = Sample("openai/openai_humaneval", "while True: pass", json.dumps(DOUBLE))
    handles: list[int] = []
    ended = threading.Event()
    cut_off_once(monkeypatch, lambda cut: cut == sample and len(handles) >= 5)
    before = children()
    with contextlib.closing(
        RewardProcess(Router({sample.data_source: {"timeout_s": 99.0}}), timeout_s=60.0)
    ) as process:
        process.start()
        (scoring,) = children() - before

        def watch() -> None:
            while not handles and not ended.wait(0.02):
                if len(found := [scoring, *descendants(scoring)]) >= 5:
                    with contextlib.suppress(ProcessLookupError):  # one that only started others
                        handles.extend([os.pidfd_open(identity) for identity in found])

        watching = threading.Thread(target=watch)
        watching.start()
        outcome = process.evaluate(sample)
        ended.set()
        watching.join()
        assert outcome.status == "timeout"
        assert len(handles) >= 5
        for handle in handles:
            assert select.select([handle], [], [], 60.0)[0], "a process outlived the scoring process"
            os.close(handle)
        assert process.evaluate(sample._replace(solution_str="def double(x): return 2 * x")).score == 1.0


Case = tuple[str, str, str]
"""Name, program and ground truth."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Case]]:
    """Canonical solutions with the ground truths as prepared, by data set and task."""
    found = {}
    for name in ("humaneval", "mbpp"):
        if not (SHARED_DATA / name).is_dir():
            pytest.skip(f"the real data is not here: {SHARED_DATA / name}")
        written = prepare(name, SHARED_DATA / name, tmp_path_factory.mktemp(name))
        rows = [row for split in written.values() for row in pq.read_table(split.path).to_pylist()]
        found[name] = {
            row["extra_info"]["task_id"]: (
                row["extra_info"]["task_id"],
                row["extra_info"]["answer"],
                row["reward_model"]["ground_truth"],
            )
            for row in rows
        }
    assert (len(found["humaneval"]), len(found["mbpp"])) == (164, 974)
    return found


def failures(cases: Iterable[Case]) -> dict[str, str]:
    verdicts = {name: judge(program, truth, limits=PATIENT) for name, program, truth in cases}
    return {name: verdict.reason for name, verdict in verdicts.items() if not verdict.passed}


@pytest.mark.fast("mbpp-special1-100")
@pytest.mark.parametrize(
    ("name", "special", "every"),
    [
        ("humaneval", (32, 38, 50), 20),  # their tests use helpers of the prompt
        ("mbpp", (126, 367, 533, 601, 927), 100),  # a function called sum; classes; a type as an argument
    ],
)
def test_a_sample_of_the_canonical_solutions_passes(cases, name: str, special: tuple[int, ...], every: int):
    found = cases[name]
    wanted = [task for task in found if task.rpartition("/")[2] in map(str, special)]
    assert len(wanted) == len(special)
    assert failures(found[task] for task in [*wanted, *list(found)[::every]]) == {}


def test_a_solution_of_another_task_fails(cases):
    first = list(cases["humaneval"].values())[:6]
    programs = [program for _, program, _ in first]
    shifted = [
        (name, program, truth)
        for (name, _, truth), program in zip(first, [*programs[1:], programs[0]], strict=True)
    ]
    assert len(failures(shifted)) == len(first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_every_tenth_canonical_solution_passes(cases, name: str):
    assert failures(list(cases[name].values())[::10]) == {}

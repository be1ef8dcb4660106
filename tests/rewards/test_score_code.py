from __future__ import annotations

import gzip
import json
import os
import select
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rewards_support import SHARED_DATA, children, real_rows

from strop.errors import ConfigError
from strop.prepare import prepare
from strop.rewards.manager import RewardManager
from strop.rewards.process_tree import descendants
from strop.rewards.router import Router, default_compute_score
from strop.rewards.sandbox import Limits, require_bubblewrap
from strop.rewards.score.code import compute_score, extract_program, judge
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Sample

from messages import naming

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt-get install bubblewrap"
)

PATIENT = Limits(wall_s=30.0)
DOUBLE = {
    "kind": "assert",
    "tests": ["assert double(2) == 4", "assert double(3) == 6"],
    "entry_point": "double",
}


def test_all_tests_must_pass():
    assert compute_score("def double(x): return 2 * x", json.dumps(DOUBLE), timeout_s=30) == 1.0
    assert compute_score("def double(x): return 2 * x", DOUBLE, score=0.5, timeout_s=30) == 0.5
    assert compute_score("def double(x): return x + 2", DOUBLE, timeout_s=30) == 0.0
    assert compute_score("I do not know.", DOUBLE, timeout_s=30) == 0.0
    assert compute_score(" \n", DOUBLE) == 0.0


def test_programs_of_standard_input_and_output():
    truth = {"kind": "stdin", "tests": [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "6"}]}
    assert (
        compute_score("Like so:\n```python\nprint(int(input()) * 2)\n```", json.dumps(truth), timeout_s=30)
        == 1.0
    )
    assert compute_score("print(int(input()) + 2)", json.dumps(truth), timeout_s=30) == 0.0


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
    ],
)
def test_the_last_fenced_block_of_python_is_the_program(response: str, program: str):
    assert extract_program(response) == program


def test_the_rest_of_a_function_or_all_of_it_may_follow_the_prefix():
    prefix = 'import math\n\ndef area(r):\n    """The area of a circle."""\n'
    tests = ["def check(candidate):\n    assert abs(candidate(2) - 12.56637) < 1e-4"]
    truth = {"kind": "assert", "prefix": prefix, "entry_point": "area", "tests": tests}
    assert judge("    return math.pi * r * r\n", truth, limits=PATIENT).passed
    assert judge("```python\ndef area(r):\n    return math.pi * r ** 2\n```", truth, limits=PATIENT).passed
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


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    require_bubblewrap.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        yield
    require_bubblewrap.cache_clear()


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_a_run_with_code_does_not_start(tokenizer: Any):
    manager = RewardManager(tokenizer, 0)
    manager.validate_sources(["openai/gsm8k"])
    with pytest.raises(ConfigError, match=naming("google-research-datasets/mbpp", "bubblewrap")):
        manager.validate_sources(["google-research-datasets/mbpp", "openai/gsm8k"])


def test_a_scoring_process_that_is_cut_off_takes_its_sandboxes_along():
    sample = Sample("openai/openai_humaneval", "while True: pass", json.dumps(DOUBLE))
    handles: list[int] = []
    before = children()
    with RewardProcess(Router({sample.data_source: {"timeout_s": 99.0}}), timeout_s=6.0) as process:
        process.start()
        (scoring,) = children() - before
        watching = threading.Thread(target=lambda: handles.extend(_handles_after(4.0, scoring)))
        watching.start()
        outcome = process.evaluate(sample)
        watching.join()
        assert outcome.status == "timeout"
        assert len(handles) >= 5
        for handle in handles:
            assert select.select([handle], [], [], 10.0)[0], "a process outlived the scoring process"
            os.close(handle)
        assert process.evaluate(sample._replace(solution_str="def double(x): return 2 * x")).score == 1.0


def _handles_after(seconds: float, scoring: int) -> list[int]:
    """Of a scoring process and everything below it."""
    time.sleep(seconds)
    return [os.pidfd_open(identity) for identity in [scoring, *descendants(scoring)]]


def humaneval() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, canonical solution and ground truth."""
    path = SHARED_DATA / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"the real data is not here: {path}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        (
            row["task_id"],
            row["canonical_solution"],
            {
                "kind": "assert",
                "prefix": row["prompt"],
                "entry_point": row["entry_point"],
                "tests": [row["test"]],
            },
        )
        for row in rows
    ]


def mbpp() -> list[tuple[str, str, dict[str, Any]]]:
    rows = real_rows("mbpp", "mbpp.jsonl")
    return [(str(row["task_id"]), row["code"], _mbpp_truth(row)) for row in rows]


def _mbpp_truth(row: dict[str, Any]) -> dict[str, Any]:
    setup = [row["test_setup_code"]] if row["test_setup_code"] else []
    entry_point = "sum" if row["code"].startswith("def sum(") else ""  # hides Python's own
    return {"kind": "assert", "tests": setup + row["test_list"], "entry_point": entry_point}


def failures(cases: list[tuple[str, str, dict[str, Any]]]) -> dict[str, str]:
    verdicts = {name: judge(program, truth, limits=PATIENT) for name, program, truth in cases}
    return {name: verdict.reason for name, verdict in verdicts.items() if not verdict.passed}


def test_a_sample_of_the_canonical_solutions_passes():
    by_name = {name: (name, program, truth) for name, program, truth in humaneval()}
    special = [f"HumanEval/{number}" for number in (32, 38, 50)]  # their tests use helpers of the prompt
    assert failures([by_name[name] for name in [*special, *list(by_name)[::20]]]) == {}
    by_name = {name: (name, program, truth) for name, program, truth in mbpp()}
    special = ["126", "367", "533", "601", "927"]  # a function called sum; classes; a type as an argument
    assert failures([by_name[name] for name in [*special, *list(by_name)[::100]]]) == {}


def test_a_solution_of_another_task_fails():
    cases = humaneval()[:6]
    programs = [program for _, program, _ in cases]
    shifted = [
        (name, program, truth)
        for (name, _, truth), program in zip(cases, [*programs[1:], programs[0]], strict=True)
    ]
    assert len(failures(shifted)) == len(cases)


@pytest.mark.slow
def test_every_canonical_solution_passes():
    cases = humaneval()
    assert len(cases) == 164
    assert failures(cases) == {}
    cases = mbpp()
    assert len(cases) == 974
    assert failures(cases) == {}


@pytest.mark.slow
def test_mbpp_as_it_is_prepared_accepts_its_own_answers_with_the_default_limits(tmp_path: Path):
    assert len(real_rows("mbpp", "mbpp.jsonl")) == 974  # or the test is skipped
    written = prepare("mbpp", SHARED_DATA / "mbpp" / "mbpp.jsonl", tmp_path)
    rows = [row for split in written.values() for row in pq.read_table(split.path).to_pylist()]
    assert len(rows) == 974
    refused = [
        row["extra_info"]["task_id"]
        for row in rows
        if not compute_score(row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
    ]
    # A limit of the clock: a busy machine may refuse the few that compute for long.
    assert len(refused) <= 14, refused

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rewards_support import SHARED_DATA, real_rows
from rich.console import Console

from strop.cli.score import add_arguments, run
from strop.errors import ConfigError, DataError, ModelError, RewardError
from strop.prepare import prepare
from strop.rewards.worker.pool import RewardPool

from messages import mentions, naming

ROWS: list[dict[str, Any]] = [
    {"data_source": "openai/gsm8k", "response": "#### 7", "reward_model": {"ground_truth": "7"}},
    {"data_source": "openai/gsm8k", "response": "7", "reward_model": {"ground_truth": "7"}},
    {"data_source": "openai/gsm8k", "response": "#### 8", "reward_model": {"ground_truth": "7"}},
    {"data_source": "strop/arithmetic", "response": "7", "reward_model": {"ground_truth": "7"}},
]


@pytest.fixture
def score(running: Callable[[], list[int]]) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command; gives its status and the lines that it printed."""

    def call(*words: object) -> tuple[int, list[str]]:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        text = io.StringIO()
        status = run(parser.parse_args([str(word) for word in words]), Console(file=text, width=100))
        return status, text.getvalue().splitlines()

    return call


@pytest.fixture(params=["parquet", "jsonl"])
def answers(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / f"answers.{request.param}", ROWS)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def cells(lines: list[str]) -> dict[str, list[str]]:
    """Rows of the printed table by data source."""
    heading = next(number for number, line in enumerate(lines) if "mean score" in line)
    rows = [line.split() for line in itertools.takewhile(str.strip, lines[heading + 2 :])]
    return {row[0]: row[1:] for row in rows}


def test_the_table_has_answers_mean_and_errors_by_source(score: Callable[..., Any], answers: Path):
    status, lines = score(answers)
    assert status == 0
    assert cells(lines) == {"openai/gsm8k": ["3", "0.3333", "0"], "strop/arithmetic": ["1", "1.0000", "0"]}
    assert cells(score(answers, "--limit", 2)[1]) == {"openai/gsm8k": ["2", "0.5000", "0"]}


def test_columns_can_be_named_and_reach_into_nested_ones(score: Callable[..., Any], tmp_path: Path):
    rows = [{"origin": "openai/gsm8k", "extra_info": {"answer": "#### 7"}, "target": 7}]
    path = write(tmp_path / "answers.jsonl", rows)
    options = ["--response-column", "extra_info.answer", "--ground-truth-column", "target"]
    expected = {"openai/gsm8k": ["1", "1.0000", "0"]}
    assert cells(score(path, *options, "--data-source-column", "origin")[1]) == expected
    assert cells(score(path, *options, "--data-source", "openai/gsm8k")[1]) == expected


def test_right_answers_are_not_scored_as_those_of_the_model(score: Callable[..., Any], tmp_path: Path):
    rows = [{"question": "1+2=", "answer": 3, "text": "3"}, {"question": "2+2=", "answer": 4, "text": "5"}]
    source = write(tmp_path / "sums.jsonl", rows)
    prepare("table", source, tmp_path / "own", prompt="question", data_source="strop/arithmetic")
    file = tmp_path / "own" / "train.parquet"
    with pytest.raises(
        DataError, match=naming("answer", "reward_model.ground_truth", "--response-column", "text")
    ):
        score(file)
    for column, mean in (("text", "0.5000"), ("answer", "1.0000")):
        _, lines = score(file, "--response-column", column)
        assert cells(lines) == {"strop/arithmetic": ["2", mean, "0"]}
        assert mentions(lines[0], f"column {column}", "column reward_model.ground_truth")
    for name in ("completion", "output", "response"):  # a model that is always right, or right answers
        table = pq.read_table(file)
        pq.write_table(table.append_column(name, pa.array(["3", "4"])), tmp_path / f"{name}.parquet")
        options = () if name == "response" else ("--response-column", name)
        if options:
            with pytest.raises(DataError, match=naming(name, "reward_model.ground_truth")):
                score(tmp_path / f"{name}.parquet")
        _, lines = score(tmp_path / f"{name}.parquet", *options)
        assert cells(lines) == {"strop/arithmetic": ["2", "1.0000", "0"]}
        assert mentions(lines[0], f"column {name}")


def test_an_answer_that_is_not_always_the_ground_truth_is_the_models(
    score: Callable[..., Any], tmp_path: Path
):
    rows = [{"answer": answer, "reward_model": {"ground_truth": "7"}} for answer in ("7", "8")]
    exact = ["--scorer", "exact"]
    assert cells(score(write(tmp_path / "a.jsonl", rows), *exact)[1]) == {"exact": ["2", "0.5000", "0"]}
    own = [{"answer": "7", "ground_truth": "7"}]  # a model that is always right, and no prepared file
    assert cells(score(write(tmp_path / "b.jsonl", own), *exact)[1]) == {"exact": ["1", "1.0000", "0"]}
    later = [{"answer": answer, "reward_model": {"ground_truth": "7"}} for answer in ("7", "7", "8")]
    limited = write(tmp_path / "l.jsonl", later), *exact, "--limit", "2"
    assert cells(score(*limited)[1]) == {"exact": ["2", "1.0000", "0"]}  # the third row shows whose they are
    both = write(tmp_path / "c.jsonl", [{"answer": "7", "solution": "8"}])
    _, lines = score(both, *exact, "--ground-truth-column", "solution")
    assert mentions(lines[0], "column answer", "column solution")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv"])
def test_numbers_in_the_columns_that_are_scored_are_text_as_in_training(
    score: Callable[..., Any], tmp_path: Path, name: str
):
    """With data.answer_key; a column that no option names keeps its numbers."""
    (tmp_path / "r.py").write_text(
        "def compute_score(response, ground_truth, answer):\n"
        "    return float(response.strip() == ground_truth) + 10 * answer\n"
    )
    rows = [
        {"response": 42, "ground_truth": 42, "answer": 1},
        {"response": 1.5, "ground_truth": 2, "answer": 2},
    ]
    path = tmp_path / name
    if name == "a.csv":
        path.write_text("response,ground_truth,answer\n42,42,1\n1.5,2,2\n")
    elif name == "a.json":
        path.write_text(json.dumps(rows))
    else:
        write(path, rows)
    reward = path, "--reward", tmp_path / "r.py"
    named = *reward, "--ground-truth-column", "ground_truth"
    assert cells(score(*named)[1]) == {"a": ["2", "15.5000", "0"]}
    assert cells(score(*reward)[1]) == {"a": ["2", "15.0000", "0"]}  # "42" is not 42


def test_the_text_of_a_csv_file_is_scored_as_it_is_written(score: Callable[..., Any], tmp_path: Path):
    (tmp_path / "a.csv").write_text("response,ground_truth\n1.50,1.50\n2,2\n")
    (tmp_path / "r.py").write_text(
        "def f(response, ground_truth):\n    return len(response + ground_truth)\n"
    )
    named = "--reward", tmp_path / "r.py", "--ground-truth-column", "ground_truth"
    assert cells(score(tmp_path / "a.csv", *named)[1]) == {"a": ["2", "5.0000", "0"]}


def test_prompts_of_any_form_are_no_error_where_no_scorer_reads_them(
    score: Callable[..., Any], tmp_path: Path
):
    for number, prompt in enumerate((["Q"], [], 3, {"text": "Q"})):
        rows = [{**row, "prompt": prompt} for row in ROWS]
        status, lines = score(write(tmp_path / f"{number}.jsonl", rows))
        assert status == 0, lines


def test_a_function_of_pictures_does_not_get_their_names(score: Callable[..., Any], tmp_path: Path):
    (tmp_path / "r.py").write_text("def count(response, images):\n    return len(images)\n")
    paths = [write(tmp_path / f"{len(own)}.jsonl", [{**ROWS[0], "images": own}]) for own in ([], ["1f2e"])]
    assert cells(score(paths[0], "--reward", tmp_path / "r.py")[1])["openai/gsm8k"][1] == "0.0000"
    with pytest.raises(ConfigError, match=naming("takes images", "strop score reads none", "1f2e")):
        score(paths[1], "--reward", tmp_path / "r.py")


def test_a_custom_function_scores_any_source(score: Callable[..., Any], tmp_path: Path):
    rewards = tmp_path / "reward.py"
    rewards.write_text(
        "def mine(solution_str, extra_info, **rest):\n"
        "    return {'score': len(solution_str) + extra_info['x']}\n"
    )
    path = write(tmp_path / "a.jsonl", [{**ROWS[3], "data_source": "own", "extra_info": {"x": 10}}])
    expected = {"own": ["1", "11.0000", "0"]}
    assert cells(score(path, "--custom", rewards, "--name", "mine")[1]) == expected
    assert cells(score(path, "--reward", f"{rewards}:mine")[1]) == expected
    assert cells(score(path, "--reward", rewards)[1]) == expected


QUESTIONS = [
    {"prompt": [{"role": "user", "content": "1+2="}], "answer": "3", "response": "3"},
    {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "response": "55"},
    {"prompt": [{"role": "user", "content": "2+3="}], "answer": "5", "response": "5"},
]
FUNCTIONS = """
import asyncio

def by_name(response, answer, messages, prompt=None):
    assert prompt is None and messages[0]["role"] == "user", (prompt, messages)
    return float(response == answer)

def trl(prompts, completions, answer, **kwargs):
    assert len(prompts) == 3 and prompts[1][0]["content"] == "2+2=" and "response" in kwargs
    return [None if a == "4" else 1.0 + (c[0]["content"] == a) for c, a in zip(completions, answer)]

open_now = 0
async def judge(response, answer):
    global open_now
    open_now += 1
    most = open_now
    for _ in range(5):
        await asyncio.sleep(0.002)  # the next request is on its way
        most = max(most, open_now)
    open_now -= 1
    return {"score": most}

def tokens(prompt, n_prompt_tokens, prompt_ids, response_ids, n_response_tokens):
    assert len(prompt_ids) == n_prompt_tokens and len(response_ids) == n_response_tokens
    return n_response_tokens + 10 * n_prompt_tokens + 100 * len(prompt)

def misspelt(response, anwser): ...
def cut(response, truncated): return float(truncated)
"""


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return write(tmp_path / "questions.jsonl", QUESTIONS)


def test_custom_functions_take_columns_and_prompts_by_name_and_whole_files(
    score: Callable[..., Any], questions: Path
):
    custom = ["--custom", questions.parent / "functions.py", "--name"]
    assert cells(score(questions, *custom, "by_name")[1]) == {"questions": ["3", "0.6667", "0"]}
    assert cells(score(questions, *custom, "trl")[1]) == {"questions": ["3", "2.0000", "0"]}  # None: no score
    assert cells(score(questions, *custom, "judge", "--concurrency", 1)[1])["questions"][1] == "1.0000"
    rows = write(questions.parent / "many.jsonl", QUESTIONS * 20)
    assert 1 < float(cells(score(rows, *custom, "judge", "--concurrency", 3)[1])["many"][1]) <= 3


def test_tokens_are_those_of_a_tokenizer_or_of_the_columns_that_strop_writes(
    score: Callable[..., Any], questions: Path, tokenizer: Any, tmp_path: Path
):
    custom = ["--custom", questions.parent / "functions.py", "--name", "tokens"]
    with pytest.raises(ConfigError, match=naming("functions.py:tokens", "'prompt'", "--tokenizer MODEL")):
        score(questions, *custom)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = None
    found = cells(score(questions, *custom, "--tokenizer", tmp_path / "model")[1])
    assert found == {"questions": ["3", f"{440 + (2 + 3 + 2) / 3:.4f}", "0"]}
    written = {"prompt": "1+2=", "prompt_ids": [5, 6], "response": "3", "response_ids": [7, 8, 1]}
    path = write(tmp_path / "samples.parquet", [{**written, "data_source": "d"}])
    assert cells(score(path, *custom)[1]) == {"d": ["1", "423.0000", "0"]}


def test_a_tokenizer_may_be_a_name_on_the_hub(
    score: Callable[..., Any],
    questions: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tokenizer.save_pretrained(tmp_path / "model")
    paths = {"org/model": tmp_path / "model"}
    monkeypatch.setattr("strop.data.hub.local_tokenizer", lambda path: paths.get(path, Path(path)))
    (tmp_path / "n.py").write_text("def f(n_response_tokens):\n    return n_response_tokens\n")
    reward = ["--reward", tmp_path / "n.py"]
    assert cells(score(questions, *reward, "--tokenizer", "org/model")[1])["questions"][0] == "3"
    with pytest.raises(ModelError, match=f"^--tokenizer={tmp_path}/none: .*OWNER/NAME"):
        score(questions, *reward, "--tokenizer", tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "found"),
    [("misspelt", ["'anwser'", "did you mean 'answer'"]), ("cut", ["'truncated'", "a column 'truncated'"])],
)
def test_a_value_that_the_file_does_not_have_is_an_error_before_scoring(
    score: Callable[..., Any], questions: Path, tmp_path: Path, name: str, found: list[str]
):
    with pytest.raises(ConfigError, match=naming(f"--reward {tmp_path}/functions.py:{name}", *found)):
        score(questions, "--custom", questions.parent / "functions.py", "--name", name)


def test_answers_that_cannot_be_scored_are_counted_and_the_first_is_printed(
    score: Callable[..., Any], tmp_path: Path
):
    rewards = tmp_path / "reward.py"
    rewards.write_text(
        "def compute_score(solution_str, **rest):\n"
        "    if solution_str == 'nan': return float('nan')\n"
        "    while solution_str == 'hang': pass\n"
        "    return float(solution_str)\n"
    )
    rows = [{**ROWS[0], "response": response} for response in ("2", "[bold]", "hang", "4")]
    status, lines = score(write(tmp_path / "a.jsonl", rows), "--custom-reward", rewards, "--timeout", 1)
    assert status == 1
    assert cells(lines) == {"openai/gsm8k": ["4", "3.0000", "2"]}
    assert "could not convert string to float: '[bold]'" in "\n".join(lines)

    status, lines = score(write(tmp_path / "b.jsonl", [{**ROWS[0], "response": "nan"}]), "--custom", rewards)
    assert status == 1
    assert cells(lines) == {"openai/gsm8k": ["1", "-", "1"]}
    assert "returned score=nan" in "\n".join(lines)


def test_an_unknown_source_is_an_error_before_anything_is_scored(
    score: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[object] = []
    monkeypatch.setattr(RewardPool, "evaluate_all", lambda self, samples: started.append(samples))
    rows = [ROWS[0], {**ROWS[0], "data_source": "own"}, {**ROWS[0], "data_source": "own"}]
    with pytest.raises(RewardError, match=naming("'own'", "2", "--scorer", "NAME", "--reward", "FILE")):
        score(write(tmp_path / "a.jsonl", rows))
    assert not started


@pytest.mark.parametrize("workers", [1, 3])
def test_one_scorer_with_options_scores_all_rows(
    score: Callable[..., Any], answers: Path, tmp_path: Path, workers: int
):
    status, lines = score(answers, "--scorer", "gsm8k", "--option", "method=flexible", "--workers", workers)
    assert status == 0
    assert cells(lines) == {"openai/gsm8k": ["3", "0.6667", "0"], "strop/arithmetic": ["1", "1.0000", "0"]}
    bare = write(tmp_path / "bare.jsonl", [{"response": "1 2 3"}, {"response": "1"}])  # no ground truth
    options = ["--option", "max_length=3", "--option", "buffer=2", "--option", "unit=words"]
    assert cells(score(bare, "--scorer", "length", *options)[1]) == {"length": ["2", "-0.5000", "0"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--option", "method=flexible"], "--option method=flexible"),
        (["--scorer", "gsm8k", "--option", "method"], "--option method: .*KEY=VALUE"),
        (["--scorer", "length", "--option", "unit=tokens"], "unit=tokens.* words or characters"),
        (["--scorer", "gsm8k", "--option", "methd=flexible"], "--scorer gsm8k: .*'methd'"),
        (["--scorer", "gsm8k", "--reward", "reward.py"], "--reward and --scorer"),
        (["--scorer", "code", "--timeout", "2"], "(?s)--timeout=2.*--option timeout_s"),
        (["--data-source", "openai/openai_humaneval", "--timeout", "2"], "humaneval.*--timeout=2"),
        (["--limit", "0"], "--limit 0"),
        (["--timeout", "0"], "--timeout 0"),
        (["--workers", "0"], "--workers 0"),
    ],
)
def test_options_that_cannot_be_used_are_errors_before_scoring(
    score: Callable[..., Any], tmp_path: Path, options: list[str], message: str
):
    with pytest.raises(ConfigError, match=message):
        score(write(tmp_path / "answers.jsonl", ROWS), *options)


@pytest.mark.usefixtures("no_bubblewrap")
@pytest.mark.parametrize("options", [[], ["--scorer", "code"]])
def test_code_without_a_sandbox_is_one_error_and_not_one_for_each_row(
    score: Callable[..., Any], tmp_path: Path, options: list[str]
):
    path = write(tmp_path / "a.jsonl", [{**ROWS[0], "data_source": "openai/openai_humaneval"}])
    with pytest.raises(ConfigError, match="bubblewrap"):
        score(path, *options)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", '{"a": 1}', [], "row 0: .*response .* a\\b.*--response"),
        ("a.jsonl", '{"response": "7"}', [], "row 0: .*reward_model.ground_truth .*--ground-truth-column"),
        ("a.jsonl", '{"response": "7", "ground_truth": 7}', [], r"row 0: .*'data_source'"),
        ("a.jsonl", '{"response": [7], "ground_truth": 7}', [], "row 0: .*response .*7"),
        ("a.jsonl", json.dumps({**ROWS[0], "reward_model": {"ground_truth": None}}), [], "row 0: .*null"),
        ("a.jsonl", json.dumps({**ROWS[0], "reward_model": {"ground_truth": math.nan}}), [], "row 0: .*NaN"),
        ("a.jsonl", '{"response": "7"}', ["--response-column", "x.y"], "reward_model"),
        (
            "a.jsonl",
            '{"response": "7"}',
            ["--response-column", "response.y", "--ground-truth-column", "response"],
            "row 0: .*'response.y'",
        ),
        (
            "a.jsonl",
            '{"response": "7", "ground_truth": "7"}\n{"response": null}',
            ["--data-source", "x"],
            "row 1: ",
        ),
        ("a.jsonl", "{\n", [], "line 1: .*several lines"),
        ("a.jsonl", "[1]\n", [], "line 1: .*object"),
        ("a.jsonl", "\n", [], "rows"),
        ("a.jsonl", None, [], "a.jsonl"),
        ("a.txt", "a,b\n", [], "a.txt.* .parquet.* .jsonl"),
        ("a.parquet", "a,b\n", [], "a.parquet"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_message(
    score: Callable[..., Any],
    tmp_path: Path,
    name: str,
    content: str | None,
    options: list[str],
    message: str,
):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        score(tmp_path / name, *options)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_pipe_is_an_error_without_waiting_for_a_writer(
    score: Callable[..., Any], tmp_path: Path, name: str
):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: expected a data file"):
        score(tmp_path / name)


def test_the_prepared_data_sets_score_1_on_their_own_answers(score: Callable[..., Any], tmp_path: Path):
    real_rows("gsm8k", "train.jsonl", "test.jsonl")  # skips where there are none
    prepare("gsm8k", SHARED_DATA / "gsm8k", tmp_path)
    for split, rows in (("train", "7473"), ("test", "1319")):
        status, lines = score(tmp_path / f"{split}.parquet", "--response-column", "extra_info.answer")
        assert status == 0
        assert cells(lines) == {"openai/gsm8k": [rows, "1.0000", "0"]}


def test_a_second_reward_is_an_error_and_replaces_none(capsys: pytest.CaptureFixture):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["FILE", "--reward", "a.py", "--reward", "a.py"]).custom == "a.py"
    with pytest.raises(SystemExit):
        parser.parse_args(["FILE", "--reward", "a.py", "--custom-reward", "b.py"])
    assert mentions(capsys.readouterr().err, "--reward", "a.py and b.py", "reward_model.parts")

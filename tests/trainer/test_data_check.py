"""``strop check`` on data files and reward options: what a run would stop at."""

from __future__ import annotations

import string
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from strop.cli.check import check_inputs, turns_table
from strop.config.load import load_config
from strop.errors import ConfigError, ModelError, RewardError
from strop.trainer.commands import train_once
from strop.trainer.ray_trainer import RayPPOTrainer

import tiny_model
from messages import Message, mentions
from runs import make_inputs, overrides


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model that can write sentences, and additions."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    tokenizer = tiny_model.build_tokenizer(string.printable)
    tiny_model.build_model(tokenizer, hidden=32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def problems(inputs, tmp_path):
    """problems(change of the training rows, *overrides): the validation files are correct."""
    rows = pq.read_table(inputs / "train.parquet").to_pylist()

    def find(change=lambda row: row, *options):
        pq.write_table(pa.Table.from_pylist([change(row) for row in rows]), tmp_path / "changed.parquet")
        files = f"data.train_files={tmp_path}/changed.parquet"
        return check_inputs(load_config(overrides(inputs, tmp_path / "run", files, *options)))[1]

    return find


def without(column):
    return lambda row: {name: value for name, value in row.items() if name != column}


def with_value(column, value, *, index=7):
    return lambda row: {**row, column: value} if row["extra_info"]["index"] == index else row


UNANSWERED = with_value("reward_model", {"style": "rule", "ground_truth": None})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (without("data_source"), "custom_reward_function.path=FILE.py"),
        (without("data_source"), "'data_source' (data.reward_fn_key)"),
        (with_value("data_source", None), "row 7, field data_source"),
        (UNANSWERED, "changed.parquet, row 7, field reward_model.ground_truth"),
        (with_value("reward_model", None), "row 7, field reward_model"),
        (lambda row: {**row, "extra_info": {"index": 1}, "uid": "1"}, "'uid'"),
        (lambda row: {**row, "data_source": 3}, "row 0, field data_source"),
    ],
)
def test_a_row_that_a_run_would_stop_at_is_one_line(problems, change, found):
    assert problems(change) == [Message(found)]


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("reward_kwargs.scorer_kwargs", "{openai/gsm8kk: {method: flexible}}", "'openai/gsm8kk'"),
        ("reward_kwargs.scorer_kwargs", "{openai/gsm8k: {methd: flexible}}", "'methd'"),
        ("parts", "{f: {scorer: format, kwargs: {patern: a}}}", "parts.f.kwargs"),
    ],
)
def test_an_option_that_a_scorer_does_not_take_is_one_line(problems, key, value, found):
    assert problems(lambda row: row, f"+reward_model.{key}={value}") == [Message(found)]


def test_good_files_have_no_problems_and_training_files_are_not_read_for_validation(problems):
    assert problems() == []
    assert problems(without("prompt"), "trainer.val_only=True") == []


CUSTOM = """
def with_truth(response, ground_truth):
    return {"score": float(response == ground_truth), "length": len(response)}

def trl(completions, answer, **columns):
    assert len(completions) == 2 and completions[0][0]["role"] == "assistant"  # a group
    return [float(one[0]["content"] == right) for one, right in zip(completions, answer)]

async def without_answer(response):
    return len(response)

def failing(response, ground_truth):
    raise ValueError("cannot read it")

def strict(response, answer):
    return float(response.split("####")[1] == answer.split("####")[1])

def of_row(response, number):
    return 1 / number

def text_and_number(response, answer):
    return float(int(response) == answer)

def boxed(response, answer):
    return float("{%s}" % answer in response)

def contained(response, answer):
    return float(answer in response)

async def judge(response):
    raise ValueError("called")

def misspelt(response, anwser):
    return 0.0

def of_numbers(response, level, number):
    return float(response == number)

def first_of(response, answers):
    return float(response == answers)

def price(response, euros):
    return float(response == euros)

def second(response, level, answer):
    return float(response == answer)

def without_else(response, answer):
    if response == answer:
        return 1.0

def penalty(response, answer):
    return 0.0 if answer in response[:99] + response[0] else -1.0

def first(response, answer):
    return float(response[0] == answer)

def distance(response, number):
    return -abs((int(response) if response else 99) - number)
"""


ANSWERED = [("0", 1), (SENTENCE := "The answer is 0.", 0), ("", 0), ("1", 0)]
BOXED = [("\\boxed{0}", 1), ("The answer is 0.\n\\boxed{0}", 1), ("", 0), ("\\boxed{1}", 0)]


@pytest.mark.parametrize(
    ("name", "answered", "what", "scores"),
    [
        ("with_truth", True, "its ground truth", ANSWERED),
        ("with_truth", False, "an empty text (no ground truth", [("", 0)]),
        ("trl", False, "its column 'answer'", ANSWERED),
        ("contained", False, "its column 'answer'", [("0", 1), (SENTENCE, 1), ("", 0), ("1", 0)]),
        ("boxed", False, "its column 'answer' as \\boxed{X}", BOXED),
        ("without_answer", True, "its ground truth", [("0", 1), (SENTENCE, 16), ("", 0), ("1", 1)]),
        ("second", False, "its column 'answer'", ANSWERED),
        ("distance", False, "its column 'number'", [("0", 0), (SENTENCE, None), ("", -99), ("1", -1)]),
    ],
)
def test_the_first_row_is_scored_as_a_model_may_answer_it(inputs, tmp_path, name, answered, what, scores):
    warnings, errors, row = check_custom(inputs, tmp_path, name, answered)
    assert errors == []
    assert row is not None
    assert (f"name={name}" in row.function, row.prompt) == (True, "0+0=")
    assert row.tried[0].what.startswith(what)
    found = [(one.response, None if one.outcome.error else one.outcome.score) for one in row.tried]
    assert found == scores
    assert [line for line in warnings if "expected more for a right answer" in line] == []
    whole = [line for line in warnings if "whole texts" in line]
    assert len(whole) == (scores == ANSWERED)
    assert [line for line in warnings if "fails for the response" in line and "ValueError" in line] == (
        [Message("name=distance", SENTENCE)] if name == "distance" else []
    )


def test_a_function_that_fails_is_named_and_not_what_follows_from_it(inputs, tmp_path):
    warnings, errors, _ = check_custom(inputs, tmp_path, "without_else", False)
    (doubt,) = (line for line in warnings if "name=without_else" in line)
    assert mentions(doubt, "fails for the response", SENTENCE, "the score is None")
    assert "whole texts" not in doubt
    assert errors == []


@pytest.mark.parametrize(
    ("name", "doubt"), [("penalty", ()), ("first", ("whole texts", "as a wrong answer"))]
)
def test_a_function_that_fails_for_an_empty_text_is_compared_with_a_wrong_answer(
    inputs, tmp_path, name, doubt
):
    warnings, _, _ = check_custom(inputs, tmp_path, name, False)
    (line,) = (line for line in warnings if f"name={name}" in line)
    assert mentions(line, "fails for the response ''", *doubt)
    assert "as an empty text" not in line
    assert "expected more" not in line
    assert ("besides" in line) == bool(doubt)


@pytest.mark.parametrize(
    ("name", "column", "reason"),
    [
        ("of_numbers", "number", ["number=0 is of type int", "data.answer_key=number"]),
        ("text_and_number", "answer", ["'answer' is text", "as a number", "float("]),
        ("first_of", "answers", ["an empty text 0"]),
        ("price", "euros", ["an empty text 0"]),
    ],
)
def test_a_truth_of_another_type_than_the_function_compares_is_named(inputs, tmp_path, name, column, reason):
    warnings, errors, _ = check_custom(inputs, tmp_path, name, False)
    doubts = [line for line in warnings if "expected more for a right answer" in line]
    assert doubts == [Message(f"name={name}", f"its column {column!r} scores 0", *reason)]
    assert errors == []


def test_a_built_in_scorer_is_tried_in_its_own_form(inputs, tmp_path):
    def tried(source, truth):
        rows = pq.read_table(inputs / "train.parquet").to_pylist()
        chat = [{"role": "user", "content": [{"type": "text", "text": "0+"}, {"type": "text", "text": "0="}]}]
        answer = {"style": "rule", "ground_truth": truth}
        rows = [{**row, "data_source": source, "reward_model": answer, "prompt": chat} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        options = [f"data.{kind}_files={tmp_path}/rows.parquet" for kind in ("train", "val")]
        warnings, errors, row, *_ = check_inputs(load_config(overrides(inputs, tmp_path / "run", *options)))
        assert errors == []
        assert not any("response" in line for line in warnings)
        assert row is None or row.prompt == "0+0="
        return row and [(one.response, one.value) for one in row.tried]

    assert tried("openai/gsm8k", "72") == [
        ("#### 72", 1), ("The answer is 72.\n#### 72", 1), ("", 0), ("#### 73", 0)
    ]  # fmt: skip
    assert tried("strop/arithmetic", "72")[0] == ("72", 1)
    assert tried("openai/gsm8k", "no number") is None


def check_custom(inputs, tmp_path, name, answered):
    return check_inputs(load_config(custom(inputs, tmp_path, name, answered)))[:3]


def custom(inputs, tmp_path, name, answered):
    rows = pq.read_table(inputs / "train.parquet").drop_columns("ability").to_pylist()
    for row in rows:
        target = row["reward_model"] if answered else row.pop("reward_model")
        row["answer"] = target["ground_truth"]
        row["number"], row["level"] = int(row["answer"]), "hard"
        row["answers"], row["euros"] = [row["answer"]], Decimal(row["answer"] + ".50")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "reward.py").write_text(CUSTOM)
    options = [f"data.{kind}_files={tmp_path}/rows.parquet" for kind in ("train", "val")]
    options += [
        f"custom_reward_function.path={tmp_path}/reward.py",
        f"custom_reward_function.name={name}",
    ]
    return overrides(inputs, tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("name", "options", "stopped", "shown"),
    [
        ("failing", [], True, "cannot read it"),
        ("failing", ["reward_model.max_error_rate=1"], False, "cannot read it"),
        ("strict", [], True, "IndexError"),
        ("of_row", [], False, "ZeroDivisionError"),  # of the first row alone
        ("judge", [], False, ""),
        ("second", [], False, "reward of the first row: '0' scores 1; "),
    ],
)
def test_train_tries_the_reward_function_before_a_model_loads(
    inputs, tmp_path, monkeypatch, caplog, name, options, stopped, shown
):
    def load(self):
        raise ModelError("a model is loaded")

    monkeypatch.setattr(RayPPOTrainer, "init_workers", load)
    config = load_config([*custom(inputs, tmp_path, name, True), *options])
    with caplog.at_level("INFO"), pytest.raises(RewardError if stopped else ModelError) as error:
        train_once(config)
    said = str(error.value) if stopped else caplog.text
    assert shown in said
    assert (name in said) == (shown != "")


def test_a_function_without_ground_truths_is_warned_of_and_one_that_fails_is_an_error(inputs, tmp_path):
    warnings, errors, _ = check_custom(inputs, tmp_path, "with_truth", False)
    assert any("ground_truth=None for every row" in line and "answer" in line for line in warnings)
    assert errors == []
    warnings, errors, scored = check_custom(inputs, tmp_path, "failing", True)
    assert [line for line in warnings if "ground_truth" in line] == []
    assert scored is None
    assert len(errors) == 1
    assert "its ground truth as the response: '0'" in errors[0]
    assert "cannot read it" in errors[0]
    _, errors, _ = check_custom(inputs, tmp_path, "misspelt", True)
    assert "did you mean 'answer'" in errors[0]


@pytest.mark.parametrize("is_check", [True, False])
def test_an_environment_that_cannot_begin_is_an_error_before_a_model_loads(inputs, tmp_path, is_check):
    (tmp_path / "own.py").write_text(
        "class Own:\n    def reset(self, extra_info):\n        self.board = extra_info['board']\n"
        "    def respond(self, response): ...\n"
    )
    config = load_config(overrides(inputs, tmp_path / "run", f"environment.path={tmp_path}/own.py:Own"))
    if is_check:
        _, (error,), *_ = check_inputs(config)
    else:
        with pytest.raises(ConfigError) as raised:
            train_once(config)
        error = str(raised.value)
    assert error.splitlines()[2].strip() == f'File "{tmp_path}/own.py", line 3, in reset'
    assert error.endswith("\nKeyError: 'board'")


def test_rows_that_neither_their_environment_nor_a_function_scores_are_an_error(problems, tmp_path):
    (tmp_path / "own.py").write_text(
        "class Game:\n    def reset(self): ...\n    def respond(self, response): ...\n"
        "class Scored(Game):\n    def reward(self): return 1\n"
    )
    paths = f"environment.path={{game: {tmp_path}/own.py:Game, scored: {tmp_path}/own.py:Scored}}"
    no_val = "data.val_files=[]"

    def of(source):  # a built-in scorer's, and one that the environment of row 7 leaves without a score
        def change(row):
            is_game = row["extra_info"]["index"] == 7
            return {
                **row,
                "environment": "game" if is_game else "scored",
                **({"data_source": source} if is_game else {}),
            }

        return change

    assert problems(of("openai/gsm8k"), paths, no_val) == []
    (error,) = problems(of("chess"), paths, no_val)
    assert mentions(error, "'game'", "has no reward", "'chess'", "custom_reward_function.path")


def test_the_turns_of_an_environment_are_shown(inputs, tmp_path):
    (tmp_path / "own.py").write_text(
        "class Own:\n    def reset(self, extra_info): return 'The board.'\n"
        "    def respond(self, response): ...\n"
    )
    key = f"environment.path={tmp_path}/own.py:Own"
    room = "data.max_prompt_length=32"  # for the text of reset
    _, errors, _, turns, _ = check_inputs(load_config(overrides(inputs, tmp_path / "run", key, room)))
    assert errors == []
    prompt, texts, history = turns
    assert texts == [
        (True, "(a turn)<end>"),
        (False, "<user>(the answer)<assistant>"),
        (True, "(the next turn)<end>"),
    ]
    assert (prompt.endswith("The board.<assistant>"), history) == (
        True,
        "history: the chat template only appends to it",
    )
    shown = Console(width=80)
    with shown.capture() as captured:
        shown.print(turns_table(prompt, [(True, "a\nb"), (False, "\nc")], history))
    assert captured.get().splitlines()[-5:] == [
        "     1  a\\n",
        "     1  b",
        "     0  \\n",
        "     0  c",
        f"        {history}",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1" * 99, ["1 of 1 prompts", "data.truncation", "data.max_prompt_length="]),
        ("2", ["reset", "user '", "TemplateError: no twos"]),
    ],
    ids=["too long", "refused"],
)
def test_a_text_of_reset_with_which_there_is_no_prompt_is_an_error(inputs, tmp_path, text, named):
    refuses = "{% if messages[-1].content.endswith('2') %}{{ raise_exception('no twos') }}{% endif %}"
    (tmp_path / "chat.jinja").write_text(refuses + tiny_model.CHAT_TEMPLATE)
    (tmp_path / "own.py").write_text(
        f"class Own:\n    def reset(self): return {text!r}\n    def respond(self, response): ...\n"
    )
    keys = (f"environment.path={tmp_path}/own.py:Own", f"data.chat_template={tmp_path / 'chat.jinja'}")
    _, errors, *_ = check_inputs(load_config(overrides(inputs, tmp_path / "run", *keys)))
    assert len(errors) == 1
    assert mentions(errors[0], *named)

"""The values that reward functions take by name, for one sample and for a batch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from strop import pictures
from strop.errors import ConfigError
from strop.protocol import DataProto
from strop.rewards.arguments import Function, Sample
from strop.rewards.custom import load_custom_reward
from strop.rewards.manager import RewardManager
from strop.rewards.scorer import Scorer, run
from strop.rewards.worker.pool import Cancelled, Feed, RewardProcess

from messages import mentions, naming

Make = Callable[..., RewardManager]


def with_columns(batch: DataProto, **columns: list[Any]) -> DataProto:
    return batch.union(DataProto.from_dict(non_tensors=columns))


CHAT = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "1+2"}]


def test_a_function_gets_the_values_that_it_names(make: Make, batch_of: Callable[..., DataProto]):
    def score(
        response, prompt, messages, ground_truth, index, level, n_prompt_tokens, n_response_tokens,
        prompt_ids, response_ids, data_source, extra_info, unknown=7,
    ):  # fmt: skip
        import json

        raise AssertionError(json.dumps(locals(), default=str))

    batch = with_columns(
        batch_of(["3", "44"], ["3", "4"]), prompt=["1+2=", "2+2="], level=[5, 6], index=[8, 9], unused=[1, 1]
    )
    output = make(score, max_error_rate=1.0)(batch)
    found = [json.loads(error.split("AssertionError: ")[1]) for error in output.errors]
    ids = [[3, 12, 4, 13], [3, 12, 4, 13]]
    assert [one.pop("prompt_ids") for one in found] == [batch.batch["prompts"][0, 1:].tolist()] * 2
    assert len(ids[0]) == 4
    assert [len(one.pop("response_ids")) for one in found] == [2, 3]  # with the end token
    assert found[1] == {
        "response": "44",
        "prompt": "2+2=",
        "messages": [{"role": "user", "content": "2+2="}],
        "ground_truth": "4",
        "index": 9,
        "level": 6,
        "n_prompt_tokens": 4,
        "n_response_tokens": 3,
        "data_source": "strop/arithmetic",
        "extra_info": {"index": 101},
        "unknown": 7,
        "json": found[1]["json"],
    }


def test_a_function_with_keywords_of_any_name_gets_what_it_names(
    make: Make, batch_of: Callable[..., DataProto]
):
    """Pictures, and turns of a sample without an environment, are passed to those that name them."""
    file = io.BytesIO()
    Image.new("RGB", (5, 4)).save(file, "PNG")
    batch = batch_of(["3", "44"], ["3", "4"])
    batch.batch["images"] = torch.tensor([[pictures.hold(file.getvalue())], [0]])

    def of_sample(response, images, n_turns, **kwargs):
        return {"score": sum(one.width for one in images), "more": len(kwargs.keys() & {"images", "turns"})}

    def of_batch(completions, images=None, n_turns=None, **kwargs):
        return [sum(one.width for one in own) + turns - 1 for own, turns in zip(images, n_turns, strict=True)]

    def of_any(response, **kwargs):
        return float("images" in kwargs)

    assert make(of_sample)(batch).parts["more"].tolist() == [0, 0]
    for function, expected in ((of_sample, [5, 0]), (of_batch, [5, 0]), (of_any, [0, 0])):
        assert make(function)(batch).token_level_scores.sum(1).tolist() == expected


def test_messages_are_passed_as_given_and_as_the_text_of_the_model(
    make: Make, batch_of: Callable[..., DataProto]
):
    def score(prompt, messages):
        return {
            "score": float(prompt == "1+2="),
            "chat": float(messages[0] == {"role": "system", "content": "s"}),
        }

    output = make(score)(with_columns(batch_of(["3"], ["3"]), prompt=[CHAT]))
    assert output.parts["rule"].tolist() == [1.0]
    assert output.parts["chat"].tolist() == [1.0]


def test_the_column_ground_truth_is_the_answer_of_rows_without_the_record(
    make: Make, batch_of: Callable[..., DataProto]
):
    batch = batch_of(["3", "4"], ["3", "3"])
    del batch.non_tensor_batch["reward_model"]
    output = make(lambda response, ground_truth: float(response == ground_truth))(
        with_columns(batch, ground_truth=["3", "3"])
    )
    assert output.parts["rule"].tolist() == [1.0, 0.0]


def test_a_function_of_trl_gets_lists_and_none_does_not_apply(make: Make, batch_of: Callable[..., DataProto]):
    def reward(completions, **columns):
        assert set(columns) >= {
            "prompts",
            "completion_ids",
            "level",
            "data_source",
            "ground_truth",
            "truncated",
        }
        assert "responses" not in columns
        right = [a == b for a, b in zip(completions, columns["ground_truth"], strict=True)]
        return [
            None if level == 0 else float(one) for one, level in zip(right, columns["level"], strict=True)
        ]

    def polite(prompts, completions):
        assert prompts == ["1+2="] * 3
        return [0.5] * len(completions)

    batch = batch_of(["3", "4", "3"], ["3"] * 3, truncated=torch_bools(3))
    batch = with_columns(batch, prompt=["1+2="] * 3, level=[1, 1, 0])
    output = make(reward)(batch)
    assert output.parts["rule"].nan_to_num(-1).tolist() == [1.0, 0.0, -1.0]
    assert output.token_level_scores.sum(1).tolist() == [1.0, 0.0, 0.0]
    assert output.errors == ["", "", ""]
    sys.modules["polite_of_a_test"] = module = type(sys)("polite_of_a_test")
    module.polite = polite
    polite.__module__ = "__main__"
    output = make(reward, parts={"polite": {"weight": 2, "scorer": "polite_of_a_test:polite"}})(batch)
    assert output.token_level_scores.sum(1).tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["response", "solution_str", "responses", "messages", "truncated"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_column_goes_before_other_names_of_the_response_in_a_function_of_trl(
    make: Make, batch_of: Callable[..., DataProto], name: str, is_named: bool
):
    """Completions that are compared with a column ``response`` are not compared with themselves."""
    taken = f"{name}, **kwargs" if is_named else "**kwargs"
    lines = f"def reward(completions, {taken}):\n    column = {name if is_named else f'kwargs[{name!r}]'}\n"
    exec(lines + "    return [float(a == b) for a, b in zip(completions, column)]", found := {})
    batch = with_columns(batch_of(["3", "4"], ["3"] * 2), prompt=["1", "2"], **{name: ["3", "3"]})
    assert make(found["reward"])(batch).parts["rule"].tolist() == [1.0, 0.0]
    asked = with_columns(batch_of(["3"], ["3"]), messages=[CHAT])  # the prompts' own column
    output = make(lambda completions, messages: ["name" not in messages[0][0]], prompt_key="messages")(asked)
    assert output.parts["rule"].tolist() == [1.0]


def torch_bools(size: int) -> Any:
    import torch

    return torch.zeros(size, dtype=torch.bool)


def test_conversational_prompts_have_completions_as_messages(make: Make, batch_of: Callable[..., DataProto]):
    def reward(prompts, completions):
        assert prompts[0] == [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2"}]
        return [float(one == [{"role": "assistant", "content": "3"}]) for one in completions]

    output = make(reward)(with_columns(batch_of(["3", "4"], ["3"] * 2), prompt=[CHAT, CHAT]))
    assert output.parts["rule"].tolist() == [1.0, 0.0]


def test_a_batch_function_that_fails_fails_all(make: Make, batch_of: Callable[..., DataProto]):
    batch = batch_of(["3", "4"], ["3"] * 2)
    output = make(lambda completions: [1.0], max_error_rate=1.0)(batch)
    assert ["returned 1 scores for 2 samples" in error for error in output.errors] == [True, True]


def test_optional_parameters_that_are_nearly_columns_or_hide_their_default_are_warnings(
    caplog: pytest.LogCaptureFixture,
):
    def trl(completions, answers=None, log_extra=None, trainer_state=None, level=None, **kwargs): ...
    def verl(solution_str, ground_truth, extra_info=None, method="strict", score=1.0): ...

    columns = ["answer", "score", "level", "extra_info"]
    for function in (trl, verl, trl):
        Function(function, "f").require(columns)
    first, second = (record.getMessage() for record in caplog.records)
    assert mentions(first, "answers=None", "did you mean 'answer'")
    assert mentions(second, "score", "default 1.0", "verl")


def test_a_batch_has_the_columns_of_all_its_rows():
    samples = [Sample("s", "3", named={"completions": "3"})]
    samples.append(Sample("s", "4", named={"completions": "4", "answer": "4"}))
    taken = Function(lambda completions, answer=None, **columns: None, "f").of_batch(samples)
    assert taken["answer"] == [None, "4"]


@pytest.mark.parametrize("found", [{0: 1.0, 1: 0.0}, {0.25, 0.5}, "10", 1.0, None])
def test_a_batch_function_returns_a_list(found: Any):
    """The keys of a dict, or the numbers of a set in some order, are no scores of the samples."""
    samples = [Sample("s", "3", named={"completions": "3"}), Sample("s", "4", named={"completions": "4"})]
    scorer = Scorer(Function(lambda completions: found, "f"))
    with pytest.raises(
        TypeError, match=naming("test_rewards_arguments.py", "2 samples", type(found).__name__)
    ):
        run(scorer.score_all(samples))


def test_what_is_bound_to_a_partial_is_no_column():
    def score(response, tolerance, **columns):
        return tolerance + ("tolerance" in columns)

    function = Function(functools.partial(score, tolerance=0.5), "f")
    sample = Sample("s", "3", named={"tolerance": 7.0, "level": 1})
    assert run(Scorer(function).score(sample)).score == 0.5
    assert function.wanted() == {"response"}


@pytest.mark.parametrize("function", [type("Accuracy", (), {"__call__": print}), lambda *everything: 1.0])
def test_what_no_value_reaches_is_no_function(function: Any):
    """A class would be made, and a function of ``*args`` be called with nothing: each score is the same."""
    with pytest.raises(ConfigError, match=naming("the place")):
        Function(function, "the place")


def test_a_decorator_decides_whether_a_function_is_async():
    @functools.wraps(lambda response: 1.0)
    async def score(**values):
        await asyncio.sleep(0)
        return 1.0

    assert Function(score, "f").is_async
    hidden = Function(lambda response: judge(response), "f")
    with pytest.raises(TypeError, match=naming("coroutine of judge", "async def")):
        run(Scorer(hidden).score(Sample("s", "3")))


def test_truncated_is_known_once_the_batch_is_complete(make: Make, batch_of: Callable[..., DataProto]):
    batch = batch_of(["3", "4"], ["3"] * 2, truncated=torch_bools(2) | (torch_bools(2) == 0))
    manager = make(lambda response, truncated: float(truncated))
    pending = manager.expect(batch)
    assert not pending.takes_samples
    pending.cancel()
    assert manager(batch).parts["rule"].tolist() == [1.0, 1.0]
    assert make(lambda response, **values: float("truncated" not in values))(batch).parts[
        "rule"
    ].tolist() == [1, 1]


def test_a_missing_argument_is_named_with_the_columns():
    function = Function(lambda response, anwser: 1.0, "compute_score")
    with pytest.raises(
        ConfigError, match=naming("'anwser'", "did you mean 'answer'", "level", "ground_truth")
    ):
        function.require(["answer", "level"])
    function = Function(lambda response, solution: 1.0, "compute_score")  # like solution_str, the response
    with pytest.raises(
        ConfigError, match=naming("'solution'", "the model's response", "'ground_truth'", "data.answer_key")
    ) as raised:
        function.require(["loesung"])
    assert "did you mean" not in str(raised.value)
    function = Function(lambda completion, answer: 1.0, "compute_score")
    with pytest.raises(ConfigError, match=naming("'completion'", "response is 'response'")):
        function.require(["answer"])
    function = Function(lambda completions, answers: 1.0, "compute_score")
    with pytest.raises(ConfigError, match=naming("'answers'", "strop docs rewards")):
        function.require(["answer"])
    Function(lambda response, answer, tokenizer=None: 1.0, "f").require(["answer"])


async def judge(response: str, seconds: float = 0.0) -> float:
    """Wait, and score; other responses misbehave."""
    import os

    if response == "block":
        time.sleep(1e6)
    if response == "exit":
        os._exit(3)
    if response == "swallow":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)
    done = vars(asyncio).setdefault("of_the_test", [])  # of the process
    if response == "hang":
        while len(done) < 4:  # the clock of the deadlines goes on when all others are scored
            await asyncio.sleep(0.01)
        loop, before = asyncio.get_running_loop(), asyncio.get_running_loop().time
        loop.time = lambda: before() + 1000.0
        await asyncio.sleep(1e6)
    done.append(response)
    if response == "raise":
        raise TimeoutError("the judge's own")
    await asyncio.sleep(seconds)
    return float(response)


@pytest.fixture
def judging(running: Any) -> Iterator[Callable[..., RewardProcess]]:
    made = []

    def build(**options: Any) -> RewardProcess:
        judge.__module__ = "__main__"  # sent by value
        made.append(RewardProcess(judge, **options))
        return made[-1]

    yield build
    for process in made:
        process.close()


def asked(*responses: str, seconds: float = 0.0) -> Feed:
    return Feed.of([Sample("d", response, named={"seconds": seconds}) for response in responses])


def test_async_functions_score_at_the_same_time_in_order(judging: Callable[..., RewardProcess]):
    process = judging(max_concurrency=10)
    process.start()
    started = time.monotonic()
    found = list(process.evaluate_all(asked(*map(str, range(40)), seconds=0.2)))
    assert [outcome.score for outcome in found] == list(range(40))
    assert 0.8 <= time.monotonic() - started < 7.5  # one after the other: 8 s
    assert process._child.process.poll() is None


def test_a_coroutine_that_hangs_is_cancelled_and_the_others_are_not(judging: Callable[..., RewardProcess]):
    process = judging(max_concurrency=4, timeout_s=60)
    process.start()
    child = process._child
    found = list(process.evaluate_all(asked("1", "hang", "2", "raise", "3", "hang")))
    assert [outcome.status for outcome in found] == [
        "scored",
        "timeout",
        "scored",
        "raised",
        "scored",
        "timeout",
    ]
    assert "the judge's own" in found[3].error
    assert process._child is child  # one process all the time


@pytest.mark.fast("exit")
@pytest.mark.parametrize("fault", ["block", "exit", "swallow"])
def test_a_coroutine_that_costs_the_process_costs_no_other_sample(
    judging: Callable[..., RewardProcess], fault: str
):
    process = judging(max_concurrency=4, timeout_s=60 if fault == "exit" else 4)
    found = list(process.evaluate_all(asked("1", "2", fault, "3", "4", "5")))
    expected = "crashed" if fault == "exit" else "timeout"
    assert [outcome.status for outcome in found] == ["scored"] * 2 + [expected] + ["scored"] * 3
    assert [outcome.score for outcome in found if not outcome.error] == [1, 2, 3, 4, 5]


def test_a_process_has_its_next_sample_before_it_answers(judging: Callable[..., RewardProcess]):
    """A sample that was only sent ahead costs nothing when the one before it ends the process."""
    process = judging(max_concurrency=1, timeout_s=60)
    taken: list[str] = []

    def noted(response: str) -> Sample:
        taken.append(response)
        return Sample("d", response, named={"seconds": 0.0})

    feed = Feed()
    for response in ("1", "exit", "2", "3"):
        feed.add(functools.partial(noted, response))
    feed.end()
    outcomes = process.evaluate_all(feed)
    assert next(outcomes).score == 1.0
    assert taken[:2] == ["1", "exit"]
    rest = list(outcomes)
    assert [outcome.status for outcome in rest] == ["crashed", "scored", "scored"]
    assert [outcome.score for outcome in rest[1:]] == [2.0, 3.0]


def test_async_functions_are_weighted_parts(
    make: Make, batch_of: Callable[..., DataProto], monkeypatch: pytest.MonkeyPatch
):
    async def judge(response):
        await asyncio.sleep(0.01)
        if response == "7":
            raise ValueError("no verdict")
        return float(response)

    async def critic(completions, ground_truth, **values):
        await asyncio.sleep(0.01)
        return [None if truth == "0" else 10.0 for truth in ground_truth]

    module = types.ModuleType("async_of_a_test")
    module.judge, module.critic = judge, critic
    judge.__module__ = critic.__module__ = "__main__"  # sent by value
    monkeypatch.setitem(sys.modules, "async_of_a_test", module)
    rule = lambda response, ground_truth: float(response == ground_truth)  # noqa: E731
    judged = {"weight": 0.5, "scorer": "async_of_a_test:judge"}
    batch = batch_of(["3", "4", "7"], ["3", "0", "7"])
    output = make(rule, parts={"judge": judged}, max_error_rate=1.0, error_score=-1.0)(batch)
    assert output.token_level_scores.sum(1).tolist() == [2.5, 2.0, -1.0]
    assert "no verdict" in output.errors[2]
    both = {"judge": judged, "critic": {"weight": 2, "scorer": "async_of_a_test:critic"}}
    output = make(rule, parts=both, max_error_rate=1.0, error_score=-1.0)(batch)  # of samples, and of a batch
    assert output.token_level_scores.sum(1).tolist() == [22.5, 2.0, -1.0]


def test_data_without_any_ground_truth_is_a_warning_if_a_function_takes_it(
    make: Make, caplog: pytest.LogCaptureFixture
):
    rows = [{"prompt": "1+2=", "answer": "3", "input_ids": [1]}, {"prompt": "1", "answer": "1"}]

    def warnings_of(function: Any, rows: list[dict[str, Any]]) -> list[str]:
        caplog.clear()
        make(function).warn_without_ground_truths(rows)
        return [record.getMessage() for record in caplog.records]

    (warning,) = warnings_of(lambda response, ground_truth: 1.0, rows)
    for word in ("ground_truth=None for every row", "data.answer_key", "answer, prompt"):
        assert word in warning
    assert len(warnings_of(lambda completions, ground_truths: [1.0], rows)) == 1
    assert warnings_of(lambda response, answer: 1.0, rows) == []
    assert warnings_of(lambda response, ground_truth: 1.0, [{"ground_truth": "3"}]) == []
    record = {"reward_model": {"style": "rule", "ground_truth": "3"}}
    assert warnings_of(lambda response, ground_truth: 1.0, [record]) == []
    (warning,) = warnings_of(lambda response, ground_truth: 1.0, [*rows, record])
    assert "2 of the first 3 rows have no ground_truth" in warning
    assert (
        len(warnings_of(lambda response, ground_truth: 1.0, [{"reward_model": {"ground_truth": None}}])) == 1
    )
    assert warnings_of(None, rows) == []  # built-in scorers have errors of their own


def test_cancelling_kills_the_process_of_coroutines(judging: Callable[..., RewardProcess]):
    process, feed = judging(timeout_s=60), asked("1", "hang", "hang")
    outcomes = process.evaluate_all(feed)
    assert next(outcomes).score == 1.0
    feed.cancel()
    with pytest.raises(Cancelled):
        next(outcomes)
    assert process._child is None


def test_modules_beside_the_file_are_found_also_in_its_process(tmp_path: Path, running: Any):
    for number in (1, 2):  # two files with helpers of one name
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper_of_a_test.py").write_text(f"VALUE = {number}.0\n")
        (folder / "random.py").write_text("raise SystemExit('shadows the standard library')\n")
        (folder / "reward.py").write_text(
            "import random\nfrom helper_of_a_test import VALUE\n"
            "def compute_score(response):\n    return VALUE\n"
        )
        function = load_custom_reward(str(folder / "reward.py"))
        assert function(response="") == number
        with contextlib.closing(RewardProcess(function)) as process:
            assert process.evaluate(Sample("d", "")).score == number


@pytest.mark.parametrize(
    "function",
    [
        lambda response, answer: float(answer in response),
        lambda completions, answer: [
            float(right in text) for text, right in zip(completions, answer, strict=True)
        ],
    ],
)
def test_an_error_of_types_names_the_columns_that_are_numbers(function: Any):
    sample = Sample("d", "5", named={"answer": 5, "completions": "5"})
    scorer = Scorer(Function(function, "the function"))
    with pytest.raises(TypeError) as caught:
        run(scorer.score_all([sample]) if scorer.is_batch else scorer.score(sample))
    assert caught.value.__notes__ == [
        "answer=5 is of type int, as in the data; data.answer_key=answer makes the column text"
    ]


def test_a_column_of_truth_values_is_named_as_one_of_numbers():
    remarks = Function(lambda response, answer: 0.0, "the function").numbers({"answer": True})
    assert remarks == [
        "answer=True is of type bool, as in the data; data.answer_key=answer makes the column text"
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, **kwargs: [1.0] * len(completions),
        lambda completions, response: [1.0] * len(completions),
        lambda completion_ids, n_turns: [1.0] * len(n_turns),
        lambda response, uid: 1.0,
    ],
)
def test_values_that_every_sample_has_are_no_answers_that_rows_lack(
    make: Make, caplog: pytest.LogCaptureFixture, function: Any
):
    with caplog.at_level("WARNING"):
        make(function).warn_without_ground_truths([{"answer": "1"}, {"answer": "2"}])
    assert not caplog.records


def test_rows_without_an_answer_are_counted(make: Make, caplog: pytest.LogCaptureFixture):
    def warnings_of(function: Any, *answers: Any) -> list[str]:
        caplog.clear()
        make(function).warn_without_ground_truths({"answer": answer, "note": None} for answer in answers)
        return [record.getMessage() for record in caplog.records]

    (warning,) = warnings_of(lambda response, answer: 1.0, "3", None, "", float("nan"), 0)
    assert "3 of the first 5 rows have no answer" in warning
    assert warnings_of(lambda response, answer: 1.0, "3", 0, False) == []
    assert warnings_of(lambda response, answer, note: 1.0, "3") == []  # of several kinds of rows
    assert warnings_of(lambda response, answer=None: 1.0, "3", None) == []
    assert warnings_of(lambda response: 1.0, None) == []
    caplog.clear()
    rows = [{"ground_truth": "3"}, {"reward_model": {"ground_truth": ""}}]
    make(lambda response, ground_truth, extra_info: 1.0).warn_without_ground_truths(rows)
    (record,) = caplog.records
    assert "1 of the first 2 rows have no ground_truth" in record.getMessage()

"""One row, scored before a run starts: a reward function that cannot work is found before a model loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from strop.config.schema.reward import RewardModelConfig
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import BATCH_NAMES, GROUND_TRUTHS, SAMPLE_NAMES, Function, row_fields
from strop.rewards.base import Example, Reward

_OF_EVERY_ROW = ("index", "uid")  # columns that strop adds
_TRIED = ("the first row", "the second row")
"""Rows on which a user's reward function must fail to be an error: one alone may be odd."""


def example_of(
    functions: Sequence[Function],
    prompts: DataProto,
    score: Callable[[str, str], Example],
    *,
    prompt_key: str,
    reward_fn_key: str,
    fails_always: bool,
    is_judged: bool,
) -> Example:
    """Score a batch of one row with what may be its right answer as the response.

    The response is the ground truth if a function takes it; else one of the columns that they name, the first
    with a score above 0; else the ground truth, or empty without one. ``score`` makes the example of what a
    text is, in words, and the text. With ``fails_always``, a failure for all texts is recorded as such; with
    ``is_judged``, a doubt about the first function.
    """
    answers, is_taken = _answers(functions, prompts, prompt_key, reward_fn_key)
    first, *others = answers
    example = score(*first)
    if example.outcome.error:
        was_ended = example.outcome.status != "raised"
        example.always_fails = fails_always and (
            was_ended or all(score(*answer).outcome.error for answer in (*others, ("", "")))
        )
    if not example.is_without_reward() or not is_taken or not is_judged:
        return example
    scored = [example]
    for answer in others:
        scored.append(score(*answer))
        if (scored[-1].outcome.score or 0.0) > 0:
            return scored[-1]
    columns = {name: column[0] for name, column in prompts.non_tensor_batch.items()}
    if found := _doubt(scored, score("", ""), functions[0].numbers(columns)):
        example.doubt = f"{functions[0].where}: {found}"
    return example


def _doubt(examples: Sequence[Example], empty: Example, remarks: Iterable[str]) -> str:
    """Return a warning if none of the right answers in ``examples`` scores more than an empty response.

    ``remarks`` say why that may be.
    """
    lowest = empty.outcome.score
    scores = {
        example.what: example.outcome.score
        for example in examples
        if not example.outcome.error and example.outcome.score is not None
    }
    if empty.outcome.error or lowest is None or not scores or max(scores.values()) > lowest:
        return ""
    found = ", ".join(f"{what} scores {score:g}" for what, score in scores.items())
    reasons = [*remarks, "a function may expect more than the bare answer, such as a tag around it"]
    return (
        f"as the response, {found}, and an empty text {lowest:g}; expected more for a right answer: "
        + "; ".join(reasons)
    )


def _answers(
    functions: Sequence[Function], prompts: DataProto, prompt_key: str, reward_fn_key: str
) -> tuple[list[tuple[str, str]], bool]:
    """Return what may be the right answer of a batch of one row, and True if the functions take it.

    Each is what it is in words, and its text; the likeliest is first.
    """
    ((_, ground_truth, _),) = row_fields(prompts, reward_fn_key)
    if ground_truth is None or not any(function.names & GROUND_TRUTHS for function in functions):
        known = {*SAMPLE_NAMES, *BATCH_NAMES, *_OF_EVERY_ROW, prompt_key, reward_fn_key}
        columns = {name: column[0] for name, column in prompts.non_tensor_batch.items() if name not in known}
        named = {
            f"its column {name!r}": str(columns[name])
            for function in functions
            for name in function.ordered
            if isinstance(columns.get(name), str | int | float)
        }
        if named:
            return list(named.items()), True
        if ground_truth is None:
            return [
                ("an empty text (the row has no ground truth, and no column that the function names)", "")
            ], False
        return [("its ground truth", str(ground_truth))], False
    return [("its ground truth", str(ground_truth))], True


def score_first_row(
    settings: RewardModelConfig, reward_fn: Reward, loader: Any, *, n: int, is_check: bool
) -> tuple[str, str]:
    """Score the first row of ``loader`` with its right answer as the response.

    Returns the result in words, and a warning; "" where there is none. ``n`` and ``is_check`` are those of
    ``Reward.score_example``.

    Raises:
        RewardError: the user's function fails for two rows, whatever the response.
    """
    failure = ""
    for row, name in zip(range(len(loader.dataset)), _TRIED, strict=False):
        prompts = loader.collate_fn([loader.dataset[row]])
        started = time.monotonic()
        found = reward_fn.score_example(
            prompts.union(DataProto.from_dict(non_tensors={"uid": [f"0-{row}"]})),
            n=n,
            has_reward_model=settings.enable,
            is_check=is_check,
        )
        if found is None:
            return "", ""
        outcome, seconds = found.outcome, time.monotonic() - started
        response = f": {found.response!r:.80}" if found.response else ""
        of_row = f"{name}, with {found.what} as the response{response}"
        if not outcome.error:
            score = "None: it does not apply" if outcome.score is None else f"{outcome.score:g}"
            parts = "".join(
                f", {name} {value:g}" if isinstance(value, float) else f", {name} {value!r:.80}"
                for name, value in outcome.parts.items()
            )
            result = f"{found.function}\nscore of {of_row}: {score}{parts} ({seconds:.2f} s)"
            return result, failure or found.doubt
        expected = "expected a number for any text, such as 0 for one that it cannot read"
        failure = failure or f"{found.function} and fails for {of_row}; {expected}\n{outcome.error.strip()}"
        if not found.always_fails:
            return "", failure
    if failure and settings.max_error_rate < 1:
        raise RewardError(failure)
    return "", failure

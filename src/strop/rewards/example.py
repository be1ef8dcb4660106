"""One row, scored before a run starts: a reward function that cannot work is found before a model loads."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from decimal import Decimal
from typing import Any

from strop.config.schema.reward import RewardModelConfig
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import (
    BATCH_NAMES,
    GROUND_TRUTHS,
    SAMPLE_NAMES,
    Function,
    row_fields,
    text_of_content,
)
from strop.rewards.base import Example, Reward, Tried
from strop.rewards.scorer import Outcome

_TRIED = ("the first row", "the second row")
"""Rows on which a user's reward function must fail to be an error: one alone may be odd."""
_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Forms of an answer that scorers look for, the bare one first."""
LONGEST_ANSWER = 80  # characters; a longer one, such as a program, stands in no sentence
_EXPECTED = "expected a number for any text, such as 0 for one that it cannot read"

Convert = Callable[[Any], Any]
"""Change of the type of a ground truth or a column."""


def example_of(
    functions: Sequence[Function],
    prompts: DataProto,
    score: Callable[[str, Convert | None], tuple[str, Outcome]],
    *,
    function: str,
    prompt_key: str,
    reward_fn_key: str,
    error_score: float,
    fails_always: bool,
    is_judged: bool,
) -> Example:
    """Score a batch of one row as a model may answer: rightly, in a sentence, not at all, and wrongly.

    The right answer is the ground truth if a function takes it; else one of the columns that they name, the
    first that scores more than an empty text; else the ground truth, or empty without one. It is written in
    the first of ``_FORMS`` that scores more than an empty text. ``score`` returns a text as the tokenizer
    writes it, and its outcome after a conversion of ground truth and columns. With ``fails_always``, a
    failure for all texts is recorded as such; with ``is_judged``, a doubt about the first function.
    """
    answers, is_taken = _answers(functions, prompts, prompt_key, reward_fn_key)
    where = functions[0].where
    score = functools.cache(score)

    def tried(what: str, text: str, convert: Convert | None = None) -> Tried:
        response, outcome = score(text, convert)
        return Tried(what, response, outcome, error_score if outcome.error else outcome.score or 0.0)

    right, form = tried(*answers[0]), _FORMS[0]
    prompt = prompts.non_tensor_batch[prompt_key][0]
    asked = prompt if isinstance(prompt, str) else text_of_content(prompt[-1].get("content"))
    example = Example([right], function, asked)
    if right.outcome.error and right.outcome.status != "raised":  # any other text may take as long
        example.always_fails = fails_always
        return example
    empty = tried("an empty text", "")
    for form, (what, answer) in itertools.product(_FORMS, answers if is_taken else ()):
        found = tried(what if form == "{}" else f"{what} as {form.format('X')}", form.format(answer))
        if found.value > empty.value:
            right, answers = found, [(what, answer)]
            break
    else:
        form = _FORMS[0]
    answer, sentence, number = answers[0][1], None, _as_number(answers[0][1])
    example.tried = [right, empty] if answer else [right]
    if answer and len(answer) <= LONGEST_ANSWER and "\n" not in answer:
        written = "" if form == "{}" else f"\n{form.format(answer)}"
        wrong = "something else" if isinstance(number, str) else str(number + 1)
        sentence = tried("a sentence", f"The answer is {answer}.{written}")
        example.tried = [right, sentence, empty, tried("a wrong answer", form.format(wrong))]
    failed = [one for one in example.tried if one.outcome.error]
    example.always_fails = fails_always and bool(empty.outcome.error) and failed == example.tried
    doubts = []
    if failed and not example.always_fails:
        text = f"{failed[0].response!r:.80}, {failed[0].in_words()}"
        doubts.append(f"{where} fails for the response {text}; {_EXPECTED}")
    # a text that fails has no score to compare with
    useless = next((one for one in (empty, *example.tried[3:]) if not one.outcome.error), None)
    is_scored = not (right.outcome.error or right.outcome.score is None) and useless is not None
    if is_scored and is_taken and is_judged:
        if right.value <= useless.value:
            doubts.append(_without_score(functions[0], prompts, tried, answers, useless))
        elif sentence is not None and not sentence.outcome.error and sentence.value <= useless.value:
            found = "response" if isinstance(number, str) else "re.findall(r'\\d+', response)"
            doubts.append(
                f"{where} compares whole texts: {right.response!r} scores {right.in_words()}, "
                f"{sentence.response!r} {sentence.in_words()}, as {useless.what}. Chat models answer in "
                "sentences, and learn nothing from equal scores: look for the answer in the response, as in "
                f"float(answer in {found}), or ask for the answer alone in the prompt"
            )
    example.doubt = "; besides, ".join(doubts)
    return example


def _without_score(
    function: Function,
    prompts: DataProto,
    tried: Callable[..., Tried],
    answers: Sequence[tuple[str, str]],
    useless: Tried,
) -> str:
    """Return a warning that no right answer scores more than a ``useless`` text, and the reason."""
    found = ", ".join(f"{what} scores {tried(what, answer).in_words()}" for what, answer in answers)
    reasons = ["a function may expect more than the bare answer, such as a tag around it"]
    for what, answer in answers:
        if tried(what, answer, _as_text).value > useless.value:
            columns = {name: column[0] for name, column in prompts.non_tensor_batch.items()}
            reasons = [f"it scores more as text: {remark}" for remark in function.numbers(columns)]
        elif tried(what, answer, _as_number).value > useless.value:
            reasons = [f"{what} is text, and scores more as a number: compare numbers, as float(...)"]
    found = f"{found}, and {useless.what} {useless.in_words()}"
    return f"{function.where}: {found}; expected more for a right answer: {'; '.join(reasons)}"


def _as_number(value: Any) -> Any:
    """Return the number that a text is; any other value as it is."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value) if isinstance(value, str) else value
    return value


def _as_text(value: Any) -> Any:
    """Return a number as text; any other value as it is."""
    return str(value) if type(value) in (int, float) else value


def _answers(
    functions: Sequence[Function], prompts: DataProto, prompt_key: str, reward_fn_key: str
) -> tuple[list[tuple[str, str]], bool]:
    """Return what may be the right answer of a batch of one row, and True if the functions take it.

    Each is what it is in words, and its text; the likeliest is first.
    """
    ((_, truth, _),) = row_fields(prompts, reward_fn_key)
    if truth is not None and any(function.names & GROUND_TRUTHS for function in functions):
        return [("its ground truth", str(truth))], True
    known = {*SAMPLE_NAMES, *BATCH_NAMES, "index", "uid", prompt_key, reward_fn_key}
    columns = {name: column[0] for name, column in prompts.non_tensor_batch.items() if name not in known}
    named = {
        f"its column {name!r}": text
        for function in functions
        for name in function.ordered
        if (text := _as_answer(columns.get(name)))
    }
    if named:
        return list(named.items()), True
    if truth is None:
        return [
            ("an empty text (no ground truth, and no answer in a column that the function names)", "")
        ], False
    return [("its ground truth", str(truth))], False


def _as_answer(value: Any) -> str:
    """Return the text of a value that may be an answer, such as a number or a list of one; else ""."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return str(value) if isinstance(value, str | int | float | Decimal | date) else ""


def score_first_row(
    settings: RewardModelConfig, reward_fn: Reward, rows: Iterable[dict[str, Any]], *, n: int, is_check: bool
) -> tuple[Example | None, str]:
    """Score the first of ``rows``, with ``input_ids`` as an array, as a model may answer; see ``example_of``.

    Returns its scores, None if nothing scores it, and a warning, or "". ``n`` and ``is_check`` are those of
    ``Reward.score_example``.

    Raises:
        RewardError: the user's function fails for two rows, whatever the response.
    """
    failure = ""
    for row, (columns, name) in enumerate(zip(rows, _TRIED, strict=False)):
        ids_BP = columns["input_ids"][None]
        tensors = {"input_ids": ids_BP, "attention_mask": ids_BP == ids_BP}
        if hasattr(columns.get("images"), "dtype"):  # digests; in a data set of text a column of the user
            tensors["images"] = columns["images"][None]
        objects = {key: [value] for key, value in columns.items() if key not in tensors}
        found = reward_fn.score_example(
            DataProto.from_dict(tensors, {**objects, "uid": [f"0-{row}"]}),
            n=n,
            has_reward_model=settings.enable,
            is_check=is_check,
        )
        if found is None:
            return None, ""
        if not found.always_fails:
            return found, failure or found.doubt
        right = found.tried[0]
        response = f": {right.response!r:.80}" if right.response else ""
        failure = failure or (
            f"{found.function} and fails for {name}, with {right.what} as the response{response}; {_EXPECTED}"
            f"\n{right.outcome.error.strip()}"
        )
    if failure and settings.max_error_rate < 1:
        raise RewardError(failure)
    return None, failure

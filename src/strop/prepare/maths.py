r"""Mathematics with worked solutions: GSM8K and MATH.

GSM8K (Cobbe et al. 2021) has grade-school word problems whose answer ends in ``#### number``. MATH (Hendrycks
et al. 2021) has competition problems whose solution ends in ``\boxed{answer}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.errors import DataError
from strop.prepare.source import Split, make_row, read_splits, text_field
from strop.rewards.score.math import last_boxed

GSM8K = "openai/gsm8k"
MATH = "lighteval/MATH"
GSM8K_INSTRUCTION = 'Think step by step, then give the final answer as a plain number after "####".'
MATH_INSTRUCTION = r"Reason step by step and put the final answer in \boxed{}."

_MATH_ON_HUB = "DigitalLearningGmbH/MATH-lighteval"  # the same data; lighteval/MATH is no longer on the hub
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def gsm8k_splits(
    source: str | Path | None = None,
    *,
    instruction: str = GSM8K_INSTRUCTION,
    cache_dir: str | Path | None = None,
) -> dict[str, Split]:
    """Return every split of ``source`` (default: the hub). Records need ``question`` and ``answer``."""
    convert = _converter(GSM8K, instruction, ("question", "answer"), final_number)
    return read_splits(source or GSM8K, convert, hub_config="main", cache_dir=cache_dir)


def math_splits(
    source: str | Path | None = None,
    *,
    instruction: str = MATH_INSTRUCTION,
    cache_dir: str | Path | None = None,
) -> dict[str, Split]:
    """Return every split of ``source`` (default: the hub). Records need ``problem`` and ``solution``."""
    convert = _converter(MATH, instruction, ("problem", "solution"), boxed_answer, extra=("level", "type"))
    return read_splits(source or _MATH_ON_HUB, convert, cache_dir=cache_dir)


def _converter(
    data_source: str,
    instruction: str,
    fields: tuple[str, str],
    find_answer: Callable[[str], str],
    extra: tuple[str, ...] = (),
) -> Callable[[Any, str, int], dict[str, Any]]:
    """Return the function that makes a row of a record; ``fields`` are those of problem and solution."""

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        question, answer = (text_field(record, name) for name in fields)
        return make_row(
            data_source=data_source,
            prompt=f"{question}\n{instruction}",
            ability="math",
            ground_truth=find_answer(answer),
            split=split,
            index=index,
            question=question,
            answer=answer,
            **{name: record.get(name) for name in extra},
        )

    return convert


def final_number(answer: str) -> str:
    """Return the number after the last ``####``, without ``$``, thousands separators and a trailing ``.``"""
    _, marker, tail = answer.rpartition("####")
    if not marker:
        raise DataError('field answer: there is no "####"')
    number = tail.strip().replace(",", "").replace("$", "").removesuffix(".")
    if not _NUMBER.fullmatch(number):
        raise DataError(f'field answer: expected a number after "####", found {tail.strip()!r}')
    return number


def boxed_answer(solution: str) -> str:
    r"""Return the answer in the last ``\boxed{...}``, as the scorer reads it."""
    # by the scorer's function: a ground truth that it would not find could never be matched
    answer = last_boxed(solution)
    if answer is None:
        raise DataError(
            r"field solution: expected an answer in a last \boxed{...}; "
            "it is missing, empty, not closed, or in another box"
        )
    return answer

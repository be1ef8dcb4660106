"""GSM8K (Cobbe et al. 2021): grade-school word problems whose answer ends in ``#### number``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from strop.errors import DataError
from strop.prepare.source import Split, make_row, read_source, text_field
from strop.rewards.score.math import closing_brace

GSM8K = "openai/gsm8k"

GSM8K_INSTRUCTION = 'Think step by step, then give the final answer as a plain number after "####".'


_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def gsm8k_splits(
    source: str | Path | None = None,
    *,
    instruction: str = GSM8K_INSTRUCTION,
    cache_dir: str | Path | None = None,
) -> dict[str, Split]:
    """Every split of ``source`` (default: the hub). Records need ``question`` and ``answer``."""

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        question, answer = text_field(record, "question"), text_field(record, "answer")
        return make_row(
            data_source=GSM8K,
            prompt=f"{question}\n{instruction}",
            ability="math",
            ground_truth=final_number(answer),
            split=split,
            index=index,
            question=question,
            answer=answer,
        )

    records = read_source(source or GSM8K, hub_config="main", cache_dir=cache_dir)
    return {split: Split(found, convert) for split, found in records.items()}


def final_number(answer: str) -> str:
    """The number after the last ``####``, without ``$``, thousands separators and a trailing ``.``"""
    _, marker, tail = answer.rpartition("####")
    if not marker:
        raise DataError('field answer: there is no "####"')
    number = tail.strip().replace(",", "").replace("$", "").removesuffix(".")
    if not _NUMBER.fullmatch(number):
        raise DataError(f'field answer: expected a number after "####", found {tail.strip()!r}')
    return number


# MATH (Hendrycks et al. 2021): competition problems whose solution ends in ``\boxed{answer}``.

MATH = "lighteval/MATH"

_HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"  # the same data; lighteval/MATH is no longer on the hub

MATH_INSTRUCTION = r"Reason step by step and put the final answer in \boxed{}."


def math_splits(
    source: str | Path | None = None,
    *,
    instruction: str = MATH_INSTRUCTION,
    cache_dir: str | Path | None = None,
) -> dict[str, Split]:
    """Every split of ``source`` (default: the hub). Records need ``problem`` and ``solution``."""

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        problem, solution = text_field(record, "problem"), text_field(record, "solution")
        return make_row(
            data_source=MATH,
            prompt=f"{problem}\n{instruction}",
            ability="math",
            ground_truth=boxed_answer(solution),
            split=split,
            index=index,
            question=problem,
            answer=solution,
            level=record.get("level"),
            type=record.get("type"),
        )

    records = read_source(source or _HUB_NAME, cache_dir=cache_dir)
    return {split: Split(found, convert) for split, found in records.items()}


def boxed_answer(solution: str) -> str:
    r"""The content of the last ``\boxed{...}`` (or ``\fbox{...}``) with balanced braces; ``\boxed 5`` gives
    ``5``.
    """
    command, start = max(
        ((name, solution.rfind(name)) for name in ("\\boxed", "\\fbox")), key=lambda found: found[1]
    )
    if start < 0:
        raise DataError(r"field solution: there is no \boxed{...}")
    rest = solution[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        # TeX takes the next token alone; the data set means all that stands before the formula's end.
        answer = rest.split("$", 1)[0].strip()
    else:
        end = closing_brace(rest)
        if end is None:
            raise DataError(r"field solution: the braces of the last \boxed do not balance")
        answer = rest[1:end].strip()
    if not answer:
        raise DataError(r"field solution: the last \boxed is empty")
    return answer

"""Generated additions: small enough to be learned from random weights in minutes, with held-out pairs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from strop.errors import DataError
from strop.prepare.source import Split, make_row

DATA_SOURCE = "strop/arithmetic"
_MAX_ROWS = 5_000_000  # they are made in memory
_LARGEST_OPERAND = 10**9  # numbers of pairs are 64 bits


def splits(
    source: str | Path | None = None,
    *,
    min_operand: int = 0,
    max_operand: int = 9,
    held_out: float = 0.2,
    train_size: int | None = None,
    seed: int = 1,
    question: str = "{a}+{b}=",
) -> dict[str, Split]:
    """Return ``question`` for ordered pairs of operands from ``min_operand`` to ``max_operand``, inclusive.

    ``held_out`` pairs form the split ``test``: a fraction if below 1, else a count; 0 makes no test split.
    The others, or ``train_size`` of them, form ``train``. No pair is in both (its mirror image b+a may be).
    The order and the choice depend on ``seed`` alone.
    """
    if source is not None:
        raise DataError("arithmetic is generated: it takes no source")
    if "{a}" not in question or "{b}" not in question:
        raise DataError(
            f"question={question!r}: expected a text with {{a}} and {{b}}, like 'What is {{a}}+{{b}}?'"
        )
    if not 0 <= min_operand <= max_operand <= _LARGEST_OPERAND:
        raise DataError(
            f"expected 0 <= min_operand <= max_operand <= {_LARGEST_OPERAND}, "
            f"found min_operand={min_operand}, max_operand={max_operand}"
        )
    operands = max_operand - min_operand + 1
    pairs = operands * operands
    if seed < 0:
        raise DataError(f"seed={seed}: expected a number of at least 0")
    if not 0 <= held_out <= pairs or (held_out >= 1 and held_out != int(held_out)):
        raise DataError(
            f"held_out={held_out}: expected a fraction below 1 or a whole number of the {pairs} pairs"
        )
    test_rows = int(held_out) if held_out >= 1 else round(held_out * pairs)
    train_rows = pairs - test_rows if train_size is None else train_size
    if train_rows < 1 or train_rows + test_rows > pairs:
        raise DataError(
            f"{operands} operands give {pairs} pairs: too few for {test_rows} held out "
            f"and {max(train_rows, 1)} to train on"
        )
    if train_rows + test_rows > _MAX_ROWS:
        raise DataError(
            f"{train_rows + test_rows} rows exceed {_MAX_ROWS}; set train_size and a count for held_out"
        )
    # numbers of pairs: a million operands have 10^12 pairs, which no list holds
    chosen = np.random.default_rng(seed).choice(pairs, train_rows + test_rows, replace=False)
    left, right = np.divmod(chosen, operands)
    terms = list(zip((left + min_operand).tolist(), (right + min_operand).tolist(), strict=True))
    row = partial(_row, question)
    made = {"train": Split(terms[test_rows:], row)}
    return made | {"test": Split(terms[:test_rows], row)} if test_rows else made


def _row(question: str, terms: tuple[int, int], split: str, index: int) -> dict[str, Any]:
    a, b = terms
    return make_row(
        data_source=DATA_SOURCE,
        # not format, which other braces in a question would break
        prompt=question.replace("{a}", str(a)).replace("{b}", str(b)),
        ability="math",
        ground_truth=str(a + b),
        split=split,
        index=index,
        a=a,
        b=b,
    )

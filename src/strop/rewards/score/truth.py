"""The ground truth of a row as the text that an answer is compared with."""

from __future__ import annotations

import re
from typing import Any

_PADDED = re.compile(r"\A(-?)0+(?=[0-9])")


def text_of_truth(ground_truth: Any) -> str:
    """Return the text of a ground truth, of a list with one member that member's.

    Raises ``ValueError`` for other lists and for records, whose text would equal no answer.
    """
    if isinstance(ground_truth, list | tuple) and len(ground_truth) == 1:
        return text_of_truth(ground_truth[0])
    if isinstance(ground_truth, list | tuple | dict):
        raise ValueError(
            f"the ground truth is a {type(ground_truth).__name__}, {ground_truth!s:.80}: expected one "
            "answer; a reward function of your own can compare with several"
        )
    return str(ground_truth)


def unpadded(found: str, expected: str) -> tuple[str, str]:
    """Return both without leading zeros where the ground truth has some, as in AIME's ``033``."""
    if _PADDED.match(expected):
        return _PADDED.sub(r"\1", found), _PADDED.sub(r"\1", expected)
    return found, expected

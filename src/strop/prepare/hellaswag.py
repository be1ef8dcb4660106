"""HellaSwag (Zellers et al. 2019): which of four endings follows a context."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from strop.errors import DataError
from strop.prepare.source import Split, make_row, read_source, text_field

logger = logging.getLogger("strop.data")

DATA_SOURCE = "Rowan/hellaswag"
INSTRUCTION = 'Which ending is the most plausible? Finish with "Answer: " and its letter.'
LETTERS = "ABCD"

# WikiHow articles contain marks such as [title] and [step].
_TITLE = re.compile(r"\s*\[title\]\s*")
_MARK = re.compile(r"\[\w+\]")


def splits(
    source: str | Path | None = None, *, instruction: str = INSTRUCTION, cache_dir: str | Path | None = None
) -> dict[str, Split]:
    """Return every split of ``source`` (default: the hub) that has labels.

    Records need ``ctx``, ``endings`` and ``label``; ``activity_label`` goes before the context. Skips a split
    without any label, with a warning: labels of the test split are not public.
    """

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        context = readable(text_field(record, "ctx"))
        endings = [readable(ending) for ending in _endings(record)]
        letter = LETTERS[_label(record)]
        choices = "\n".join(f"{name}. {ending}" for name, ending in zip(LETTERS, endings, strict=True))
        activity = record.get("activity_label") or ""
        return make_row(
            data_source=DATA_SOURCE,
            prompt=f"{activity}: {context}\n\n{choices}\n\n{instruction}".removeprefix(": "),
            ability="commonsense",
            ground_truth=letter,
            split=split,
            index=index,
            answer=endings[LETTERS.index(letter)],
            type=record.get("split_type") or "",
        )

    labelled = {}
    for split, found in read_source(source or DATA_SOURCE, cache_dir=cache_dir).items():
        if found and all(record.get("label") in (None, "") for record in found):
            logger.warning("split %s: skipped, because none of its %d records has a label", split, len(found))
        else:
            labelled[split] = Split(found, convert)
    if not labelled:
        raise DataError(f"source {source or DATA_SOURCE}: no record has a label")
    return labelled


def readable(text: str) -> str:
    """Return the text without WikiHow's marks: ``[title]`` ends a sentence, others are removed."""
    return " ".join(_MARK.sub(" ", _TITLE.sub(". ", text.strip())).split()).removeprefix(". ")


def _endings(record: Any) -> list[str]:
    endings = record.get("endings")
    is_list = isinstance(endings, list) and len(endings) == len(LETTERS)
    if not is_list or not all(isinstance(ending, str) and ending.strip() for ending in endings):
        raise DataError(f"field endings: expected a list of {len(LETTERS)} texts, found {endings!r:.60}")
    return endings


def _label(record: Any) -> int:
    label = str(record.get("label")).strip()
    if label not in ("0", "1", "2", "3"):
        raise DataError(f"field label: expected 0, 1, 2 or 3, found {record.get('label')!r:.20}")
    return int(label)

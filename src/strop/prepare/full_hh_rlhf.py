r"""Helpful and harmless dialogues (Bai et al. 2022): two answers to a prompt, of which people chose one.

A raw transcript is ``\n\nHuman: ...\n\nAssistant: ...`` and so on; its last turn is the answer. Error texts
do not quote the transcripts, which are offensive in places.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from strop.errors import DataError
from strop.prepare.source import Split, make_row, read_splits

DATA_SOURCE = "Dahoas/full-hh-rlhf"
SPLIT_KINDS = ("sft", "rm", "rl")

_ANSWER = "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Pair(NamedTuple):
    """A prompt as chat messages, and two answers to it."""

    prompt: list[dict[str, str]]
    chosen: str
    rejected: str


def splits(
    source: str | Path | None = None, *, split_kind: str = "rl", cache_dir: str | Path | None = None
) -> dict[str, Split]:
    """Return every split of ``source`` (default: the hub) as rows for ``sft``, ``rm`` or ``rl``.

    Records need ``chosen`` and ``rejected``: two transcripts, or two answers and a ``prompt``.
    """
    if split_kind not in SPLIT_KINDS:
        raise DataError(f"split_kind={split_kind!r}: expected one of {', '.join(SPLIT_KINDS)}")

    def convert(record: Any, split: str, index: int) -> dict[str, Any]:
        return _row(split_kind, read_pair(record), split, index)

    return read_splits(source or DATA_SOURCE, convert, cache_dir=cache_dir)


def read_pair(record: Any) -> Pair:
    """Return the pair of a record; raise :class:`DataError` if it has none."""
    chosen, rejected = _text(record, "chosen"), _text(record, "rejected")
    if record.get("prompt") is not None:
        prompt = _prompt_field(_text(record, "prompt"))
    else:
        (prompt, chosen), (other, rejected) = _cut(chosen, "chosen"), _cut(rejected, "rejected")
        if prompt != other:
            raise DataError("the prompts of chosen and rejected differ")
    chosen, rejected = chosen.strip(), rejected.strip()
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise DataError(f"the answer of {name} is empty")
    if chosen == rejected:
        raise DataError("the answers of chosen and rejected are the same")
    return Pair(dialogue(prompt), chosen, rejected)


def dialogue(transcript: str) -> list[dict[str, str]]:
    """Return the turns as chat messages.

    Raises :class:`DataError` unless user and assistant alternate, with the user at both ends.
    """
    # the group in the pattern: turns alternate between speaker and text
    head, *turns = _TURN.split(transcript)
    if head.strip() or not turns:
        raise DataError("the prompt does not start with a turn of the human")
    roles = [_ROLES[speaker] for speaker in turns[::2]]
    if roles[-1] != "user":
        raise DataError("the prompt does not end with a turn of the human")
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise DataError("the turns of the prompt do not alternate")
    texts = [text.strip() for text in turns[1::2]]
    if not all(texts):
        raise DataError("a turn of the prompt is empty")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def _row(kind: str, pair: Pair, split: str, index: int) -> dict[str, Any]:
    row = make_row(
        data_source=DATA_SOURCE,
        prompt=pair.prompt,
        ability="alignment",
        ground_truth=pair.chosen,
        split=split,
        index=index,
        style="model",
    )
    if kind == "rl":
        return row
    answers = (
        {"response": pair.chosen} if kind == "sft" else {"chosen": pair.chosen, "rejected": pair.rejected}
    )
    return {name: row[name] for name in ("data_source", "prompt", "extra_info")} | answers


def _cut(transcript: str, name: str) -> tuple[str, str]:
    # the last turn: earlier ones of the assistant belong to the prompt
    prompt, found, answer = transcript.rpartition(_ANSWER)
    if not found:
        raise DataError(f"the transcript of {name} has no turn of the assistant")
    return prompt, answer


def _prompt_field(prompt: str) -> str:
    r"""Return a prompt without a final ``\n\nAssistant:``, and with the initial white space restored."""
    return "\n\n" + prompt.strip().removesuffix(_ANSWER)


def _text(record: Any, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise DataError(f"field {name}: expected text, found {type(value).__name__}")
    return value

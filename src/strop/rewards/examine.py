"""Samples with their scores, as text to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.rewards.records import Sample


def describe_sample(
    sample: Sample, *, prompt: str, score: float, parts: Mapping[str, float], error: str
) -> str:
    """Source, prompt, response, ground truth and score, one below the other."""
    named = "".join(f", {name} {value:g}" for name, value in parts.items())
    lines = [
        _field("data source", sample.data_source),
        _field("prompt", prompt),
        _field("response", sample.solution_str),
        _field("ground truth", sample.ground_truth),
        _field("score", f"{score:g}{named}"),
    ]
    if error:
        lines.append(_field("error", error.strip()))
    return "\n".join(lines)


def _field(name: str, value: Any) -> str:
    text = str(value)
    return f"[{name}]\n{text}" if "\n" in text else f"[{name}] {text}"

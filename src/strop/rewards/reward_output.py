"""The scores of a batch as tensors, metrics and text. B samples, T padded response tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.config.reward_parts import RULE
from strop.rewards.worker.records import Outcome, Sample


@dataclass(frozen=True)
class RewardOutput:
    """The scores of a batch and their parts."""

    token_level_scores: Tensor
    """float32 [B, T]: the sample's score at its last response token, 0 elsewhere."""
    parts: dict[str, Tensor]
    """float32 [B] by name: ``rule``, ``reward_model``, the names of ``reward_model.parts``, and further
    numbers of a scorer. NaN where a part does not apply to a sample."""
    metrics: dict[str, float]
    """See :func:`score_metrics`."""
    responses: list[str]
    """The decoded responses [B]."""
    errors: list[str]
    """Why a sample could not be scored [B]; "" for one that could."""


def rule_parts(
    outcomes: Sequence[Outcome | None], has_rule: Sequence[bool], *, error_score: float
) -> dict[str, Tensor]:
    """Return ``rule`` and the scorers' other parts [B], NaN for samples without; empty without outcomes.

    A sample that could not be scored has ``rule`` = ``error_score`` and no other parts.
    """
    columns: dict[str, list[float]] = {}
    for row, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        rule = {RULE: outcome.score} if has_rule[row] else {}
        named = {RULE: error_score} if outcome.error else {**rule, **outcome.parts}
        for name, value in named.items():
            columns.setdefault(name, [math.nan] * len(outcomes))[row] = value
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}


def at_last_token(scores_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Put each score at the last position with mask 1, or at 0 where there is none; float32 [B, T]."""
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = (positions_T * mask_BT.bool()).amax(dim=1)
    scores_BT = torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
    return scores_BT.scatter_(1, last_B[:, None], scores_B.float().to(mask_BT.device)[:, None])


def score_metrics(
    outcomes: Sequence[Outcome | None],
    sources: Sequence[str],
    parts: Mapping[str, Tensor],
    contributions: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return the metrics of a batch's scores, by part and by data source.

    ``reward/error_rate``, ``/errors``, ``/timeouts``: over the samples that functions scored;
    ``reward/<part>/mean``: over the samples that have the part, before its weight;
    ``reward/score/<source>/mean``: over the samples of a data source;
    ``reward/added/<source>/<part>``: the contribution to the mean score of the batch. These sum to it.
    """
    asked = [outcome for outcome in outcomes if outcome is not None]
    errors = sum(bool(outcome.error) for outcome in asked)
    return {
        "reward/error_rate": errors / max(len(asked), 1),
        "reward/errors": float(errors),
        "reward/timeouts": float(sum(outcome.status == "timeout" for outcome in asked)),
        **{f"reward/{name}/mean": values.nanmean().item() for name, values in parts.items()},
        **_by_source(sources, contributions),
    }


def _by_source(sources: Sequence[str], contributions: Mapping[str, Tensor]) -> dict[str, float]:
    metrics = {}
    for source in sorted(set(sources)):
        of_source_B = torch.tensor([other == source for other in sources])
        added = {name: values_B[of_source_B].sum().item() for name, values_B in contributions.items()}
        metrics[f"reward/score/{source}/mean"] = sum(added.values()) / int(of_source_B.sum())
        for name, total in added.items():
            metrics[f"reward/added/{source}/{name}"] = total / len(sources)
    return metrics


def describe_sample(
    sample: Sample, *, prompt: str, score: float, parts: Mapping[str, float], error: str, whole: str = ""
) -> str:
    """Format source, prompt, response, ground truth and score, one per line.

    ``whole``: the response with special tokens, if its scored text lacks some.
    """
    named = "".join(f", {name} {value:g}" for name, value in parts.items())
    lines = [
        _field("data source", sample.data_source),
        _field("prompt", prompt),
        _field("response", sample.solution_str),
        *([_field("response with special tokens", whole)] if whole else []),
        _field("ground truth", sample.ground_truth),
        _field("score", f"{score:g}{named}"),
    ]
    if error:
        lines.append(_field("error", error.strip()))
    return "\n".join(lines)


def _field(name: str, value: Any) -> str:
    text = str(value)
    return f"[{name}]\n{text}" if "\n" in text else f"[{name}] {text}"

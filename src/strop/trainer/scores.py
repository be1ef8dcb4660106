"""From what a reward function returned to columns of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.errors import TrainingError
from strop.protocol import DataProto


def attach_scores(batch: DataProto, output: Any) -> DataProto:
    """The batch with ``token_level_scores`` [B, T] and each named part of the score as ``reward/<part>`` [B].

    ``output`` is a ``RewardOutput``, or plain token-level scores [B, T] from a user's own function. Raises
    ``TrainingError`` when a score is not finite.
    """
    if isinstance(output, Tensor):
        scores_BT, parts, metrics = output, {}, {}
    else:
        scores_BT, parts, metrics = output.token_level_scores, output.parts, output.metrics
    require_finite("reward scores", scores_BT)
    columns = {"token_level_scores": scores_BT.float()}
    columns |= {f"reward/{name}": values_B.float() for name, values_B in parts.items()}
    return batch.union(DataProto(columns, {}, {"reward_metrics": dict(metrics)}))


def require_finite(name: str, values: Tensor) -> None:
    """``TrainingError`` naming what is wrong and the first sample [B, ...] in which it is."""
    bad_B = ~torch.isfinite(values.reshape(len(values), -1)).all(dim=1)
    if bad_B.any():
        raise TrainingError(
            f"{name}: {int(bad_B.sum())} of {len(values)} samples are NaN or infinite "
            f"(the first is sample {int(bad_B.nonzero()[0])})"
        )

"""Scores on their way, and what a reward function returned as columns of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strop.errors import TrainingError
from strop.protocol import DataProto
from strop.rewards.manager import RewardManager


class PendingScores:
    """The scores of a batch, which are computed while the caller does something else.

    The reward model works in its own processes, where it has some; rules in a thread that feeds theirs. A
    user's own function of the whole batch is called when the scores are asked for: it need not bear threads.
    """

    def __init__(self, batch: DataProto, reward_fn: Callable[[DataProto], Any], reward_model: Any) -> None:
        """``reward_model`` is a worker group, or None."""
        self._batch, self._reward_fn = batch, reward_fn
        self._rules = None
        if isinstance(reward_fn, RewardManager) and type(reward_fn).__call__ is RewardManager.__call__:
            self._rules = reward_fn.begin(batch, with_model=reward_model is not None)
        self._model = None if reward_model is None else reward_model.compute_rm_score.start(batch)

    def get(self) -> DataProto:
        """Wait for them: the batch with the columns of ``attach_scores``, and ``rm_scores`` [B]."""
        batch = self._batch
        if self._model is not None:
            batch = batch.union(self._model.get())
        if self._rules is None:
            return attach_scores(batch, self._reward_fn(batch))
        return attach_scores(batch, self._rules.get(batch.batch.get("rm_scores")))

    def cancel(self) -> None:
        """Nobody will ask for them."""
        if self._rules is not None:
            self._rules.cancel()


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

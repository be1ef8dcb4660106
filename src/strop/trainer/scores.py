"""Scores computed while samples are generated and evaluated, and their columns in the batch.

Shapes: B samples, T response tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strop.algorithms.aggregation import masked_sum
from strop.columns import REWARD_TEXT
from strop.controller.group import Future
from strop.errors import TrainingError
from strop.protocol import DataProto
from strop.rewards.base import Reward, as_reward
from strop.rewards.reward_output import RewardOutput, ScoreCheck, model_scores
from strop.rollout.base import Finished
from strop.trainer.metrics import PhaseTimer

if TYPE_CHECKING:
    from torch import Tensor


class _Cancellable:
    def cancel(self) -> None:
        """Cancel scoring; the scores will not be read."""
        raise NotImplementedError

    @contextlib.contextmanager
    def cancelled_on_error(self) -> Generator[None]:
        """Cancel scoring if the body raises."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise


class PendingScores(_Cancellable):
    """Scores of one batch, computed in the background.

    Rules score each sample as soon as it is generated; a reward model in another pool works while other
    models evaluate the batch. A user's function of the whole batch is called by ``get``, in its thread.
    """

    def __init__(
        self,
        prompts: DataProto,
        n: int,
        reward_fn: Reward | Callable[[DataProto], Any],
        reward_model: Any,
        check: ScoreCheck | None = None,
    ) -> None:
        """Expect ``n`` samples of each prompt; ``reward_model`` is a worker group, or None.

        ``check`` counts the errors of several batches.
        """
        self._n, self._reward_model, self._check = n, reward_model, check or ScoreCheck()
        self._batch = DataProto()
        self._model: Future | None = None
        self._rewards = as_reward(reward_fn).expect(prompts, n=n, with_model=reward_model is not None)

    @property
    def finished(self) -> Finished | None:
        """Callback for each finished sample; None if the batch is only scored as a whole."""
        if not self._rewards.takes_samples:
            return None
        # the samples of a prompt are adjacent rows
        return lambda prompt, number, token_ids: self._rewards.add(prompt * self._n + number, token_ids)

    def complete(self, batch: DataProto) -> None:
        """Score the complete batch, and start the reward model on it."""
        self._batch = batch
        self._rewards.complete(batch)
        if self._reward_model is not None:
            self._model = self._reward_model.compute_rm_score.start(batch)

    def is_done(self) -> bool:
        """Return True if ``get`` of the complete batch will not wait."""
        return self._rewards.is_done() and (self._model is None or self._model.is_done())

    def get(self) -> DataProto:
        """Wait for the scores; returns the batch with those of ``attach_scores`` and ``rm_scores`` [B]."""
        batch = self._batch
        if self._model is not None:
            found = self._model.get()
            mask_BT = batch.batch["response_mask"]
            found.batch["rm_scores"] = model_scores(found.batch.get("rm_scores"), mask_BT)
            batch = batch.union(found)
        rewards = self._rewards.get(batch.batch.get("rm_scores"))
        return attach_scores(batch, self._check(rewards, batch))

    def cancel(self) -> None:
        self._rewards.cancel()


@dataclass
class Samples(_Cancellable):
    """Generated samples with pending scores."""

    batch: DataProto
    scores: PendingScores | None = None
    """None: ``batch`` has its scores."""
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    """Seconds by phase of this iteration; it travels with the samples, so two iterations may overlap."""
    greedy_scores: PendingScores | None = None
    """Scores of the greedy response to each prompt, for ReMax."""

    def cancel(self) -> None:
        for scores in (self.scores, self.greedy_scores):
            if scores is not None:
                scores.cancel()

    def is_scored(self) -> bool:
        """Return True if ``scored`` will not wait."""
        return all(scores is None or scores.is_done() for scores in (self.scores, self.greedy_scores))

    def scored(self) -> DataProto:
        """Wait for the scores; returns the batch with them and, for ReMax, ``baseline_scores`` [B]."""
        if self.scores is None:
            return self.batch
        batch = self.scores.get()
        if self.greedy_scores is not None:
            greedy = self.greedy_scores.get()
            mask_BT = greedy.batch["response_mask"]
            scores_B = masked_sum(greedy.batch["token_level_scores"], mask_BT, dim=1)
            scores_B = scores_B.masked_fill(~mask_BT.bool().any(1), math.nan)  # lost by its environment
            baseline_B = scores_B.repeat_interleave(len(batch) // len(greedy))
            metrics = {f"greedy_{name}": value for name, value in greedy.meta_info["reward_metrics"].items()}
            meta_info = {"greedy_reward_metrics": metrics}
            batch = batch.union(DataProto({"baseline_scores": baseline_B}, {}, meta_info))
        # kept: a checkpoint of batches in flight may call this before the learner does
        self.batch, self.scores, self.greedy_scores = batch, None, None
        return batch


def attach_scores(batch: DataProto, output: RewardOutput) -> DataProto:
    """Add ``token_level_scores`` [B, T] and each part of the score as ``reward/<part>`` [B] to the batch.

    Texts of a scorer are ``reward_text/<part>`` [B]. Marks the samples that could not be scored
    (``reward_failed`` [B], bool).
    """
    columns = {
        "reward_failed": torch.tensor([bool(error) for error in output.errors]),
        "token_level_scores": output.token_level_scores,
        **{f"reward/{name}": values_B.float() for name, values_B in output.parts.items()},
    }
    metrics = {
        name: float(value) for name, value in output.metrics.items()
    }  # numpy's are not in a checkpoint
    texts = {f"{REWARD_TEXT}{name}": np.array(values, object) for name, values in output.texts.items()}
    return batch.union(DataProto(columns, texts, {"reward_metrics": metrics}))


def with_equal_columns(batches: list[DataProto]) -> list[DataProto]:
    """Fill parts of the score that only some batches have with NaN in the others, and texts with None."""
    names = {name for batch in batches for name in batch.batch if name.startswith("reward/")}
    texts = {name for batch in batches for name in batch.non_tensor_batch if name.startswith(REWARD_TEXT)}
    return [
        batch.union(
            DataProto(
                {name: torch.full((len(batch),), math.nan) for name in names - batch.batch.keys()},
                {name: np.full(len(batch), None) for name in texts - batch.non_tensor_batch.keys()},
            )
        )
        for batch in batches
    ]


def require_finite(name: str, values_BT: Tensor, batch: DataProto) -> None:
    """Raise ``TrainingError`` with ``name`` and the first sample and token [B, T] that are not finite."""
    bad_BT = ~torch.isfinite(values_BT)
    if not bad_BT.any():
        return
    row, token = bad_BT.nonzero()[0].tolist()
    named = [
        f"{column} {batch.non_tensor_batch[column][row]}"
        for column in ("uid", "data_source")
        if column in batch.non_tensor_batch
    ]
    if "responses" in batch:
        named.append(f"token id {int(batch.batch['responses'][row, token])}")
    raise TrainingError(
        f"{name}: {int(bad_BT.any(dim=1).sum())} of {len(values_BT)} samples are NaN or infinite; the first "
        f"is sample {row}: {values_BT[row, token].item()} at response token {token} ({', '.join(named)})"
    )

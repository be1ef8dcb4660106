"""``strop train-rm``: reward modelling; and what it shares with other trainers on pairs of answers.

Shapes: N pairs of a data set, 2N answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from strop.algorithms.preference import bradley_terry_loss, calibration, pairwise_accuracy
from strop.config.checks.supervised import Pairs
from strop.config.schema.supervised import RewardModellingConfig
from strop.controller.pools import Role
from strop.data.answers import pair_batch
from strop.data.loader import PromptLoader
from strop.protocol import DataProto
from strop.tracking.report import ShownPair
from strop.trainer.supervised.base import SupervisedTrainer

if TYPE_CHECKING:
    from torch import Tensor


class PairTrainer(SupervisedTrainer[Pairs]):
    """A trainer on pairs of answers."""

    collate: ClassVar[Callable[..., DataProto]] = staticmethod(pair_batch)
    _scores: tuple[Tensor, Tensor] | None = None
    """Chosen and rejected scores of all rows of the last evaluation."""

    def shown(self) -> list[ShownPair]:
        """Return validation pairs, spread evenly and the same each time, with both scores.

        The texts are decoded from the tokens that the model reads.
        """
        count = self.config.trainer.log_val_generations
        if self._scores is None or self.val_loader is None or not count:
            return []
        rows: Any = self.val_loader.dataset
        chosen_N, rejected_N = self._scores
        pairs = []
        for number in np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int).tolist():
            row = rows[number]
            texts = (self.tokenizer.decode(row[name]) for name in ("input_ids", "chosen", "rejected"))
            scores = chosen_N[number].item(), rejected_N[number].item()
            pairs.append(ShownPair(row["data_source"], *texts, *scores))
        return pairs

    @property
    def answer_keys(self) -> dict[str, str]:
        return {"chosen": self.config.data.chosen_key, "rejected": self.config.data.rejected_key}

    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Count pairs."""
        return {"n_pairs": float(len(batch))}

    def count_tokens(self, batch: DataProto) -> float:
        """Count each prompt once, and both answers; a pair's mask covers the longer answer only."""
        columns = batch.batch
        prompts = columns["attention_mask"][:, : -columns["response_mask"].shape[1]].sum()
        return float(prompts + columns["response_mask"].sum() + columns["rejected_mask"].sum())


class RewardModelTrainer(PairTrainer[RewardModellingConfig]):
    """``strop train-rm``: fits a Bradley-Terry model to pairs (Stiennon et al. 2020)."""

    worker: ClassVar[str] = "strop.workers.supervised:RewardModellingWorker"
    trains_policy: ClassVar[bool] = False
    role: ClassVar[Role] = Role.RewardModel
    group_name: ClassVar[str] = "reward_model"
    _calibration: tuple[float | None, float | None] = None, None
    """Mean and standard deviation of the scores; None after an update, until the next evaluation."""

    def step(self, batch: DataProto) -> dict[str, float]:
        """See ``SupervisedTrainer``; the worker removes the calibration."""
        self._calibration = None, None
        return super().step(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the calibration: a run that was killed after its last checkpoint exports with it."""
        return {**super().state_dict(), "calibration": self._calibration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._calibrate(*state.get("calibration", (None, None)))

    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """Return metrics of all pairs; the mean score becomes the model's offset."""
        chosen, rejected, sources = [], [], []
        for batch in batches:
            answers = self.call("evaluate", batch)
            chosen.append(answers.batch["chosen_scores"])
            rejected.append(answers.batch["rejected_scores"])
            sources.append(batch.non_tensor_batch["data_source"])
        chosen_N, rejected_N = torch.cat(chosen).double(), torch.cat(rejected).double()
        self._scores = chosen_N, rejected_N
        metrics = pair_metrics(chosen_N, rejected_N, np.concatenate(sources))
        self._calibrate(metrics["score_mean"], metrics["score_std"])
        return metrics

    def _calibrate(self, mean: float | None, std: float | None) -> None:
        self._calibration = mean, std
        self.group.calibrate(mean, std)

    def measure(self) -> dict[str, float]:
        """See ``SupervisedTrainer``; validation pairs, if there are any, centre the saved model's scores."""
        if self.val_loader is None:
            return super().measure()
        return {f"val/{name}": value for name, value in self.evaluate(self.val_loader).items()}


def pair_metrics(chosen_N: Tensor, rejected_N: Tensor, sources_N: np.ndarray) -> dict[str, float]:
    """Return loss, accuracy (also by data source), margin, scores and calibration of N pairs."""
    margin_N = chosen_N - rejected_N
    accuracy_N = pairwise_accuracy(margin_N)
    scores_2N = torch.cat([chosen_N, rejected_N])
    found = calibration(margin_N)
    return {
        "loss": bradley_terry_loss(chosen_N, rejected_N).mean().item(),
        "accuracy": accuracy_N.mean().item(),
        **means_by_source("accuracy", accuracy_N, sources_N),
        "margin": margin_N.mean().item(),
        "chosen_score": chosen_N.mean().item(),
        "rejected_score": rejected_N.mean().item(),
        "score_mean": scores_2N.mean().item(),
        "score_std": scores_2N.std(correction=0).item(),
        "ece": found.error,
        **{f"confidence/{decile}": value for decile, value in enumerate(found.confidence, start=1)},
        **{f"accuracy_at/{decile}": value for decile, value in enumerate(found.accuracy, start=1)},
    }


def means_by_source(name: str, figure_N: Tensor, sources_N: np.ndarray) -> dict[str, float]:
    """Return the mean over the pairs of each data source, as ``name/source``."""
    return {
        f"{name}/{source}": figure_N[torch.from_numpy(sources_N == source)].mean().item()
        for source in sorted(set(sources_N))
    }

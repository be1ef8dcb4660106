"""Reward modelling on pairs of answers (Bradley & Terry 1952; Stiennon et al. 2020)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.preference import bradley_terry_loss, calibration, pairwise_accuracy
from strop.config.schema.supervised import RewardModellingConfig
from strop.controller.pools import Role
from strop.data.answers import pair_batch
from strop.data.loader import PromptLoader
from strop.data.rl_dataset import FirstRows
from strop.protocol import DataProto
from strop.trainer.supervised import SupervisedTrainer
from strop.workers.supervised import RewardModellingWorker

_CALIBRATION_PAIRS = 1000
"""Training pairs from which the mean score is taken where there are no validation files."""


class RewardModelTrainer(SupervisedTrainer[RewardModellingConfig]):
    """What ``strop train-rm`` runs."""

    worker_cls: ClassVar[type] = RewardModellingWorker
    role: ClassVar[Role] = Role.RewardModel
    group_name: ClassVar[str] = "reward_model"
    _calibrated_step: int | None = None

    @property
    def answer_keys(self) -> dict[str, str]:
        """See ``SupervisedTrainer``."""
        return {"chosen": self.config.data.chosen_key, "rejected": self.config.data.rejected_key}

    @property
    def collate(self) -> Any:
        """See ``SupervisedTrainer``."""
        return pair_batch

    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Pairs."""
        return {"n_pairs": float(len(batch))}

    def count_tokens(self, batch: DataProto) -> float:
        """Those of a prompt once, and of both its answers: the mask of a pair covers the longer one only."""
        columns = batch.batch
        prompts = columns["attention_mask"][:, : -columns["response_mask"].shape[1]].sum()
        return float(prompts + columns["response_mask"].sum() + columns["rejected_mask"].sum())

    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """Figures of all pairs; the mean of their scores goes into the model's configuration."""
        chosen, rejected, sources = [], [], []
        for batch, answers in self.answered(batches):
            chosen.append(answers.batch["chosen_scores"])
            rejected.append(answers.batch["rejected_scores"])
            sources.append(batch.non_tensor_batch["data_source"])
        chosen_N, rejected_N = torch.cat(chosen).double(), torch.cat(rejected).double()
        scores_2N = torch.cat([chosen_N, rejected_N])
        self.group.calibrate(scores_2N.mean().item(), scores_2N.std(correction=0).item())
        self._calibrated_step = self.global_step
        return pair_metrics(chosen_N, rejected_N, np.concatenate(sources))

    def finish(self) -> None:
        """Centre the scores of the model that is saved: on the validation pairs, or on training pairs."""
        if self._calibrated_step == self.global_step:
            return
        dataset = self.train_loader.dataset
        pairs = self.val_loader or self._one_pass(FirstRows(dataset, _CALIBRATION_PAIRS))
        with self.timer.phase("testing"):
            self.evaluate(pairs)


def pair_metrics(chosen_N: Tensor, rejected_N: Tensor, sources_N: np.ndarray) -> dict[str, float]:
    """Loss, accuracy, margin, scores and calibration of N pairs; accuracy by data source, too."""
    margin_N = chosen_N - rejected_N
    accuracy_N = pairwise_accuracy(margin_N)
    scores_2N = torch.cat([chosen_N, rejected_N])
    found = calibration(margin_N)
    by_source = {
        f"accuracy/{source}": accuracy_N[torch.from_numpy(sources_N == source)].mean().item()
        for source in sorted(set(sources_N))
    }
    return {
        "loss": bradley_terry_loss(chosen_N, rejected_N).mean().item(),
        "accuracy": accuracy_N.mean().item(),
        **by_source,
        "margin": margin_N.mean().item(),
        "chosen_score": chosen_N.mean().item(),
        "rejected_score": rejected_N.mean().item(),
        "score_mean": scores_2N.mean().item(),
        "score_std": scores_2N.std(correction=0).item(),
        "ece": found.error,
        **{f"confidence/{decile}": value for decile, value in enumerate(found.confidence, start=1)},
        **{f"accuracy_at/{decile}": value for decile, value in enumerate(found.accuracy, start=1)},
    }

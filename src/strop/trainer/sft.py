"""Supervised fine-tuning: the mean negative log-likelihood of given responses."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from strop.config.schema.supervised import SftConfig
from strop.controller.pools import Role
from strop.data.answers import response_batch
from strop.data.loader import PromptLoader
from strop.protocol import DataProto
from strop.trainer.supervised import SupervisedTrainer
from strop.workers.supervised import SftWorker


class SftTrainer(SupervisedTrainer[SftConfig]):
    """What ``strop sft`` runs."""

    worker_cls: ClassVar[type] = SftWorker
    role: ClassVar[Role] = Role.Actor
    group_name: ClassVar[str] = "actor"

    @property
    def answer_keys(self) -> dict[str, str]:
        """See ``SupervisedTrainer``."""
        return {"response": self.config.data.response_key}

    @property
    def collate(self) -> Any:
        """See ``SupervisedTrainer``."""
        return response_batch

    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Response tokens: every token counts alike, whatever row, rank or micro-batch it is in."""
        return {"n_tokens": float(batch.batch["response_mask"].sum())}

    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """``loss``, the mean over all response tokens, and ``perplexity``, its exponential."""
        log_prob, n_tokens = 0.0, 0.0
        for batch, answers in self.answered(batches):
            log_prob += float(answers.batch["log_prob"].double().sum())
            n_tokens += float(batch.batch["response_mask"].sum())
        loss = -log_prob / n_tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

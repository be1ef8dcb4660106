"""``strop sft``: fine-tuning on responses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from strop.config.schema.supervised import SftConfig
from strop.controller.pools import Role
from strop.data.answers import response_batch
from strop.data.loader import PromptLoader
from strop.protocol import DataProto
from strop.trainer.supervised.base import SupervisedTrainer


class SftTrainer(SupervisedTrainer[SftConfig]):
    """``strop sft``: minimizes the mean negative log-likelihood of response tokens."""

    worker: ClassVar[str] = "strop.workers.supervised:SftWorker"
    role: ClassVar[Role] = Role.Actor
    group_name: ClassVar[str] = "actor"
    collate: ClassVar[Callable[..., DataProto]] = staticmethod(response_batch)

    @property
    def answer_keys(self) -> dict[str, str]:
        return {"response": self.config.data.response_key}

    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Count response tokens: each has the same weight, whatever its row, rank or micro-batch."""
        return {"n_tokens": float(batch.batch["response_mask"].sum())}

    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """Return ``loss``, the mean over all response tokens, and ``perplexity``, its exponential."""
        log_prob, n_tokens = 0.0, 0.0
        for batch in batches:
            answers = self.call("evaluate", batch)
            log_prob += float(answers.batch["log_prob"].double().sum())
            n_tokens += float(batch.batch["response_mask"].sum())
        loss = -log_prob / n_tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # exp overflows at 710

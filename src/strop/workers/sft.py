"""Supervised fine-tuning's worker: a language model that learns given responses."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from strop.algorithms.aggregation import masked_sum
from strop.config.schema.supervised import SftConfig
from strop.controller.group import Dispatch, register
from strop.engines.base import Loss
from strop.models.deferred import defer_causal_lm
from strop.models.loader import load_causal_lm
from strop.models.policy import PolicyModel
from strop.protocol import DataProto
from strop.workers.supervised import SupervisedWorker


class ResponseModel(PolicyModel):
    """A policy whose configuration is that of supervised fine-tuning."""

    packing_key = "model.use_remove_padding"


class SftWorker(SupervisedWorker[SftConfig]):
    """Raises the probability of the responses, token by token."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the language model."""
        options = self.model_options(self.config.model)
        self.tokenizer = self.load_own_tokenizer()
        model, weights = defer_causal_lm(**options) if self.sharded else (load_causal_lm(**options), None)
        module = ResponseModel(model, packed=self.config.model.use_remove_padding)
        self.engine = self.build_trained_engine(module, weights)

    @register(Dispatch.DATA_PARALLEL)
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on a batch whose ``meta_info`` has ``n_tokens``, counted over all ranks."""
        objective = response_objective(n_tokens=batch.meta_info["n_tokens"])
        return self.train_on(batch, objective, self.config.update, self.micro_batching, with_entropy=False)

    @register(Dispatch.DATA_PARALLEL)
    def evaluate(self, batch: DataProto) -> DataProto:
        """``log_prob`` [B]: of each whole response."""
        log_prob_BT = self.engine.infer(batch, self.micro_batching, with_entropy=False)["log_prob"]
        return DataProto({"log_prob": log_prob_BT.sum(dim=1)})


def response_objective(*, n_tokens: float) -> Loss:
    """The mean negative log-likelihood of the response tokens of a whole batch."""

    def objective(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -masked_sum(outputs["log_prob"], columns["response_mask"]) / n_tokens, {}

    return objective

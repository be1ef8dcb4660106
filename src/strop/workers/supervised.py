"""What the workers of the supervised trainers share: one model, one optimizer step for each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from strop.algorithms.aggregation import masked_sum
from strop.algorithms.preference import bradley_terry_loss, centering_loss, pairwise_accuracy
from strop.config.checks.supervised import Supervised, sequences_of_a_row
from strop.config.schema.supervised import RewardModellingConfig, SftConfig
from strop.controller.group import Dispatch, register
from strop.data.hub import local_tokenizer
from strop.engines.base import Engine, Loss
from strop.engines.micro_batches import MicroBatching
from strop.models.base import RoleModel
from strop.models.deferred import WeightSource, defer_causal_lm, defer_scorer
from strop.models.loader import load_causal_lm, load_scorer, load_tokenizer
from strop.models.policy import PolicyModel
from strop.models.scorer import REWARD_MEAN, REWARD_STD, PairScorer
from strop.protocol import DataProto
from strop.workers.base import Worker


class SupervisedWorker(Worker[Supervised]):
    """One process of the model that is trained."""

    def load_own_tokenizer(self) -> Any:
        """The tokenizer of the run, which is saved beside the model."""
        model, data = self.config.model, self.config.data
        return load_tokenizer(
            local_tokenizer(data.tokenizer or model.path, data.cache_dir),
            trust_remote_code=model.trust_remote_code,
        )

    def build_trained_engine(self, module: RoleModel, weights: WeightSource | None) -> Engine:
        """The engine that trains ``module`` as the section ``update`` says."""
        model, update = self.config.model, self.config.update
        return self.build_engine_on(
            module,
            strategy=update.strategy,
            compute_dtype=model.compute_dtype,
            fsdp=model.fsdp_config,
            weights=weights,
            checkpointing=model.enable_gradient_checkpointing,
            trained=update,
        )

    @property
    def micro_batching(self) -> MicroBatching:
        """How passes are cut on this rank; a row of several sequences has the tokens of all."""
        update = self.config.update
        if not update.use_dynamic_bsz:
            return MicroBatching(rows=update.micro_batch_size_per_gpu)
        return MicroBatching(max_tokens=update.max_token_len_per_gpu // sequences_of_a_row(self.config))


# Supervised fine-tuning's worker: a language model that learns given responses.


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


# Reward modelling's worker: a model with a scalar head that learns which of two answers is preferred.


class RewardModellingWorker(SupervisedWorker[RewardModellingConfig]):
    """Scores the chosen answers above the rejected ones."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model; a language model gets a fresh score head, drawn from ``trainer.seed``."""
        options = self.model_options(self.config.model)
        options["fresh_head_seed"] = self.config.trainer.seed
        self.tokenizer = self.load_own_tokenizer()
        model, weights = defer_scorer(**options) if self.sharded else (load_scorer(**options), None)
        # Whoever loads the exported folder by transformers alone looks for the last token by this.
        model.config.pad_token_id = self.tokenizer.pad_token_id
        self._model_config = model.config
        self.calibrate(None, None)  # of a reward model that is trained further
        module = PairScorer(model, packed=self.config.model.use_remove_padding)
        self.engine = self.build_trained_engine(module, weights)

    @register(Dispatch.DATA_PARALLEL)
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on a batch whose ``meta_info`` has ``n_pairs``, counted over all ranks."""
        self.calibrate(None, None)
        update = self.config.update
        objective = pair_objective(
            n_pairs=batch.meta_info["n_pairs"], center_coefficient=update.center_rewards_coefficient
        )
        return self.train_on(batch, objective, update, self.micro_batching)

    @register(Dispatch.DATA_PARALLEL)
    def evaluate(self, batch: DataProto) -> DataProto:
        """``chosen_scores`` and ``rejected_scores``, [B] each, as the head gives them."""
        return DataProto(self.engine.infer(batch, self.micro_batching))

    @register(Dispatch.ONE_TO_ALL)
    def calibrate(self, mean: float | None, std: float | None) -> None:
        """Note mean and standard deviation of the scores in the model's configuration; None: not known.

        They are exported with it. The next update forgets them: they were another model's.
        """
        for name, value in ((REWARD_MEAN, mean), (REWARD_STD, std)):
            if value is not None:
                setattr(self._model_config, name, value)
            elif hasattr(self._model_config, name):
                delattr(self._model_config, name)


def pair_objective(*, n_pairs: float, center_coefficient: float) -> Loss:
    """The mean Bradley-Terry loss of a whole batch, with the centering term.

    A row without response tokens is padding, and counts for nothing.
    """

    def objective(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_B, rejected_B = outputs["chosen_scores"], outputs["rejected_scores"]
        is_pair_B = columns["response_mask"].any(dim=1)

        def mean(figure_B: Tensor) -> Tensor:
            return (figure_B * is_pair_B).sum() / n_pairs

        loss = mean(bradley_terry_loss(chosen_B, rejected_B))
        if center_coefficient:
            loss = loss + center_coefficient * mean(centering_loss(chosen_B, rejected_B))
        margin_B = (chosen_B - rejected_B).detach()
        return loss, {
            "accuracy": mean(pairwise_accuracy(margin_B)),
            "margin": mean(margin_B),
            "chosen_score": mean(chosen_B),
            "rejected_score": mean(rejected_B),
        }

    return objective

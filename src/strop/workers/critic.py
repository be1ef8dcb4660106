"""The critic's worker: values of states, and their regression on the returns."""

from __future__ import annotations

from typing import ClassVar

from strop.config.roles import critic_tokenizer
from strop.controller.group import Dispatch, register
from strop.models.deferred import defer_scorer
from strop.models.loader import load_scorer
from strop.models.scorer import ValueModel
from strop.protocol import DataProto
from strop.workers.base import RoleWorker
from strop.workers.losses import critic_objective


class CriticWorker(RoleWorker):
    """Holds the value model, which may start from a language model or from a reward model."""

    shared_passes: ClassVar = {"compute_values": "values", "update_critic": "critic"}

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model; a language model gets a fresh value head, drawn from ``trainer.seed``."""
        critic = self.config.critic
        self.tokenizer = self.load_tokenizer(critic_tokenizer(self.config))
        options = self.model_options(critic.model)
        options["fresh_head_seed"] = self.config.trainer.seed
        scorer, weights = defer_scorer(**options) if self.sharded else (load_scorer(**options), None)
        self.engine = self.build_engine(
            ValueModel(scorer, packed=critic.model.use_remove_padding),
            name="critic",
            compute_dtype=critic.model.compute_dtype,
            fsdp=critic.model.fsdp_config,
            weights=weights,
            checkpointing=critic.model.enable_gradient_checkpointing,
            trained=critic,
        )

    @register(Dispatch.DATA_PARALLEL)
    def compute_values(self, batch: DataProto) -> DataProto:
        """``values`` [B, T]: the state before each response token, 0 where the mask is 0."""
        return DataProto(self.engine.infer(batch, self.micro_batching("values")))

    @register(Dispatch.DATA_PARALLEL)
    def update_critic(self, mini_batch: DataProto) -> dict[str, float]:
        """One optimizer step on a mini-batch whose ``meta_info`` has the global denominators."""
        critic, meta = self.config.critic, mini_batch.meta_info
        objective = critic_objective(
            critic,
            n_tokens=meta["n_tokens"],
            n_seqs=meta["n_seqs"],
            max_response_length=self.config.data.max_response_length,
        )
        return self.train_on(mini_batch, objective, critic, self.micro_batching("critic"))

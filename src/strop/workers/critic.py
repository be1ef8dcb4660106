"""``CriticWorker``: values of states, and their regression on the returns."""

from __future__ import annotations

from typing import ClassVar

from strop.config.roles import critic_tokenizer
from strop.controller.group import Dispatch, register
from strop.protocol import DataProto
from strop.workers.base import RoleWorker, options_of
from strop.workers.losses import critic_objective
from strop.workers.memory import phase


class CriticWorker(RoleWorker):
    """Hold the value model, which may start from a language model or from a reward model."""

    shared_passes: ClassVar = {"compute_values": "values", "update_critic": "critic"}

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the value model; a language model gets a new value head, drawn from ``trainer.seed``."""
        critic = self.config.critic
        options = self.model_options(critic.model)  # imports what may register the tokenizer's class
        self.tokenizer = self.load_tokenizer(critic_tokenizer(self.config))
        self.engine = self.build_engine(
            "value",
            options,
            name="critic",
            head_seed=self.config.trainer.seed,
            **options_of(critic.model, "critic.model", trained=critic),
            lora=self.adapters_of(critic.model, "critic.model"),
        )

    @register(Dispatch.DATA_PARALLEL)
    @phase("values")
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return ``values`` [B, T] of the state before each response token, 0 where the mask is 0."""
        return DataProto(self.engine.infer(batch, self.micro_batching("values")))

    @register(Dispatch.DATA_PARALLEL)
    @phase("update_critic")
    def update_critic(self, mini_batch: DataProto) -> dict[str, float]:
        """Take one optimizer step on a mini-batch whose ``meta_info`` has the global denominators."""
        critic, meta = self.config.critic, mini_batch.meta_info
        objective = critic_objective(
            critic,
            n_tokens=meta["n_tokens"],
            n_seqs=meta["n_seqs"],
            max_response_length=self.config.data.max_response_length,
        )
        return self.train_on(mini_batch, objective, critic, self.micro_batching("critic"))

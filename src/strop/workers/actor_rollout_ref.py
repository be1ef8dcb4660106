"""The policy's worker: actor, rollout and reference model, in whichever combination its role asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from strop.config.roles import uses_reference
from strop.config.schema import Config
from strop.controller.dispatch import Dispatch, register
from strop.controller.roles import Role
from strop.engines.base import Engine, Loss, compute_dtype
from strop.models.deferred import WeightSource, defer_causal_lm
from strop.models.loader import end_token_ids, load_causal_lm
from strop.models.policy import PolicyModel
from strop.protocol import DataProto
from strop.rollout.base import RolloutEngine, SamplingParams, build_rollout
from strop.workers.base import Worker
from strop.workers.losses import Recorder, actor_objective


class ActorRolloutRefWorker(Worker):
    """Holds the trained policy and the rollout on its weights, or a frozen reference, or both."""

    rollout: RolloutEngine
    reference: Engine

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, role, rank=rank, world_size=world_size)
        self.section = config.actor_rollout_ref
        self.temperature = self.section.rollout.temperature
        actor = self.section.actor
        self.full_kl_loss = actor.use_kl_loss and actor.kl_loss_type == "full"
        self.full_kl = self.full_kl_loss or (uses_reference(config) and config.algorithm.kl_penalty == "full")

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model (twice when the role has both actor and reference) and build what the role needs."""
        self.tokenizer = self.load_tokenizer(self.config.data.tokenizer or self.section.model.path)
        if self.role in (Role.RefPolicy, Role.ActorRolloutRef):
            self.reference = self._build_engine(self.section.ref.fsdp_config, trained=None)[0]
        if self.role is Role.Rollout:
            model, weights = self._without_weights()
            self.rollout = self._build_replica(model, weights.stream())
        elif self.role is not Role.RefPolicy:
            actor = self.section.actor
            self.engine, policy = self._build_engine(actor.fsdp_config, trained=actor)
            if self.full_kl:
                with self.engine.on_device():
                    policy.keep_reference_head()
            if self.role is not Role.Actor:
                self._build_rollout(policy)

    def _build_rollout(self, policy: PolicyModel) -> None:
        """On the actor's own weights; beside a sharded actor on a copy that exists while it generates."""
        if self.sharded:
            self.rollout = self._build_replica(self._without_weights()[0], self.engine.named_weights())
            self.rollout.release()
            return
        with self.engine.on_device():
            self.rollout = build_rollout(
                self.section.rollout.name,
                model=policy.hugging_face_model,
                autocast_dtype=self.engine.autocast_dtype,
                **self._rollout_options(policy.hugging_face_model),
            )

    def _build_replica(self, model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> RolloutEngine:
        return build_rollout(
            self.section.rollout.name,
            own_weights=True,
            model=model,
            weights=weights,
            device=self.device,
            dtype=compute_dtype(self.section.model.compute_dtype, self.device),
            **self._rollout_options(model),
        )

    def _rollout_options(self, model: PreTrainedModel) -> dict[str, Any]:
        return {
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_ids": end_token_ids(model, self.tokenizer),
            "micro_batch_size": self.section.rollout.micro_batch_size_per_gpu,
        }

    def _model_options(self) -> dict[str, Any]:
        model = self.section.model
        return {
            "path": self.find_model(model.path, model.external_lib),
            "override_config": model.override_config,
            "trust_remote_code": model.trust_remote_code,
            "attn_implementation": model.attn_implementation,
        }

    def _without_weights(self) -> tuple[PreTrainedModel, WeightSource]:
        return defer_causal_lm(**self._model_options())

    def _build_engine(self, fsdp: Any, trained: Any | None) -> tuple[Engine, PolicyModel]:
        if self.sharded:
            model, weights = self._without_weights()
        else:
            model, weights = load_causal_lm(**self._model_options()), None
        policy = PolicyModel(model, packed=self.section.model.use_remove_padding)
        engine = self.build_engine(
            policy,
            compute_dtype=self.section.model.compute_dtype,
            fsdp=fsdp,
            weights=weights,
            checkpointing=self.section.model.enable_gradient_checkpointing,
            trained=trained,
        )
        return engine, policy

    @register(Dispatch.DATA_PARALLEL)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to each prompt; ``meta_info["mode"]`` is ``train``, ``greedy`` or ``validate``."""
        mode = prompts.meta_info["mode"]
        params = SamplingParams.from_config(self.section.rollout, validate=mode == "validate")
        if mode == "greedy":
            params = dataclasses.replace(params, n=1, do_sample=False)
        if self.role is Role.Rollout:
            return self.rollout.generate(prompts, params)
        if not self.sharded:
            with self.engine.on_device():
                return self.rollout.generate(prompts, params)
        self.rollout.update_weights(self.engine.named_weights())
        try:
            return self.rollout.generate(prompts, params)
        finally:
            self.rollout.release()

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket: list[tuple[str, Tensor]] | None) -> None:
        """Take over the actor's weights, one ``weight_bucket`` a call, None after the last.

        ``ModelError`` names a parameter that is unknown, has another shape, comes twice or never came.
        """
        self.rollout.update_weights(bucket or [], last=bucket is None)

    @register(Dispatch.DATA_PARALLEL)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` [B, T]; ``full_kl`` [B, T] when the KL is the full one."""
        micro = self.micro_batching("log_prob")
        found = self.engine.infer(
            batch, micro, temperature=self.temperature, with_entropy=True, with_full_kl=self.full_kl
        )
        columns = {"old_log_probs": found["log_prob"], "entropys": found["entropy"]}
        if self.full_kl:
            columns["full_kl"] = found["full_kl"]
        return DataProto(columns)

    @register(Dispatch.DATA_PARALLEL)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """``ref_log_prob`` [B, T]; for the full KL also the hidden states ``ref_hidden`` [B, T, H]."""
        micro = self.micro_batching("ref")
        found = self.reference.infer(
            batch, micro, temperature=self.temperature, with_entropy=False, with_hidden=self.full_kl
        )
        columns = {"ref_log_prob": found["log_prob"]}
        if self.full_kl:
            columns["ref_hidden"] = found["hidden"]
        return DataProto(columns)

    @register(Dispatch.DATA_PARALLEL)
    def update_actor(self, mini_batch: DataProto) -> dict[str, float]:
        """One optimizer step on a mini-batch whose ``meta_info`` has the global denominators."""
        return self._update(mini_batch, self._objective(mini_batch))

    @register(Dispatch.DATA_PARALLEL)
    def update_actor_on_policy(self, batch: DataProto) -> DataProto:
        """One optimizer step on samples of this very policy, whose ``old_log_probs`` are not known yet.

        ``old_log_probs`` and ``entropys`` [B, T] from before the step; what ``update_actor`` returns is
        ``meta_info["metrics"]``.
        """
        recorder = Recorder(batch, {"log_prob": "old_log_probs", "entropy": "entropys"})
        metrics = self._update(recorder.mini_batch, recorder.watch(self._objective(batch)))
        return DataProto(recorder.columns(), {}, {"metrics": metrics})

    def _objective(self, mini_batch: DataProto) -> Loss:
        return actor_objective(
            self.section.actor,
            n_tokens=mini_batch.meta_info["n_tokens"],
            n_seqs=mini_batch.meta_info["n_seqs"],
            max_response_length=self.config.data.max_response_length,
        )

    def _update(self, mini_batch: DataProto, loss: Loss) -> dict[str, float]:
        return self.train_on(
            mini_batch,
            loss,
            self.section.actor,
            self.micro_batching("actor"),
            temperature=self.temperature,
            with_entropy=True,
            with_full_kl=self.full_kl_loss,
        )

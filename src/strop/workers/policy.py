"""``ActorRolloutRefWorker``: actor, rollout and reference model of a policy, as its role requires."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from strop.config.backends import ROLLOUTS
from strop.config.placement import rollout_dtype
from strop.config.roles import uses_full_kl
from strop.config.schema import Config
from strop.controller.group import Dispatch, register
from strop.controller.pools import Role
from strop.data.hub import local_tokenizer
from strop.engines.base import Engine, Loss
from strop.errors import ModelError
from strop.models.loader import dtype_named
from strop.protocol import DataProto
from strop.rollout.base import Finished, RolloutEngine, RolloutSpec, SamplingParams, build_rollout
from strop.rollout.weights import checksums, require_equal_checksums
from strop.workers.base import RoleWorker, engine_section
from strop.workers.losses import Recorder, actor_objective


class ActorRolloutRefWorker(RoleWorker):
    """Hold the trained policy and a rollout, or a frozen reference, or both."""

    shared_passes: ClassVar = {
        "compute_log_prob": "log_prob",
        "compute_ref_log_prob": "ref",
        "update_actor": "actor",
        "update_actor_on_policy": "actor",
    }
    rollout: RolloutEngine
    rollout_version: int | None = None
    """Version of the rollout's weights, numbered by the trainer."""
    reference: Engine

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, role, rank=rank, world_size=world_size)
        self.section = config.actor_rollout_ref
        self.temperature = self.section.rollout.temperature
        actor = self.section.actor
        self.full_kl_loss = actor.use_kl_loss and actor.kl_loss_type == "full"
        self.full_kl = uses_full_kl(config)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model (twice if the role has actor and reference) and build what the role needs."""
        self.tokenizer = self.load_tokenizer(self.config.data.tokenizer or self.section.model.path)
        if self.role in (Role.RefPolicy, Role.ActorRolloutRef):
            self.reference = self._build_engine("ref")
        if self.role is Role.Rollout:
            self.rollout = self._build_rollout()
        elif self.role is not Role.RefPolicy:
            self.engine = self._build_engine("actor")
            if self.role is not Role.Actor:
                with self.engine.on_device() if self._shareable_model else contextlib.nullcontext():
                    self.rollout = self._build_rollout()
                self.rollout.release()

    def _build_engine(self, name: str) -> Engine:
        """Build the engine of the section ``name``: ``actor`` or ``ref``."""
        policy, model = self.section, self.section.model
        trains = name == "actor" and not self.config.trainer.val_only
        return self.build_engine(
            "policy",
            self.model_options(model),
            name="actor" if trains else "ref",
            role="actor" if name == "actor" else "reference",
            section=engine_section(self.strategy, getattr(policy, name)),
            compute_dtype=model.compute_dtype,
            packed=model.use_remove_padding,
            checkpointing=model.enable_gradient_checkpointing,
            trained=policy.actor if trains else None,
            keeps_reference_head=name == "actor" and self.full_kl,
        )

    @property
    def _shareable_model(self) -> PreTrainedModel | None:
        """The actor's module, if the rollout can generate with it."""
        shares = self.role is not Role.Rollout and ROLLOUTS[self.section.rollout.name].shared is not None
        return self.engine.shareable_model if shares else None

    def _build_rollout(self) -> RolloutEngine:
        config, apart = self.config, self.role is Role.Rollout
        spec = RolloutSpec(
            config=config,
            model=self.model_options(self.section.model),
            tokenizer=self.tokenizer,
            tokenizer_path=local_tokenizer(
                config.data.tokenizer or self.section.model.path, config.data.cache_dir
            ),
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
            shared_model=self._shareable_model,
            autocast_dtype=None if apart else self.engine.autocast_dtype,
            weights=None if apart else self.engine.named_weights(),
        )
        return build_rollout(self.section.rollout.name, spec)

    @register(Dispatch.DATA_PARALLEL)
    def generate_sequences(self, prompts: DataProto, finished: Finished | None = None) -> DataProto:
        """Generate responses to each prompt; ``meta_info["mode"]`` is ``train``, ``greedy`` or ``validate``.

        ``finished`` is called for samples that are complete before the call returns.
        """
        mode = prompts.meta_info["mode"]
        params = SamplingParams.from_config(self.section.rollout, validate=mode == "validate")
        if mode == "greedy":
            params = dataclasses.replace(params, n=1, do_sample=False)
        version = prompts.meta_info.get("weights_version", self.rollout_version)
        if version != self.rollout_version:
            raise ModelError(
                f"the rollout has the weights of version {self.rollout_version}, and version {version} was "
                "requested: the actor was updated without sync_rollout or load_weights"
            )
        with self.engine.on_device() if self._shareable_model else contextlib.nullcontext():
            return self.rollout.generate(prompts, params, finished)

    @register(Dispatch.ONE_TO_ALL)
    def sync_rollout(self, version: int) -> None:
        """Copy the actor's current weights (policy ``version``) into the co-located rollout."""
        self.rollout.update_weights(self.engine.named_weights())
        self.rollout_version = version

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket: list[tuple[str, Tensor]] | None, version: int = 0) -> None:
        """Load the actor's weights, one ``weight_bucket`` per call, None after the last.

        Raises ``ModelError`` for a parameter that is unknown, misshapen, duplicated or missing.
        """
        self.rollout.update_weights(bucket or [], last=bucket is None)
        self.rollout_version = version if bucket is None else None

    @register(Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """Free the rollout's weights and KV cache for the update, where it can sleep."""
        self.rollout.release()

    @register(Dispatch.ONE_TO_ALL)
    def weight_checksums(self) -> dict[str, int]:
        """Return checksums of the actor's weights in the rollout's dtype, by name in a checkpoint."""
        dtype = dtype_named(rollout_dtype(self.config), self.device)
        return checksums(self.engine.named_weights(as_saved=True), dtype)

    @register(Dispatch.ONE_TO_ALL)
    def verify_rollout(self, version: int, expected: dict[str, int] | None = None) -> None:
        """Raise ``ModelError`` naming weights of the rollout that differ from the actor's.

        ``expected`` are the actor's checksums; None: the actor is in this process.
        """
        held = self.rollout.checksums()
        if held is None:
            return
        require_equal_checksums(expected or self.weight_checksums(), held, version)

    @register(Dispatch.DATA_PARALLEL)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys`` [B, T], and ``full_kl`` [B, T] for the full KL."""
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
        """Return ``ref_log_prob`` [B, T], and the hidden states ``ref_hidden`` [B, T, H] for the full KL."""
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
        """Take one optimizer step on a mini-batch whose ``meta_info`` has the global denominators."""
        return self._update(mini_batch, self._objective(mini_batch))

    @register(Dispatch.DATA_PARALLEL)
    def update_actor_on_policy(self, batch: DataProto) -> DataProto:
        """Take the only optimizer step of an iteration, on samples without ``old_log_probs``.

        Return ``old_log_probs`` and ``entropys`` [B, T] from before the step, with the metrics of
        ``update_actor`` in ``meta_info["metrics"]``.
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

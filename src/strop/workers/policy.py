"""The policy's worker: actor, rollout and reference model, in whichever combination its role asks for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.config.placement import extra_sampling, rollout_dtype, tensor_parallel_size
from strop.config.roles import uses_reference
from strop.config.schema import Config
from strop.controller.group import Dispatch, register
from strop.controller.pools import Role
from strop.data.hub import local_tokenizer
from strop.engines.base import Engine, Loss, compute_dtype
from strop.errors import ModelError
from strop.models.deferred import WeightSource, defer_causal_lm
from strop.models.loader import end_token_ids, load_causal_lm
from strop.models.policy import PolicyModel
from strop.protocol import DataProto
from strop.rollout.base import Finished, RolloutEngine, SamplingParams, build_rollout
from strop.rollout.weights import checksums, require_equal_checksums
from strop.workers.base import RoleWorker
from strop.workers.losses import Recorder, actor_objective

# How a policy's worker comes by its rollout: on the actor's own weights, or with a copy of them.


def shares_weights(worker: RoleWorker) -> bool:
    """Whether the rollout beside this worker's actor generates on the actor's very weights."""
    return worker.config.actor_rollout_ref.rollout.name == "hf" and not worker.sharded


def build_shared(
    worker: RoleWorker, model: PreTrainedModel, autocast_dtype: torch.dtype | None
) -> RolloutEngine:
    """A rollout on ``model`` as it lies in memory."""
    rollout = worker.config.actor_rollout_ref.rollout
    return build_rollout(
        rollout.name,
        model=model,
        autocast_dtype=autocast_dtype,
        micro_batch_size=rollout.micro_batch_size_per_gpu,
        **_token_ids(worker, model),
    )


def build_copy(
    worker: RoleWorker, model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> RolloutEngine:
    """A rollout with weights of its own; ``model`` is one without any, on the meta device."""
    rollout = worker.config.actor_rollout_ref.rollout
    if rollout.name == "vllm":
        options: dict[str, Any] = {"settings": _vllm_settings(worker)}
    else:
        options = {
            "weights": weights,
            "device": worker.device,
            "dtype": copy_dtype(worker),
            "micro_batch_size": rollout.micro_batch_size_per_gpu,
        }
    return build_rollout(rollout.name, own_weights=True, model=model, **options, **_token_ids(worker, model))


def copy_dtype(worker: RoleWorker) -> torch.dtype:
    """Of the weights that a rollout with a copy computes with."""
    section = worker.config.actor_rollout_ref
    if section.rollout.name != "vllm":
        return compute_dtype(section.model.compute_dtype, worker.device)
    name = rollout_dtype(worker.config)
    return torch.float16 if name == "float16" else compute_dtype(name, worker.device)


def _token_ids(worker: RoleWorker, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "pad_token_id": worker.tokenizer.pad_token_id,
        "eos_token_ids": end_token_ids(model, worker.tokenizer),
    }


def _vllm_settings(worker: RoleWorker) -> Any:
    from strop.rollout.vllm.settings import VLLMSettings  # vllm takes 20 s to import

    config: Config = worker.config
    policy, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    sampling = extra_sampling(config)
    reads_text = not sampling.keys().isdisjoint({"stop", "bad_words", "structured_outputs"})
    tokenizer = config.data.tokenizer or policy.path
    return VLLMSettings(
        model_path=worker.find_model(policy.path, policy.external_lib),
        config_overrides=policy.override_config,
        tokenizer_path=local_tokenizer(tokenizer, config.data.cache_dir) if reads_text else None,
        device=worker.device,
        dtype=copy_dtype(worker),
        load_format="dummy" if rollout.load_format.startswith("dummy") else "auto",
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        memory_share=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        sleeps=rollout.free_cache_engine and worker.device.type == "cuda",
        tensor_parallel=tensor_parallel_size(config),
        rank=worker.rank,
        world_size=worker.world_size,
        trust_remote_code=policy.trust_remote_code,
        sampling=sampling,
    )


class ActorRolloutRefWorker(RoleWorker):
    """Holds the trained policy and the rollout on its weights, or a frozen reference, or both."""

    shared_passes: ClassVar = {
        "compute_log_prob": "log_prob",
        "compute_ref_log_prob": "ref",
        "update_actor": "actor",
        "update_actor_on_policy": "actor",
    }
    rollout: RolloutEngine
    rollout_version: int | None = None
    """Of the weights that the rollout has; the trainer counts."""
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
            self.rollout = build_copy(self, model, weights.stream())
        elif self.role is not Role.RefPolicy:
            actor, trains = self.section.actor, not self.config.trainer.val_only
            self.engine, policy = self._build_engine(actor.fsdp_config, trained=actor if trains else None)
            if self.full_kl:
                with self.engine.on_device():
                    policy.keep_reference_head()
            if self.role is not Role.Actor:
                self._build_rollout(policy)

    def _build_rollout(self, policy: PolicyModel) -> None:
        if shares_weights(self):
            with self.engine.on_device():
                model = policy.hugging_face_model
                self.rollout = build_shared(self, model, self.engine.autocast_dtype)
            return
        self.rollout = build_copy(self, self._without_weights()[0], self.engine.named_weights())
        self.rollout.release()

    def _without_weights(self) -> tuple[PreTrainedModel, WeightSource]:
        return defer_causal_lm(**self.model_options(self.section.model))

    def _build_engine(self, fsdp: Any, trained: Any | None) -> tuple[Engine, PolicyModel]:
        if self.sharded:
            model, weights = self._without_weights()
        else:
            model, weights = load_causal_lm(**self.model_options(self.section.model)), None
        policy = PolicyModel(model, packed=self.section.model.use_remove_padding)
        engine = self.build_engine(
            policy,
            name="ref" if trained is None else "actor",
            compute_dtype=self.section.model.compute_dtype,
            fsdp=fsdp,
            weights=weights,
            checkpointing=self.section.model.enable_gradient_checkpointing,
            trained=trained,
        )
        return engine, policy

    @register(Dispatch.DATA_PARALLEL)
    def generate_sequences(self, prompts: DataProto, finished: Finished | None = None) -> DataProto:
        """Responses to each prompt; ``meta_info["mode"]`` is ``train``, ``greedy`` or ``validate``.

        ``finished`` is told of samples on the way.
        """
        mode = prompts.meta_info["mode"]
        params = SamplingParams.from_config(self.section.rollout, validate=mode == "validate")
        if mode == "greedy":
            params = dataclasses.replace(params, n=1, do_sample=False)
        version = prompts.meta_info.get("weights_version", self.rollout_version)
        if version != self.rollout_version:
            raise ModelError(
                f"the rollout has the weights of version {self.rollout_version} and is to generate with "
                f"those of version {version}: the actor was updated without sync_rollout or load_weights"
            )
        shared = self.role is not Role.Rollout and shares_weights(self)
        with self.engine.on_device() if shared else contextlib.nullcontext():
            return self.rollout.generate(prompts, params, finished)

    @register(Dispatch.ONE_TO_ALL)
    def sync_rollout(self, version: int) -> None:
        """Give the rollout beside this actor the weights of now, which are ``version``."""
        self.rollout.update_weights(self.engine.named_weights())
        self.rollout_version = version

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket: list[tuple[str, Tensor]] | None, version: int = 0) -> None:
        """Take over the actor's weights, one ``weight_bucket`` a call, None after the last.

        ``ModelError`` names a parameter that is unknown, has another shape, comes twice or never came.
        """
        self.rollout.update_weights(bucket or [], last=bucket is None)
        self.rollout_version = version if bucket is None else None

    @register(Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """Give the memory of the rollout's own weights to the update, where it has any and can."""
        self.rollout.release()

    @register(Dispatch.ONE_TO_ALL)
    def weight_checksums(self) -> dict[str, int]:
        """Of the actor's weights in the rollout's dtype, by Hugging Face name."""
        return checksums(self.engine.named_weights(), copy_dtype(self))

    @register(Dispatch.ONE_TO_ALL)
    def verify_rollout(self, version: int, expected: dict[str, int] | None = None) -> None:
        """Compare the weights that the rollout computes with with the actor's, or with their checksums.

        ``ModelError`` names those that differ.
        """
        held = self.rollout.checksums()
        if held is None:
            return
        require_equal_checksums(expected or self.weight_checksums(), held, version)

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

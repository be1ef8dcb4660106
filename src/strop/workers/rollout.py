"""How a policy's worker comes by its rollout: on the actor's own weights, or with a copy of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.config.placement import extra_sampling, rollout_dtype, tensor_parallel_size
from strop.config.schema import Config
from strop.data.hub import local_tokenizer
from strop.engines.base import compute_dtype
from strop.models.loader import end_token_ids
from strop.rollout.base import RolloutEngine, build_rollout
from strop.workers.role import RoleWorker


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

"""Engines of vLLM for models of ``tiny_lms``, with heads that vLLM has kernels for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tiny_lms import EOS, PAD, tiny_lm

FAMILIES = {
    "qwen2": {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 32},
    "llama": {"head_dim": 32},
    "phi3": {"head_dim": 32},
    "olmo2": {"hidden_size": 128, "head_dim": 32},
    "mixtral": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32},
}


def model_of(family: str, tied: bool, seed: int = 0, **changes: Any) -> PreTrainedModel:
    return tiny_lm(family, seed, tie_word_embeddings=tied, **FAMILIES[family], **changes)


def rollout_of(
    model: PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    sampling: dict[str, Any] | None = None,
    seed_per_sample: bool | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Any:
    """A ``VLLMRollout`` with the weights of ``model``; with several ranks one engine of all."""
    from strop.rollout.vllm.engine import VLLMRollout

    if rank == 0:
        model.save_pretrained(folder)
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "load_format": "dummy",
        "max_model_len": 48,
        "block_size": 32,  # the smallest on a CPU; only whole blocks are cached
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 1 << 24,
        "enforce_eager": True,
    }
    if world_size > 1:
        arguments |= {
            "tensor_parallel_size": world_size,
            "distributed_executor_backend": "external_launcher",
        }
        torch.distributed.barrier()
    built = VLLMRollout(
        model,
        arguments,
        device=torch.device("cpu"),
        pad_token_id=PAD,
        eos_token_ids=[EOS],
        hidden_token_ids=[EOS, *range(20, 30)],
        sampling=sampling,
        seed_per_sample=seed_per_sample,
        rank=rank,
        world_size=world_size,
    )
    built.update_weights(model.named_parameters())
    return built

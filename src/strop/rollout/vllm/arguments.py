"""strop's keys and requests as vLLM's arguments; vLLM itself is not imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, cast

import torch
from transformers import PreTrainedConfig

from strop.config.memory.facts import facts_of_loaded
from strop.config.names import SEEN_BOTH_WAYS
from strop.models.folder import is_dropout
from strop.models.heads import reads_pictures
from strop.models.loader import dtype_named
from strop.rollout.base import MANY, RolloutSpec, Samples
from strop.rollout.in_flight import InFlight, continued_seed
from strop.rollout.vllm.kind import (
    HEAD_SIZES_ON_A_CPU,
    KIND,
    cache_of_rank,
    causal_over_pictures,
    enforce_eager,
    extra_sampling,
    no_attention_on_a_cpu,
    sleeps,
    tensor_parallel_size,
)

_NOT_COMPARED = frozenset((
    "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache",
))  # fmt: skip
"""Entries of a model's configuration that say nothing of its numbers; ``model_facts`` has ties."""
FIXED: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
    "generation_config": "vllm",  # ignore the folder's sampling defaults
    "enable_prefix_caching": True,  # compute a prompt once for its samples
}
"""Arguments of every engine."""
ENDS = ("stop", "length", "repetition")
"""Reasons of vLLM for the end of a request that ran as it should."""


def engine_arguments(spec: RolloutSpec, model: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that the configuration and the worker determine."""
    ranks = tensor_parallel_size(spec.config)
    arguments = server_arguments(spec, model, ranks, spec.world_size // ranks)
    if spec.world_size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
        # vLLM's own all-reduce numbers the ranks' GPUs as one process sees them: with a process for each GPU
        # it looks up one that is not visible. FlashInfer's adds up in no fixed order.
        arguments["disable_custom_all_reduce"] = True
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if spec.device.type == "cuda":
        # sleeping drops tensors that are no buffers, as the slopes of ALiBi
        arguments["enable_sleep_mode"] = sleeps(spec.config) and model.model_type != "bloom"
    return arguments


def server_arguments(spec: RolloutSpec, model: PreTrainedConfig, ranks: int, engines: int) -> dict[str, Any]:
    """Return the arguments of one of ``engines``, each of ``ranks`` processes, wherever it runs."""
    config, rollout = spec.config, cast(Any, spec.config.actor_rollout_ref.rollout)
    # Stop strings, bad words and grammars need vLLM's tokenizer; else it sees token ids only.
    reads_text = not extra_sampling(config).keys().isdisjoint({"stop", "bad_words", "structured_outputs"})
    reads_text |= spec.max_pictures > 0  # vLLM finds placeholders by its tokenizer
    max_model_len = config.data.max_prompt_length + config.data.max_response_length
    arguments = {
        "model": str(spec.model["path"]),
        "hf_overrides": dict(spec.model["override_config"]),
        "tokenizer": str(spec.tokenizer_path if reads_text else spec.model["path"]),
        "skip_tokenizer_init": not reads_text,
        "trust_remote_code": spec.model["trust_remote_code"],
        "dtype": str(dtype_named(KIND.dtype(config), spec.device)).removeprefix("torch."),
        # dummy: start without weights, the trainer sends them. With pictures vLLM 0.32's dummy weights would
        # also overwrite the constants that normalize pixels (visual.input_norm), which are in no checkpoint.
        "load_format": "dummy"
        if rollout.load_format.startswith("dummy") and not spec.max_pictures
        else "auto",
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": enforce_eager(config),
        "tensor_parallel_size": ranks,
    }
    if reads_pictures(model):
        has_turns = spec.environments is not None or spec.program_pool is not None
        most = MANY if spec.max_pictures and has_turns else spec.max_pictures
        arguments["limit_mm_per_prompt"] = {"image": most, "video": 0}
        arguments["mm_processor_cache_gb"] = 0
        data = config.data
        bounds = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
        if bounds := {name: value for name, value in bounds.items() if value is not None}:
            arguments["mm_processor_kwargs"] = bounds
    if spec.device.type != "cuda":
        arguments["kv_cache_memory_bytes"] = cache_of_rank(config, facts_of_loaded(model), ranks, engines)
    return arguments


def whole_prompts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with which an engine on a CPU computes no part of a prompt.

    After a part vLLM 0.32 drops the token that it sampled and rewinds the sample's generator, which a CPU's
    cannot do.
    """
    tokens = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}


def sampling_arguments(
    batch: InFlight,
    row: int,
    options: Mapping[str, Any],
    eos_token_ids: Sequence[int],
    *,
    seeded: bool = True,
) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` of the request that continues a sample.

    ``options`` are those of ``extra_sampling``.
    """
    params, found = batch.params, dict(options)
    done = int(batch.lengths[row] - batch.begun[row])  # of the last turn
    if "min_tokens" in found:  # of a whole turn, and vLLM refuses more than max_tokens
        found["min_tokens"] = min(max(found["min_tokens"] - done, 0), batch.room(row))
    if not params.greedy:
        found |= {"top_k": max(params.top_k, 0), "top_p": params.top_p}
        if seeded:
            found["seed"] = continued_seed(batch.turn_seeds[row], done)
    return found | {
        "temperature": 0.0 if params.greedy else params.temperature,
        "max_tokens": batch.room(row),
        "stop_token_ids": [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)],
        "ignore_eos": True,  # stop_token_ids has the end-of-sequence ids unless params ignores them
        "logprobs": 0,  # of the sampled token alone; n would add the n likeliest
        "detokenize": bool(options.get("stop")),  # stop strings are found in text
    }


def row_of_samples(ids: Sequence[int], log_probs: Sequence[float], reason: str | None) -> Samples:
    """Return what a request generated, as one row; ``reason`` of vLLM for its end, None before it.

    A response that repeats itself is as truncated as one at the length limit: neither has a stop token.
    """
    columns = ([ids], [log_probs], [len(ids)], [reason != "stop"])
    return Samples(*map(torch.tensor, columns), over=torch.tensor([reason == "repetition"]))


def why_unsupported(model: PreTrainedConfig, device: str, *, pictures: bool = False) -> str | None:
    """Return an error for models that vLLM reports late, or computes otherwise than transformers."""
    if pictures and device == "cpu" and model.model_type in SEEN_BOTH_WAYS:
        return causal_over_pictures(model.model_type)
    if model.model_type == "phimoe":
        # vLLM 0.32 loads the bias of the output layer and does not add it.
        computed = {"router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": False}
        other = {name: getattr(model, name) for name in computed if getattr(model, name) != computed[name]}
        if other:
            return (
                f"rollout.name=vllm: vLLM computes Phi-3.5-MoE as with {_listed(computed)}, and this model "
                f"has {_listed(other)}; set actor_rollout_ref.rollout.name=hf"
            )
    if device == "cpu" and (width := facts_of_loaded(model).head_size) not in HEAD_SIZES_ON_A_CPU:
        return no_attention_on_a_cpu(width)
    return None


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def vocabulary_digest(tokenizer: Any, *, added: bool = True) -> str:
    """Return a digest of the ids of a tokenizer's tokens, with or without those that were added to it."""
    left_out = () if added else tokenizer.get_added_vocab()
    tokens = {token: number for token, number in tokenizer.get_vocab().items() if token not in left_out}
    return hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()[:16]


def model_facts(config: Any, *, is_tied: bool = False) -> dict[str, Any]:
    """Return what of a model's configuration affects its results, in values of JSON, as facts of a server.

    ``is_tied``: its word embeddings are tied, though vLLM, which found a copy of them, has changed that.
    """
    values = config.to_dict()
    ties = {"model.tie_word_embeddings": is_tied or bool(values.get("tie_word_embeddings"))}
    return ties | {f"model.{name}": value for name, value in _in_json(values).items()}


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        # 0: off, for which vLLM writes None
        parts = {
            str(name): part or None if name == "sliding_window" else part for name, part in value.items()
        }
        return {name: _in_json(part) for name, part in parts.items() if _is_compared(name, part)}
    if isinstance(value, list | tuple):
        return [_in_json(part) for part in value if _is_compared("", part)]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _is_compared(name: str, value: Any) -> bool:
    is_json = value is None or isinstance(value, Mapping | list | tuple | str | int | float)
    # a run computes without dropout, and no server has any
    is_beside = name in _NOT_COMPARED or name.endswith("_token_id") or is_dropout(name, value)
    return is_json and not is_beside

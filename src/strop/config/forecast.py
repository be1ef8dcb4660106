"""How much memory a run takes on one rank, worked out from shapes: can it fit at all?

Weights, gradients and AdamW's two moments are float32. Activations follow Korthikanti et al.
(arXiv:2205.05198, section 4): about 34 bytes x tokens x hidden size a layer in 16 bits with an attention
kernel that keeps no score matrix, twice that in 32 bits; with checkpointing, the inputs of all layers and
one layer's activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.batch_plan import BatchPlan, uses_reference
from strop.config.model_facts import ModelFacts, read_model_facts
from strop.config.schema import Config

_FLOAT32 = 4
_TRAINED = 4 * _FLOAT32
"""Weight, gradient and two moments."""
_ACTIVATION_BYTES = {2: 34, 4: 68}
"""By the bytes of a number: activation bytes for each token, layer and hidden unit."""
_LOGIT_TOKENS = 1024
"""Tokens whose logits exist at once; a handful of float32 tensors of that size live together."""
_LOGIT_COPIES = 4


@dataclass(frozen=True)
class Forecast:
    """Bytes by what they are for; None for a model whose size is not known."""

    resident: dict[str, int | None]
    """There all the time."""
    phases: dict[str, int | None]
    """There in one phase of an iteration; the phases follow one another."""

    @property
    def peak(self) -> int | None:
        """Everything resident and the largest phase; None if any part is not known."""
        parts = [*self.resident.values(), *self.phases.values()]
        if any(part is None for part in parts):
            return None
        return sum(part or 0 for part in self.resident.values()) + max(
            part or 0 for part in self.phases.values()
        )


def forecast(config: Config, plan: BatchPlan) -> Forecast:
    """The memory of one rank. Reads config.json and the headers of the weights, and nothing else."""
    policy_section = config.actor_rollout_ref
    policy = read_model_facts(policy_section.model.path)
    resident = {"actor: weights, gradients, AdamW": _times(policy, _TRAINED)}
    phases = {
        "generation: KV cache": _kv_cache(config, policy, plan),
        "actor update: activations, logits": _activations(
            config, policy, plan.actor.micro_batch.rows, policy_section.actor.ppo_max_token_len_per_gpu,
            checkpointing=policy_section.model.enable_gradient_checkpointing, with_logits=True,
        ),
    }  # fmt: skip
    if uses_reference(config):
        resident["reference: weights"] = _times(policy, _FLOAT32)
    if plan.critic is not None:
        critic = read_model_facts(config.critic.model.path)
        resident["critic: weights, gradients, AdamW"] = _times(critic, _TRAINED)
        phases["critic update: activations"] = _activations(
            config, critic, plan.critic.micro_batch.rows, config.critic.ppo_max_token_len_per_gpu,
            checkpointing=config.critic.model.enable_gradient_checkpointing, with_logits=False,
        )  # fmt: skip
    if config.reward_model.enable:
        resident["reward model: weights"] = _times(read_model_facts(config.reward_model.model.path), _FLOAT32)
    return Forecast(resident, phases)


def _times(facts: ModelFacts | None, bytes_each: int) -> int | None:
    return None if facts is None else facts.parameters * bytes_each


def _number_bytes(config: Config) -> int:
    """Bytes of an activation. With `auto` on an unknown device: the larger figure."""
    return 2 if config.actor_rollout_ref.model.compute_dtype == "bfloat16" else 4


def _kv_cache(config: Config, facts: ModelFacts | None, plan: BatchPlan) -> int | None:
    if facts is None:
        return None
    samples = plan.samples // plan.ranks
    at_once = min(config.actor_rollout_ref.rollout.micro_batch_size_per_gpu or samples, samples)
    tokens = at_once * (config.data.max_prompt_length + config.data.max_response_length)
    return tokens * 2 * facts.layers * facts.kv_width * _number_bytes(config)


def _activations(
    config: Config,
    facts: ModelFacts | None,
    rows: int | None,
    max_tokens: int,
    *,
    checkpointing: bool,
    with_logits: bool,
) -> int | None:
    if facts is None:
        return None
    size = _number_bytes(config)
    length = config.data.max_prompt_length + config.data.max_response_length
    tokens = max_tokens if rows is None else rows * length
    layer = tokens * facts.hidden * _ACTIVATION_BYTES[size]
    kept = tokens * facts.hidden * size * facts.layers + layer if checkpointing else layer * facts.layers
    logits = min(tokens, _LOGIT_TOKENS) * facts.vocabulary * _FLOAT32 * _LOGIT_COPIES if with_logits else 0
    return kept + logits

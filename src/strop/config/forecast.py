"""How much memory a run takes on one rank, worked out from shapes: can it fit at all?

Weights, gradients and AdamW's two moments are float32. Activations follow Korthikanti et al.
(arXiv:2205.05198, section 4): about 34 bytes x tokens x hidden size a layer in 16 bits with an attention
kernel that keeps no score matrix, twice that in 32 bits; with checkpointing, the inputs of all layers and
one layer's activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.batch_plan import BatchPlan, UpdatePlan
from strop.config.model_facts import ModelFacts, read_model_facts
from strop.config.roles import uses_reference
from strop.config.schema import Config
from strop.config.schema.actor_rollout_ref import ActorModelConfig
from strop.config.schema.critic import CriticModelConfig

_FLOAT32 = 4
_TRAINED = 4 * _FLOAT32
"""Weight, gradient and two moments."""
_ACTIVATION_BYTES = {2: 34, 4: 68}
"""By the bytes of a number: activation bytes for each token, layer and hidden unit."""
_LOGITS_AT_ONCE = 1 << 25
"""Logits in one block of the vocabulary on a GPU; on a CPU there are fewer."""
_LOGIT_COPIES = 3


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
        resident = _sum(*self.resident.values())
        phases = [size for size in self.phases.values() if size is not None]
        if resident is None or len(phases) < len(self.phases):
            return None
        return resident + max(phases)


def forecast(config: Config, plan: BatchPlan) -> Forecast:
    """The memory of one rank. Reads config.json and the headers of the weights, and nothing else."""
    actor = config.actor_rollout_ref.model
    policy = read_model_facts(actor.path)
    length = config.data.max_prompt_length + config.data.max_response_length
    activations = _activations(policy, plan.actor, length, actor)
    resident = {"actor: weights, gradients, AdamW": _times(policy, _TRAINED)}
    phases = {
        "generation: KV cache": _kv_cache(config, policy, plan.samples // plan.ranks * length),
        "actor update: activations, logits": _sum(activations, _logits(policy, plan.actor, length)),
    }
    if uses_reference(config):
        resident["reference: weights"] = _times(policy, _FLOAT32)
    if plan.critic is not None:
        critic = read_model_facts(config.critic.model.path)
        resident["critic: weights, gradients, AdamW"] = _times(critic, _TRAINED)
        phases["critic update: activations"] = _activations(critic, plan.critic, length, config.critic.model)
    if config.reward_model.enable:
        resident["reward model: weights"] = _times(read_model_facts(config.reward_model.model.path), _FLOAT32)
    return Forecast(resident, phases)


def _times(facts: ModelFacts | None, bytes_each: int) -> int | None:
    return None if facts is None else facts.parameters * bytes_each


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _number_bytes(model: ActorModelConfig | CriticModelConfig) -> int:
    """Bytes of an activation. With `auto`, on a device that is not known here: the larger figure."""
    return 2 if model.compute_dtype == "bfloat16" else 4


def _kv_cache(config: Config, facts: ModelFacts | None, tokens: int) -> int | None:
    """Of all `tokens` of an iteration, or of the sequences that are generated at once."""
    if facts is None:
        return None
    at_once = config.actor_rollout_ref.rollout.micro_batch_size_per_gpu
    if at_once is not None:
        tokens = min(tokens, at_once * (config.data.max_prompt_length + config.data.max_response_length))
    return tokens * 2 * facts.layers * facts.kv_width * _number_bytes(config.actor_rollout_ref.model)


def _tokens_at_once(update: UpdatePlan, length: int) -> int:
    rows, all_tokens = update.micro_batch.rows, update.samples_per_rank * length
    tokens = min(all_tokens, update.micro_batch.max_tokens or all_tokens if rows is None else rows * length)
    return -(-tokens // update.sharing)


def _activations(
    facts: ModelFacts | None, update: UpdatePlan, length: int, model: ActorModelConfig | CriticModelConfig
) -> int | None:
    if facts is None:
        return None
    size, numbers = _number_bytes(model), _tokens_at_once(update, length) * facts.hidden
    layer = numbers * _ACTIVATION_BYTES[size]
    if model.enable_gradient_checkpointing:
        return numbers * size * facts.layers + layer
    return layer * facts.layers


def _logits(facts: ModelFacts | None, update: UpdatePlan, length: int) -> int | None:
    if facts is None:
        return None
    logits = min(_tokens_at_once(update, length) * facts.vocabulary, _LOGITS_AT_ONCE)
    return logits * _FLOAT32 * _LOGIT_COPIES

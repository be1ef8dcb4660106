"""Forecast of the memory that a run needs on one rank, and of its samples on disk, computed from shapes.

Weights, gradients and AdamW's two moments are float32. Activations follow Korthikanti et al.
(arXiv:2205.05198, section 4): about 34 bytes x tokens x hidden size a layer in 16 bits with an attention
kernel that keeps no score matrix, twice that in 32 bits; with checkpointing, the inputs of all layers and
one layer's activations. Ranks that shard a model share its weights evenly. Roles in separate pools are
counted as if they shared one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from strop.config.backends import ROLLOUTS, load_backend
from strop.config.batch_plan import MICRO_BATCHES, BatchPlan, UpdatePlan, ranks_with_same_rows, strategy_of
from strop.config.keys import longest_row, value_at
from strop.config.paths import expand, is_url
from strop.config.placement import Placement, rollout_dtype, tensor_parallel_size
from strop.config.roles import has_kl_in_reward, uses_critic, uses_reference
from strop.config.schema import Config
from strop.config.schema.critic import CriticModelConfig
from strop.config.schema.policy import ActorModelConfig


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder-only transformer."""

    parameters: int | None
    """Counted in the headers of the weights; None without safetensors files."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    """Query heads."""
    kv_heads: int
    kv_width: int
    """Key-value heads x head size: a token's cache holds 2 x layers x kv_width numbers."""
    context: int | None
    """Context window in tokens."""


def read_model_facts(path: str) -> ModelFacts | None:
    """Return facts about the model in the folder `path`; None if it is not local or lacks them."""
    folder = Path(expand(path))
    if not path or is_url(path) or not (folder / "config.json").is_file():
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
        shape = config.get("text_config", config)
        heads = shape["num_attention_heads"]
        head_size = shape.get("head_dim") or shape["hidden_size"] // heads
        return ModelFacts(
            parameters=sum(count_parameters(file) for file in folder.glob("*.safetensors")) or None,
            layers=shape["num_hidden_layers"],
            hidden=shape["hidden_size"],
            vocabulary=shape["vocab_size"],
            heads=heads,
            kv_heads=shape.get("num_key_value_heads", heads),
            kv_width=shape.get("num_key_value_heads", heads) * head_size,
            context=shape.get("max_position_embeddings"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None  # loading the model reports a broken folder


def count_parameters(file: Path) -> int:
    """Count the numbers in a safetensors file by the shapes in its header."""
    with safe_open(file, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


_FLOAT32 = 4
_TRAINED = 4 * _FLOAT32  # weight, gradient and two moments
_ACTIVATION_BYTES = {2: 34, 4: 68}  # for each token, layer and hidden unit, by the bytes of a number
_LOGITS_AT_ONCE = 1 << 25  # in one block of the vocabulary on a GPU; fewer on a CPU
_LOGIT_COPIES = 3
_CACHE_BLOCK = 128  # tokens in a block of vLLM's KV cache; the last block of a sequence is not full


@dataclass(frozen=True)
class Forecast:
    """Bytes by purpose; None for a model of unknown size."""

    resident: dict[str, int | None]
    """Memory held throughout."""
    phases: dict[str, int | None]
    """Memory held in one phase of an iteration; the phases follow one another."""

    @property
    def peak(self) -> int | None:
        """Resident memory and the largest phase; None if any part is unknown."""
        resident = _sum(*self.resident.values())
        phases = [size for size in self.phases.values() if size is not None]
        if resident is None or len(phases) < len(self.phases):
            return None
        return resident + max(phases)


def forecast(config: Config, plan: BatchPlan) -> Forecast:
    """Return the memory of one rank, from config.json and the headers of the weights alone."""
    actor = config.actor_rollout_ref.model
    policy = read_model_facts(actor.path)
    length = config.data.max_prompt_length + config.data.max_response_length
    activations = _activations(policy, plan.actor, length, actor)
    policy_role = "ActorRollout" if config.actor_rollout_ref.hybrid_engine else "Actor"
    fsdp_size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    trained = _trained(config, "actor", policy, policy_role, fsdp_size)
    resident = {"actor: weights, gradients, AdamW": trained}
    phases = {"actor update: activations, logits": _sum(activations, _logits(policy, plan.actor, length))}
    generation = load_backend(ROLLOUTS[config.actor_rollout_ref.rollout.name].forecast)(config, plan, policy)
    resident |= generation.resident
    phases |= generation.phases
    if uses_reference(config):
        shards = _shards(config, "ref", "RefPolicy", -1)
        resident["reference: weights"] = _times(policy, _FLOAT32, shards)
    if plan.critic is not None:
        critic = read_model_facts(config.critic.model.path)
        fsdp_size = config.critic.model.fsdp_config.fsdp_size
        trained = _trained(config, "critic", critic, "Critic", fsdp_size)
        resident["critic: weights, gradients, AdamW"] = trained
        phases["critic update: activations"] = _activations(critic, plan.critic, length, config.critic.model)
    if config.reward_model.enable:
        scorer = read_model_facts(config.reward_model.model.path)
        shards = _shards(config, "reward_model", "RewardModel", -1)
        resident["reward model: weights"] = _times(scorer, _FLOAT32, shards)
    return Forecast(resident, phases)


# Bytes of a token in a file of samples, compressed; `strop.columns.TOKEN_COLUMNS` has the significant bits.
_ID_AND_TEXT = 3.0
_16_BITS = 2.4
_11_BITS = 1.8


@dataclass(frozen=True)
class SampleFiles:
    """Disk space of rollouts/."""

    file: int
    """Bytes of one iteration, at full prompts and responses."""
    files: int | None
    """Files that are kept; None if their number is not limited and that of the iterations is unknown."""


def sample_files(config: Config, plan: BatchPlan) -> SampleFiles:
    """Estimate the disk space of rollouts/ (trainer.log_rollouts).

    The bytes of a number were measured on numbers without structure. One that is equal for a whole response
    takes nothing: advantages and returns without values and KL penalty.
    """
    columns = 2 * _16_BITS + _11_BITS  # log-probs of sampler and policy, entropies
    if uses_reference(config):
        columns += _16_BITS
    if has_kl_in_reward(config):
        columns += _16_BITS
    if has_kl_in_reward(config) or uses_critic(config):
        columns += 2 * _11_BITS
    if uses_critic(config):
        columns += _11_BITS
    data, settings = config.data, config.trainer
    tokens = data.max_prompt_length + data.max_response_length
    sample = tokens * _ID_AND_TEXT + data.max_response_length * columns
    files = [] if plan.iterations is None else [-(-plan.iterations // settings.log_rollouts_freq)]
    files += [] if settings.rollouts_to_keep is None else [settings.rollouts_to_keep]
    return SampleFiles(round(plan.samples * sample), min(files, default=None))


def _trained(config: Config, name: str, facts: ModelFacts | None, role: str, fsdp_size: int) -> int | None:
    """Return the bytes of weights, gradients and moments on one rank of a role."""
    shards = _shards(config, name, role, fsdp_size)
    section = value_at(config, MICRO_BATCHES[name].megatron)
    if strategy_of(config, name) != "megatron" or not section.use_distributed_optimizer:
        return _times(facts, _TRAINED, shards)
    ranks = Placement.from_config(config).ranks(role)
    return _sum(_times(facts, 2 * _FLOAT32, shards), _times(facts, 2 * _FLOAT32, ranks))


def _shards(config: Config, name: str, role: str, fsdp_size: int) -> int:
    """Return the ranks over which one copy of a role's model is spread; `name` is a pass of it."""
    ranks = Placement.from_config(config).ranks(role)
    if strategy_of(config, name) == "megatron":
        return ranks_with_same_rows(config, name, ranks)
    return min(fsdp_size, ranks) if fsdp_size > 0 else ranks


def sample_caches(config: Config, plan: BatchPlan, facts: ModelFacts | None) -> Forecast:
    """Return the memory of a rollout on the actor's weights: KV caches of the samples generated at once."""
    cache = None
    if facts is not None:
        samples, at_once = (
            plan.samples // plan.ranks,
            config.actor_rollout_ref.rollout.micro_batch_size_per_gpu,
        )
        tokens = min(samples, at_once or samples) * longest_row(config.data)[0]
        cache = tokens * 2 * facts.layers * facts.kv_width * _number_bytes(config.actor_rollout_ref.model)
    return Forecast({}, {"generation: KV cache": cache})


def replica_with_cache(config: Config, plan: BatchPlan, facts: ModelFacts | None) -> Forecast:
    """Return the memory of vLLM: one rank's part of a copy of the weights, and a cache of ``max_num_seqs``.

    On a GPU vLLM takes ``gpu_memory_utilization`` of the memory for both, whether it needs that or not.
    """
    del plan
    weights = cache = None
    if facts is not None:
        size = 2 if rollout_dtype(config) in ("bfloat16", "float16") else 4  # auto, on an unknown device
        length = config.data.max_prompt_length + config.data.max_response_length
        ranks, blocks = tensor_parallel_size(config), -(-length // _CACHE_BLOCK) + 1
        tokens = config.actor_rollout_ref.rollout.max_num_seqs * blocks * _CACHE_BLOCK
        weights = _times(facts, size, ranks)
        cache = tokens * 2 * facts.layers * facts.kv_width * size // ranks
    if config.trainer.device == "cpu" or not config.actor_rollout_ref.rollout.free_cache_engine:
        return Forecast({"vLLM: weights": weights, "vLLM: KV cache, at most": cache}, {})
    return Forecast({}, {"generation: vLLM's weights, and KV cache at most": _sum(weights, cache)})


def _times(facts: ModelFacts | None, bytes_each: int, shards: int) -> int | None:
    return facts.parameters * bytes_each // shards if facts is not None and facts.parameters else None


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _number_bytes(model: ActorModelConfig | CriticModelConfig) -> int:
    """Return the bytes of an activation; the larger figure for `auto`, as the device is unknown here."""
    return 2 if model.compute_dtype == "bfloat16" else 4


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

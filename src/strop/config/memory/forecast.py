"""Forecast of the memory that a run needs on one rank, and of its samples on disk, computed from shapes.

Weights, gradients and AdamW's two moments are float32. Activations follow Korthikanti et al.
(arXiv:2205.05198, section 4): about 34 bytes x tokens x hidden size a layer in 16 bits with an attention
kernel that keeps no score matrix, twice that in 32 bits; with checkpointing, the inputs of all layers and
one layer's activations. Ranks that shard a model share its weights evenly. Roles in separate pools are
counted as if they shared one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strop.config.backends import ROLLOUTS, load_backend
from strop.config.batch_plan import (
    MICRO_BATCHES,
    BatchPlan,
    ForwardPlan,
    MicroBatchSize,
    ranks_with_same_rows,
    sequences_of_a_row,
    strategy_of,
)
from strop.config.keys import longest_row, value_at
from strop.config.machine import memory_for
from strop.config.memory.facts import ModelFacts, count_parameters, read_model_facts, trained_whole
from strop.config.paths import ADAPTER_WEIGHTS, expand
from strop.config.placement import (
    Placement,
    pools_of,
    rollout_dtype,
    sequences_of_engine,
    tensor_parallel_size,
    uses_gpu,
)
from strop.config.roles import (
    has_kl_in_reward,
    reason_for_old_log_prob_pass,
    reference_is_the_actor,
    uses_critic,
    uses_reference,
)
from strop.config.schema import Config, RootConfig
from strop.config.schema.base import FsdpConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.supervised import RewardModellingConfig, SupervisedConfig

_FLOAT32 = 4
_TRAINED = 4 * _FLOAT32  # weight, gradient and two moments
ACTIVATION_BYTES = {2: 34, 4: 68}  # for each token, layer and hidden unit, by the bytes of a number
_LOGITS_AT_ONCE = 1 << 25  # in one block of the vocabulary on a GPU; fewer on a CPU
_LOGIT_COPIES = 3
_SHARE_OF_CACHES = 0.5  # of the memory beside the models; the rest is for prefills, batches and the system
_UNKNOWN_GPU = 16 << 30  # bytes that a GPU is assumed to have where nvidia-smi lists none
_CACHE_BLOCK = 128  # tokens in a block of vLLM's KV cache; the last block of a sequence is not full


@dataclass(frozen=True)
class Forecast:
    """Bytes by purpose; None for a model of unknown size."""

    resident: dict[str, int | None]
    """Memory held throughout."""
    phases: dict[str, int | None]
    """Memory held in one phase of an iteration; the phases follow one another."""

    @property
    def held(self) -> int | None:
        """Resident memory; None if any part is unknown."""
        return _sum(*self.resident.values())

    @property
    def peak(self) -> int | None:
        """Resident memory and the largest phase; None if any part is unknown."""
        resident = self.held
        phases = [size for size in self.phases.values() if size is not None]
        if resident is None or len(phases) < len(self.phases):
            return None
        return resident + max(phases, default=0)


def forecast(config: Config, plan: BatchPlan, *, pool: str | None = None) -> Forecast:
    """Return the memory of one rank, from config.json and the headers of the weights alone.

    ``pool``: of the roles in this pool; None: of all roles, as if they shared one.
    """
    actor = config.actor_rollout_ref.model
    policy = read_model_facts(actor.path)
    length = longest_row(config.data)[0]
    resident, phases = resident_weights(config, pool), {}
    if _is_in(config, _policy_role(config), pool):
        tokens = _tokens_at_once(plan.actor, length, plan.actor.sharing)
        activations = _activations(policy, tokens, actor)
        ranks = Placement.from_config(config).ranks_of_pass("actor")
        whole = _beside_its_part(config, policy, actor, config.actor_rollout_ref.actor.fsdp_config, ranks)
        phases["actor update: activations, logits"] = _sum(activations, _logits(policy, tokens), whole)
    if _is_in(config, _rollout_role(config), pool):
        back_end = ROLLOUTS[config.actor_rollout_ref.rollout.name]
        generation = load_backend(back_end.forecast)(config, plan, policy)
        resident |= generation.resident
        phases |= generation.phases
    if plan.critic is not None and _is_in(config, "Critic", pool):
        critic = read_model_facts(config.critic.model.path)
        tokens = _tokens_at_once(plan.critic, length, plan.critic.sharing)
        ranks = Placement.from_config(config).ranks_of_pass("critic")
        whole = _beside_its_part(config, critic, config.critic.model, config.critic.model.fsdp_config, ranks)
        phases["critic update: activations"] = _sum(_activations(critic, tokens, config.critic.model), whole)
    return Forecast(resident, phases)


def resident_weights(config: Config, pool: str | None = None) -> dict[str, int | None]:
    """Return the bytes of one rank's models of ``pool`` (None: of all), with what their training keeps."""
    policy = read_model_facts(config.actor_rollout_ref.model.path)
    trains = not config.trainer.val_only
    resident: dict[str, int | None] = {}
    actor, critic = config.actor_rollout_ref, config.critic
    if _is_in(config, _policy_role(config), pool):
        size = actor.actor.fsdp_config.fsdp_size
        if trains:
            resident["actor: weights, gradients, AdamW"] = _updated(
                config, "actor", policy, actor.model, size
            )
        else:
            resident["actor: weights"] = _weights(config, "actor", policy, _FLOAT32, size)
    if (
        uses_reference(config)
        and trains
        and not reference_is_the_actor(config)
        and _is_in(config, _reference_role(config), pool)
    ):
        resident["reference: weights"] = _weights(config, "ref", policy, _FLOAT32)
    if uses_critic(config) and trains and _is_in(config, "Critic", pool):
        facts, size = read_model_facts(critic.model.path), critic.model.fsdp_config.fsdp_size
        resident["critic: weights, gradients, AdamW"] = _updated(config, "critic", facts, critic.model, size)
    if config.reward_model.enable and _is_in(config, "RewardModel", pool):
        scorer = read_model_facts(config.reward_model.model.path)
        resident["reward model: weights"] = _weights(config, "reward_model", scorer, _FLOAT32)
    return resident


def supervised_forecast(config: SupervisedConfig) -> Forecast:
    """Return the memory of one rank of a supervised run."""
    model, update, length = read_model_facts(config.model.path), config.update, longest_row(config.data)[0]
    ranks, sequences = sum(map(sum, pools_of(config).values())), sequences_of_a_row(config)
    rows = -(-config.data.train_batch_size // ranks) * sequences
    if update.use_dynamic_bsz:
        size = MicroBatchSize(max_tokens=update.max_token_len_per_gpu)
    else:
        size = MicroBatchSize(rows=(update.micro_batch_size_per_gpu or rows) * sequences)
    tokens = _tokens_at_once(ForwardPlan(rows, size), length)
    size_of_group = config.model.fsdp_config.fsdp_size
    shards = min(size_of_group, ranks) if size_of_group > 0 else ranks
    logits = 0 if isinstance(config, RewardModellingConfig) else _logits(model, tokens)
    whole = _beside_its_part(config, model, config.model, config.model.fsdp_config, ranks)
    return Forecast(
        {"model: weights, gradients, AdamW": _trained(model, config.model, shards)},
        {"update: activations, logits": _sum(_activations(model, tokens, config.model), logits, whole)},
    )


def _policy_role(config: Config) -> str:
    return Placement.from_config(config).role_of_pass("actor")


def _reference_role(config: Config) -> str:
    return Placement.from_config(config).role_of_pass("ref")


def _rollout_role(config: Config) -> str:
    return _policy_role(config) if config.actor_rollout_ref.hybrid_engine else "Rollout"


def _is_in(config: Config, role: str, pool: str | None) -> bool:
    return pool is None or Placement.from_config(config).roles[role] == pool


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
    if reason_for_old_log_prob_pass(config):
        columns += _16_BITS  # log-probs in the update
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


def _updated(
    config: Config, name: str, facts: ModelFacts | None, model: ModelConfig, fsdp_size: int
) -> int | None:
    """Return the bytes of weights, gradients and moments on one rank of the role of a pass."""
    if strategy_of(config, name) != "megatron":
        return _trained(facts, model, _shards(config, name, fsdp_size))
    if not value_at(config, MICRO_BATCHES[name].megatron).use_distributed_optimizer:
        return _weights(config, name, facts, _TRAINED)
    moments = _times(facts, 2 * _FLOAT32, Placement.from_config(config).ranks_of_pass(name))
    return _sum(_weights(config, name, facts, 2 * _FLOAT32), moments)


def _weights(
    config: Config, name: str, facts: ModelFacts | None, bytes_each: int, fsdp_size: int = -1
) -> int | None:
    """Return the bytes of one rank's part of a model that is held whole, of so many for each parameter."""
    shards = _shards(config, name, fsdp_size)
    if strategy_of(config, name) != "megatron" or facts is None or facts.parameters is None:
        return _times(facts, bytes_each, shards)
    layout = value_at(config, MICRO_BATCHES[name].megatron)
    holders = layout.expert_model_parallel_size * layout.pipeline_model_parallel_size
    dense = facts.parameters - facts.expert_parameters
    return bytes_each * dense // shards + bytes_each * facts.expert_parameters // holders


def _shards(config: Config, name: str, fsdp_size: int) -> int:
    """Return the ranks over which one copy of the model of a pass is spread."""
    ranks = Placement.from_config(config).ranks_of_pass(name)
    if strategy_of(config, name) == "megatron":
        return ranks_with_same_rows(config, name, ranks)
    return min(fsdp_size, ranks) if fsdp_size > 0 else ranks


def sample_caches(config: Config, plan: BatchPlan, facts: ModelFacts | None) -> Forecast:
    """Return the memory of rollout ``hf``: a copy of the weights, and caches of samples generated at once."""
    cache = None
    if facts is not None:
        samples = min(plan.samples // plan.ranks, samples_at_once(config, facts))
        number = _number_bytes(config.actor_rollout_ref.model)
        cache = samples * longest_row(config.data)[0] * _cache_bytes(facts, number)
    return Forecast({}, {"generation: weights' copy, KV cache": _sum(_copy_of_hf(config, facts), cache)})


def _copy_of_hf(config: Config, facts: ModelFacts | None) -> int | None:
    """Return the bytes of weights in the compute dtype: cast, packed on a CPU, or beside a sharded actor."""
    return _times(facts, _number_bytes(config.actor_rollout_ref.model), 1)


def samples_at_once(config: Config, facts: ModelFacts) -> int:
    """Return how many samples rollout ``hf`` generates at once: ``micro_batch_size_per_gpu``, or what fits.

    What fits depends on the configuration and on the memory that is installed (of a GPU of unknown size
    ``_UNKNOWN_GPU``), not on what is free at the moment: a resumed run has to form the same batches.
    """
    if size := config.actor_rollout_ref.rollout.micro_batch_size_per_gpu:
        return size
    memory = memory_for(config)
    own = memory.size // memory.processes if memory else _UNKNOWN_GPU
    pool = Placement.from_config(config).roles[_rollout_role(config)]
    held = _sum(*resident_weights(config, pool).values())
    number = _number_bytes(config.actor_rollout_ref.model)
    free = own // 2 if held is None else own - held - (_copy_of_hf(config, facts) or 0)
    tokens, logits = longest_row(config.data)[0], 2 * _FLOAT32 * facts.vocabulary
    cache = tokens * _cache_bytes(facts, number)
    sample = cache * (facts.layers + 1) // max(facts.layers, 1) + logits  # grows by a layer
    return max(1, max(int(free * _SHARE_OF_CACHES), own // 32) // sample)


def _cache_bytes(facts: ModelFacts, number: int) -> int:
    """Return the bytes of a token's keys and values, of ``number`` bytes each."""
    return 2 * facts.layers * facts.kv_width * number


def replica_with_cache(config: Config, plan: BatchPlan, facts: ModelFacts | None) -> Forecast:
    """Return the memory of vLLM: one rank's part of a copy of the weights, and a cache of its sequences.

    On a GPU vLLM takes ``gpu_memory_utilization`` of the memory for both, whether it needs that or not.
    """
    del plan
    weights = cache = None
    if facts is not None:
        size = 2 if rollout_dtype(config) in ("bfloat16", "float16") else 4  # auto, on an unknown device
        length = config.data.max_prompt_length + config.data.max_response_length
        ranks, blocks = tensor_parallel_size(config), -(-length // _CACHE_BLOCK) + 1
        engines = Placement.from_config(config).ranks(_rollout_role(config)) // ranks
        tokens = sequences_of_engine(config, engines) * blocks * _CACHE_BLOCK
        weights = _times(facts, size, ranks)
        cache = tokens * _cache_bytes(facts, size) // ranks
        if memory := memory_for(config):  # vLLM takes no more, whatever is asked for
            share = config.actor_rollout_ref.rollout.gpu_memory_utilization * memory.size / memory.processes
            cache = min(cache, int(share))
    if config.trainer.device == "cpu" or not config.actor_rollout_ref.rollout.free_cache_engine:
        return Forecast({"vLLM: weights": weights, "vLLM: KV cache, at most": cache}, {})
    return Forecast({}, {"generation: vLLM's weights, and KV cache at most": _sum(weights, cache)})


def _times(facts: ModelFacts | None, bytes_each: int, shards: int) -> int | None:
    return facts.parameters * bytes_each // shards if facts is not None and facts.parameters else None


def _trained(facts: ModelFacts | None, model: ModelConfig, shards: int) -> int | None:
    """Return the bytes of a rank's part of a model that is trained; of LoRA see ``_trained_numbers``.

    A module that is trained whole beside adapters is held twice, once as in the base model.
    """
    if not model.has_adapters or facts is None:
        return _times(facts, _TRAINED, shards)
    return _sum(_times(facts, _FLOAT32, shards), _TRAINED * _trained_numbers(facts, model) // shards)


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _number_bytes(model: ModelConfig) -> int:
    """Return the bytes of an activation; the larger figure for `auto`, as the device is unknown here."""
    return 2 if model.compute_dtype == "bfloat16" else 4


def _tokens_at_once(part: ForwardPlan, length: int, sharing: int = 1) -> int:
    rows, all_tokens = part.micro_batch.rows, part.samples_per_rank * length
    tokens = min(all_tokens, part.micro_batch.max_tokens or all_tokens if rows is None else rows * length)
    return -(-tokens // sharing)


def _activations(facts: ModelFacts | None, tokens: int, model: ModelConfig) -> int | None:
    if facts is None:
        return None
    size, numbers = _number_bytes(model), tokens * facts.hidden
    layer = numbers * ACTIVATION_BYTES[size]
    if model.enable_gradient_checkpointing is True:
        return numbers * size * facts.layers + layer
    return layer * facts.layers


def tokens_in(memory: int, facts: ModelFacts, model: ModelConfig, *, trains: bool, has_logits: bool) -> int:
    """Return the tokens of a pass that ``memory`` bytes hold: its activations, and logits where it has them.

    A pass without gradients holds the activations of one layer at a time.
    """
    one = _activations(facts, 1, model) if trains else facts.hidden * ACTIVATION_BYTES[_number_bytes(model)]
    logits = _logits(facts, _LOGITS_AT_ONCE) if has_logits else 0
    return max(memory - (logits or 0), 0) // max(one or 0, 1)


def whole_gradients(facts: ModelFacts | None, model: ModelConfig) -> int | None:
    """Return the bytes of unsharded float32 gradients; of LoRA see ``_trained_numbers``."""
    if not model.has_adapters or facts is None:
        return _times(facts, _FLOAT32, 1)
    return _FLOAT32 * _trained_numbers(facts, model)


def _trained_numbers(facts: ModelFacts, model: ModelConfig) -> int:
    """Return the number of parameters of modules trained whole, and about that of adapters of all-linear."""
    folder = model.lora_adapter_path
    if folder is not None:
        file = Path(expand(folder)) / ADAPTER_WEIGHTS
        return count_parameters(file) if file.is_file() else 0
    whole: dict[str, int] = {}
    for end in model.modules_to_save:
        whole |= trained_whole(model.path, end) or {}
    # Widths in and out of the seven matrices of a layer; a feed-forward part is about four times as wide.
    return sum(whole.values()) + model.lora_rank * facts.layers * 25 * facts.hidden


def cast_weights(config: RootConfig, facts: ModelFacts | None, model: ModelConfig) -> int | None:
    """Return the bytes of the copies of its weights with which one rank computes in 16 bits."""
    on_gpu = model.compute_dtype == "auto" and uses_gpu(config)
    return _times(facts, 2, 1) if model.compute_dtype == "bfloat16" or on_gpu else 0


def _beside_its_part(
    config: RootConfig, facts: ModelFacts | None, model: ModelConfig, fsdp: FsdpConfig, ranks: int
) -> int | None:
    """Return the bytes of whole weights and gradients that an update holds beside a rank's own part."""
    if ranks == 1:
        return cast_weights(config, facts, model)
    kept = 0 if fsdp.reshard_after_forward else _times(facts, _number_bytes(model), 1)
    return _sum(kept, whole_gradients(facts, model) if fsdp.use_no_sync_for_gradient_accumulation else 0)


def _logits(facts: ModelFacts | None, tokens: int) -> int | None:
    if facts is None:
        return None
    return min(tokens * facts.vocabulary, _LOGITS_AT_ONCE) * _FLOAT32 * _LOGIT_COPIES

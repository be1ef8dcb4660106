"""Rules that compare the forecast of a run's memory with the memory that there is.

On a GPU vLLM takes the share ``gpu_memory_utilization`` at its start, whatever it needs: the rest must hold
what the trainer keeps on the same device, and the share what vLLM needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strop.config.batch_plan import (
    MICRO_BATCHES,
    SUPERVISED_MICRO_BATCH,
    BatchPlan,
    MicroBatchKeys,
    sequences_of_a_row,
)
from strop.config.checks.finding import Finding, error, warning
from strop.config.keys import longest_row, value_at
from strop.config.machine import Memory, memory_for
from strop.config.memory.facts import ModelFacts, read_model_facts
from strop.config.memory.forecast import (
    ACTIVATION_BYTES,
    Forecast,
    forecast,
    resident_weights,
    supervised_forecast,
)
from strop.config.placement import (
    Placement,
    enforce_eager,
    honours,
    rollout_dtype,
    tensor_parallel_size,
    uses_gpu,
)
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import SupervisedConfig

_REMEDIES = {
    "generation": "lower actor_rollout_ref.rollout.micro_batch_size_per_gpu (null: as many as fit) or "
    "data.max_response_length",
    "vLLM": "lower actor_rollout_ref.rollout.max_num_seqs or gpu_memory_utilization",
}
"""Beginning of the name of a part of a forecast -> the keys that make it smaller."""
_OF_WEIGHTS = "take a smaller model, or more GPUs (trainer.n_gpus_per_node)"


def run(config: Config, plan: BatchPlan) -> Iterator[Finding]:
    """Compare the memory of reinforcement learning: on a CPU of all pools, on GPUs of the largest one."""
    memory, placement = memory_for(config), Placement.from_config(config)
    if memory is None:
        return
    needs = {pool: forecast(config, plan, pool=pool) for pool in placement.pools}
    known = {pool: need for pool, need in needs.items() if need.peak is not None}
    if not known:
        return
    largest = max(known.values(), key=lambda need: need.peak or 0)
    on_gpu = memory.place != "this machine"
    each = [(need.peak or 0) * (1 if on_gpu else max(placement.pools[pool])) for pool, need in known.items()]
    row = longest_row(config.data)[0]
    updates = {
        f"{name} update": _smaller_pass(config, MICRO_BATCHES[name], model, -(-row // update.sharing))
        for name, model, update in (
            ("actor", "actor_rollout_ref.model", plan.actor),
            ("critic", "critic.model", plan.critic),
        )
        if update is not None
    }
    yield from _compare(largest, max(each) if on_gpu else sum(each), memory, _REMEDIES | updates)


def supervised(config: SupervisedConfig) -> Iterator[Finding]:
    """Compare the memory of a supervised run."""
    if config.trainer.val_only:
        return
    memory, need = memory_for(config), supervised_forecast(config)
    if memory is None:
        return
    row = sequences_of_a_row(config) * longest_row(config.data)[0]
    remedies = {"update": _smaller_pass(config, SUPERVISED_MICRO_BATCH, "model", row)}
    if need.peak is not None:
        yield from _compare(need, need.peak * memory.processes, memory, remedies)


def vllm(config: Config, plan: BatchPlan) -> Iterator[Finding]:
    """Compare the share of a GPU that vLLM takes with what vLLM needs, and with what the trainer keeps."""
    memory = memory_for(config)
    if not (honours(config, "gpu_memory_utilization") and uses_gpu(config)) or memory is None:
        return
    facts, rollout = read_model_facts(config.actor_rollout_ref.model.path), config.actor_rollout_ref.rollout
    if facts is None or facts.parameters is None:
        return
    share = int(rollout.gpu_memory_utilization * memory.size)
    given = f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} is " + _gib(
        share
    )
    parts = _vllm_needs(config, facts)
    if (need := sum(parts.values())) > share:
        fixed = parts["weights"] + parts["the longest sequence"]
        yield (error if fixed > share else warning)(
            f"memory: {given}, and vLLM needs about {_gib(need)}: {_listed(parts)}; raise it, lower "
            f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} or "
            f"max_num_seqs={rollout.max_num_seqs}, or raise tensor_model_parallel_size"
        )
    placed = Placement.from_config(config)
    pool = placed.roles[placed.rollout_role]
    kept = dict(resident_weights(config, pool))
    if not rollout.free_cache_engine:
        update = forecast(config, plan, pool=pool).phases
        kept |= {name: size for name, size in update.items() if not name.startswith("generation")}
    sizes = {name: size for name, size in kept.items() if size}
    if sum(sizes.values()) + share <= memory.size:
        return
    room = max(memory.size - sum(sizes.values()), 0) / memory.size
    lower = f"lower it to {int(100 * room) / 100:g} at most" if room >= 0.01 else "take more ranks"
    graphs = "" if enforce_eager(config) else " and CUDA graphs, which stay in memory,"
    yield warning(
        f"memory: {given} of {memory.place} with {_gib(memory.size)}, and the trainer keeps about "
        f"{_gib(sum(sizes.values()))} there while vLLM has it: {_listed(sizes)}{graphs} do not fit; {lower}, "
        "or offload (fsdp_config.optimizer_offload=True and param_offload=True; the forecast leaves both out)"
    )


def _vllm_needs(config: Config, facts: ModelFacts) -> dict[str, int]:
    """Return the bytes that vLLM measures on a rank at its start, and those of the longest sequence."""
    size = 4 if rollout_dtype(config) == "float32" else 2
    rollout, ranks = config.actor_rollout_ref.rollout, tensor_parallel_size(config)
    length = config.data.max_prompt_length + config.data.max_response_length
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    return {
        "weights": size * (facts.parameters or 0) // ranks,
        f"activations of {tokens:,} tokens": tokens * facts.hidden * ACTIVATION_BYTES[size],
        # in float32: the logits, those that are sampled from, and log-probs
        f"logits of {sequences:,} sequences": sequences * facts.vocabulary * 3 * 4,
        "the longest sequence": 2 * facts.layers * facts.kv_width * size * length // ranks,
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size >= 2**30 // 20)


def _smaller_pass(config: RootConfig, keys: MicroBatchKeys, model: str, row: int) -> str:
    """Return the keys that make a pass smaller: its size, unless it is one ``row`` of tokens, and others."""
    found = []
    if value_at(config, keys.dynamic):
        cap = value_at(config, keys.max_tokens)
        found += [f"lower {keys.max_tokens}={cap} (at least {row})"] if cap > row else []
    elif (rows := value_at(config, keys.per_gpu)) != 1:
        found.append(f"lower {keys.per_gpu if rows else keys.overall}")
    if not value_at(config, f"{model}.enable_gradient_checkpointing"):
        found.append(f"set {model}.enable_gradient_checkpointing=True")
    return ", or ".join(found) or "lower data.max_prompt_length or data.max_response_length"


def _compare(need: Forecast, total: int, memory: Memory, remedies: dict[str, str]) -> Iterator[Finding]:
    """Warn of a forecast above the memory; require that it is at most twice the memory."""
    if total <= memory.size:
        return
    parts = {name: size or 0 for name, size in (need.resident | need.phases).items()}
    name = max(parts, key=parts.__getitem__)
    remedy = next((words for start, words in remedies.items() if name.startswith(start)), _OF_WEIGHTS)
    finding = error if total > 2 * memory.size else warning
    yield finding(
        f"memory: about {total / 2**30:,.1f} GiB at full sequence lengths"
        + (f" in {memory.processes} processes" if memory.processes > 1 else "")
        + f", and {memory.place} has {memory.size / 2**30:,.1f} GiB. The largest part, {name}, takes "
        f"{parts[name] / 2**30:,.1f} GiB: {remedy}"
    )

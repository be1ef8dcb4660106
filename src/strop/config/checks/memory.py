"""Rules that compare the forecast of a run's memory with the memory that there is."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.batch_plan import BatchPlan
from strop.config.checks.finding import Finding, error, warning
from strop.config.checks.supervised import sequences_of_a_row
from strop.config.machine import Memory, memory_for
from strop.config.memory.forecast import Forecast, forecast, supervised_forecast
from strop.config.placement import Placement
from strop.config.schema import Config
from strop.config.schema.supervised import SupervisedConfig

_REMEDIES = {
    "actor update": "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, or set "
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "critic update": "lower critic.ppo_micro_batch_size_per_gpu, or set "
    "critic.model.enable_gradient_checkpointing=True",
    "generation": "lower actor_rollout_ref.rollout.micro_batch_size_per_gpu (null: as many as fit) or "
    "data.max_response_length",
    "vLLM": "lower actor_rollout_ref.rollout.max_num_seqs or gpu_memory_utilization",
    "update": "lower update.micro_batch_size_per_gpu, or set model.enable_gradient_checkpointing=True",
}
"""Beginning of the name of a part of a forecast -> the keys that make it smaller."""
_OF_WEIGHTS = "take a smaller model, or more GPUs (trainer.n_gpus_per_node)"


def run(config: Config, plan: BatchPlan) -> Iterator[Finding]:
    """Compare the memory of reinforcement learning: on a CPU of all pools, on GPUs of the largest one."""
    memory, pools = memory_for(config), Placement.from_config(config).pools
    needs = {pool: forecast(config, plan, pool=pool) for pool in pools}
    known = {pool: need for pool, need in needs.items() if need.peak is not None}
    if not known:
        return
    largest = max(known.values(), key=lambda need: need.peak or 0)
    on_gpu = memory.place != "this machine"
    each = [(need.peak or 0) * (1 if on_gpu else max(pools[pool])) for pool, need in known.items()]
    yield from _compare(largest, max(each) if on_gpu else sum(each), memory)


def supervised(config: SupervisedConfig) -> Iterator[Finding]:
    """Compare the memory of a supervised run."""
    if config.trainer.val_only:
        return
    memory, need = memory_for(config), supervised_forecast(config, sequences_of_a_row(config))
    if need.peak is not None:
        yield from _compare(need, need.peak * memory.processes, memory)


def _compare(need: Forecast, total: int, memory: Memory) -> Iterator[Finding]:
    """Warn of a forecast above the memory; require that it is at most twice the memory."""
    if total <= memory.size:
        return
    parts = {name: size or 0 for name, size in (need.resident | need.phases).items()}
    name = max(parts, key=parts.__getitem__)
    remedy = next((words for start, words in _REMEDIES.items() if name.startswith(start)), _OF_WEIGHTS)
    finding = error if total > 2 * memory.size else warning
    yield finding(
        f"memory: about {total / 2**30:,.1f} GiB at full sequence lengths"
        + (f" in {memory.processes} processes" if memory.processes > 1 else "")
        + f", and {memory.place} has {memory.size / 2**30:,.1f} GiB. The largest part, {name}, takes "
        f"{parts[name] / 2**30:,.1f} GiB: {remedy}"
    )

"""Rules that compare the forecast of a run's memory with the memory that there is."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.backends import ROLLOUTS, Forecast
from strop.config.batch_plan import (
    MICRO_BATCHES,
    MODELS,
    SUPERVISED_MICRO_BATCH,
    BatchPlan,
    MicroBatchKeys,
    sequences_of_a_row,
)
from strop.config.checks.finding import Finding, error, warning
from strop.config.keys import longest_row, value_at
from strop.config.machine import Memory, memory_for
from strop.config.memory.facts import read_model_facts
from strop.config.memory.forecast import forecast, rollout_forecast, supervised_forecast, trainer_forecast
from strop.config.memory.shapes import gib
from strop.config.placement import Placement, uses_gpu
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import SupervisedConfig

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
    row, rollout = longest_row(config.data)[0], rollout_forecast(config, plan)
    remedy = ROLLOUTS[config.actor_rollout_ref.rollout.name].remedy
    remedies = dict.fromkeys(rollout.resident | rollout.phases, remedy) | {
        f"{name} update": _smaller_pass(config, MICRO_BATCHES[name], MODELS[name], -(-row // update.sharing))
        for name, update in (("actor", plan.actor), ("critic", plan.critic))
        if update is not None
    }
    yield from _compare(largest, max(each) if on_gpu else sum(each), memory, remedies)


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


def share(config: Config, plan: BatchPlan) -> Iterator[Finding]:
    """Compare what a rollout takes of a GPU at its start with its needs and with what the trainer keeps."""
    path, memory = config.actor_rollout_ref.model.path, memory_for(config)
    facts, placed = read_model_facts(path), Placement.from_config(config)
    if not uses_gpu(config) or memory is None or facts is None or facts.parameters is None:
        return
    beside = trainer_forecast(config, plan, pool=placed.roles[placed.rollout_role])
    kind = ROLLOUTS[config.actor_rollout_ref.rollout.name]
    yield from kind.share_fits(config, facts, beside, memory.size)


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
    """Warn of a forecast above the memory; require that it is at most twice the memory.

    ``remedies``: beginning of the name of a part -> the keys that make it smaller.
    """
    if total <= memory.size:
        return
    parts = {name: size or 0 for name, size in (need.resident | need.phases).items()}
    name = max(parts, key=parts.__getitem__)
    remedy = next((words for start, words in remedies.items() if name.startswith(start)), _OF_WEIGHTS)
    finding = error if total > 2 * memory.size else warning
    yield finding(
        f"memory: about {gib(total)} at full sequence lengths"
        + (f" in {memory.processes} processes" if memory.processes > 1 else "")
        + f", and {memory.place} has {gib(memory.size)}. The largest part, {name}, takes "
        f"{gib(parts[name])}: {remedy}"
    )

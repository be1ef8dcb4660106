"""Values of unwritten keys, chosen from the forecast of memory: token caps, and when gradients are reduced.

Both change the order of sums, and so the last bits of a result. They are therefore chosen once, when a
configuration is loaded, and are values of it from then on: all processes have the same, and the
``config.yaml`` of a run folder keeps them for later commands in that folder, on whatever machine they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.batch_plan import (
    MICRO_BATCHES,
    MODELS,
    SUPERVISED_MICRO_BATCH,
    BatchPlan,
    MicroBatchKeys,
    engine_of,
    longest_row_of,
    sequence_parallel_size,
    sequences_of_a_row,
)
from strop.config.derived import recorded_run
from strop.config.identity import value_in
from strop.config.keys import longest_row, value_at
from strop.config.machine import memory_for
from strop.config.memory.facts import read_model_facts
from strop.config.memory.forecast import forecast, supervised_forecast
from strop.config.memory.shapes import cast_weights, tokens_in, whole_gradients
from strop.config.paths import expand
from strop.config.placement import Placement, pools_of, process_count, uses_gpu
from strop.config.schema import Config, RootConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.supervised import RewardModellingConfig, SupervisedConfig
from strop.errors import ConfigError

MOST_TOKENS, MOST_ON_A_GPU = 4096, 8192
"""Tokens of a pass beyond which more take memory and no less time; not measured on a GPU yet.

An update on one core takes with 512, 1k, 2k, 4k and 8k tokens, relative to the least time: of 5 million
parameters 1.24, 1.03, 1, 1 and 1 in float32, 1.34, 1.13, 1.04, 1 and 1.10 in bfloat16; of 30 million with 1k
to 8k 1.02, 1.06, 1 and 1.10, and 1.05, 1.08, 1 and 1.01. With 4k instead of 8k a run takes a quarter less
memory (5 million parameters, float32).
"""
_ROWS_OF_AN_UNKNOWN_MODEL = 8
# Of the memory beside the models; the rest is for samples, what allocators keep, and the system.
_SHARE_OF_A_PASS, _SHARE_OF_GRADIENTS = 0.5, 0.25


def choices(config: RootConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return token caps of passes, how gradients are reduced, and the reasons, for keys without a value.

    A value that is not written is that of an earlier run of the model in the same folder, or chosen:

    - a cap: the power of two that fits into half of the memory beside the models, at most ``MOST_TOKENS`` (on
      a GPU ``MOST_ON_A_GPU``), so that machines of about equal size choose the same; in any case the longest
      row. It is eight rows, within the same limits, for a model of unknown size (on the hub, not downloaded)
      and on GPUs of unknown size (``trainer.device=cuda`` on a cluster's node that has none).
    - ``EngineKind.accumulation``, whether several ranks keep whole gradients until a step: True if these fit
      into a quarter;
      False if either size is unknown.
    """
    before, values, chosen = _earlier_run(config), dict[str, Any](), list[tuple[_Pass, str]]()
    whys: dict[str, str] = {}
    for part in _passes(config):
        for key in part.undecided(config):
            kept = part.kept(config, before, key)
            values[key] = part.fallback(key) if kept is None else kept
            whys[key] = (
                "size of model or memory unknown" if kept is None else "as in an earlier run in this folder"
            )
            chosen += [(part, key)] if kept is None else []
    filled = with_values(config, values)
    free = _free_memory(filled) if chosen else {}
    for part, key in chosen:
        choice = part.choose(filled, key, free[part.pool]) if part.pool in free else None
        if choice is not None:
            values[key], whys[key] = choice, "chosen from the memory"
    return values, whys


@dataclass(frozen=True)
class _Pass:
    """A pass that may be cut by tokens."""

    keys: MicroBatchKeys
    model: str
    """Section of its model."""
    longest: int
    """Tokens of the longest row on one rank."""
    most: int
    """Tokens beyond which a pass gets no faster."""
    pool: str = ""
    trains: bool = True
    has_logits: bool = True
    sync: str | None = None
    """Key that says whether whole gradients are kept; None for a pass that does not train."""
    reduces: bool = False
    """Several ranks reduce its gradients."""
    alone: bool = True
    """One rank computes it, with a whole model."""

    def undecided(self, config: RootConfig) -> Iterator[str]:
        """Yield the keys without a value."""
        if value_at(config, self.keys.dynamic) and value_at(config, self.keys.max_tokens) is None:
            yield self.keys.max_tokens
        if self.sync is not None and value_at(config, self.sync) is None:
            yield self.sync

    def fallback(self, key: str) -> Any:
        """Return the value for a model or GPUs of unknown size."""
        return False if key == self.sync else self._bounded(_ROWS_OF_AN_UNKNOWN_MODEL * self.longest)

    def kept(self, config: RootConfig, before: Mapping[str, Any], key: str) -> Any:
        """Return the value of a run with the values ``before``, if it was of this model and still fits."""
        path, value = f"{self.model}.path", value_in(before, key)
        if value_in(before, path) != value_at(config, path):
            return None
        if key == self.sync:
            return value if isinstance(value, bool) else None
        holds_a_row = isinstance(value, int) and value >= self.longest
        return value if holds_a_row and value_in(before, self.keys.dynamic) is True else None

    def choose(self, config: RootConfig, key: str, free: int) -> Any:
        """Return the value that suits ``free`` bytes beside the models; None for a model of unknown size."""
        if key == self.sync and not self.reduces:
            return False
        model = value_at(config, self.model)
        facts = read_model_facts(model.path)
        if facts is None:
            return None
        if key == self.sync:
            whole = whole_gradients(facts, model)
            return None if whole is None else whole <= free * _SHARE_OF_GRADIENTS
        # the reward model computes like the policy
        options = model if isinstance(model, ModelConfig) else value_at(config, "actor_rollout_ref.model")
        copy = (cast_weights(config, facts, options) or 0) if self.alone else 0
        memory = int(max(free - copy, 0) * _SHARE_OF_A_PASS)
        tokens = tokens_in(memory, facts, options, trains=self.trains, has_logits=self.has_logits)
        return self._bounded(1 << max(tokens, 1).bit_length() - 1)

    def _bounded(self, tokens: int) -> int:
        return max(min(tokens, self.most), self.longest)


def _sync_key(config: RootConfig, name: str) -> str | None:
    """Return the key of the engine of a pass that says whether whole gradients are kept, if it has one."""
    engine = engine_of(config, name)
    return f"{engine.key_of(name)}.{engine.accumulation}" if engine.accumulation else None


def _passes(config: RootConfig) -> Iterator[_Pass]:
    most = MOST_ON_A_GPU if uses_gpu(config) else MOST_TOKENS
    if isinstance(config, SupervisedConfig):
        longest = sequences_of_a_row(config) * longest_row(config.data)[0]
        yield _Pass(
            SUPERVISED_MICRO_BATCH,
            "model",
            longest,
            most,
            has_logits=not isinstance(config, RewardModellingConfig),
            sync=_sync_key(config, "update"),
            reduces=process_count(config) > 1,
            alone=process_count(config) == 1,
        )
    if not isinstance(config, Config):
        return
    for name, keys in MICRO_BATCHES.items():
        with suppress(ConfigError):  # a layout over ranks that cannot be: `check` reports it
            placement = Placement.from_config(config)
            ranks = placement.ranks_of_pass(name)
            sharing = sequence_parallel_size(config, name, ranks)
            yield _Pass(
                keys,
                MODELS[name],
                -(-longest_row_of(config, name)[0] // sharing),
                most,
                pool=placement.pool_of_pass(name),
                trains=name in ("actor", "critic"),
                has_logits=name in ("actor", "log_prob", "ref"),
                sync=_sync_key(config, name) if name in ("actor", "critic") else None,
                reduces=ranks > 1,
                alone=ranks == 1,
            )


def _earlier_run(config: RootConfig) -> Mapping[str, Any]:
    """Return the values of the run that this one may continue."""
    settings = config.trainer
    if settings.resume_mode == "disable":
        return {}
    auto = settings.resume_mode == "auto"
    return recorded_run(settings.default_local_dir if auto else Path(expand(settings.resume_mode)).parent)


def _free_memory(config: RootConfig) -> dict[str, int]:
    """Return the bytes beside the models of a process of each pool, where both sizes are known."""
    needs = {}
    with suppress(ConfigError):  # sizes that do not fit each other: `check` reports them
        if isinstance(config, SupervisedConfig):
            needs[""] = supervised_forecast(config)
        elif isinstance(config, Config):
            plan = BatchPlan.from_config(config)
            needs |= {pool: forecast(config, plan, pool=pool) for pool in pools_of(config)}
    memory = memory_for(config)
    if memory is None:
        return {}
    own = memory.size // memory.processes
    return {pool: max(own - need.held, 0) for pool, need in needs.items() if need.held is not None}


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a section with other values, by their paths in it."""
    below: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = value
    return section.model_copy(
        update={
            name: parts[""] if "" in parts else with_values(getattr(section, name), parts)
            for name, parts in below.items()
        }
    )

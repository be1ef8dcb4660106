"""Token caps of micro-batches that nobody wrote, chosen from the forecast of memory.

How a batch is cut changes the order of sums, and so the last bits of a result. A cap is therefore chosen
once, when a configuration is loaded, and is one of its values from then on: all processes have the same, and
the ``config.yaml`` of a run folder keeps it for later commands in that folder, on whatever machine they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.batch_plan import (
    MICRO_BATCHES,
    SUPERVISED_MICRO_BATCH,
    BatchPlan,
    MicroBatchKeys,
    longest_row_of,
    sequence_parallel_size,
    sequences_of_a_row,
)
from strop.config.identity import value_in
from strop.config.keys import longest_row, value_at
from strop.config.machine import memory_for
from strop.config.memory.facts import read_model_facts
from strop.config.memory.forecast import forecast, supervised_forecast, tokens_in
from strop.config.paths import expand
from strop.config.placement import Placement, Root, pools_of
from strop.config.schema import Config, RootConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.supervised import RewardModellingConfig, SupervisedConfig
from strop.config.trees import recorded_run
from strop.errors import ConfigError

MOST_TOKENS = 8192
"""More tokens in a pass make it no faster."""
_ROWS_OF_AN_UNKNOWN_MODEL = 8
_SHARE = 0.5  # of the memory beside the models; the rest is for samples, what allocators keep, and the system


def with_token_caps(config: Root) -> Root:
    """Return ``config`` with a cap for each pass that is cut by tokens and has none.

    It is that of an earlier run of the model in the same folder; else the power of two that fits into half of
    the memory beside the models, at most ``MOST_TOKENS``: machines of about equal size choose the same. It
    holds the longest row in any case. A model of unknown size (on the hub, not downloaded) gets eight rows.
    """
    before, caps, passes = _earlier_run(config), dict[str, int](), list[_Pass]()
    for part in _passes(config):
        if value_at(config, part.keys.dynamic) and value_at(config, part.keys.max_tokens) is None:
            kept = part.kept(config, before)
            caps[part.keys.max_tokens] = kept or part.bounded(_ROWS_OF_AN_UNKNOWN_MODEL * part.longest)
            passes += [] if kept else [part]
    if not caps:
        return config
    filled = _with_values(config, caps)
    free = _free_memory(filled) if passes else {}
    for part in passes:
        tokens = part.fitting(filled, free.get(part.pool))
        if tokens is not None:
            caps[part.keys.max_tokens] = part.bounded(tokens)
    return _with_values(config, caps)


@dataclass(frozen=True)
class _Pass:
    """A pass that may be cut by tokens."""

    keys: MicroBatchKeys
    model: str
    """Section of its model."""
    longest: int
    """Tokens of the longest row on one rank."""
    pool: str = ""
    trains: bool = True
    has_logits: bool = True

    def bounded(self, tokens: int) -> int:
        """Return ``tokens`` as a cap: at most ``MOST_TOKENS``, but a whole row."""
        return max(min(tokens, MOST_TOKENS), self.longest)

    def kept(self, config: RootConfig, before: Mapping[str, Any]) -> int | None:
        """Return the cap of a run with the values ``before``, if it was of this model and holds a row."""
        path, cap = f"{self.model}.path", value_in(before, self.keys.max_tokens)
        if value_in(before, path) != value_at(config, path) or not isinstance(cap, int):
            return None
        return cap if value_in(before, self.keys.dynamic) is True and cap >= self.longest else None

    def fitting(self, config: RootConfig, free: int | None) -> int | None:
        """Return the power of two of tokens whose pass takes a share of ``free`` bytes; None if not known."""
        model = value_at(config, self.model)
        facts = read_model_facts(model.path)
        if free is None or facts is None:
            return None
        # the reward model computes like the policy
        options = model if isinstance(model, ModelConfig) else value_at(config, "actor_rollout_ref.model")
        tokens = tokens_in(int(free * _SHARE), facts, options, trains=self.trains, has_logits=self.has_logits)
        return 1 << max(tokens, 1).bit_length() - 1


def _passes(config: RootConfig) -> Iterator[_Pass]:
    if isinstance(config, SupervisedConfig):
        longest = sequences_of_a_row(config) * longest_row(config.data)[0]
        scores = isinstance(config, RewardModellingConfig)
        yield _Pass(SUPERVISED_MICRO_BATCH, "model", longest, has_logits=not scores)
    if not isinstance(config, Config):
        return
    models = {"critic": "critic.model", "values": "critic.model", "reward_model": "reward_model.model"}
    for name, keys in MICRO_BATCHES.items():
        with suppress(ConfigError):  # a layout over ranks that cannot be: `check` reports it
            placement = Placement.from_config(config)
            sharing = sequence_parallel_size(config, name, placement.ranks_of_pass(name))
            yield _Pass(
                keys,
                models.get(name, "actor_rollout_ref.model"),
                -(-longest_row_of(config, name)[0] // sharing),
                pool=placement.pool_of_pass(name),
                trains=name in ("actor", "critic"),
                has_logits=name not in models,
            )


def _earlier_run(config: RootConfig) -> Mapping[str, Any]:
    """Return the values of the run that this one may continue."""
    settings = config.trainer
    if settings.resume_mode == "disable":
        return {}
    auto = settings.resume_mode == "auto"
    return recorded_run(settings.default_local_dir if auto else Path(expand(settings.resume_mode)).parent)


def _free_memory(config: RootConfig) -> dict[str, int]:
    """Return the bytes beside the models of a process of each pool; without those of unknown size."""
    needs = {}
    with suppress(ConfigError):  # sizes that do not fit each other: `check` reports them
        if isinstance(config, SupervisedConfig):
            needs[""] = supervised_forecast(config)
        elif isinstance(config, Config):
            plan = BatchPlan.from_config(config)
            needs |= {pool: forecast(config, plan, pool=pool) for pool in pools_of(config)}
    memory = memory_for(config)
    own = memory.size // memory.processes
    return {pool: max(own - need.held, 0) for pool, need in needs.items() if need.held is not None}


def _with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a section with other values, by their paths in it."""
    below: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = value
    return section.model_copy(
        update={
            name: parts[""] if "" in parts else _with_values(getattr(section, name), parts)
            for name, parts in below.items()
        }
    )

"""The kinds of runs, each a tree of keys: a schema, and the YAML file that holds its defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from strop.config.keys import value_at
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import RewardModellingConfig, SftConfig

# Keys that still work under an old name or meaning, and the line that says so.

OLD_LIBS = "actor_rollout_ref.model.external_libs"

NEW_LIB = "actor_rollout_ref.model.external_lib"


OLD_MICRO_BATCH_KEYS = (
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.forward_micro_batch_size",
    "reward_model.micro_batch_size",
)


def settle(tree: DictConfig, explicit: Collection[str]) -> None:
    """Make old and new keys agree in `tree`, in place, before it is resolved.

    `explicit` holds the full paths of the keys that the user wrote. A pair of which both were written stays
    as it is, for `check` to report.
    """

    def written(path: str) -> bool:
        return (
            path in explicit and OmegaConf.select(tree, path, throw_on_resolution_failure=False) is not None
        )

    for old in OLD_MICRO_BATCH_KEYS:
        new = f"{old}_per_gpu"
        if written(old) and not written(new):
            OmegaConf.update(tree, new, None)
        elif written(new) and not written(old):
            OmegaConf.update(tree, old, None)
    if written(OLD_LIBS) and not written(NEW_LIB):
        OmegaConf.update(tree, NEW_LIB, OmegaConf.select(tree, OLD_LIBS))


def deprecation_lines(config: Config) -> list[str]:
    """One line for each deprecated key that `config` uses."""
    lines = [
        f"{old}={value_at(config, old)} is deprecated: use {old}_per_gpu, which counts sequences per rank"
        for old in OLD_MICRO_BATCH_KEYS
        if value_at(config, old) is not None
    ]
    if config.actor_rollout_ref.model.external_libs is not None:
        lines.append(f"{OLD_LIBS} is deprecated: use {NEW_LIB}")
    return lines


Root = TypeVar("Root", bound=RootConfig)


def _nothing_to_settle(tree: DictConfig, explicit: Collection[str]) -> None:
    """A tree without deprecated keys."""


@dataclass(frozen=True)
class Tree(Generic[Root]):
    """One kind of run."""

    schema: type[Root]
    name: str
    """Of the file of defaults, without .yaml: what a `defaults:` list calls it."""
    settle: Callable[[DictConfig, Collection[str]], None] = _nothing_to_settle
    """Makes deprecated keys and their successors agree, before interpolations are resolved."""

    @property
    def defaults_file(self) -> Path:
        """The only place where defaults stand."""
        return Path(__file__).with_name(f"{self.name}.yaml")

    @cache  # noqa: B019 - there are as many trees as kinds of runs
    def defaults(self) -> DictConfig:
        """What that file holds; not to be changed."""
        return cast(DictConfig, OmegaConf.load(self.defaults_file))


PPO = Tree(Config, "ppo_trainer", settle)

SFT = Tree(SftConfig, "sft_trainer")

REWARD_MODELLING = Tree(RewardModellingConfig, "rm_trainer")

_TREES: tuple[Tree[Any], ...] = (PPO, SFT, REWARD_MODELLING)


def tree_of(config: RootConfig) -> Tree[Any]:
    """The tree that a configuration is one of."""
    return next(tree for tree in _TREES if type(config) is tree.schema)

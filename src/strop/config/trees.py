"""The kinds of runs, each a tree of keys: a schema, and the YAML file that holds its defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from strop.config import deprecated
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import RewardModellingConfig, SftConfig

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


PPO = Tree(Config, "ppo_trainer", deprecated.settle)
SFT = Tree(SftConfig, "sft_trainer")
REWARD_MODELLING = Tree(RewardModellingConfig, "rm_trainer")
_TREES: tuple[Tree[Any], ...] = (PPO, SFT, REWARD_MODELLING)


def tree_of(config: RootConfig) -> Tree[Any]:
    """The tree that a configuration is one of."""
    return next(tree for tree in _TREES if type(config) is tree.schema)

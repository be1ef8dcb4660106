"""The kinds of runs, each a tree of keys: a schema, and the YAML file with its defaults."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, cast

from omegaconf import DictConfig, OmegaConf

from strop.config.backends import ENGINES, ROLLOUTS
from strop.config.keys import all_keys, short_names
from strop.config.placement import Root
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import PreferenceConfig, RewardModellingConfig, SftConfig


@dataclass(frozen=True)
class Tree(Generic[Root]):
    """One kind of run."""

    schema: type[Root]
    name: str
    """Name of the file of defaults without .yaml: a ``defaults:`` list may use it."""

    @property
    def defaults_file(self) -> Path:
        """File with all defaults."""
        return Path(__file__).with_name(f"{self.name}.yaml")

    @property
    def short(self) -> dict[str, str]:
        """Key behind each argument of the short form, as in {"lr": "actor_rollout_ref.actor.optim.lr"}."""
        return short_names(self.schema)

    @cache  # noqa: B019 - there are as many trees as kinds of runs
    def defaults(self) -> DictConfig:
        """Return the content of that file, with defaults of back-ends that it lacks; not to be changed."""
        tree = cast(DictConfig, OmegaConf.load(self.defaults_file))
        _add_back_ends(tree, self.schema)
        return tree

    @cache  # noqa: B019
    def raw_defaults(self) -> dict[str, Any]:
        """Return the defaults with interpolations as they stand; not to be changed."""
        return cast(dict[str, Any], OmegaConf.to_container(self.defaults(), resolve=False))

    def raw_default(self, path: str) -> Any:
        """Return a key's default with its interpolation; None if there is no such key."""
        value: Any = self.raw_defaults()
        for word in path.split("."):
            value = value.get(word) if isinstance(value, dict) else None
        return value

    @cache  # noqa: B019
    def default(self, path: str) -> Any:
        """Return a key's default beside the other defaults; None if there is no such key."""
        return OmegaConf.select(self.defaults(), path)

    def followed_by(self, path: str) -> str | None:
        """Return the key that the default of ``path`` is, as in ``${data.max_prompt_length}``."""
        default = self.raw_default(path)
        return default[2:-1] if isinstance(default, str) and default.startswith("${") else None

    def written_for(self, path: str, written: Collection[str]) -> str | None:
        """Return the key in ``written`` that decides ``path``: itself, or one that it follows."""
        key: str | None = path
        while key is not None and key not in written:
            key = self.followed_by(key)
        return key

    def author(self, config: Root, path: str) -> str:
        """Return who decided the value of a key, in words."""
        followed = self.followed_by(path)
        return config.author(path) or (f"follows {followed}" if followed else "default")


def _add_back_ends(tree: DictConfig, schema: type[RootConfig]) -> None:
    """Add the keys of back-ends in ``schema`` that the file does not have, in place.

    An engine's first section has the defaults of its class; its others follow that one, key by key.
    """
    for module in ENGINES.keys_modules():
        first = None
        for place, section in module.SECTIONS.items():
            path, fields = f"{place}.{module.SECTION}", section.model_fields
            if path not in all_keys(schema) or OmegaConf.select(tree, path) is not None:
                continue
            values = {
                name: f"${{{first}.{name}}}" if first else field.get_default(call_default_factory=True)
                for name, field in fields.items()
            }
            OmegaConf.update(tree, path, values)
            first = first or path
    rollout = OmegaConf.select(tree, "actor_rollout_ref.rollout")
    for section in (section for module in ROLLOUTS.keys_modules() for section in module.SECTIONS):
        for name, field in section.model_fields.items():
            if rollout is not None and name not in rollout:
                rollout[name] = field.get_default(call_default_factory=True)


PPO = Tree(Config, "ppo_trainer")

SFT = Tree(SftConfig, "sft_trainer")

REWARD_MODELLING = Tree(RewardModellingConfig, "rm_trainer")

DPO = Tree(PreferenceConfig, "dpo_trainer")

TREES: dict[str, Tree] = {"train": PPO, "sft": SFT, "train-rm": REWARD_MODELLING, "dpo": DPO}
"""Command -> its tree."""


def tree_of(schema: type[RootConfig]) -> Tree:
    """Return the tree of a configuration's class."""
    return next(tree for tree in TREES.values() if issubclass(schema, tree.schema))

"""The kinds of runs, each a tree of keys: a schema, and the YAML file with its defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strop.config.batch_plan import MICRO_BATCHES, SUPERVISED_MICRO_BATCH
from strop.config.identity import Change, default_name, value_in
from strop.config.keys import all_keys, value_at
from strop.config.paths import expand
from strop.config.placement import Root, automatic_rollout
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import PreferenceConfig, RewardModellingConfig, SftConfig

OLD_LIBS = "actor_rollout_ref.model.external_libs"
NEW_LIB = "actor_rollout_ref.model.external_lib"
ROLLOUT_NAME = "actor_rollout_ref.rollout.name"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_EXPERIMENT, _RUN_FOLDER = "trainer.experiment_name", "trainer.default_local_dir"


def settle_deprecated(tree: DictConfig, written: Collection[str]) -> None:
    """Make deprecated keys and their successors agree in ``tree``, in place, before it is resolved.

    A pair of which the user wrote both stays as it is, for ``check`` to report.
    """

    def is_set(path: str) -> bool:
        return path in written and _select(tree, path) is not None

    for keys in MICRO_BATCHES.values():
        old, new = keys.overall, keys.per_gpu
        if is_set(old) and not is_set(new):
            OmegaConf.update(tree, new, None)
        elif is_set(new) and not is_set(old):
            OmegaConf.update(tree, old, None)
    if is_set(OLD_LIBS) and not is_set(NEW_LIB):
        OmegaConf.update(tree, NEW_LIB, OmegaConf.select(tree, OLD_LIBS))


def name_experiment(tree: DictConfig, command: str) -> None:
    """Set ``trainer.experiment_name=null`` to the run folder's name, in place.

    The default folder is named after the experiment. Where both are left out, both are called after what the
    run trains, so that unrelated runs share no folder.
    """
    if not isinstance(_select(tree, "trainer"), DictConfig) or _select(tree, _EXPERIMENT) is not None:
        return
    name = default_name(command, _plain(tree))
    OmegaConf.update(tree, _EXPERIMENT, name)
    folder = _select(tree, _RUN_FOLDER)
    if isinstance(folder, str):
        OmegaConf.update(tree, _EXPERIMENT, Path(folder).name or name)
        if _select(tree, _RUN_FOLDER) != folder:  # it holds the name, elsewhere than at its end
            OmegaConf.update(tree, _EXPERIMENT, name)


def choose_rollout(tree: DictConfig) -> bool:
    """Replace ``rollout.name=auto`` (or null) by an engine, in place; return True if there was a choice.

    A run folder keeps the engine of its first run, so that a resume does not switch engines.
    """
    if not isinstance(_select(tree, ROLLOUT_NAME.rpartition(".")[0]), DictConfig):
        return False
    if _select(tree, ROLLOUT_NAME) not in (None, "auto"):
        return False
    found = (_select(tree, key) for key in ("trainer.device", "actor_rollout_ref.model.path"))
    name = value_in(recorded_run(str(_select(tree, _RUN_FOLDER))), ROLLOUT_NAME)
    name = name if isinstance(name, str) else automatic_rollout(*map(str, found))[0]
    OmegaConf.update(tree, ROLLOUT_NAME, name)
    return True


def fit_mini_batch(tree: DictConfig, written: Collection[str]) -> None:
    """Lower the default mini-batch to the prompts of an iteration, in place: it is never more than these."""
    prompts, default = _select(tree, "data.train_batch_size"), _select(tree, _MINI_BATCH)
    if (
        _MINI_BATCH not in written
        and isinstance(prompts, int)
        and isinstance(default, int)
        and 0 < prompts < default
    ):
        OmegaConf.update(tree, _MINI_BATCH, prompts)


def recorded_run(folder: str | Path) -> Mapping[str, Any]:
    """Return the configuration of the last run in a run folder, as its file has it; empty without one."""
    try:
        recorded = yaml.safe_load(Path(expand(str(folder)), "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        recorded = None
    return recorded if isinstance(recorded, Mapping) else {}


def _plain(tree: DictConfig) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
    except OmegaConfBaseException:  # reported when it is resolved
        return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False))


def _select(tree: DictConfig, path: str) -> Any:
    return OmegaConf.select(tree, path, throw_on_resolution_failure=False)


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

    @cache  # noqa: B019 - there are as many trees as kinds of runs
    def defaults(self) -> DictConfig:
        """Return the content of that file; not to be changed."""
        return cast(DictConfig, OmegaConf.load(self.defaults_file))

    @cache  # noqa: B019
    def raw_defaults(self) -> dict[str, Any]:
        """Return the content of that file with interpolations as they stand; not to be changed."""
        return cast(dict[str, Any], OmegaConf.to_container(self.defaults(), resolve=False))

    def raw_default(self, path: str) -> Any:
        """Return a key's default with its interpolation; None if there is no such key."""
        value: Any = self.raw_defaults()
        for word in path.split("."):
            value = value.get(word) if isinstance(value, dict) else None
        return value

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

    def differences(self, config: Root) -> Iterator[Change]:
        """Yield the written keys whose values differ from their defaults (`before`)."""
        for path, key in all_keys(self.schema).items():
            if key.is_section or (config.written is not None and path not in config.written):
                continue
            followed, value = self.followed_by(path), value_at(config, path)
            default = value_at(config, followed) if followed else self.raw_default(path)
            if value != default:
                yield Change(path, default, value)

    def settle(self, tree: DictConfig, written: set[str]) -> None:
        """Replace values that stand for others, in place, before interpolations are resolved.

        A rollout that was chosen here counts as unwritten.
        """
        name_experiment(tree, self.name.removesuffix("_trainer"))
        self._cut_by_tokens(tree, written)
        if self.schema is Config:
            settle_deprecated(tree, written)
            fit_mini_batch(tree, written)
            if choose_rollout(tree):
                written.discard(ROLLOUT_NAME)

    def _cut_by_tokens(self, tree: DictConfig, written: Collection[str]) -> None:
        """Set ``use_dynamic_bsz`` of passes where it is not written: False if a size in rows is.

        Each pass is decided by its own sizes, so a key does not follow an unwritten one of another pass.
        """
        of_tree = MICRO_BATCHES.values() if self.schema is Config else [SUPERVISED_MICRO_BATCH]
        sizes: dict[str, list[str]] = {}
        for keys in of_tree:
            sizes.setdefault(keys.dynamic, []).extend([keys.overall, keys.per_gpu])
        for dynamic, of_rows in sizes.items():
            if self.written_for(dynamic, written) is not None:
                continue
            if isinstance(_select(tree, dynamic.rpartition(".")[0]), DictConfig):
                in_rows = any(key in written and _select(tree, key) is not None for key in of_rows)
                OmegaConf.update(tree, dynamic, not in_rows)


PPO = Tree(Config, "ppo_trainer")

SFT = Tree(SftConfig, "sft_trainer")

REWARD_MODELLING = Tree(RewardModellingConfig, "rm_trainer")

DPO = Tree(PreferenceConfig, "dpo_trainer")

TREES: dict[str, Tree] = {"train": PPO, "sft": SFT, "train-rm": REWARD_MODELLING, "dpo": DPO}
"""Command -> its tree."""


def tree_of(schema: type[RootConfig]) -> Tree:
    """Return the tree of a configuration's class."""
    return next(tree for tree in TREES.values() if issubclass(schema, tree.schema))

"""Values of keys before they are validated, each with its author, and those that follow from others.

Every step returns new values. ``load`` runs the steps in order.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from strop.config.batch_plan import MICRO_BATCHES, SUPERVISED_MICRO_BATCH
from strop.config.identity import default_name, value_in
from strop.config.keys import divisors
from strop.config.memory.facts import read_model_facts
from strop.config.paths import expand
from strop.config.placement import automatic_rollout
from strop.config.schema import Config
from strop.config.schema.critic import CriticModelConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.policy import ActorModelConfig
from strop.config.trees import Tree

OLD_LIBS = "actor_rollout_ref.model.external_libs"
NEW_LIB = "actor_rollout_ref.model.external_lib"
_ROLLOUT_NAME = "actor_rollout_ref.rollout.name"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_POLICY_RATE = "actor_rollout_ref.actor.optim.lr"
RATES: dict[str, tuple[str, type[ModelConfig]]] = {
    _POLICY_RATE: ("actor_rollout_ref.model", ActorModelConfig),
    "critic.optim.lr": ("critic.model", CriticModelConfig),
}
"""Learning rates, null in recipes -> the model whose size decides, and its schema."""
_USUAL_SIZE, _USUAL_RATE = 1e8, 1e-5
"""Parameters and a learning rate that suits them; it falls with size: 5e-4 at 1.4e5, 1e-6 at 5e9."""
UNKNOWN_SIZE = "size of the model unknown"
_ADAPTERS_FACTOR, _USUAL_OF_ADAPTERS, USUAL_ALPHA = 3.3, 1e-4, 16
"""Rates of LoRA adapters: relative to those of the weights (below 16 million parameters), those of larger
models and of unknown sizes, and the alpha that they are for."""
_EXPERIMENT, _RUN_FOLDER = "trainer.experiment_name", "trainer.default_local_dir"


@dataclass(frozen=True)
class Values:
    """The values of all keys as written, and their authors."""

    tree: DictConfig
    """Values with interpolations as they stand; never changed."""
    authors: Mapping[str, str] = field(default_factory=dict)
    """Author of each value that is not the default: "file PATH", "override", "derived: WHY", ..."""
    written: frozenset[str] = frozenset()
    """Keys and sections that a file, an argument or an override wrote."""

    def select(self, path: str) -> Any:
        """Return the resolved value of a key; None if there is none, or it cannot be resolved."""
        value = OmegaConf.select(self.tree, path, throw_on_resolution_failure=False)
        if not OmegaConf.is_config(value):
            return value
        try:
            return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException:  # reported when all keys are resolved
            return OmegaConf.to_container(value, resolve=False)

    def has_section(self, path: str) -> bool:
        """Return True if a section is a mapping, as it should be."""
        return isinstance(OmegaConf.select(self.tree, path, throw_on_resolution_failure=False), DictConfig)

    def under(self, keys: Mapping[Any, Any], author: str) -> Values:
        """Return these values with ``keys``, a nested mapping, laid over them."""
        tree, paths = copied(self.tree), written_paths(keys)
        # OmegaConf cannot merge a list and a mapping
        written = OmegaConf.to_container(tree, resolve=False)
        for path in list(_of_another_kind(written, keys, self.select)):
            section, _, name = path.rpartition(".")
            del (OmegaConf.select(tree, section) if section else tree)[name]
        merged = cast(DictConfig, OmegaConf.unsafe_merge(tree, OmegaConf.create(dict(keys))))
        return Values(merged, {**self.authors, **dict.fromkeys(paths, author)}, self.written | paths)

    def changed(self, values: Mapping[str, Any], authors: Mapping[str, str]) -> Values:
        """Return these values with those of some keys replaced, by their full paths."""
        if not values:
            return self
        tree = copied(self.tree)
        for path, value in values.items():
            OmegaConf.update(tree, path, value, force_add=True)
        return replace(self, tree=tree, authors={**self.authors, **authors})

    def derived(self, values: Mapping[str, Any], why: str) -> Values:
        """Return these values with those of some keys replaced for a reason."""
        return self.changed(values, dict.fromkeys(values, f"derived: {why}"))


def copied(tree: DictConfig) -> DictConfig:
    """Return a copy, in half the time of ``copy.deepcopy``."""
    return pickle.loads(pickle.dumps(tree, pickle.HIGHEST_PROTOCOL))


def written_paths(mapping: Mapping[Any, Any], prefix: str = "") -> set[str]:
    """Return the full path of every key in a plain nested mapping."""
    paths: set[str] = set()
    for key, value in mapping.items():
        paths.add(f"{prefix}{key}")
        if isinstance(value, dict):
            paths |= written_paths(value, f"{prefix}{key}.")
    return paths


def _of_another_kind(default: Any, given: Any, select: Callable[[str], Any], path: str = "") -> Iterator[str]:
    """Yield the paths at which one is a list and the other a mapping, also by reference."""
    if isinstance(default, str) and isinstance(given, dict | list):
        default = select(path)
    if {type(default), type(given)} == {dict, list}:
        yield path
    elif isinstance(default, dict) and isinstance(given, dict):
        for key in default.keys() & given.keys():
            place = f"{path}.{key}" if path else key
            yield from _of_another_kind(default[key], given[key], select, place)


def name_experiment(values: Values, tree: Tree) -> Values:
    """Name an experiment without a name after the run folder.

    The default folder is named after the experiment. Where both are left out, both are called after what the
    run trains, so that unrelated runs share no folder.
    """
    if not values.has_section("trainer") or values.select(_EXPERIMENT) is not None:
        return values
    name = default_name(tree.name.removesuffix("_trainer"), values.select, tree.default, tree.schema)
    named = values.derived({_EXPERIMENT: name}, "named after what the run trains")
    folder = named.select(_RUN_FOLDER)
    if not isinstance(folder, str) or Path(folder).name in (name, ""):
        return named
    after_folder = values.derived({_EXPERIMENT: Path(folder).name}, "the name of the run folder")
    # A folder may hold the experiment's name elsewhere than at its end.
    return after_folder if after_folder.select(_RUN_FOLDER) == folder else named


def cut_by_tokens(values: Values, tree: Tree) -> Values:
    """Set ``use_dynamic_bsz`` of passes where it is not written: False if a size in rows is.

    Each pass is decided by its own sizes, so a key does not follow an unwritten one of another pass.
    """
    sizes: dict[str, list[str]] = {}
    for keys in MICRO_BATCHES.values() if tree.schema is Config else [SUPERVISED_MICRO_BATCH]:
        sizes.setdefault(keys.dynamic, []).extend([keys.overall, keys.per_gpu])
    chosen = {
        dynamic: not any(_is_set(values, key) for key in of_rows)
        for dynamic, of_rows in sizes.items()
        if tree.written_for(dynamic, values.written) is None
        and values.has_section(dynamic.rpartition(".")[0])
    }
    if all(values.select(key) == by_tokens for key, by_tokens in chosen.items()):
        return values
    return values.derived(chosen, "tokens, unless a size in rows is written")


def _is_set(values: Values, path: str) -> bool:
    return path in values.written and values.select(path) is not None


def replace_deprecated(values: Values, tree: Tree) -> Values:
    """Make deprecated keys and their successors agree.

    A pair of which the user wrote both stays as it is, for ``check`` to report.
    """
    if tree.schema is not Config:
        return values
    for keys in MICRO_BATCHES.values():
        old, new = keys.overall, keys.per_gpu
        for one, other in ((old, new), (new, old)):
            if _is_set(values, one) and not _is_set(values, other):
                values = values.derived({other: None}, f"{one} is set")
    if _is_set(values, OLD_LIBS) and not _is_set(values, NEW_LIB):
        values = values.derived({NEW_LIB: values.select(OLD_LIBS)}, f"{OLD_LIBS} is set")
    return values


def fit_mini_batch(values: Values, tree: Tree) -> Values:
    """Replace a default mini-batch that does not divide the prompts of an iteration by one that does."""
    prompts, default = values.select("data.train_batch_size"), values.select(_MINI_BATCH)
    if _MINI_BATCH in values.written or not isinstance(prompts, int) or not isinstance(default, int):
        return values
    if prompts <= 0 or default <= 0 or prompts % default == 0:
        return values
    shared = math.gcd(prompts, default)  # a multiple of it divides over ranks as the default does
    sizes = [size for size in divisors(prompts) if size % shared == 0]
    size = min(sizes, key=lambda size: max(size / default, default / size))
    return values.derived({_MINI_BATCH: size}, "divides data.train_batch_size")


def usual_rate(parameters: int | None, model: ModelConfig) -> float:
    """Return a learning rate that suits a model, or its adapters; 0 for an unknown size."""
    usual = 0.0 if parameters is None else _USUAL_RATE * (_USUAL_SIZE / parameters) ** 0.6
    if model.has_adapters:  # one moves by rate x alpha; that of a folder has its own alpha
        alpha = USUAL_ALPHA if model.lora_adapter_path is not None else model.lora_alpha
        usual = max(_ADAPTERS_FACTOR * usual, _USUAL_OF_ADAPTERS) * USUAL_ALPHA / alpha
    return usual


def choose_rate(values: Values, tree: Tree) -> Values:
    """Replace rates of null, as in recipes: the critic's by the user's of the policy, others by the usual."""
    for key, (section, kind) in RATES.items() if tree.schema is Config else ():
        sections = section, key.rpartition(".")[0]
        if values.select(key) is not None or not all(map(values.has_section, sections)):
            continue
        rate, why, of_policy = tree.raw_default(key), UNKNOWN_SIZE, values.select(_POLICY_RATE)
        with suppress(ValidationError):  # of another key, which is reported as such
            model = kind.model_validate(values.select(section))
            facts = read_model_facts(model.path)
            if usual := usual_rate(None if facts is None else facts.parameters, model):
                rate, why = float(f"{usual:.0e}"), "from the model's size"
        if of_policy is not None and not values.authors.get(_POLICY_RATE, "").startswith("derived"):
            rate, why = of_policy, f"as {_POLICY_RATE}"
        values = values.derived({key: rate}, why)
    return values


def choose_rollout(values: Values, tree: Tree) -> Values:
    """Replace ``rollout.name=auto`` (or null) by an engine; the key then counts as unwritten.

    A run folder keeps the engine of its first run, so that a resume does not switch engines.
    """
    if not values.has_section(_ROLLOUT_NAME.rpartition(".")[0]):
        return values
    if values.select(_ROLLOUT_NAME) not in (None, "auto"):
        return values
    found = (values.select(key) for key in ("trainer.device", "actor_rollout_ref.model.path"))
    name, why = automatic_rollout(*map(str, found))
    kept = value_in(recorded_run(str(values.select(_RUN_FOLDER))), _ROLLOUT_NAME)
    if isinstance(kept, str) and kept != name:
        name, why = kept, "as in an earlier run in this folder"
    chosen = values.derived({_ROLLOUT_NAME: name}, why)
    return replace(chosen, written=values.written - {_ROLLOUT_NAME})


STEPS: tuple[Callable[[Values, Tree], Values], ...] = (
    name_experiment,
    cut_by_tokens,
    replace_deprecated,
    fit_mini_batch,
    choose_rate,
    choose_rollout,
)
"""The steps from written values to those that are validated, in order."""


def recorded_run(folder: str | Path) -> Mapping[str, Any]:
    """Return the configuration of the last run in a run folder, as its file has it; empty without one."""
    try:
        recorded = yaml.safe_load(Path(expand(str(folder)), "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        recorded = None
    return recorded if isinstance(recorded, Mapping) else {}

"""Identity of a run: the keys that name its model, reward and data, and the name of its default folder.

A checkpoint is continued with the same model, reward and data only. Other keys may change between two
commands: learning rates, lengths, batch sizes, validation, logging.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from strop.config.keys import all_keys
from strop.config.names import REWARD_MANAGERS
from strop.config.paths import expand, is_url
from strop.config.schema import RootConfig

_MAY_CHANGE = re.compile(
    r"data\.(val_\w+|train_batch_size|max_\w+|truncation|filter_\w+|shuffle|num_workers|cache_dir|return_\w+)"
    r"|reward_model\.(\w*micro_batch_size\w*|use_dynamic_bsz|\w*token_len\w*|ulysses_\w+|num_workers"
    r"|timeout_s|error_score|max_error_rate|max_concurrency|memory_limit_mb|\w*num_examine|max_length)"
    r"|reward_model\.megatron\..*"
    r"|reward_model\.model\.(external_lib|trust_remote_code|fsdp_config.*)"
)
"""Keys of the sections below that say how the run computes, not what it trains."""
_SECTIONS = ("data", "reward_model", "custom_reward_function")
_MODELS = ("model.path", "actor_rollout_ref.model.path", "critic.model.path")
_ADAPTER_KEYS = (
    *("lora_rank", "lora_alpha", "target_modules", "exclude_modules"),
    *("modules_to_save", "lora_adapter_path"),
)
_ADAPTERS_OF = {
    section: {f"{section}{name}" for name in _ADAPTER_KEYS}
    for section in (key.removesuffix("path") for key in _MODELS)
}
"""Keys of adapters, by what their names begin with."""
_ADAPTERS = frozenset().union(*_ADAPTERS_OF.values())
FILES = (
    *_MODELS,
    *(f"{section}lora_adapter_path" for section in _ADAPTERS_OF),
    *("data.train_files", "data.tokenizer", "custom_reward_function.path"),
    *("reward_model.model.path", "reward_model.model.input_tokenizer"),
)
"""Keys that name files or folders; equal contents are the same, wherever they are."""


_UNKNOWN = object()


class Change(NamedTuple):
    """A key with two values, or one whose files were changed."""

    key: str
    before: Any
    now: Any
    modules: tuple[str, ...] = ()
    """Changed modules that the reward imports."""

    def __str__(self) -> str:
        before, now = (in_words(value) for value in (self.before, self.now))
        where = f" in {', '.join(self.modules)}" if self.modules else ""
        return f"{self.key}: {before} -> {now}" if before != now else f"{self.key}: {now}, changed{where}"


def in_words(value: Any) -> str:
    """Return a value as the configuration writes it, cut to a line."""
    text = "null" if value is None else "''" if value == "" else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def values_of(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by full path."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        values |= values_of(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return values


def changes(before: Mapping[str, Any], now: Mapping[str, Any], schema: type[RootConfig]) -> Iterator[Change]:
    """Yield the keys of ``schema`` with other values; keys that ``before`` does not know are left out."""
    for key, facts in all_keys(schema).items():
        old, new = value_in(before, key), value_in(now, key)
        if not facts.is_section and old is not _UNKNOWN and old != new:
            yield Change(key, old, new)


def value_in(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in a nested mapping, or a value that equals no other."""
    value: Any = tree
    for word in key.split("."):
        value = value.get(word, _UNKNOWN) if isinstance(value, Mapping) else _UNKNOWN
    return value


def decides_what_is_trained(key: str, *, validates_only: bool = False) -> bool:
    """Return True for a key of the model, the reward or the data; only the model counts in a validation."""
    if key in _MODELS or key in _ADAPTERS:
        return True
    return not validates_only and key.startswith(_SECTIONS) and not _MAY_CHANGE.fullmatch(key)


def is_the_same(key: str, before: Any, now: Any) -> bool:
    """Return True for two names of one reward manager: ``prime`` is ``naive`` with more processes."""
    return key == "reward_model.reward_manager" and before in REWARD_MANAGERS and now in REWARD_MANAGERS


def files_of(tree: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each key that names local files or folders of the model, the reward or the data, and these."""
    values = values_of(tree)
    for key in FILES:
        value = values.get(key)
        paths = [value] if isinstance(value, str) else value or []
        local = [expand(path) for path in paths if path and not is_url(path)]
        if local and len(local) == len(paths) and all(map(os.path.exists, local)):
            yield key, local


def default_name(command: str, tree: Mapping[str, Any]) -> str:
    """Return a name for a run that has none: command, model, data, and a digest of all that it trains.

    Equal commands get equal names, so that a repeated one resumes. Another model, reward, data set,
    algorithm or seed gives another name.
    """
    values = values_of(tree)
    trained = {key: value for key, value in values.items() if decides_what_is_trained(key)}
    for section, keys in _ADAPTERS_OF.items():
        if not (values.get(f"{section}lora_rank") or values.get(f"{section}lora_adapter_path")):
            trained = {key: value for key, value in trained.items() if key not in keys}
    trained |= {key: values.get(key) for key in ("algorithm.adv_estimator", "trainer.seed")}
    if (manager := "reward_model.reward_manager") in trained and is_the_same(
        manager, trained[manager], "naive"
    ):
        trained[manager] = "naive"
    for key in FILES:
        value = trained.get(key)
        if isinstance(value, str | list):
            trained[key] = [_absolute(path) for path in ([value] if isinstance(value, str) else value)]
    digest = hashlib.sha256(json.dumps(trained, sort_keys=True, default=str).encode()).hexdigest()[:8]
    if (estimator := values.get("algorithm.adv_estimator", "gae")) != "gae":
        command = str(estimator)
    model = next((values[key] for key in _MODELS if isinstance(values.get(key), str)), "")
    files = values.get("data.train_files") or values.get("data.val_files") or []
    first = next(iter(files), "") if isinstance(files, list) else files
    place = Path(str(first))
    words = [command, Path(model).name, place.parent.name or place.stem, digest]
    return "-".join(
        word for word in (re.sub(r"[^\w.]+", "_", word)[:40].strip("_.") for word in words) if word
    )


def _absolute(path: Any) -> str:
    return str(path) if is_url(str(path)) else os.path.abspath(expand(str(path)))

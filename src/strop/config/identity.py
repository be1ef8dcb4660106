"""Identity of a run: its keys that resumes compare (``resumes`` in the schema), and the name of its folder.

A checkpoint is continued with the same model, reward and data only. Other keys may change between two
commands: learning rates, lengths, validation, logging.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from strop.config.keys import Key, all_keys
from strop.config.names import NO_REWARD, REWARD_MANAGERS, defining_file, is_import_path
from strop.config.paths import expand, is_url
from strop.config.schema import Config, RootConfig
from strop.config.schema.base import NOT_COMPARED, SAME, SAME_AHEAD, SAME_MODEL
from strop.errors import ConfigError
from strop.passed import is_function
from strop.redaction import redacted

_UNKNOWN = object()
_DIGEST = "[0-9a-f]{8}"
"""The end of a default name."""


class Change(NamedTuple):
    """A key with two values, or one whose files were changed."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = (in_words(redacted(value, self.key)) for value in (self.before, self.now))
        return f"{self.key}: {before} -> {now}" if before != now else f"{self.key}: {now}, changed"


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
        if not facts.is_section and facts.resumes != NOT_COMPARED and old is not _UNKNOWN and old != new:
            yield Change(key, old, new)


def value_in(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in a nested mapping, or a value that equals no other."""
    value: Any = tree
    for word in key.split("."):
        value = value.get(word, _UNKNOWN) if isinstance(value, Mapping) else _UNKNOWN
    return value


def decides_what_is_trained(key: Key, *, validates_only: bool = False, runs_ahead: bool = False) -> bool:
    """Return True for a key of the model, the reward or the data; only the model counts in a validation."""
    same = (SAME, SAME_AHEAD) if runs_ahead else (SAME,)
    return key.resumes == SAME_MODEL or (key.resumes in same and not validates_only)


def is_the_same(key: str, before: Any, now: Any) -> bool:
    """Return True for two names of one reward manager: ``prime`` is ``naive`` with more processes."""
    return key == "reward_model.reward_manager" and {str(before), str(now)} <= {*REWARD_MANAGERS} - {
        NO_REWARD
    }


def files_of(tree: Mapping[str, Any], schema: type[RootConfig]) -> Iterator[tuple[str, list[str]]]:
    """Yield each key that names local files or folders of the model, the reward or the data, and these."""
    for key, facts in all_keys(schema).items():
        value = value_in(tree, key) if facts.names_files else None
        paths = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        with contextlib.suppress(ConfigError):  # a text that no file system takes as a name
            local = [expand(path) for path in paths if path and not is_url(path)]
            if local and len(local) == len(paths) and all(map(os.path.exists, local)):
                yield key, local


def named_files(tree: Mapping[str, Any], config: RootConfig) -> dict[str, list[str]]:
    """Return the files of ``files_of``, and those that define what keys name in Python.

    ``tree`` has the values of ``config``, in which keys that were not written may have those of this machine.
    """
    return dict(files_of(tree, type(config))) | (_defining(config) if isinstance(config, Config) else {})


def _defining(config: Config) -> dict[str, list[str]]:
    """Return the files that define what keys of the reward, teachers, environment and agent name."""
    section = config.reward_model
    parts = [part.get("scorer") for part in section.parts.values() if isinstance(part, Mapping)]
    named = {"reward_model.parts": parts, "reward_model.reward_manager": [section.reward_manager]}
    own = {
        key: [
            name for name in names if isinstance(name, str) and is_import_path(name) and not is_function(name)
        ]
        for key, names in named.items()
    }
    found = {
        key: files for key, names in own.items() if (files := [*filter(None, map(defining_file, names))])
    }
    environment, agent = config.environment, config.agent
    # the folders of teachers that by_source names, as of any other model
    models = [entry.get("model") for entry in config.teacher.by_source.values()]
    paths = [expand(str(model["path"])) for model in models if isinstance(model, Mapping) and "path" in model]
    if teachers := [path for path in paths if os.path.exists(path)]:
        found["teacher.by_source"] = teachers
    named = {
        "environment.path": [*environment.path.values()],
        "environment.tools": environment.tools,
        "environment.parser": [environment.parser],
        "agent.path": [agent.path or ""],
        "agent.command": [f"mcp:{agent.command}" if agent.command else ""],
        "agent.parser": [agent.parser],
    }
    for key, values in named.items():
        if files := [file for value in values for file in _sources(value)]:
            found[key] = files
    return found


def _sources(value: str) -> list[str]:
    """Return the files of an environment or tool: the one of its class, or the programs of a command."""
    kind, _, command = value.partition(":")
    if kind in ("mcp", "mcp-shared"):
        words: list[str] = []
        with contextlib.suppress(ValueError):  # an open quote, which the start of the command reports
            words = [] if command.startswith("http") else shlex.split(command)
        return [word for word in words if word.endswith((".py", ".js", ".ts")) and Path(word).is_file()]
    return [expand(value.rpartition(":")[0])] if ".py:" in value else []


def default_name(
    command: str,
    value_of: Callable[[str], Any],
    default_of: Callable[[str], Any],
    schema: type[RootConfig],
) -> str:
    """Return a name for a run that has none: command, model, data, and a digest of all that it trains.

    Equal commands get equal names, so that a repeated one resumes. Another model, reward, data set,
    algorithm or seed gives another name; a key that a later version adds does not, while it has its default.

    Args:
        command: the first word of the name, unless there is an estimator.
        value_of: returns the value of a key, by its path; None if there is none.
        default_of: returns the default of a key.
        schema: the tree of these keys.
    """
    trained: dict[str, Any] = {}

    @functools.cache
    def has_adapters(section: str) -> bool:
        return bool(value_of(f"{section}.lora_rank") or value_of(f"{section}.lora_adapter_path"))

    for key, facts in all_keys(schema).items():
        section, _, name = key.rpartition(".")
        if not decides_what_is_trained(facts):
            continue
        if facts.resumes == SAME_MODEL and name != "path" and not has_adapters(section):
            continue
        value = value_of(key)
        if value == default_of(key) or is_the_same(key, value, default_of(key)):
            continue
        if facts.names_files and isinstance(value, str | list):
            value = [_absolute(path) for path in ([value] if isinstance(value, str) else value)]
        trained |= values_of({key: value})
    estimator = value_of("algorithm.adv_estimator")
    trained |= {"algorithm.adv_estimator": estimator, "trainer.seed": value_of("trainer.seed")}
    digest = hashlib.sha256(json.dumps(trained, sort_keys=True, default=str).encode()).hexdigest()[:8]
    models = (value_of(key) for key in ("model.path", "actor_rollout_ref.model.path"))
    model = next((path for path in models if isinstance(path, str)), "")
    files = value_of("data.train_files") or value_of("data.val_files") or []
    first = next(iter(files), "") if isinstance(files, list) else files
    place = Path(str(first))
    words = [
        command if estimator in (None, "gae") else str(estimator),
        Path(model).name,
        place.parent.name or place.stem,
        digest,
    ]
    return "-".join(
        word for word in (re.sub(r"[^\w.]+", "_", word)[:40].strip("_.") for word in words) if word
    )


def others_like(folder: Path) -> list[Path]:
    """Return the folders beside ``folder`` whose names differ from its default name in the digest alone."""
    stem, _, digest = folder.name.rpartition("-")
    if not stem or not re.fullmatch(_DIGEST, digest):
        return []
    return [
        path
        for path in folder.parent.glob(f"{glob.escape(stem)}-*")
        if path != folder and re.fullmatch(_DIGEST, path.name.removeprefix(f"{stem}-"))
    ]


def _absolute(path: Any) -> str:
    with contextlib.suppress(ConfigError):  # as above
        return str(path) if is_url(str(path)) else os.path.abspath(expand(str(path)))
    return str(path)

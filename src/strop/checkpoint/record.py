"""Record of the run that saved a checkpoint, and its comparison with the run that continues it.

Part of ``trainer.pt``: ``{"kind": the configuration's class, "config": its values, "files": {key: digests},
"version": that of this package}``. Version 0.1.0 wrote no version, and ``"modules"`` of the reward.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from strop.checkpoint.folder import TRAINER, verify
from strop.checkpoint.store import reading_state_of
from strop.config.identity import (
    Change,
    changes,
    decides_what_is_trained,
    files_of,
    is_the_same,
    named_files,
    value_in,
)
from strop.config.keys import all_keys
from strop.config.placement import settled
from strop.config.roles import uses_critic
from strop.config.schema import Config, RootConfig
from strop.config.trees import TREES, tree_of
from strop.errors import ConfigError
from strop.manifest import require_unchanged
from strop.version import __version__

logger = logging.getLogger("strop")

RECORD = "run"
_OF_SAMPLES = (
    *("trainer.async_steps", "trainer.seed", "data.train_batch_size", "data.shuffle"),
    *("data.max_prompt_length", "data.max_response_length", "actor_rollout_ref.rollout.n"),
    "algorithm.adv_estimator",  # those of ReMax have the scores of greedy responses
)
"""Keys that samples in flight depend on, besides those that decide what is trained."""
_MODULES = "modules"
"""Is in records of version 0.1.0."""
_DIGEST = re.compile(r"(?<=function:)(\w+)-[0-9a-f]{8}")
_WHOLE = 64 << 20  # bytes; of a longer file blocks are read, which takes no longer with a larger model
_BLOCKS, _BLOCK = 64, 64 << 10
_OF_A_MODEL = re.compile(
    r".*\.(safetensors|bin|gguf|pt|jinja)|config\.json|(tokenizer|vocab|merges|added|special).*"
)


def record_of(config: RootConfig) -> dict[str, Any]:
    """Return what identifies a run: its kind, its configuration, and digests of the files that it names."""
    tree = settled(config).model_dump(mode="json")
    files = {key: [digest(Path(path)) for path in paths] for key, paths in named_files(tree, config).items()}
    return {"kind": type(config).__name__, "config": tree, "files": files, "version": __version__}


def digest(path: Path) -> str:
    """Return a digest of a file, or of the files in a folder; of a model: weights, config, tokenizer."""
    hasher = xxhash.xxh3_128()
    for name, file in _files(path):
        size = file.stat().st_size
        hasher.update(f"{name} {size}\n".encode())
        with file.open("rb") as content:
            if size <= _WHOLE:
                while block := content.read(1 << 20):
                    hasher.update(block)
                continue
            for number in range(_BLOCKS):
                content.seek((size - _BLOCK) * number // (_BLOCKS - 1))
                hasher.update(content.read(_BLOCK))
    return hasher.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield "", path
        return
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if (path / "config.json").is_file():
        files = [file for file in files if file.parent == path and _OF_A_MODEL.fullmatch(file.name)]
    for file in files:
        yield str(file.relative_to(path)), file


def require_same_run(checkpoint: Path, config: RootConfig) -> None:
    """Verify ``checkpoint``, compare its run with ``config``, and log what is resumed and what differs.

    Raises ``CheckpointError`` if it is damaged, and ``ConfigError`` if ``trainer.resume_mode=auto`` found a
    checkpoint of another model, reward or data.
    """
    before = _recorded(checkpoint)
    goes_on = config.trainer.resume_mode == "auto"
    if before is None:
        logger.info("resuming from %s", checkpoint)
        return
    now = record_of(config)
    if before["kind"] != now["kind"]:
        where = (
            f"trainer.default_local_dir={config.trainer.default_local_dir}"
            if goes_on
            else "trainer.resume_mode"
        )
        raise ConfigError(
            f"{where}: {checkpoint} was saved by another command than this one ({', '.join(TREES)}); "
            + ("name another folder for this run" if goes_on else "give a checkpoint of the same command")
        )
    found = _changes(before, now, type(config))
    others = _trains_something_else(found, before, now, config)
    if others and goes_on:
        listed = "; ".join(map(str, others))
        raise ConfigError(
            f"trainer.default_local_dir={config.trainer.default_local_dir} has a checkpoint of a run that "
            f"trains something else ({listed}). To start from the beginning, name another folder or set "
            "trainer.resume_mode=disable; to continue that checkpoint with these changes, set "
            f"trainer.resume_mode={checkpoint}"
        )
    listed = "".join(f"\n  {change}" for change in found)
    logger.info(
        "resuming from %s; %s", checkpoint, f"changed since:{listed}" if found else "configuration as before"
    )
    if (version := before.get("version", "0.1.0")) != __version__:
        logger.warning(
            "warning: strop %s saved it: `strop docs upgrading` lists what the same keys and files do "
            "otherwise in %s",
            *(version, __version__),
        )


def changed_samples(before: Mapping[str, Any], now: Mapping[str, Any], config: RootConfig) -> list[Change]:
    """Return the changes since the record ``before`` that samples in flight cannot be used with."""
    found = _changes(before, now, type(config))
    others = _trains_something_else(found, before, now, config)
    return [change for change in found if change in others or change.key in _OF_SAMPLES]


def without_effect(before: Mapping[str, Any], now: Mapping[str, Any], config: RootConfig) -> list[Change]:
    """Return the written changes since the record ``before`` of a finished run that more training would need.

    Keys of ``trainer`` are left out: they say where and how often to write, and for how long to train.
    """
    return [
        change
        for change in _changes(before, now, type(config))
        if change.key in (config.written or ())
        and not change.key.startswith("trainer.")
        and _has_another_meaning(change, before, now)
    ]


def _trains_something_else(
    found: list[Change], before: Mapping[str, Any], now: Mapping[str, Any], config: RootConfig
) -> list[Change]:
    """Return the changes of the model, the reward or the data."""
    keys = all_keys(type(config))
    runs_ahead = isinstance(config, Config) and config.trainer.async_steps >= 2
    return [
        change
        for change in found
        if _is_used(change.key, config)
        and decides_what_is_trained(
            keys[change.key], validates_only=config.trainer.val_only, runs_ahead=runs_ahead
        )
        and _has_another_meaning(change, before, now)
    ]


def _has_another_meaning(change: Change, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return False for another name of the same value, and for files that were moved."""
    return not (
        is_the_same(change.key, change.before, change.now)
        or _same_files(change.key, before, now)
        or _same_functions(change, before)
    )


def _recorded(checkpoint: Path) -> dict[str, Any] | None:
    """Return the record of a checkpoint; None if it has none."""
    own = {name: entry for name, entry in verify(checkpoint).items() if name == TRAINER}
    require_unchanged(str(checkpoint), checkpoint, own)
    with reading_state_of(checkpoint):
        return torch.load(checkpoint / TRAINER, weights_only=True).get(RECORD)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], schema: type[RootConfig]) -> list[Change]:
    """Return the keys that differ, also those whose files were changed in their place.

    None since a record of another kind of run, or an empty one.
    """
    if before.get("kind") != now["kind"]:
        return []
    found = list(changes(before["config"], now["config"], schema))
    keys, tree = {change.key for change in found}, tree_of(schema)
    found = [change for change in found if tree.followed_by(change.key) not in keys]
    named = {key: ", ".join(paths) for key, paths in files_of(now["config"], schema)}
    for key in now["files"]:
        value, earlier = named.get(key, value_in(now["config"], key)), before["files"].get(key)
        follows = tree.followed_by(key) in now["files"]
        is_changed = earlier is not None and earlier != now["files"].get(key) and not follows
        if key not in keys and is_changed:
            found.append(Change(key, value, value))
    return found


def _is_used(key: str, config: RootConfig) -> bool:
    """Return False for a key of a model that this run does not have."""
    if not isinstance(config, Config):
        return True
    if key.startswith("reward_model.model."):
        return config.reward_model.enable
    return not key.startswith("critic.model.") or uses_critic(config)


def _same_files(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True for a key whose files were moved; these two have more than files."""
    if key in ("reward_model.parts", "teacher.by_source"):
        return False
    return now["files"].get(key, 0) == before["files"].get(key, 1)


def _same_functions(change: Change, before: Mapping[str, Any]) -> bool:
    """Return True if functions have one name since 0.1.0, which had other digests of those of a program."""
    old, new = (_DIGEST.sub(r"\1", repr(value)) for value in (change.before, change.now))
    return _MODULES in before and old == new

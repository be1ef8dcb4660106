"""The markers of the schema, applied to a configuration: keys without effect, unusable or missing keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from strop.config.checks.finding import Finding, error, warning
from strop.config.keys import Key, all_keys, value_at
from strop.config.placement import pools_of, runs_on_ray, uses_gpu
from strop.config.schema import RootConfig
from strop.config.schema.base import At, Limit
from strop.config.trees import tree_of
from strop.config.verl import OtherDefault, other_defaults, other_meanings


def check_keys(config: RootConfig) -> Iterator[Finding]:
    """Yield an error for each key that is missing or refused, and a warning for each reason for no effect.

    Only keys that somebody wrote are reported as without effect, each for its first reason: a default
    without effect is no mistake, and ``strop docs config`` mentions it.
    """
    at_key = _looking_at(config)
    idle: dict[str, list[str]] = {}
    for key in all_keys(type(config)).values():
        if key.is_section:
            continue
        value = value_at(config, key.path)
        at = at_key(key, value)
        if key.required is not None and not value and key.required.applies(at):
            given = f"{key.path}={key.required.example}"
            yield error(f"{key.path}: not set; expected {key.required.what}, for example {given}")
        applying = _applying(key, at)
        if not applying:
            continue
        if applying[0].level == "error":  # a key without effect is not refused
            for limit in applying:
                yield error(f"{key.path}={value}: {limit.refusal(at)}")
            continue
        # A mapping counts as written if any key in it was.
        if any(f"{path}.".startswith(f"{key.path}.") for path in config.meant):
            when, reason = applying[0].words(key.path, at)
            idle.setdefault(f"{when} ({reason})" if reason else when, []).append(f"{key.path}={value}")
    for why, keys in idle.items():
        yield warning(f"no effect {why}: {', '.join(keys)}")


def changed_from_verl(config: RootConfig, version: str) -> Iterator[str]:
    """Yield what unwritten keys and written values mean in a version of verl and here, where that differs."""
    at_key, keys, other = _looking_at(config), all_keys(type(config)), []
    for key, meanings in other_meanings().items():
        here = value_at(config, key)
        if here in meanings and not _applying(keys[key], at_key(keys[key], here)):
            yield f"{key}={here} is another estimate in verl; {key}={meanings[here]} is as there"
    for key, there, because, kind in _unwritten(config, version):
        here = value_at(config, key)
        here_in_words = "null" if here is None else here
        if kind == "results":
            why = f" ({because})" if because else ""
            yield (
                f"{key} is not written: {there} in verl {version}{why}, {here_in_words} here; "
                f"{key}={there} is as there"
            )
        else:
            given = f"[{','.join(there)}]" if isinstance(there, list) else there
            other.append(f"{key}={given}")
    if other:
        yield f"speed, memory and records; as in verl {version}: {' '.join(other)}"


def sizes_in_verl(config: RootConfig, version: str) -> list[str]:
    """Return, as overrides, the unwritten sizes of layouts that have another default in a version of verl."""
    tree, written = tree_of(type(config)), config.written or ()
    return [
        f"{key}={there}"
        for key, there, _, kind in _unwritten(config, version)
        if kind == "sizes" and not tree.written_for(key, written)
    ]


def _unwritten(config: RootConfig, version: str) -> Iterator[OtherDefault]:
    """Yield the other defaults of a version of verl for keys that are not written and decide something."""
    at_key, keys = _looking_at(config), all_keys(type(config))
    for other in other_defaults(version):
        key, here = keys[other.key], value_at(config, other.key)
        idle = any(_applying(key, at_key(key, value)) for value in (here, other.there))
        if other.key not in (config.written or ()) and here != other.there and not idle:
            yield other


def _looking_at(config: RootConfig) -> Callable[[Key, Any], At]:
    """Return a function that puts a value of a key into its surroundings, for the conditions of markers."""
    one_rank = all(sum(pool) == 1 for pool in pools_of(config).values())
    on_ray, on_cpu = runs_on_ray(config), not uses_gpu(config)

    def at(key: Key, value: Any) -> At:
        section = value_at(config, key.path.rpartition(".")[0])
        return At(key.path, value, section, config, one_rank=one_rank, on_ray=on_ray, on_cpu=on_cpu)

    return at


def _applying(key: Key, at: At) -> list[Limit]:
    return [limit for limit in key.limits if at.value not in (None, "") and limit.applies(at)]


def status_in_words(key: Key, *, inherited: int = 0) -> str:
    """Return the entry of a key in the last column of the reference page, less ``inherited`` markers."""
    required = key.required
    entries = [] if required is None or required.is_usual else [f"required {required.when}"]
    for limit in key.limits[inherited:]:
        verb, (when, reason) = "no effect" if limit.level == "warning" else "error", limit.words(key.path)
        entries.append(f"{verb} {when}" + (f": {reason}" if reason else ""))
    return "; ".join(entries) or "honoured"

"""Keys and values of verl: what they are called here, which are not needed, what to do about the rest.

All facts are in ``verl.yaml``; this module reads them. Keys that the schema has are left alone, but for the
few of their values that verl alone has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from strop.config.keys import all_keys

_MISSING = object()
OWN_FOLDERS = ("config", "./config")
"""Values of ``--config-path`` in verl's scripts: Hydra looks for the folder beside verl's code."""


@dataclass(frozen=True)
class Rule:
    """Meaning here of one of verl's keys."""

    to: str = ""
    """Key here that takes the value; empty if none does."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values that have another name here."""
    default: Collection[Any] | None = ()
    """Values that need no mention; None: none of a file does."""
    replaces: Collection[Any] | str = ()
    """Values that count also where the key here is written, or "any"."""
    yields: Collection[Any] = ()
    """Values that do not count where the key here is written."""
    clash: Mapping[str, Any] = field(default_factory=dict)
    """A ``value`` that is refused where the key ``other`` is True, with the reason ``do``."""
    only_with: Mapping[str, Any] = field(default_factory=dict)
    """Values of other keys that verl reads this one with."""
    note: str = ""
    why: str = ""
    """Reason why a run here does not need the key."""
    do: str = ""
    """Advice on a value that is not in ``default``."""


@dataclass
class Translation:
    """Meaning here of verl's keys in one configuration."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values to set, by key here."""
    defaults: list[str] = field(default_factory=list)
    """Keys that keep the default of the schema."""
    sources: dict[str, str] = field(default_factory=dict)
    """Key here -> the key that was written."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@cache
def _table() -> dict[str, Any]:
    # libyaml's loader, where there is one, takes 5 ms of the 50 that Python's takes at every `strop check`
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(Path(__file__).with_name("verl.yaml").read_bytes(), Loader=loader)


@cache
def _rules() -> list[tuple[str, Rule]]:
    """Return all rules by pattern; the first whose pattern matches a key counts."""
    table = _table()
    found = [(pattern, Rule(default=None)) for pattern in table["ignored"]]
    found += [
        (pattern, Rule(**({"to": rule} if isinstance(rule, str) else rule)))
        for pattern, rule in table["renamed"].items()
    ]
    for kind, default in (("refused", ()), ("unused", None)):
        for group in table[kind]:
            keys = group["keys"]
            defaults = keys if isinstance(keys, dict) else dict.fromkeys(keys, default)
            reason = {name: text for name, text in group.items() if name != "keys"}
            found += [(pattern, Rule(default=values, **reason)) for pattern, values in defaults.items()]
    return found


def versions() -> list[str]:
    """Return the versions of verl whose defaults are known, the oldest first."""
    return list(_table()["defaults"])


class OtherDefault(NamedTuple):
    """A key with another default in a version of verl."""

    key: str
    there: Any
    because: str
    """Reason for verl's value, where its own key does not say it."""
    kind: str
    """``results``, ``sizes`` or ``other``: what it changes."""


def other_defaults(version: str) -> Iterator[OtherDefault]:
    """Yield the keys whose default in a version of verl is another one."""
    table = _table()["defaults"][version]
    for kind, values in table.items():
        for key, there in values.items():
            because = ""
            if isinstance(there, dict):
                there, because = there["is"], there["because"]
            yield OtherDefault(key, there, because, kind)


def other_meanings() -> dict[str, dict[str, str]]:
    """Return by key the values that mean something else in verl, with the value here that means the same."""
    return _table()["other_meaning"]


def leaves(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every key that holds no further keys, or a mapping as its value."""
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and not _takes_mapping(path):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def is_foreign(path: str) -> bool:
    """Return True for a key of verl's that no schema has."""
    keys, above = all_keys(), path
    while above:
        if above == path and above in keys:
            return False
        if _takes_mapping(above):
            return False
        above = above.rpartition(".")[0]
    return _rule(path) is not None


def without_foreign(mapping: Mapping[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """Return a copy without verl's keys, and without sections that held nothing else."""
    kept = {}
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and not _takes_mapping(path):
            if own := without_foreign(value, f"{path}."):
                kept[name] = own
        elif not is_foreign(path):
            kept[name] = value
    return kept


def _takes_mapping(path: str) -> bool:
    key = all_keys().get(path)
    return key is not None and not key.is_section and "mapping" in key.expected


def _rule(path: str) -> Rule | None:
    for pattern, rule in _rules():
        is_section = pattern.endswith(".*") and fnmatchcase(path, pattern[:-2])
        if path != pattern and not is_section and not fnmatchcase(path, pattern):
            continue
        if not rule.to.endswith("*"):
            return rule
        if is_section:
            return Rule(do=f"expected a mapping of keys, those of {rule.to[:-2]}")
        target = rule.to[:-1] + path.removeprefix(pattern[:-1])
        if target in all_keys() or any(
            _takes_mapping(target[:end]) for end, letter in enumerate(target) if letter == "."
        ):
            return Rule(to=target)
        return _rule(target)
    return None


def translate(
    given: Mapping[str, Any], overridden: Collection[str], default: Callable[[str], Any]
) -> Translation:
    """Return what the keys in ``given`` mean here, as far as they or their values are verl's alone.

    ``given`` has the values as written, interpolations included, by full path; those of ``overridden`` come
    from the command line and win over a file's. ``default`` returns the default of a key here: a file that
    only repeats it needs no mention.
    """
    found, renamed = Translation(), list[str]()
    refused, idle = dict[str, list[str]](), dict[str, list[str]]()
    for path, value in given.items():
        if not is_foreign(path):
            if path in overridden or _renamed_value(path, value) != default(path):
                _translate_value(path, value, found, renamed)
            else:
                found.defaults.append(path)
            continue
        rule = _rule(path)
        assert rule is not None
        if rule.clash and _same(value, rule.clash["value"]) and given.get(rule.clash["other"]) is True:
            found.problems.append(f"{path}={_shown(value)}: {rule.clash['do']}")
            continue
        changes_a_file = path in overridden and rule.to in given and rule.to not in overridden
        silent = _is_empty(value) or (_among(value, rule.default or ()) and not changes_a_file)
        if rule.to and all(given.get(key) == needed for key, needed in rule.only_with.items()):
            repeats = path not in overridden and rule.to not in given and value == default(rule.to)
            if not silent and not repeats:
                _rename(path, value, rule, given, overridden, found, renamed)
            continue
        if silent or _follows(value):
            continue
        if rule.do:
            refused.setdefault(rule.do, []).append(f"{path}={_shown(value)}")
        elif path in overridden or rule.default is not None:
            why = rule.why or "verl reads it only with " + ", ".join(
                f"{key}={needed}" for key, needed in rule.only_with.items()
            )
            idle.setdefault(why, []).append(f"{path}={_shown(value)}")
    found.problems += [f"{', '.join(keys)}: {do}" for do, keys in refused.items()]
    if renamed:
        found.notes.append(f"keys of verl are read by their names here: {'; '.join(renamed)}")
    found.notes += [f"keys of verl without effect ({why}): {', '.join(keys)}" for why, keys in idle.items()]
    return found


def _rename(
    path: str,
    value: Any,
    rule: Rule,
    given: Mapping[str, Any],
    overridden: Collection[str],
    found: Translation,
    renamed: list[str],
) -> None:
    value, there = _mapped(value, rule.values, value), value
    also, named = found.values.get(rule.to, given.get(rule.to)), found.sources.get(rule.to, rule.to)
    if also is not None and (_follows(value) or _among(there, rule.yields)):
        return
    if _follows(value) and rule.to in value:
        return  # both follow one key, as here
    replaces = rule.replaces == "any" or _among(there, rule.replaces)
    if not replaces and also is not None and also != value:
        if (path in overridden) == (named in overridden):
            found.problems.append(
                f"{path}={_shown(there)} is {rule.to} here, and {named}={_shown(also)}: keep one of them"
            )
            return
        if named in overridden:
            return
    found.values[rule.to], found.sources[rule.to] = value, path
    note = f" ({rule.note})" if rule.note else ""
    name = path if value is there else f"{path}={_shown(there)}"
    renamed.append(f"{name} -> {rule.to}={_shown(value)}{note}")


def _translate_value(path: str, value: Any, found: Translation, renamed: list[str]) -> None:
    """Replace or refuse a value of a key that the schema has."""
    advice = _mapped(value, _table()["advice"].get(path, {}))
    if advice is not _MISSING:
        found.problems.append(f"{path}={_shown(value)}: {advice}")
        found.defaults.append(path)
    here = _renamed_value(path, value)
    if here is None:
        found.defaults.append(path)
    elif here is not _MISSING:
        found.values[path], found.sources[path] = here, path
        renamed.append(f"{path}={_shown(value)} -> {here}")


def _renamed_value(path: str, value: Any) -> Any:
    return _mapped(value, _table()["values"].get(path, {}))


def _mapped(value: Any, values: Mapping[Any, Any], otherwise: Any = _MISSING) -> Any:
    return next((here for there, here in values.items() if _same(value, there)), otherwise)


def _among(value: Any, values: Collection[Any]) -> bool:
    return any(_same(value, other) for other in values)


def _same(value: Any, other: Any) -> bool:
    """Compare without taking True for 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _follows(value: Any) -> bool:
    """Return True for an interpolation: what it names is looked up itself."""
    return isinstance(value, str) and value.startswith("${")


def _is_empty(value: Any) -> bool:
    return value is None or value == {} or value == [] or value == "???"


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

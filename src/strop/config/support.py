"""The keys that this version does not honour in a run, and in general.

`check` takes its lines from here, and docs/config.md its column. A value that names what happens anyway, and
a default, are not reported.
"""

from __future__ import annotations

from strop.config.keys import all_keys, value_at
from strop.config.limits import LIMITS
from strop.config.schema import RootConfig


def unsupported(config: RootConfig) -> tuple[list[str], list[str]]:
    """Errors, one for each key, and warnings, one for each reason with all its keys that the user wrote.

    A default that has no effect is nobody's mistake; docs/config.md says it.
    """
    errors: list[str] = []
    by_reason: dict[str, list[str]] = {}
    for limit in LIMITS:
        for path in filter(limit.covers, all_keys(type(config))):
            value = value_at(config, path)
            if not limit.applies(config, value):
                continue
            if limit.level == "error":
                errors.append(f"{path}={value}: {limit.reason}")
            elif config.written is None or path in config.written:
                by_reason.setdefault(limit.reason, []).append(f"{path}={value}")
    warnings = [f"no effect ({reason}): {', '.join(keys)}" for reason, keys in by_reason.items()]
    return errors, warnings


def status_in_words(path: str) -> str:
    """The entry of the key `path` in the last column of the reference page."""
    entries = [limit for limit in LIMITS if limit.covers(path)]
    if not entries:
        return "honoured"
    verb = {"warning": "no effect", "error": "error"}
    return "; ".join(f"{verb[limit.level]} {limit.when}: {limit.reason}" for limit in entries)

"""The markers of the schema, applied to a configuration: keys without effect, unusable or missing keys."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.checks.finding import Finding, error, warning
from strop.config.keys import Key, all_keys, value_at
from strop.config.placement import pools_of, runs_on_ray, visible_gpus
from strop.config.schema import RootConfig
from strop.config.schema.base import At


def check_keys(config: RootConfig) -> Iterator[Finding]:
    """Yield an error for each key that is missing or refused, and a warning for each reason for no effect.

    Only keys that somebody wrote are reported as without effect, each for its first reason: a default
    without effect is no mistake, and docs/config.md mentions it.
    """
    one_rank = all(sum(pool) == 1 for pool in pools_of(config).values())
    on_ray = runs_on_ray(config)
    device = config.trainer.device
    on_cpu = device == "cpu" or (device == "auto" and visible_gpus() == 0)
    idle: dict[str, list[str]] = {}
    for key in all_keys(type(config)).values():
        if key.is_section:
            continue
        value = value_at(config, key.path)
        section = value_at(config, key.path.rpartition(".")[0])
        at = At(key.path, value, section, config, one_rank=one_rank, on_ray=on_ray, on_cpu=on_cpu)
        if key.required is not None and not value and key.required.applies(at):
            given = f"{key.path}={key.required.example}"
            yield error(f"{key.path}: not set; expected {key.required.what}, for example {given}")
        applying = [limit for limit in key.limits if value not in (None, "") and limit.applies(at)]
        refused = [limit for limit in applying if limit.level == "error"]
        for limit in refused:
            yield error(f"{key.path}={value}: {limit.reason}")
        # A mapping counts as written if any key in it was.
        is_meant = any(f"{path}.".startswith(f"{key.path}.") for path in config.meant)
        if applying and not refused and is_meant:
            first = applying[0]
            reason = f" ({first.reason})" if first.reason else ""
            idle.setdefault(f"{first.when}{reason}", []).append(f"{key.path}={value}")
    for why, keys in idle.items():
        yield warning(f"no effect {why}: {', '.join(keys)}")


def status_in_words(key: Key, *, inherited: int = 0) -> str:
    """Return the entry of a key in the last column of the reference page, less ``inherited`` markers."""
    entries = [f"required {key.required.when}".strip()] if key.required is not None else []
    for limit in key.limits[inherited:]:
        verb = "no effect" if limit.level == "warning" else "error"
        entries.append(f"{verb} {limit.when}" + (f": {limit.reason}" if limit.reason else ""))
    return "; ".join(entries) or "honoured"

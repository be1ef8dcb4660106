"""Overrides on the command line, read by Hydra's grammar and applied to the tree one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strop.config.keys import nearest
from strop.config.schema import RootConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def split_overrides(
    overrides: Sequence[str], folder: Path | None
) -> tuple[list[str], list[Override], dict[str, str]]:
    """Parse `overrides` into config-group choices, settings, and one line for each that cannot be read.

    Those lines are by the key that stands before the equals sign.

    A group is a subfolder of `folder`, where the user's file lies; a choice is handed on as text, for Hydra.
    """
    groups: list[str] = []
    settings: list[Override] = []
    problems: dict[str, str] = {}
    for text in overrides:
        try:
            override = _parse(text)
        except ValueError as error:
            _note(problems, text, str(error))
            continue
        key = override.key_or_group
        is_group = folder is not None and (folder / key).is_dir() and not isinstance(override.value(), dict)
        if is_group or key == "hydra.searchpath":
            groups.append(text)
        elif re.match(r"hydra\b", key):
            why = "Hydra's own settings have no effect; trainer.default_local_dir is the run folder"
            _note(problems, text, why)
        else:
            settings.append(override)
    return groups, settings, problems


def _note(problems: dict[str, str], text: str, why: str) -> None:
    key = text.partition("=")[0].strip().lstrip("+~")
    problems[text if key in problems else key] = f"{text}: {why}"


def apply_override(tree: DictConfig, override: Override, schema: type[RootConfig]) -> str | None:
    """Apply one setting to `tree`, in place; the line that says what is wrong with it, if anything is.

    `key=value`, `+key=value` and `++key=value` all set the key; the schema reports later those that do not
    exist. `~key` removes a key, `~key=value` only if it has that value.
    """
    key, value = override.key_or_group, override.value()
    try:
        if not override.is_delete():
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
            return None
        section, _, name = key.rpartition(".")
        parent = OmegaConf.select(tree, section) if section else tree
        if not isinstance(parent, DictConfig) or name not in parent:
            guess = nearest(key, schema)
            hint = f"; did you mean ~{guess}?" if guess and guess != key else ""
            return f"{override.input_line}: no value to remove{hint}"
        if value is not None and value != parent[name]:
            return f"{override.input_line}: not removed, its value is {parent[name]}"
        del parent[name]
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        return f"{override.input_line}: cannot be set ({' '.join(str(error).split())})"
    return None


def _parse(text: str) -> Override:
    """One override; ValueError says in one line what is wrong with it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        try:
            override = parser.parse_override(_quote_home(text))
        except HydraException:
            raise ValueError(
                "cannot be read; expected key=value, +key=value or ~key, with quotes around a value that has "
                f"special characters: 'key=\"a=b c\"' ({' '.join(str(error).split())})"
            ) from None
    if not override.key_or_group:
        raise ValueError("expected key=value")
    if override.is_sweep_override():
        raise ValueError("several values for one key (a sweep) cannot be run; a list is written key=[a,b]")
    return override


def _quote_home(text: str) -> str:
    """`text` with quotes around paths that begin with `~`, which Hydra's grammar does not have in a value."""
    key, equals, value = text.partition("=")
    return key + equals + re.sub(r"(?<![^\[,:\s])~[^,\[\]{}'\"\s]*", lambda path: f"'{path.group()}'", value)

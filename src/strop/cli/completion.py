"""Shell completion by argcomplete: commands, options, configuration keys, and values that are words."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from strop.config.names import estimators, policy_losses, preference_losses
from strop.errors import MissingExtraError


def complete(parser: argparse.ArgumentParser, command: str) -> None:
    """Answer the shell and end the process; ``parser`` has the arguments of ``command``."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        raise MissingExtraError("argcomplete", "completion", "shell completion") from None
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for own in subparsers[0].choices[command]._actions if command in subparsers[0].choices else ():
        if own.dest == "overrides":
            own.completer = _Keys(command)  # type: ignore[attr-defined] # where argcomplete looks for it
    argcomplete.autocomplete(parser, always_complete_options=False)


_NAMES = {
    "algorithm.adv_estimator": estimators,
    "actor_rollout_ref.actor.policy_loss": policy_losses,
    "update.loss": preference_losses,
}
"""Keys with named functions, which a user's import path may replace."""


class _Keys:
    """Completes a path (MODEL, DATA) or ``key=value``: the key, then one of few values, or a path."""

    def __init__(self, command: str) -> None:
        from strop.config.keys import all_keys
        from strop.config.trees import PPO, TREES

        tree = TREES.get(command, PPO)
        self._keys = {path: key for path, key in all_keys(tree.schema).items() if not key.is_section}

    def __call__(self, prefix: str, **_: Any) -> list[str]:
        completers = importlib.import_module("argcomplete.completers")

        path, equals, value = prefix.partition("=")
        if not equals:
            return [*(f"{key}=" for key in self._keys), *completers.FilesCompleter()(prefix)]
        expected = self._keys[path].expected if path in self._keys else ""
        if expected == "True or False":
            return [f"{path}=True", f"{path}=False"]
        if expected.startswith("one of "):
            return [f"{path}={word}" for word in expected.removeprefix("one of ").split(", ")]
        if path in _NAMES:
            return [f"{path}={name}" for name in _NAMES[path]()]
        return [f"{path}={file}" for file in completers.FilesCompleter()(value)]

"""``gym:ID``: an environment of gymnasium, played by text.

The action is in the text of a turn: the last integer for a space ``Discrete``, the text itself for ``Text``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from strop.environments.episode import plain
from strop.errors import ConfigError, MissingExtraError
from strop.rewards.arguments import PlayedTurn

_INTEGER = re.compile(r"(?<![\d.])[-+]?\d{1,18}(?![\d.]*\d)")


class Gym:
    """A game of one sample; subclasses have an ID."""

    id = ""
    render_mode: str | None = None

    def __init__(self) -> None:
        import gymnasium

        self._game = gymnasium.make(self.id, render_mode=self.render_mode)
        self._scores: list[tuple[str, float]] = []
        """The turns that were played, with their rewards."""

    def reset(self, seed: int, options: dict[str, Any] | None = None) -> str:
        """Begin a game; ``options`` is a column, for environments that take some."""
        return self._shown(self._game.reset(seed=seed, options=options)[0])

    def respond(self, response: str) -> str | None:
        """Take a step; return the observation, None at the end of the game."""
        space, text = self._game.action_space, response.rpartition("</think>")[2].strip()
        action: Any = text
        if is_discrete(space):
            numbers = _INTEGER.findall(text)
            action = int(numbers[-1]) if numbers else None
        if action is None or not space.contains(action):
            expected = f"a text in {space}"
            if is_discrete(space):
                expected = f"an integer from {space.start} to {space.start + space.n - 1}"
            return f"error: no action found; expected {expected} at the end of the turn"
        observation, score, terminated, truncated, _ = self._game.step(action)
        self._scores.append((response, float(score)))
        return None if terminated or truncated else self._shown(observation)

    def reward(self, turns: Sequence[PlayedTurn]) -> list[float]:
        """Return the reward of each turn; 0 where no action was found."""
        left, found = list(self._scores), []
        for turn in turns:
            is_played = bool(left) and not turn.calls and left[0][0] == turn.text
            found.append(left.pop(0)[1] if is_played else 0.0)
        return found

    def close(self) -> None:
        self._game.close()

    def _shown(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self.render_mode is not None:
            return self._game.render()
        return json.dumps(observation, default=plain)


def is_discrete(space: Any) -> bool:
    """Return True for gymnasium's ``Discrete``."""
    return type(space).__name__ == "Discrete"


def load_gym(id: str) -> type[Gym]:
    """Return the class for ``gym:ID``.

    Raises ``ConfigError`` for an ID that gymnasium does not make, and for a space of actions without texts.
    """
    given = f"environment.path=gym:{id}"
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("gymnasium", "gym", given) from error
    try:
        game = gymnasium.make(id)
    except Exception as error:  # of the module of the environment, too
        raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
    if (whole := game.spec.id) != id.rpartition(":")[2]:
        raise ConfigError(f"{given}: write gym:{whole}; another version is another environment")
    space, modes = game.action_space, game.metadata.get("render_modes") or ()
    game.close()
    if not is_discrete(space) and type(space).__name__ != "Text":
        raise ConfigError(
            f"{given}: its actions are {space}, and only Discrete and Text are read from a text; write a "
            "class around it whose respond(response) or tools make the action (strop docs environments)"
        )
    return type(id, (Gym,), {"id": id, "render_mode": "ansi" if "ansi" in modes else None})

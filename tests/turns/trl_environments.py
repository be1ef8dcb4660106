"""Environments and a tool as TRL's documentation has them (GRPO trainer, "Agent Training", Apache 2.0)."""

import random


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


class IncrementEnv:
    def reset(self, target, **kwargs) -> None:
        self.counter = 0
        self.target = target

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class SelfSamplingEnv(IncrementEnv):
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 10**9)
        return f"Increment the counter by {self.target}."


class GameEnv:
    """As its scripts for OpenEnv: numbers called ``reward`` and ``done``, and properties."""

    def __init__(self, goal=3):
        self.goal = goal

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        self.done = False
        self.moves = []
        return "Go to 3."

    @property
    def last_move(self) -> int:
        return self.moves[-1]

    def move(self, step: int) -> str:
        """
        Move.

        Args:
            step: How far.

        Returns:
            The place.
        """
        if self.done:
            raise ValueError("Game over.")
        self.moves.append(step)
        self.done = sum(self.moves) == self.goal
        self.reward = float(self.done)
        return f"at {sum(self.moves)}"

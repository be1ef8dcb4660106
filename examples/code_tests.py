"""Programs and their tests: the model writes a function, the tests run in the sandbox, and it may try again.

The rows are those of `strop prepare humaneval` or `mbpp`. A model that calls tools calls `run_tests`; else
each turn is run, and what failed is told as a user's message.
"""

from __future__ import annotations

from strop.rewards.sandbox import Limits
from strop.rewards.score.code import judge


class Tests:
    """The tests of one problem."""

    def reset(self, ground_truth: str) -> None:
        self.ground_truth, self.done = ground_truth, False

    def run_tests(self, program: str) -> str:
        """Run the tests on a program.

        Args:
            program: The whole function in Python.
        """
        verdict = judge(program, self.ground_truth, limits=Limits(wall_s=6))
        self.done = verdict.passed
        return "All tests pass." if verdict.passed else f"A test fails: {verdict.reason:.300}"

    def respond(self, response: str) -> str | None:
        """Run the program of a turn without a call; None ends the sample."""
        found = self.run_tests(response)
        return None if self.done else f"{found}\nWrite the whole function again."

    def reward(self) -> float:
        return float(self.done)

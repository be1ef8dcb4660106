"""Run untrusted Python under bubblewrap, and judge its answers in another sandbox."""

from strop.rewards.sandbox.bubblewrap import Limits, require_bubblewrap
from strop.rewards.sandbox.run import (
    Verdict,
    require_sandbox,
    run_assert_tests,
    run_program,
    run_stdin_tests,
)

__all__ = [
    "Limits",
    "Verdict",
    "require_bubblewrap",
    "require_sandbox",
    "run_assert_tests",
    "run_program",
    "run_stdin_tests",
]

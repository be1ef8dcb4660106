"""Running untrusted Python under bubblewrap, and judging what it answers in another process."""

from strop.rewards.sandbox.bubblewrap import Limits, require_bubblewrap
from strop.rewards.sandbox.run import Verdict, run_assert_tests, run_stdin_tests

__all__ = ["Limits", "Verdict", "require_bubblewrap", "run_assert_tests", "run_stdin_tests"]

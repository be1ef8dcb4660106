"""Tools that are ready for use: ``tools=[strop.tools.python]``, ``environment.tools=[python]``."""

from __future__ import annotations

from typing import ClassVar

from strop.rewards.sandbox import Limits, run_program


class Python:
    """A sandbox for the programs of one sample; a subclass may set other limits."""

    # wall time for the CPU time where three programs share a core; below the default of environment.timeout
    limits: ClassVar[Limits] = Limits(wall_s=20.0, cpu_s=10, file_mb=8, output_bytes=16 << 20)

    def __init__(self) -> None:
        self._files = ""

    def python(self, code: str) -> str:
        """Run a Python program, and return what it prints, or its traceback.

        Each call is a new process; files in the current folder stay for the next call. There is the standard
        library only, and no network.

        Args:
            code: The program.
        """
        output, self._files = run_program(code, self._files, limits=self.limits)
        return output


python = Python

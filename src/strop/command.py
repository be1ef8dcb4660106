"""How every command ends: what went wrong in one message, and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from strop.errors import ConfigError, StropError


def run_command(action: Callable[[], int], *, debug: bool) -> int:
    """Run ``action`` and return the exit status.

    A ``StropError`` is printed without its traceback (unless ``debug``) and gives 2; Ctrl-C gives 130, as
    shells expect.
    """
    try:
        return action()
    except StropError as error:
        if debug:
            raise
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        for problem in problems:
            sys.stderr.write(f"{type(error).__name__}: {problem}\n")
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        sys.stderr.write("stopped by Ctrl-C; the last whole checkpoint is kept\n")
        return 130

"""Every error that strop raises on purpose.

Each is also the standard error that it resembles, so ``except ValueError`` works as a reader would expect.
The message says what was found, what was expected and what to do; the command line prints it without a
traceback and exits with status 2 (``--debug`` shows the traceback).
"""

from __future__ import annotations

import pickle
from typing import Any


class StropError(Exception):
    """The base of all of them."""


class ConfigError(StropError, ValueError):
    """One or more configuration keys are wrong; ``problems`` holds one line for each."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class DataError(StropError, ValueError):
    """A data file, column or row cannot be used."""


class ModelError(StropError, ValueError):
    """A model folder or its tokenizer cannot be used as asked."""


class RewardError(StropError, RuntimeError):
    """Scoring failed in a way that must stop the run."""


class CheckpointError(StropError, RuntimeError):
    """A checkpoint cannot be written, found or read."""


class TrainingError(StropError, RuntimeError):
    """The run cannot go on: for example a reward that is not a number."""


class WorkerError(StropError, RuntimeError):
    """A worker's process died, raised or hung; ``is_final``: it would again, so starting anew is no help."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        self.is_final = is_final
        super().__init__(message)


class MissingExtraError(StropError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        self._given = (package, extra, needed_for)
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'strop[{extra}]'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtraError, self._given


def portable(error: Exception) -> Exception:
    """The error itself where it survives the way to another process, else one that says the same.

    An exception that cannot be pickled, or that cannot be made again from its ``args`` (a constructor with
    further arguments), would arrive there as an error about pickling.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs anybody's code
        kind = StropError if isinstance(error, StropError) else RuntimeError
        return kind(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error

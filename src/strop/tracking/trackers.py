"""``Tracking``, which passes metrics to all trackers of a run, and the trackers by name."""

from __future__ import annotations

import importlib
import json
import logging
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from strop.algorithms.registry import resolve
from strop.config.backends import load_backend
from strop.config.names import OPTIONAL_PACKAGES, TRACKERS, is_installed
from strop.errors import ConfigError, MissingExtraError, TrainingError, raised_as
from strop.files import atomic_write_text
from strop.redaction import redacted
from strop.tracking.base import AddressedTracker, RunInfo, Tracker
from strop.tracking.jsonl import JsonlTracker
from strop.tracking.lengths import ColumnLengths
from strop.tracking.report import ValidationReport

FAILURES_BEFORE_SWITCH_OFF = 3
TRACKERS_FILE = "trackers.json"
"""File in the run folder: tracker -> its page, or another place, of the run."""


_log = logging.getLogger(__name__)


class Tracking:
    """All trackers of a run, as a context manager; ``log`` passes metrics to each."""

    def __init__(self, names: Sequence[str], **run_info: Any) -> None:
        """Build every named tracker once for a ``RunInfo``, and the jsonl tracker in any case.

        Raises ConfigError for an unknown name, MissingExtraError for a missing package, and whatever a
        tracker raises when it cannot start.
        """
        classes = {name: resolve_tracker(name) for name in dict.fromkeys(names)}
        run = RunInfo(**{**run_info, "config": redacted(run_info["config"])})
        run.run_dir.mkdir(parents=True, exist_ok=True)
        self._jsonl = JsonlTracker(run)
        self._others: dict[str, Tracker] = {}
        self._failures: Counter[str] = Counter()
        try:
            for name, tracker_class in classes.items():
                if tracker_class is not JsonlTracker:
                    self._others[name] = tracker_class(run)
            addresses = {
                name: tracker.address
                for name, tracker in self._others.items()
                if isinstance(tracker, AddressedTracker)
            }
            if addresses:
                text = json.dumps(addresses, indent=2, ensure_ascii=False) + "\n"
                atomic_write_text(run.run_dir / TRACKERS_FILE, text)
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of ``step``: numbers, 0-d tensors or numpy scalars.

        Raises TypeError for a value that is not a number and TrainingError when ``metrics.jsonl`` cannot
        be written.
        """
        numbers = numbers_of(metrics)
        self._jsonl.log(step, numbers)
        self._each(step, "log", step, numbers)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Pass the report of a validation to the trackers that show it."""
        self._each(step, "log_validation", step, report)

    def log_progress(self, line: str) -> None:
        """Pass what the run is doing to trackers with this method; called in a thread, twice a second."""
        for tracker in list(self._others.values()):
            with suppress(Exception):  # without the method; failures are counted by the steps
                operator.methodcaller("log_progress", line)(tracker)

    def log_lengths(self, step: int, columns: Sequence[ColumnLengths]) -> None:
        """Pass the token lengths of the data sets to the trackers that show them."""
        self._each(step, "log_lengths", columns)

    def log_image(self, step: int, image: str, path: Path) -> None:
        """Pass the PNG file ``path``, called ``image``, to the trackers that record pictures."""
        self._each(step, "log_image", step, image, path)

    def close(self) -> None:
        """Close every tracker; a second call has no effect."""
        others, self._others = self._others, {}
        try:
            for name, tracker in others.items():
                self._close_one(name, tracker)
        finally:
            self._jsonl.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TrainingError as failure:
            if kind is None:
                raise
            _log.warning("warning: %s", failure)  # the error that ended the run takes precedence

    def _each(self, step: int, method: str, *arguments: Any) -> None:
        """Call a method of every tracker that has it; one that fails three times in a row is closed."""
        for name, tracker in list(self._others.items()):
            if hasattr(tracker, method):
                self._call(name, step, partial(getattr(tracker, method), *arguments))

    def _call(self, name: str, step: int, call: Callable[[], None]) -> None:
        try:
            call()
        # A full disk or lost network must not end a run; rich exits where the pipe of the output is closed.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failures[name] += 1
            what = f"trainer.logger {name!r} could not log step {step} ({type(error).__name__}: {error})"
            if self._failures[name] < FAILURES_BEFORE_SWITCH_OFF:
                _log.warning("%s; the numbers are in metrics.jsonl", what)
            else:
                _log.warning("%s; failed %d times in a row, switched off", what, self._failures[name])
                self._close_one(name, self._others.pop(name))
        else:
            self._failures[name] = 0

    def _close_one(self, name: str, tracker: Tracker) -> None:
        try:
            tracker.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other trackers must still be closed
            _log.warning("trainer.logger %r did not close: %s: %s", name, type(error).__name__, error)


def resolve_tracker(name: str) -> Callable[[RunInfo], Any]:
    """Return what builds the tracker of a name in ``trainer.logger``: built in, or the user's import path.

    Raises ConfigError (unknown name, module or class) and MissingExtraError (package not installed).
    """
    if name in OPTIONAL_PACKAGES and not is_installed(name):
        raise MissingExtraError(name, name, f"trainer.logger {name!r}")
    with raised_as(ConfigError, f"trainer.logger={name!r} cannot be imported", ImportError):
        found = (
            load_backend(TRACKERS[name]) if name in TRACKERS else resolve(name, TRACKERS, "trainer.logger")
        )
        if name in OPTIONAL_PACKAGES:  # here, before a model is loaded: an installed package may not work
            importlib.import_module(getattr(found, "package", name))
        return found


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Return metrics as plain numbers; raise ``TypeError`` for a value that is none."""
    return {name: _as_number(name, value) for name, value in metrics.items()}


def _as_number(name: str, value: Any) -> int | float:
    """Return a plain int or float. Counts stay ints, so that ``episode`` is 64 and not 64.0."""
    try:
        # operator.index: int() would also take a float and cut it
        return int(operator.index(value))
    except TypeError:
        pass
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is a {type(value).__name__}, expected a number") from error

"""Trackers: where the metrics of a step go, by the names in ``trainer.logger``.

``metrics.jsonl`` is always written, first, and is the record of the run: when it cannot be written the
run stops. Every other tracker is a view of the same numbers. It must start properly (a missing package or
a failed login is an error at start-up, while somebody is watching), but once the run is under way its
failures are warnings: a step that it cannot log is skipped, and after three failures in a row it is
switched off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from strop.tracking.report import ValidationReport

"""Name in ``trainer.logger`` -> ``module:Class``, imported only when asked for."""

"""Trackers that need the package, and the extra, of their own name."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run when it is built."""

    run_dir: Path
    """The run folder; it exists."""
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    """The resolved configuration, as plain values."""
    total_steps: int
    """The step at which the run ends."""
    start_step: int = 0
    """0 for a new run; k when the run resumes after step k, so that k + 1 is the first step logged."""


class Tracker(Protocol):
    """Built as ``TrackerClass(run_info)``; records the metrics of one step at a time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` (plain ints and floats, NaN possible) for ``step``; steps never go back."""
        ...

    def close(self) -> None:
        """Finish; called once, also when the run ends by an exception."""
        ...


@runtime_checkable
class ValidationTracker(Protocol):
    """What a tracker may have besides: it is told what a validation found, with samples to look at."""

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Show or record ``report``, of the policy after ``step`` iterations; ``log`` has its numbers."""
        ...

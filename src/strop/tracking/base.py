"""The protocol of trackers, which record or show the metrics of each step (``trainer.logger``).

``metrics.jsonl`` is always written, and first. It is the record of the run: if it cannot be written, the run
stops. Every other tracker is a view of the same numbers. A missing package or a failed login is an error at
start-up, while the user is watching; later failures are warnings: the step is skipped, and after three
failures in a row the tracker is switched off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from strop.tracking.lengths import ColumnLengths
from strop.tracking.report import ValidationReport


@dataclass(frozen=True)
class RunInfo:
    """The run, as passed to the constructor of a tracker."""

    run_dir: Path
    """The run folder; it exists."""
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    """The resolved configuration, as plain values without credentials (``strop/redaction.py``)."""
    total_steps: int
    """The step at which the run ends."""
    start_step: int = 0
    """0 for a new run; k if the run resumes after step k, so that the first step logged is k + 1."""
    hf_repo_url: str | None = None
    """Page of the branch on the Hugging Face hub that gets the trained model; None if it is not published."""

    @property
    def published_config(self) -> dict[str, Any]:
        """The configuration, and ``hf_repo_url`` if there is one."""
        return {**self.config, **({"hf_repo_url": self.hf_repo_url} if self.hf_repo_url else {})}

    def known_id(self, file: str) -> str | None:
        """Return the tracker's id of this run, kept in ``file`` of the run folder; None for a new run."""
        path = self.run_dir / file
        return path.read_text().strip() if self.start_step and path.exists() else None


class Tracker(Protocol):
    """Built as ``TrackerClass(run_info)``; records the metrics step by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` (plain ints and floats, NaN possible) for ``step``; steps never decrease."""
        ...

    def close(self) -> None:
        """Finish; called once, also after an exception."""
        ...


class ValidationTracker(Protocol):
    """Optional second method of a tracker, for the report of a validation."""

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Show or record ``report``, of the policy after ``step`` iterations; ``log`` gets its numbers."""
        ...


class LengthsTracker(Protocol):
    """Optional method of a tracker, for the token lengths of the run's data sets."""

    def log_lengths(self, columns: Sequence[ColumnLengths]) -> None:
        """Show ``columns``, before the first step."""
        ...


@runtime_checkable
class AddressedTracker(Protocol):
    """Optional property of a tracker that has a page, or another place where the run can be found."""

    @property
    def address(self) -> str:
        """A URL, or words that name the place; the model card of a published model has it."""
        ...


class ImageTracker(Protocol):
    """Optional method of a tracker, for a picture of the run."""

    def log_image(self, step: int, name: str, path: Path) -> None:
        """Record the PNG file ``path`` under ``name``."""
        ...

"""Trackio: its own folder (``TRACKIO_DIR``), or the Space or server that its variables name.

All runs of a project are in one file there, where ``trackio show`` finds them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trackio
from trackio.utils import TRACKIO_DIR

from strop.errors import ConfigError
from strop.tracking.base import RunInfo
from strop.tracking.report import ValidationReport


class TrackioTracker:
    """Log to one Trackio run; a resume of the training run continues the newest one of its name."""

    def __init__(self, run: RunInfo) -> None:
        """Start or continue the run; ConfigError if that fails (no login for a Space, no network)."""
        try:
            self._run = trackio.init(
                project=run.project_name,
                name=run.experiment_name,
                config=run.published_config,
                resume="allow" if run.start_step else "never",
                embed=False,
            )
        except Exception as error:
            raise ConfigError(
                f"trainer.logger 'trackio' could not start ({type(error).__name__}: {error})"
            ) from error
        self._project = run.project_name

    @property
    def address(self) -> str:
        """The Space or server, else the folder."""
        where = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL") or TRACKIO_DIR
        return f"project {self._project}, run {self._run.name}, in {where}"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record ``step``; Trackio writes it in a thread."""
        self._run.log(dict(metrics), step=step)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Record the shown samples as a table."""
        if report.shown:
            import pandas  # trackio.Table takes a data frame

            rows = pandas.DataFrame([asdict(sample) for sample in report.shown])
            self.log(step, {report.shown_name: trackio.Table(dataframe=rows)})

    def log_image(self, step: int, name: str, path: Path) -> None:
        """Record the picture."""
        self.log(step, {name: trackio.Image(str(path))})

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()

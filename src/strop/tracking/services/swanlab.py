"""SwanLab: files in ``<run folder>/swanlab``, and the site unless ``SWANLAB_MODE`` is offline or local."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swanlab

from strop.errors import ConfigError
from strop.files import atomic_write_text
from strop.tracking.base import RunInfo
from strop.tracking.report import ValidationReport

RUN_ID_FILE = "swanlab_run_id.txt"


class SwanlabTracker:
    """Log to one SwanLab run; a resume continues it on the site, and is a run of its own where it is offline.

    Its id is in ``swanlab_run_id.txt`` of the run folder.
    """

    def __init__(self, run: RunInfo) -> None:
        """Start or continue the run; ConfigError if that fails (no login, no network)."""
        mode = os.environ.get("SWANLAB_MODE", "online")
        known_id = run.known_id(RUN_ID_FILE) if mode == "online" else None
        folder = run.run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        try:
            self._run = swanlab.init(
                mode=mode,
                project=run.project_name,
                name=run.experiment_name,
                log_dir=str(folder),
                config=run.published_config,
                id=known_id,
                resume="allow" if known_id else None,
            )
        except Exception as error:
            raise ConfigError(
                f"trainer.logger 'swanlab' could not start ({type(error).__name__}: {error}). Log in with "
                "`swanlab login`, or set SWANLAB_MODE=offline to keep the files here"
            ) from error
        self._name = f"run {self._run.id} of project {run.project_name} ({mode})"
        self._online = mode == "online"
        atomic_write_text(run.run_dir / RUN_ID_FILE, self._run.id + "\n")

    @property
    def address(self) -> str:
        """URL of the run's page; of a run that is not on the site its project and id."""
        return self._run.url if self._online else self._name

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record ``step``."""
        self._run.log(dict(metrics), step=step)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Record the shown samples as texts."""
        if report.shown:
            texts = [
                swanlab.Text(one.text(), caption=", ".join(f"{k} {v:g}" for k, v in one.figures().items()))
                for one in report.shown
            ]
            self.log(step, {report.shown_name: texts})

    def log_image(self, step: int, name: str, path: Path) -> None:
        """Record the picture."""
        self.log(step, {name: swanlab.Image(str(path))})

    def close(self) -> None:
        """End the run; one that ends by an exception has crashed."""
        if (error := sys.exception()) is not None:
            self._run.finish("crashed", str(error) or type(error).__name__)
        else:
            self._run.finish()

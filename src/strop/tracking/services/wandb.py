"""Weights & Biases: local files in ``<run folder>/wandb``, and the site unless ``WANDB_MODE=offline``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import wandb

from strop.errors import ConfigError
from strop.files import atomic_write_text
from strop.tracking.base import RunInfo
from strop.tracking.report import ValidationReport

RUN_ID_FILE = "wandb_run_id.txt"


class WandbTracker:
    """Log to one wandb run, which every resume of the training run continues.

    Its id is in ``wandb_run_id.txt`` of the run folder; a new run (``start_step`` 0) gets a new id. ``step``
    is logged as a metric and set as the horizontal axis: wandb's own step counter cannot decrease, and would
    silently drop the steps that are trained again after a resume from an earlier checkpoint.
    """

    def __init__(self, run: RunInfo) -> None:
        """Start or continue the wandb run; ConfigError if that fails (no login, no network)."""
        known_id = run.known_id(RUN_ID_FILE)
        try:
            self._run = wandb.init(
                project=run.project_name,
                name=run.experiment_name,
                dir=run.run_dir,
                config=run.published_config,
                id=known_id,
                resume="allow" if known_id else None,
                # On a terminal, wandb would upload every redraw of the live table.
                settings=wandb.Settings(console="off" if sys.stdout.isatty() else "auto"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"trainer.logger 'wandb' could not start: {error}. "
                "Log in with `wandb login`, or set WANDB_MODE=offline to keep the files here"
            ) from error
        atomic_write_text(run.run_dir / RUN_ID_FILE, self._run.id + "\n")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if run.hf_repo_url is not None:
            self._run.summary["hf_repo_url"] = run.hf_repo_url

    @property
    def address(self) -> str:
        """URL of the run's page; of an offline run its project and id."""
        run = self._run
        return run.url or f"run {run.id} of project {run.project} (offline; `wandb sync` uploads it)"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Pass ``step`` to wandb, which sends it from its own process."""
        # Offline, every resume is a separate folder whose counter would restart at 0.
        self._run.log({"step": step, **metrics}, step=step if self._run.offline else None)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Send the shown samples as a table."""
        if report.shown:
            rows: list[Any] = [list(asdict(sample).values()) for sample in report.shown]
            table = wandb.Table(columns=[field.name for field in fields(report.shown[0])], data=rows)
            self.log(step, {report.shown_name: table})

    def log_image(self, step: int, name: str, path: Path) -> None:
        """Send the picture."""
        self.log(step, {name: wandb.Image(str(path))})

    def close(self) -> None:
        """Finish the upload; mark a run that ends by an exception as failed."""
        self._run.finish(exit_code=1 if sys.exception() is not None else 0)

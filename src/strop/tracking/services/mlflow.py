"""MLflow: the server of ``MLFLOW_TRACKING_URI``, else files in ``<run folder>/mlflow``."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from strop.errors import ConfigError
from strop.files import atomic_write_text
from strop.tracking.base import RunInfo
from strop.tracking.report import ValidationReport

RUN_ID_FILE = "mlflow_run_id.txt"
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]", re.ASCII)


class MlflowTracker:
    """Log to one MLflow run, which a resume of the training run continues.

    Its id is in ``mlflow_run_id.txt`` of the run folder. The project is the experiment, the configuration is
    the artifact ``config.json``. Metrics' names lose the characters that MLflow does not allow.
    """

    def __init__(self, run: RunInfo) -> None:
        """Start or continue the run; ConfigError if that fails (no server, no rights)."""
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (run.run_dir / "mlflow").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it
        self._uri = uri
        try:
            self._client = MlflowClient(uri)
            known_id = run.known_id(RUN_ID_FILE)
            if known_id is not None:
                self._client.update_run(known_id, status="RUNNING")
                self._run = self._client.get_run(known_id)
            else:
                found = self._client.get_experiment_by_name(run.project_name)
                experiment = (
                    found.experiment_id if found else self._client.create_experiment(run.project_name)
                )
                self._run = self._client.create_run(experiment, run_name=run.experiment_name)
            self._id = self._run.info.run_id
            self._client.log_dict(self._id, run.published_config, "config.json")
            if run.hf_repo_url is not None:
                self._client.set_tag(self._id, "hf_repo_url", run.hf_repo_url)
        except (MlflowException, OSError) as error:
            raise ConfigError(
                f"trainer.logger 'mlflow' could not start at {uri}: {error}. Set MLFLOW_TRACKING_URI to a "
                "server that runs, or unset it to keep the files in the run folder"
            ) from error
        atomic_write_text(run.run_dir / RUN_ID_FILE, self._id + "\n")

    @property
    def address(self) -> str:
        """URL of the run's page on a server, else the folder of its files."""
        place = f"{self._uri.rstrip('/')}/#/experiments/{self._run.info.experiment_id}/runs/{self._id}"
        return place if self._uri.startswith("http") else f"run {self._id} in {self._uri}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send all metrics of ``step`` at once."""
        now = int(time.time() * 1000)
        values = [Metric(_NOT_IN_A_NAME.sub("_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Write the shown samples as a JSON file."""
        if report.shown:
            rows: dict[str, Any] = {"step": step, "rows": [asdict(sample) for sample in report.shown]}
            self._client.log_dict(self._id, rows, f"{report.shown_name}/step_{step:06d}.json")

    def log_image(self, step: int, name: str, path: Path) -> None:
        """Send the picture."""
        self._client.log_artifact(self._id, str(path), name)

    def close(self) -> None:
        """End the run; one that ends by an exception has failed."""
        self._client.set_terminated(self._id, "FAILED" if sys.exception() is not None else "FINISHED")

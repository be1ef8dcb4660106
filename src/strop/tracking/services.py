"""Trackers that need a package: one adapter over its run, and what differs between the packages.

The runs of wandb, trackio and swanlab have ``log(values, step=step)``. A package is imported when it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.files import atomic_write_text
from strop.redaction import HIDDEN, redacted, redacted_text
from strop.terminal import is_terminal
from strop.tracking.base import RunInfo
from strop.tracking.report import ShownPair, ShownSample, ValidationReport

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]", re.ASCII)
Shown = Sequence[ShownSample | ShownPair]


@contextlib.contextmanager
def _command_without_credentials() -> Generator[None]:
    """Replace ``sys.argv`` in the body: wandb records it with a run."""
    command = sys.argv
    sys.argv = redacted(command)
    try:
        yield
    finally:
        sys.argv = command


class ServiceTracker:
    """Log to the run of a package; ``<name>_run_id.txt`` of the run folder has its id, for a resume."""

    name: str
    """In ``trainer.logger``, and the package's."""
    remedy: str = ""
    """What to do if the run cannot start."""
    address: str
    """URL of the run's page, or words that name the place."""
    _run: Any
    """The package's run; MLflow has a client instead."""

    def __init__(self, run: RunInfo) -> None:
        """Start or continue the run; ConfigError if that fails (no login, no network, no server)."""
        self._outside = sys.exception()
        """Of a caller that handles one while the run goes on: no failure of this run."""
        id_file = f"{self.name}_run_id.txt"
        try:
            self._package: Any = importlib.import_module(self.name)
            with _command_without_credentials():
                run_id = self._start(run, run.known_id(id_file))
        except Exception as error:  # each package has error classes of its own
            what = f"trainer.logger {self.name!r} could not start ({type(error).__name__}: {error})"
            raise ConfigError(f"{what}. {self.remedy}" if self.remedy else what) from error
        if run_id is not None:
            atomic_write_text(run.run_dir / id_file, run_id + "\n")

    def _start(self, run: RunInfo, known_id: str | None) -> str | None:
        """Set ``_run`` and ``address``; return the id by which a resume continues the run."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Record the shown samples."""
        if report.shown:
            self.log(step, {report.shown_name: self._samples(report.shown)})

    def _samples(self, shown: Shown) -> Any:
        """Return the samples as a value that the package displays."""
        raise NotImplementedError

    def log_image(self, step: int, name: str, path: Path) -> None:
        self.log(step, {name: self._package.Image(str(path))})

    def close(self) -> None:
        """End the run; one that ends by an exception is marked as failed where the package can."""
        error = sys.exception()
        self._end(None if error is self._outside else error)

    def _end(self, error: BaseException | None) -> None:
        self._run.finish()


class WandbTracker(ServiceTracker):
    """Weights & Biases: files in ``<run folder>/wandb``, and the site unless ``WANDB_MODE=offline``.

    ``step`` is logged as a metric and set as the horizontal axis: wandb's own step counter cannot decrease,
    and would silently drop the steps that are trained again after a resume from an earlier checkpoint.
    """

    name = "wandb"
    remedy = "Log in with `wandb login`, or set WANDB_MODE=offline to keep the files here"

    def _start(self, run: RunInfo, known_id: str | None) -> str:
        self._run = self._package.init(
            project=run.project_name,
            name=run.experiment_name,
            dir=run.run_dir,
            config=run.published_config,
            id=known_id,
            resume="allow" if known_id else None,
            # On a terminal, wandb would upload every redraw of the live table.
            settings=self._package.Settings(console="off" if is_terminal(sys.stdout) else "auto"),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if run.hf_repo_url is not None:
            self._run.summary["hf_repo_url"] = run.hf_repo_url
        offline = f"run {self._run.id} of project {self._run.project} (offline; `wandb sync` uploads it)"
        self.address = self._run.url or offline
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Pass ``step`` to wandb, which sends it from its own process."""
        # Offline, every resume is a separate folder whose counter would restart at 0.
        self._run.log({"step": step, **metrics}, step=step if self._run.offline else None)

    def _samples(self, shown: Shown) -> Any:
        rows = [list(asdict(sample).values()) for sample in shown]
        return self._package.Table(columns=[field.name for field in fields(shown[0])], data=rows)

    def _end(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class TrackioTracker(ServiceTracker):
    """Trackio: its own folder (``TRACKIO_DIR``), or the Space or server that its variables name.

    All runs of a project are in one file there; a resume continues the newest run of its name.
    """

    name = "trackio"

    def _start(self, run: RunInfo, known_id: str | None) -> None:
        self._run = self._package.init(
            project=run.project_name,
            name=run.experiment_name,
            config=run.published_config,
            resume="allow" if run.start_step else "never",
            embed=False,
        )
        where = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        self.address = (
            f"project {run.project_name}, run {self._run.name}, in {where or self._package.utils.TRACKIO_DIR}"
        )

    def _samples(self, shown: Shown) -> Any:
        import pandas  # trackio.Table takes a data frame

        return self._package.Table(dataframe=pandas.DataFrame([asdict(sample) for sample in shown]))


class SwanlabTracker(ServiceTracker):
    """SwanLab: files in ``<run folder>/swanlab``, and the site unless ``SWANLAB_MODE`` is offline or local.

    A resume continues the run on the site; offline it is another run.
    """

    name = "swanlab"
    remedy = "Log in with `swanlab login`, or set SWANLAB_MODE=offline to keep the files here"

    def _start(self, run: RunInfo, known_id: str | None) -> str:
        mode = os.environ.get("SWANLAB_MODE", "online")
        online, folder = mode == "online", run.run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        # swanlab reads the command from /proc, with what is hidden here
        is_public = HIDDEN not in " ".join(sys.argv)
        self._run = self._package.init(
            settings=None if is_public else self._package.Settings(probe={"runtime": False}),
            mode=mode,
            project=run.project_name,
            name=run.experiment_name,
            log_dir=str(folder),
            config=run.published_config,
            id=known_id if online else None,
            resume="allow" if known_id and online else None,
        )
        self.address = (
            self._run.url if online else f"run {self._run.id} of project {run.project_name} ({mode})"
        )
        return self._run.id

    def _samples(self, shown: Shown) -> Any:
        captions = (", ".join(f"{name} {value:g}" for name, value in one.figures().items()) for one in shown)
        return [
            self._package.Text(one.text(), caption=caption)
            for one, caption in zip(shown, captions, strict=True)
        ]

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._run.finish()
        else:
            self._run.finish("crashed", redacted_text(str(error)) or type(error).__name__)


class MlflowTracker(ServiceTracker):
    """MLflow: the server of ``MLFLOW_TRACKING_URI``, else files in ``<run folder>/mlflow``.

    The project is the experiment, the configuration is the artifact ``config.json``. Metrics' names lose the
    characters that MLflow does not allow. In files they have one ``/``, and dots for further ones: a metric
    is a file there, and none can be the folder of another.
    """

    name = "mlflow"
    remedy = "Set MLFLOW_TRACKING_URI to a server that runs, or unset it to keep the files in the run folder"

    def _start(self, run: RunInfo, known_id: str | None) -> str:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (run.run_dir / "mlflow").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 requires it
        self._in_files = uri.startswith("file:") or not re.match(r"databricks|.*://", uri)
        self._client = self._package.MlflowClient(uri)
        if known_id is not None:
            self._client.update_run(known_id, status="RUNNING")
            info = self._client.get_run(known_id).info
        else:
            found = self._client.get_experiment_by_name(run.project_name)
            experiment = found.experiment_id if found else self._client.create_experiment(run.project_name)
            info = self._client.create_run(experiment, run_name=run.experiment_name).info
        self._id = info.run_id
        self._client.log_dict(self._id, run.published_config, "config.json")
        if run.hf_repo_url is not None:
            self._client.set_tag(self._id, "hf_repo_url", run.hf_repo_url)
        page = f"{uri.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{self._id}"
        self.address = page if uri.startswith("http") else f"run {self._id} in {uri}"
        return self._id

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send all metrics of ``step`` at once."""
        now = int(time.time() * 1000)
        values = [
            self._package.entities.Metric(self._name(name), value, now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=values)

    def _name(self, name: str) -> str:
        group, slash, rest = _NOT_IN_MLFLOW.sub("_", name).partition("/")
        return group + slash + (rest.replace("/", ".") if self._in_files else rest)

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Write the shown samples as a JSON file."""
        if report.shown:
            rows: dict[str, Any] = {"step": step, "rows": [asdict(sample) for sample in report.shown]}
            self._client.log_dict(self._id, rows, f"{report.shown_name}/step_{step:06d}.json")

    def log_image(self, step: int, name: str, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), name)

    def _end(self, error: BaseException | None) -> None:
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


class TensorboardTracker:
    """TensorBoard: event files in ``<run folder>/tensorboard``; a resume after step k hides later steps."""

    package = "torch.utils.tensorboard"
    """Imports the package ``tensorboard``."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A new run in the same folder (start_step 0) hides everything before it, including a step 0.
        purge_step = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(log_dir=str(run.run_dir / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("config", _verbatim(json.dumps(run.config, indent=2, default=str)))
        if run.hf_repo_url is not None:
            self._writer.add_text("hf_repo_url", run.hf_repo_url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of ``step`` to disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()  # so that a killed run loses nothing

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Write the shown samples as text."""
        if report.shown:
            text = "\n\n".join(map(_as_markdown, report.shown))
            self._writer.add_text(report.shown_name, text, global_step=step)
            self._writer.flush()

    def log_image(self, step: int, name: str, path: Path) -> None:
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[:, :, :3], global_step=step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


def _verbatim(text: str) -> str:
    """Return ``text`` as a Markdown code block."""
    return textwrap.indent(text, "    ", lambda line: True)


def _as_markdown(shown: ShownSample | ShownPair) -> str:
    heading = ", ".join(f"**{name} {value:g}**" for name, value in shown.figures().items())
    return f"{heading} ({shown.data_source})\n\n{_verbatim(shown.text())}"

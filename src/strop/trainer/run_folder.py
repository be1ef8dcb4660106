"""The run folder (``trainer.default_local_dir``): file names, lock, and the check that nodes share it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from strop.checkpoint.folder import (
    FINAL_MODEL,
    LATEST,
    iteration_of,
    name_of,
    remove_unfinished,
    saved_steps,
)
from strop.checkpoint.hub import HUB_FILE
from strop.config.identity import others_like
from strop.config.load import to_yaml
from strop.config.paths import RESULTS, SAMPLES, expand
from strop.config.placement import settled
from strop.config.schema import RootConfig
from strop.errors import CheckpointError, ConfigError, RunFolderError, write_failure
from strop.files import atomic_write_text
from strop.tracking.curves import CURVES_FILE
from strop.tracking.jsonl import METRICS_FILE, last_step
from strop.tracking.machine import MACHINE_FILE
from strop.tracking.samples import step_file, steps_with_file
from strop.tracking.thumbnails import PICTURES
from strop.tracking.trackers import TRACKERS_FILE

logger = logging.getLogger(__name__)

_REFERENCE = "reference_log_probs"
_RUN_FILES = (
    "config.yaml",
    METRICS_FILE,
    MACHINE_FILE,
    CURVES_FILE,
    "token_lengths.png",
    "timeline.png",
    "rollouts",
    "validation",
    PICTURES,
    FINAL_MODEL,
    HUB_FILE,
    TRACKERS_FILE,
    _REFERENCE,
    "tensorboard",
    "wandb",
    "wandb_run_id.txt",
    "mlflow",
    "mlflow_run_id.txt",
    "swanlab",
    "swanlab_run_id.txt",
)


LOCK_FILE = ".lock"
_LOCK_WAIT_S = 2.0
"""Children of a killed process may hold inherited descriptors for a moment."""
_PATIENCE_S = 5.0
_RETRY_S = 0.5
_held: dict[Path, os.stat_result] = {}
"""Folders that this process has locked -> the lock's file; while it is open, no other has its number."""


class RunFolder:
    """The names of a run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(expand(path)).absolute()  # workers have other working directories
        self.path.mkdir(parents=True, exist_ok=True)
        self._resolved = self.path.resolve()

    def is_held(self) -> bool:
        """Return False if the lock that this run holds, or its folder, has been removed or replaced."""
        try:
            return self._resolved not in _held or os.path.samestat(_held[self._resolved], _lock_of(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def require_held(self, step: int) -> None:
        """Raise ``RunFolderError`` unless ``is_held``, after ``step`` iterations."""
        if not self.is_held():
            raise RunFolderError(
                f"trainer.default_local_dir={self.path}: its {LOCK_FILE} or the folder was removed or moved. "
                f"The run stops after iteration {step} and writes nothing more, as another run may use the "
                "folder. Exclude the folder from what cleans it, and start the run again: with "
                "trainer.resume_mode=auto it resumes from the last checkpoint, if one is left"
            )

    def rollouts(self, step: int) -> Path:
        """Return the path of an iteration's samples."""
        return step_file(self.path / "rollouts", step)

    def prune_rollouts(self, newest: int, *, to_keep: int) -> None:
        """Delete the samples of all but the last ``to_keep`` iterations up to ``newest`` that have a file.

        Files of later iterations are from before a resume, and are written again.
        """
        steps = steps_with_file(self.path / "rollouts")
        for step in [step for step in steps if step <= newest][:-to_keep]:
            self.rollouts(step).unlink(missing_ok=True)

    def validation(self, step: int) -> Path:
        """Return the path of the validation samples after ``step`` iterations; the report is next to it."""
        return step_file(self.path / "validation", step)

    def last_logged_step(self) -> int:
        """Return the last step in ``metrics.jsonl``; 0 when nothing is logged."""
        return last_step(self.path / METRICS_FILE)

    @property
    def final_model(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / FINAL_MODEL

    def write_config(self, config: RootConfig) -> None:
        """Write the resolved configuration; an earlier one is replaced only by a whole file."""
        atomic_write_text(self.path / "config.yaml", to_yaml(settled(config)))

    def latest_checkpoint(self) -> tuple[str, int] | None:
        """Return the latest checkpoint's step and when it was recorded (ns); None when there is none."""
        try:
            return (self.path / LATEST).read_text(errors="replace").strip(), (
                self.path / LATEST
            ).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None

    def name_others_like_it(self) -> None:
        """Name the latest run that an equal command with other settings, or another version, has left."""
        found = [(folder / LATEST, folder) for folder in others_like(self.path)]
        runs = [(latest.stat().st_mtime, folder) for latest, folder in found if latest.exists()]
        if runs:
            _, folder = max(runs)
            logger.info(
                "a new run; the one in %s has the same model and data, and another reward, other settings or "
                "another version of strop. To go on with it, set trainer.default_local_dir=%s",
                folder,
                folder,
            )

    def archive_previous_run(self) -> None:
        """Move an earlier run's files to ``previous_1``, ``previous_2``, ..., so that nothing is lost.

        Half-written checkpoints, which cannot be loaded, are deleted.
        """
        remove_unfinished(self.path)
        of_evaluation = (RESULTS, SAMPLES) if (self.path / "config.yaml").exists() else ()
        names = (*_RUN_FILES, LATEST, *of_evaluation)
        left = [self.path / name for name in names] + list(self.path.glob("global_step_*"))
        left = [path for path in left if path.exists()]
        if [path.name for path in left] not in ([], [_REFERENCE]):  # alone it is of a pass that was stopped
            logger.info("the files of an earlier run in %s are now in %s", self.path, self._archive(left))

    def archive_later(self, step: int) -> None:
        """Move what is saved of later iterations than ``step`` aside, with a copy of the metrics.

        The run leaves this continuation: its metrics are dropped, and the new one has the same numbers. If
        there is no model among it, the run was killed, and writes the same files again.
        """
        later = [self.path / name_of(saved) for saved in saved_steps(self.path) if saved > step]
        later += [self.final_model] if (iteration_of(self.final_model) or 0) > step else []
        if not later:
            return
        samples = []
        for kind, suffix in (("rollouts", ".parquet"), ("validation", ".parquet"), ("validation", ".json")):
            steps = steps_with_file(self.path / kind, suffix)
            samples += [step_file(self.path / kind, at, suffix) for at in steps if at > step]
        place = self._archive([])
        if (metrics := self.path / METRICS_FILE).is_file():
            shutil.copy(metrics, place)  # first: a full disk moves nothing
        for path in [*samples, *later]:  # models last: while one is left, the next attempt moves the rest
            target = place / path.relative_to(self.path)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        logger.info("what the run has saved of later iterations than %d is now in %s", step, place)

    def _archive(self, paths: Iterable[Path]) -> Path:
        number = 1
        while (archive := self.path / f"previous_{number}").exists():
            number += 1
        archive.mkdir()
        for path in paths:
            path.rename(archive / path.name)
        return archive


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """Hold the lock of the existing ``folder`` during the body; ``ConfigError`` when another run holds it.

    The operating system releases the lock when the process dies, even by ``kill -9``, so a resume finds it
    free. The same thread may acquire it again in the body. A file system without locks gets a warning only: a
    lock that is the mere existence of a file would outlive a killed process and refuse its resume.
    """
    folder = folder.resolve()  # two names of one folder must be one lock
    lock = FileLock(folder / LOCK_FILE, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire(timeout=_LOCK_WAIT_S)
    except Timeout as error:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: another run is using this folder, and two runs would "
            "overwrite each other's files; wait until it ends, stop it, or name another folder"
        ) from error
    except OSError as error:
        # Python has subclasses for a missing permission or a wrong path, but none for ENOSYS, EOPNOTSUPP and
        # ENOLCK, with which Lustre without flock and NFS without a lock service reply.
        if type(error) is not OSError:
            raise
        logger.warning(
            "warning: %s cannot be locked (%s): make sure that no second run is started there", folder, error
        )
        yield
        return
    is_outermost = folder not in _held
    if is_outermost:
        _held[folder] = _lock_of(folder)
    try:
        yield
    finally:
        if is_outermost:
            del _held[folder]
        lock.release()


def _lock_of(folder: Path) -> os.stat_result:
    return os.stat(folder / LOCK_FILE)


def require_shared_folder(
    folder: Path, groups: Mapping[str, Any], *, patience_s: float = _PATIENCE_S
) -> None:
    """Raise ``CheckpointError`` naming the nodes whose workers do not see a file that the driver writes.

    Call it when the worker processes run and before they load a model. ``patience_s``: network file systems
    may show a new file with a delay.
    """
    folder = Path(expand(folder)).absolute()
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("every worker must see this file\n")
    except OSError as error:
        with contextlib.suppress(OSError):  # a full disk leaves an empty file
            probe.unlink(missing_ok=True)
        why = write_failure(error, folder)
        raise CheckpointError(f"trainer.default_local_dir={folder} cannot be written: {why}") from error
    try:
        deadline = time.monotonic() + patience_s
        while nodes := sorted({node for group in groups.values() for node in group.nodes_without(probe)}):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"trainer.default_local_dir={folder} is not shared: a file written by the driver on "
                    f"{socket.gethostname()} is missing on {', '.join(nodes)}, or the processes there may "
                    "not write beside it. All processes write their "
                    "part of a checkpoint into one folder: set it to one on a file system that every node "
                    "mounts at the same path (NFS, Lustre, ...); trainer.default_hdfs_dir is for copies"
                )
            time.sleep(_RETRY_S)
    finally:
        probe.unlink(missing_ok=True)

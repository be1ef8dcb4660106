"""The files of one run, under ``trainer.default_local_dir``."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from strop.config.load import to_yaml
from strop.config.placement import settled
from strop.config.schema import RootConfig
from strop.errors import CheckpointError, ConfigError
from strop.files import atomic_write_text
from strop.tracking.jsonl import METRICS_FILE, read_metrics

_RUN_FILES = (
    "config.yaml",
    METRICS_FILE,
    "curves.png",
    "rollouts",
    "validation",
    "final_model",
    "tensorboard",
    "wandb",
    "wandb_run_id.txt",
)


_LATEST = "latest_checkpointed_iteration.txt"


class RunFolder:
    """Names and makes the run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()  # workers have working directories of their own
        self.path.mkdir(parents=True, exist_ok=True)

    def rollouts(self, step: int) -> Path:
        """The samples of an iteration."""
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def validation(self, step: int) -> Path:
        """The validation samples after ``step`` iterations."""
        return self.path / "validation" / f"step_{step:06d}.parquet"

    def validation_report(self, step: int) -> Path:
        """What those samples say of each data source, with intervals."""
        return self.path / "validation" / f"step_{step:06d}.json"

    def last_logged_step(self) -> int:
        """The last step in ``metrics.jsonl``; 0 when nothing is logged."""
        path = self.path / METRICS_FILE
        return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0

    @property
    def final_model(self) -> Path:
        """The trained actor as a Hugging Face folder, when no checkpoints are kept."""
        return self.path / "final_model"

    def write_config(self, config: RootConfig) -> None:
        """The resolved configuration, in place of an earlier one only when it is whole."""
        atomic_write_text(self.path / "config.yaml", to_yaml(settled(config)))

    def latest_checkpoint(self) -> tuple[str, int] | None:
        """What names the latest checkpoint, and when it was written; None when there is none."""
        try:
            return (self.path / _LATEST).read_text().strip(), (self.path / _LATEST).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def archive_previous_run(self) -> None:
        """Move what an earlier run left into ``previous_1``, ``previous_2``, ...: nothing is lost."""
        left = [self.path / name for name in (*_RUN_FILES, _LATEST)] + list(self.path.glob("global_step_*"))
        left = [path for path in left if path.exists()]
        if not left:
            return
        number = 1
        while (archive := self.path / f"previous_{number}").exists():
            number += 1
        archive.mkdir()
        for path in left:
            path.rename(archive / path.name)


# One run at a time in a run folder.

LOCK_FILE = ".lock"


"""In the run folder; it stays when the run has ended, and then says nothing."""


_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


"""What file systems without locks answer: Lustre mounted without flock, NFS without a lock service."""


_MOMENT_S = 2.0


"""So long the children of a process that was killed may take to let go of what they inherited."""


logger = logging.getLogger(__name__)


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """No other run writes to ``folder`` (it exists) inside; ``ConfigError`` when one does already.

    The operating system holds the lock and releases it with the process, however that dies, so a resume
    finds it free. The same thread may take it again inside. A file system without locks gets a warning: a
    file that merely exists would do there, but a killed process leaves it behind, and no resume could tell.
    """
    folder = folder.resolve()  # the same folder by another name is the same lock
    lock = FileLock(folder / LOCK_FILE, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire(timeout=_MOMENT_S)
    except Timeout as error:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: {_holder(folder / LOCK_FILE)} runs there, and two runs "
            "would overwrite each other's files; wait for its end, end it, or name another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "warning: the file system of %s has no locks (%s): see to it yourself that no second run is "
            "started there",
            folder,
            os.strerror(error.errno),
        )
        yield
        return
    is_outermost = lock.lock_counter == 1
    try:
        if is_outermost:
            _write(folder / LOCK_FILE, _signature())
        yield
    finally:
        if is_outermost:
            _write(folder / LOCK_FILE, "")
        lock.release()


def _signature() -> str:
    """Whose lock it is."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return json.dumps(holder) + "\n"


def _write(path: Path, text: str) -> None:
    """On a full disk it stays unsaid, and the lock holds all the same."""
    with contextlib.suppress(OSError):
        path.write_text(text)


def _holder(path: Path) -> str:
    """Who holds it, in words."""
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, TypeError, KeyError):  # it could not be written, or is being written
        return "another process"


# Whether all nodes see the folder that checkpoints are written to.

_PATIENCE_S = 5.0

_LOOK_AGAIN_S = 0.5


def require_shared_folder(
    folder: Path, groups: Mapping[str, Any], *, patience_s: float = _PATIENCE_S
) -> None:
    """``CheckpointError`` naming the nodes whose workers do not see a file that the driver writes there.

    To be called when the workers' processes run and before they load a model. ``patience_s``: network file
    systems may show a new file with a delay.
    """
    folder = folder.expanduser().absolute()
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("every worker must see this file\n")
    except OSError as error:
        with contextlib.suppress(OSError):  # on a full disk it is there, and empty
            probe.unlink(missing_ok=True)
        raise CheckpointError(f"trainer.default_local_dir={folder} cannot be written: {error}") from error
    try:
        deadline = time.monotonic() + patience_s
        while nodes := _nodes_without(probe, groups):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"trainer.default_local_dir={folder} is not shared: a file that the driver wrote there "
                    f"on {socket.gethostname()} is not seen on {', '.join(nodes)}. All processes write "
                    "their part of a checkpoint into one folder: set it to one on a file system that every "
                    "node mounts at the same path (NFS, Lustre, ...); trainer.default_hdfs_dir takes copies"
                )
            time.sleep(_LOOK_AGAIN_S)
    finally:
        probe.unlink(missing_ok=True)


def _nodes_without(path: Path, groups: Mapping[str, Any]) -> list[str]:
    return sorted({node for group in groups.values() for node in group.nodes_without(path)})

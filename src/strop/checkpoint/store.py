"""Checkpoints that are whole or absent.

A checkpoint is written into ``global_step_N.tmp``, listed in its manifest, made durable, renamed to
``global_step_N``, and only then named in ``latest_checkpointed_iteration.txt``. Whenever the process dies,
the file names a checkpoint that loads. Ranks write into the temporary folder; the driver alone seals and
renames it, when all of them are done.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from strop.checkpoint.folder import (
    building_folder,
    is_renamed,
    latest_step,
    make_latest,
    publish,
    remove_unfinished,
    saved_steps,
    seal,
    verify,
)
from strop.checkpoint.remote import RemoteCheckpoints, Uploader
from strop.checkpoint.resume import find_checkpoint
from strop.config.schema import RootConfig
from strop.errors import CheckpointError, ConfigError, StropError, WorkerError
from strop.files import crash_point

# The global random generators of the driver: strop draws from none of them, a user's code may.


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as types that ``torch.load`` trusts."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": (version, list(words), gauss),
        "numpy": (str(name), keys.tolist(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what ``random_state`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


logger = logging.getLogger(__name__)


_TRAINER = "trainer.pt"

TRAINED = ("actor", "critic")

"""The groups of reinforcement learning that have a state: reference and reward model never change."""

AFTER_AN_INTERRUPT_S = 300.0

"""For how long a save, and then uploads, hold up the end of a run that was told to end: neither may hang."""

_LOOK_EVERY_S = 0.1


class Checkpoints:
    """The checkpoints of one run folder, and their copies in a remote one.

    A context manager around the run: leaving it finishes the save that is in flight (also after an
    exception: what was written so far is a checkpoint or gone) and waits for the uploads. After Ctrl-C or
    SIGTERM it does so for ``AFTER_AN_INTERRUPT_S`` at most, and a second one drops what is not done.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_to_keep: int | None = None,
        background: bool = False,
        remote: str | None = None,
        trained: Sequence[str] = TRAINED,
    ) -> None:
        """``trained``: the groups whose state is saved, among those that ``save`` and ``load`` are given."""
        self.folder = folder.expanduser().absolute()  # workers have working directories of their own
        self.max_to_keep = max_to_keep
        self.background = background
        self.trained = trained
        self._in_flight: tuple[int, list[Any]] | None = None
        self._uploader: Uploader | None = None
        if remote is not None:
            checkpoints = RemoteCheckpoints(remote)
            if checkpoints.is_folder(self.folder):
                raise ConfigError(
                    f"trainer.default_hdfs_dir={remote} is trainer.default_local_dir itself; name another "
                    "folder for the copies, or null"
                )
            self._uploader = Uploader(checkpoints, max_to_keep=max_to_keep)

    @classmethod
    def of(cls, config: RootConfig, *, trained: Sequence[str] = TRAINED) -> Checkpoints:
        """The checkpoints of the run that ``config`` describes.

        ``trainer.default_hdfs_dir`` counts only where the user wrote it: its default is a local path.
        """
        settings = config.trainer
        written = config.written is None or "trainer.default_hdfs_dir" in config.written
        return cls(
            Path(settings.default_local_dir),
            max_to_keep=settings.max_ckpt_to_keep,
            background=settings.async_save,
            remote=settings.default_hdfs_dir if written else None,
            trained=trained,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._end_after_interrupt()
            return
        if self._in_flight is not None:
            logger.info("finishing the checkpoint of iteration %d", self._in_flight[0])
        try:
            failures = self._end(self.finish)
        except KeyboardInterrupt:
            self._end_after_interrupt()
            raise
        first = failures.pop(0) if failures and error is None else None
        for failure in failures:  # an error that ended the run is the one to raise
            logger.warning("%s", failure)
        if first is not None:
            raise first

    def _end(self, finish: Callable[[], None], *, uploads_at_most_s: float = math.inf) -> list[Exception]:
        """Finish the save in flight and then the uploads, one also when the other fails; the failures."""
        failures: list[Exception] = []
        for end in (finish, lambda: self._finish_uploads(uploads_at_most_s)):
            try:
                end()
            except Exception as failure:  # noqa: BLE001 - a dead worker raises its group's kind of error
                failures.append(failure)
        return failures

    def _end_after_interrupt(self) -> None:
        """The same for a while, where what is under way may hang; failures are warnings."""
        if self._in_flight is not None:
            logger.info(
                "finishing the checkpoint of iteration %d, for %.0f s at most (Ctrl-C drops it)",
                self._in_flight[0],
                AFTER_AN_INTERRUPT_S,
            )
        try:
            for failure in self._end(self._finish_in_time, uploads_at_most_s=AFTER_AN_INTERRUPT_S):
                logger.warning("%s", failure)
        finally:
            self._in_flight = None
            remove_unfinished(self.folder)
            if self._uploader is not None:
                self._uploader.give_up()

    def _finish_in_time(self) -> None:
        """``finish``; ``CheckpointError`` when the groups have not written after ``AFTER_AN_INTERRUPT_S``."""
        deadline = time.monotonic() + AFTER_AN_INTERRUPT_S
        while self._in_flight is not None:
            self.poll()
            if self._in_flight is None:
                return
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint of iteration {self._in_flight[0]} was not written within "
                    f"{AFTER_AN_INTERRUPT_S:.0f} s and is dropped; the latest whole one is "
                    f"{latest_step(self.folder) or 'none'}"
                )
            time.sleep(_LOOK_EVERY_S)

    def _finish_uploads(self, at_most_s: float) -> None:
        if self._uploader is None:
            return
        self._uploader.close(at_most_s=at_most_s)
        if (newest := latest_step(self.folder)) is not None:
            self._prune(newest=newest)

    def save(self, step: int, groups: Mapping[str, Any], trainer_state: dict[str, Any]) -> Path:
        """Write ``global_step_<step>``; with ``background`` it is there after ``finish``, or some ``poll``.

        A save that is still in flight is finished first. On failure (a full disk) the earlier checkpoints
        are as they were, and the error is a ``CheckpointError``.
        """
        self.finish()
        remove_unfinished(self.folder)
        building = building_folder(self.folder, step)
        started: list[Any] = []
        with self._removed_on_failure(step, started):
            building.mkdir(parents=True)
            for name in self.trained:
                if name not in groups:
                    continue
                crash_point(f"save {name}", step)
                if self.background:
                    started.append(groups[name])
                    groups[name].save_checkpoint(building / name, background=True)
                else:
                    groups[name].save_checkpoint(building / name)
            torch.save({**trainer_state, "random": random_state()}, building / _TRAINER)
        self._in_flight = step, started
        if not self.background:
            self.finish()
        return self.folder / f"global_step_{step}"

    def poll(self) -> None:
        """Finish the save in flight if every group has written its part; else return at once."""
        if self._in_flight is None:
            return
        step, groups = self._in_flight
        with self._removed_on_failure(step, groups):
            done = all(group.save_is_done() for group in groups)
        if done:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if any, and make it the latest checkpoint.

        After an interrupt it is still in flight, and this can be called again.
        """
        if self._in_flight is None:
            return
        step, groups = self._in_flight
        with self._removed_on_failure(step, groups):
            for group in groups:
                group.finish_save()
            if not is_renamed(self.folder, step):  # it may be when this was interrupted before
                crash_point("seal", step)
                seal(building_folder(self.folder, step))
            publish(self.folder, step)
        self._in_flight = None
        if self._uploader is not None:
            self._uploader.submit(step, self.folder / f"global_step_{step}")
        self._prune(newest=step)

    def find(self, resume_mode: str) -> Path | None:
        """The checkpoint to resume from, on the disk that all nodes share; see ``find_checkpoint``."""
        remote = None if self._uploader is None else self._uploader.remote
        return find_checkpoint(self.folder, resume_mode, remote)

    def load(self, checkpoint: Path, groups: Mapping[str, Any]) -> dict[str, Any]:
        """Put the state back into worker groups and global random generators; returns the trainer's."""
        verify(checkpoint)
        checkpoint = checkpoint.absolute()
        for name in self.trained:
            if name in groups:
                if not (checkpoint / name).is_dir():
                    raise CheckpointError(
                        f"{checkpoint} has no {name}: it was made by a run without one; "
                        f"it has {[path.name for path in checkpoint.iterdir()]}"
                    )
                groups[name].load_checkpoint(checkpoint / name)
        try:
            state = torch.load(checkpoint / _TRAINER, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{checkpoint / _TRAINER} cannot be read: {error}") from error
        restore_random_state(state.pop("random"))
        if self._uploader is not None and checkpoint.parent == self.folder:
            # The run may have been killed before it was uploaded.
            self._uploader.submit(state["global_step"], checkpoint, only_if_missing=True)
        return state

    def go_on_from(self, step: int) -> None:
        """The run in this folder goes on after ``step``, also if it is killed before its next save.

        Its metrics end there, and later checkpoints are of a future that it has left.
        """
        if latest_step(self.folder) != step:
            make_latest(self.folder, step)

    def archive_remote(self) -> None:
        """Move another run's checkpoints in the remote folder aside: a new run would mix with them."""
        if self._uploader is None:
            return
        remote = self._uploader.remote
        try:
            archive = remote.archive()
        except Exception as error:  # each back-end raises its own kinds: botocore's, pyarrow's, OSError
            raise CheckpointError(
                f"the earlier checkpoints in {remote.url} cannot be moved aside ({type(error).__name__}: "
                f"{error}); set trainer.default_hdfs_dir to a folder of this run's own"
            ) from error
        if archive is not None:
            logger.info("earlier checkpoints in %s are now in %s", remote.url, archive)

    @contextlib.contextmanager
    def _removed_on_failure(self, step: int, groups: list[Any]) -> Generator[None]:
        """When the body fails, nothing of the save is left and none of ``groups`` still writes.

        An interrupt leaves that to the end of the run, which need not wait for a group that hangs.
        """
        try:
            yield
        except Exception as error:
            self._in_flight = None
            for group in groups:
                # The first failure is the one to tell; a dead group raises its own kind.
                with contextlib.suppress(Exception):
                    group.finish_save()
            shutil.rmtree(building_folder(self.folder, step), ignore_errors=True)
            if not _is_about_files(error):
                raise
            raise CheckpointError(
                f"the checkpoint of iteration {step} could not be written to {self.folder} ({error}); "
                f"the latest whole one is {latest_step(self.folder) or 'none'}"
            ) from error

    def _prune(self, newest: int) -> None:
        """Keep the last ``max_to_keep`` up to ``newest``, which is whole, and the one that is being uploaded.

        Later ones are of a run that was taken up again from an earlier checkpoint.
        """
        if self.max_to_keep is None:
            return
        steps = saved_steps(self.folder)
        kept = [step for step in steps if step <= newest][-self.max_to_keep :]
        for step in steps:
            path = self.folder / f"global_step_{step}"
            if step not in kept and (self._uploader is None or self._uploader.release(path)):
                shutil.rmtree(path, ignore_errors=True)


def _is_about_files(error: BaseException) -> bool:
    """Whether a save failed because of what it wrote to; torch reports a full disk as RuntimeError."""
    if isinstance(error, WorkerError):
        return error.is_final  # a rank that raised; when one was lost, a restart may help
    told_as_it_is = isinstance(error, StropError) and not isinstance(error, CheckpointError)
    return isinstance(error, OSError | RuntimeError) and not told_as_it_is

"""Checkpoints of a run: save, load, prune, upload; each is complete or absent.

::

    global_step_N/actor, critic   torch.distributed.checkpoint: weights, moments (``engines/torch/state.py``)
        huggingface/              configuration, tokenizer, and weights (not after a background save)
    global_step_N/trainer.pt      the loop (``Run.state_dict``, extended by ``ReinforcementRun``): iteration,
                                  position in the data, KL coefficient, best score, seconds; and the driver's
                                  global random generators, for users' code
    global_step_N/in_flight/      samples that are generated ahead of training (``trainer/pipeline.py``)
    global_step_N/manifest.json   size and digest of every file (``strop/manifest.py``)

Ranks write into ``global_step_N.tmp``; then the driver writes the manifest, makes all durable, renames the
folder, and only then names it in ``latest_checkpointed_iteration.txt``: whenever the process dies, that file
names a checkpoint that loads.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
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
    BY_TIME,
    LATEST,
    TRAINER,
    best_step,
    building_folder,
    is_renamed,
    latest_step,
    make_latest,
    name_of,
    publish,
    remove_unfinished,
    saved_steps,
    seal,
    verify,
)
from strop.checkpoint.remote import RemoteCheckpoints, Uploader, find_checkpoint
from strop.config.paths import expand
from strop.config.schema import RootConfig
from strop.config.schema.trainer import KEPT_BY_TIME
from strop.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RunFolderError,
    StropError,
    WorkerError,
    is_interrupt,
    raised_as,
    write_failure,
)
from strop.files import crash_point
from strop.manifest import require_unchanged

logger = logging.getLogger(__name__)

TRAINED = ("actor", "critic")
"""The groups of reinforcement learning with a state; reference and reward model never change."""
AFTER_AN_INTERRUPT_S = 300.0
"""Limit, after an interrupt, for the save in flight and then for uploads, as either may hang."""
IN_FLIGHT = "in_flight"
"""Folder in a checkpoint."""
_POLL_S = 0.1


def random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, as types that ``torch.load`` trusts.

    strop draws from none of them; a user's code in the driver may.
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": (version, list(words), gauss),
        "numpy": (str(name), keys.tolist(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to a state from ``random_state``."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])  # here may be fewer GPUs


class AwaitedError(Exception):
    """A save has not failed, but something that it waits for, by the error that is the cause."""


@contextlib.contextmanager
def awaiting() -> Generator[None]:
    """Raise an error of the body, which a part of a save waits for, as ``AwaitedError``."""
    try:
        yield
    except Exception as error:
        raise AwaitedError from error


class Checkpoints:
    """The checkpoints of one run folder, and their copies in a remote one.

    A context manager around the run: its exit finishes the save in flight, also after an exception, and waits
    for uploads. After Ctrl-C or SIGTERM it waits at most ``AFTER_AN_INTERRUPT_S`` for each, and a second
    interrupt cancels both.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_to_keep: int | None = None,
        save_minutes: float | None = None,
        background: bool = False,
        remote: str | None = None,
        copies_by_time: bool = False,
        trained: Sequence[str] = TRAINED,
    ) -> None:
        """Open the checkpoints in ``folder``; ``trained`` names the groups whose state is saved.

        Of the checkpoints that are saved ``by_time`` the last two are kept, and the one of the best
        validation; of the others the last ``max_to_keep``. ``copies_by_time``: they are uploaded, too, and
        the last two of them are kept there.
        """
        self.folder = Path(expand(folder)).absolute()  # workers have other working directories
        self.max_to_keep = max_to_keep
        self.save_minutes = save_minutes
        self.background = background
        self.trained = trained
        self._copies_by_time = copies_by_time
        self._in_flight: tuple[int, list[Any]] | None = None
        self._uploads_next = True
        self._saved_at = time.monotonic()
        self._uploader: Uploader | None = None
        if remote is not None:
            checkpoints = RemoteCheckpoints(remote)
            if checkpoints.is_folder(self.folder):
                raise ConfigError(
                    f"trainer.default_hdfs_dir={remote} is trainer.default_local_dir itself; set it to "
                    "another folder for the copies, or to null"
                )
            kept = KEPT_BY_TIME if copies_by_time else max_to_keep
            self._uploader = Uploader(checkpoints, max_to_keep=kept, by_time=copies_by_time)

    @classmethod
    def of(cls, config: RootConfig, *, trained: Sequence[str] = TRAINED, by_time: bool = True) -> Checkpoints:
        """Return the checkpoints of the run that ``config`` describes.

        ``by_time=False``: only those of ``trainer.save_freq``.
        """
        settings = config.trainer
        return cls(
            Path(settings.default_local_dir),
            max_to_keep=settings.max_ckpt_to_keep,
            save_minutes=settings.save_minutes if by_time else None,
            background=settings.async_save,
            remote=settings.default_hdfs_dir,
            copies_by_time=settings.save_freq < 0,  # there are no others to copy
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
        if isinstance(error, RunFolderError):  # the save in flight would write there, too
            self._in_flight = None
            if self._uploader is not None:
                self._uploader.cancel()
            return
        if self._in_flight is not None:
            logger.info("finishing the checkpoint of iteration %d", self._in_flight[0])
        try:
            failures = self._end(self.finish)
        except KeyboardInterrupt:
            self._end_after_interrupt()
            raise
        first = failures.pop(0) if failures and error is None else None
        for failure in failures:  # the error that ended the run takes precedence
            if failure is not error:  # by which samples of the save in flight failed, too
                logger.warning("%s", failure)
        if first is not None:
            raise first

    def _end(self, finish: Callable[[], None], *, uploads_at_most_s: float | None = None) -> list[Exception]:
        """Finish the save in flight, then the uploads even if the save failed; return the failures."""
        failures: list[Exception] = []
        for end in (finish, lambda: self._finish_uploads(uploads_at_most_s)):
            try:
                end()
            except Exception as failure:  # noqa: BLE001 - a dead worker raises the error type of its group
                failures.append(failure)
        return failures

    def _end_after_interrupt(self) -> None:
        """Finish as in a normal exit, but with time limits; log failures as warnings."""
        if self._in_flight is not None:
            logger.info(
                "finishing the checkpoint of iteration %d, for at most %.0f s (Ctrl-C cancels it)",
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
                self._uploader.cancel()

    def _finish_in_time(self) -> None:
        """Finish the save; ``CheckpointError`` when groups still write after ``AFTER_AN_INTERRUPT_S``."""
        deadline = time.monotonic() + AFTER_AN_INTERRUPT_S
        while self._in_flight is not None:
            self.poll()
            if self._in_flight is None:
                return
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint of iteration {self._in_flight[0]} was not written within "
                    f"{AFTER_AN_INTERRUPT_S:.0f} s and is dropped; {self._kept()}"
                )
            time.sleep(_POLL_S)

    def _finish_uploads(self, at_most_s: float | None) -> None:
        if self._uploader is None:
            return
        self._uploader.close(at_most_s=at_most_s)
        if (newest := latest_step(self.folder)) is not None:
            self._prune(newest=newest)

    def save(
        self,
        step: int,
        groups: Mapping[str, Any],
        trainer_state: dict[str, Any],
        *,
        later: Callable[[Path], Any | None] | None = None,
        by_time: bool = False,
        stopping: bool = False,
    ) -> Path:
        """Write ``global_step_<step>``; with ``background`` it appears after ``finish`` or a later ``poll``.

        One that is saved ``by_time`` is uploaded only if the run is ``stopping``, or with
        ``copies_by_time``: copies are for the loss of this machine.

        ``later`` gets the folder, and returns a part of the checkpoint that is complete only later, with the
        methods ``save_is_done()`` and ``finish_save()``, or None. With such a part the checkpoint appears as
        with ``background``.
        A save in flight is finished first. A failure (a full disk) raises ``CheckpointError`` and leaves
        earlier checkpoints intact.
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
                groups[name].save_checkpoint(building / name, background=self.background)
            torch.save({"random": random_state(), **trainer_state}, building / TRAINER)
            if by_time:
                (building / BY_TIME).touch()
            if later is not None and (part := later(building)) is not None:
                started.append(part)
        self._in_flight = step, started
        self._uploads_next = stopping or self._copies_by_time or not by_time
        self._saved_at = time.monotonic()
        if started:
            self.poll()
        else:
            self.finish()
        return self.folder_of(step)

    def folder_of(self, step: int) -> Path:
        """Return the folder of the checkpoint of iteration ``step``."""
        return self.folder / name_of(step)

    def lacks(self, step: int) -> bool:
        """Return True if ``step`` is not 0 and not the latest checkpoint, nor the one being written.

        A folder of its name may be of the continuation that a resume from an earlier checkpoint has left.
        """
        newest = latest_step(self.folder) if self._in_flight is None else self._in_flight[0]
        return step not in (0, newest)

    def copy(self, step: int) -> None:
        """Upload the checkpoint of ``step``, or the one being written, unless it is in the remote folder."""
        if self._in_flight is not None:
            self._uploads_next = True
        elif self._uploader is not None and self.folder_of(step).is_dir():
            self._uploader.submit(step, self.folder_of(step), only_if_missing=True)

    def is_time(self, *, last: bool) -> bool:
        """Return True ``save_minutes`` after the last save (of the start, before the first one).

        Also after the ``last`` iteration of a run that has saved before, so that the newest is of its end.
        """
        if self.save_minutes is None:
            return False
        if last:
            return latest_step(self.folder) is not None
        return time.monotonic() - self._saved_at >= 60 * self.save_minutes

    def poll(self) -> None:
        """Finish the save in flight if every group has written its part; never wait."""
        if self._in_flight is None:
            return
        step, groups = self._in_flight
        with self._removed_on_failure(step, groups):
            done = all(group.save_is_done() for group in groups)
        if done:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if any, and make it the latest checkpoint.

        An interrupt leaves the save in flight; call this again to finish it.
        """
        if self._in_flight is None:
            return
        step, groups = self._in_flight
        with self._removed_on_failure(step, groups):
            for group in groups:
                group.finish_save()
            if not is_renamed(self.folder, step):  # already renamed if an earlier call was interrupted
                crash_point("seal", step)
                seal(building_folder(self.folder, step))
            publish(self.folder, step)
        self._in_flight = None
        if self._uploader is not None and self._uploads_next:
            self._uploader.submit(step, self.folder_of(step))
        self._prune(newest=step)

    def find(self, resume_mode: str, require_same: Callable[[Path], None] | None = None) -> Path | None:
        """Return the checkpoint to resume from, on the disk that all nodes share; see ``find_checkpoint``."""
        remote = None if self._uploader is None else self._uploader.remote
        return find_checkpoint(self.folder, resume_mode, remote, require_same)

    def load(self, checkpoint: Path, groups: Mapping[str, Any]) -> dict[str, Any]:
        """Restore worker groups and global random generators; return the trainer's state."""
        files = verify(checkpoint)
        checkpoint = checkpoint.absolute()
        own = {name: entry for name, entry in files.items() if name == TRAINER or name.startswith(IN_FLIGHT)}
        require_unchanged(str(checkpoint), checkpoint, own)  # workers compare what they read
        with reading_state_of(checkpoint):
            state = torch.load(checkpoint / TRAINER, weights_only=True)
            generators, step = state.pop("random"), int(state["global_step"])
        for name in self.trained:
            if name in groups:
                if not (checkpoint / name).is_dir():
                    raise CheckpointError(
                        f"{checkpoint} has no {name}, so it was saved by a run without one; "
                        f"found {[path.name for path in checkpoint.iterdir()]}"
                    )
                groups[name].load_checkpoint(checkpoint / name)
        with reading_state_of(checkpoint):
            restore_random_state(generators)
        if self._uploader is not None and checkpoint.parent == self.folder:
            # The run may have been killed before these were uploaded.
            for saved in saved_steps(self.folder):
                path = self.folder_of(saved)
                if saved <= step and (self._copies_by_time or not (path / BY_TIME).is_file()):
                    self._uploader.submit(saved, path, only_if_missing=True, is_latest=saved == step)
        return state

    def go_on_from(self, step: int, resume_mode: str) -> None:
        """Make ``step`` the latest checkpoint, so that a kill before the next save resumes from it too.

        Later checkpoints belong to the abandoned continuation: the run's metrics now end at ``step``.
        """
        if self._uploader is not None and resume_mode != "auto":
            with self._moving_aside(self._uploader.remote):
                self._uploader.remote.go_back(step)
        if latest_step(self.folder) != step or not (self.folder / LATEST).exists():
            make_latest(self.folder, step)

    @contextlib.contextmanager
    def _moving_aside(self, remote: RemoteCheckpoints) -> Generator[None]:
        with raised_as(
            CheckpointError,
            f"the earlier checkpoints in {remote.url} cannot be moved aside",
            remedy="set trainer.default_hdfs_dir to a folder that only this run uses",
        ):
            yield

    def archive_remote(self, step: int, resume_mode: str) -> None:
        """Move another run's checkpoints in the remote folder aside, so that the two do not mix.

        Not if the run goes on from iteration ``step`` of them, by its URL: the same command looks for it
        there again.
        """
        if self._uploader is None:
            return
        remote, archive = self._uploader.remote, None
        with self._moving_aside(remote):
            if resume_mode.rstrip("/").rpartition("/")[0] == remote.url:
                remote.go_back(step)
            else:
                archive = remote.archive()
        if archive is not None:
            logger.info("earlier checkpoints in %s are now in %s", remote.url, archive)

    @contextlib.contextmanager
    def _removed_on_failure(self, step: int, groups: list[Any]) -> Generator[None]:
        """Wait until no group writes and remove the unfinished save, if the body fails.

        An interrupt skips this: the exit of the run removes the folder without waiting for a group that
        hangs.
        """
        try:
            yield
        except Exception as error:
            self._in_flight = None
            for group in groups:
                # Only the first failure is reported; a dead group raises its own error type.
                with contextlib.suppress(Exception):
                    group.finish_save()
            why = write_failure(error, self.folder)  # before room is made
            shutil.rmtree(building_folder(self.folder, step), ignore_errors=True)
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            if isinstance(error, AwaitedError) and error.__cause__ is not None:
                raise error.__cause__ from None
            if not _is_final_failure(error):
                raise
            raise CheckpointError(
                f"the checkpoint of iteration {step} could not be written to {self.folder} ({why}); "
                f"{self._kept()}"
            ) from error

    def _kept(self) -> str:
        step = latest_step(self.folder)
        return (
            f"no complete checkpoint in {self.folder}"
            if step is None
            else f"the latest complete one is {step}"
        )

    def _prune(self, newest: int) -> None:
        """Remove what is not to be kept up to ``newest``, which is whole, unless it is being uploaded.

        Later ones belong to a run that was resumed from an earlier checkpoint.
        """
        steps = saved_steps(self.folder)
        by_time = [step for step in steps if (self.folder_of(step) / BY_TIME).is_file()]
        by_number = [step for step in steps if step not in by_time]
        kept = set(by_number) if self.max_to_keep is None else _last(by_number, self.max_to_keep, newest)
        kept |= _last(by_time, KEPT_BY_TIME, newest)
        if not kept.issuperset(by_time):
            try:
                best = best_step(self.folder, by_time)
            except DataError:  # metrics that cannot be read tell no best: keep all
                return
            kept |= set() if best is None else {best}
        for step in steps:
            path = self.folder_of(step)
            if step not in kept and (self._uploader is None or self._uploader.release(path)):
                # A kill amid that leaves what ``remove_unfinished`` deletes, and no damaged checkpoint.
                going = building_folder(self.folder, step)
                with contextlib.suppress(OSError):
                    if not path.is_symlink():  # moved to another disk: it is left there
                        path.rename(going)
                crash_point("prune", step)
                shutil.rmtree(going, ignore_errors=True)


def _last(steps: Sequence[int], count: int, newest: int) -> set[int]:
    return set([step for step in steps if step <= newest][-count:])


@contextlib.contextmanager
def reading_state_of(checkpoint: Path, name: str = TRAINER) -> Generator[None]:
    """Raise ``CheckpointError`` if the body cannot read or use what a file or folder of it holds."""
    try:
        yield
    except StropError:
        raise
    except pickle.UnpicklingError as error:  # torch's message recommends to run what the file names
        raise CheckpointError(
            f"{checkpoint / name} cannot be read: it is damaged, or holds more than tensors and plain "
            "values, as no checkpoint of strop does"
        ) from error
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{checkpoint / name} cannot be read: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint / name} does not hold the state of this kind of run ({type(error).__name__}: "
            f"{error}); give a checkpoint that the same command has saved"
        ) from error


def _is_final_failure(error: BaseException) -> bool:
    """Return True if a restart would fail the same way; torch raises RuntimeError for a full disk."""
    if isinstance(error, WorkerError):
        return error.is_final  # a rank raised; after the loss of a rank a restart may help
    has_own_message = isinstance(error, StropError) and not isinstance(error, CheckpointError)
    return isinstance(error, OSError | RuntimeError) and not has_own_message

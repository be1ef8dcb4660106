"""Generate later batches while an earlier one is learned from (``trainer.async_steps``).

The schedule is a function of batch numbers, never of the clock. With S = ``async_steps``, A = S // 2 and
k = S - A, the driver starts three calls of the rollout before the update of iteration b: take the prompts of
batch b + k + A, load the weights of iteration b - 1, complete batch b + k. A process executes its calls in
order, so batch b is completed with the weights of iteration max(0, b - 1 - k), and samples of A further
batches are generated with it. No token is older than S updates when it is learned from (S + 1 for samples
that the filter of groups carries over). Every batch of prompts is generated and learned from once, in the
order of the loader; none is begun after the last.

A checkpoint of iteration b has what the rollout holds when it takes the weights of b: the complete batches
b + 1 ... b + k with their scores, and the tokens of unfinished samples of the A batches that follow. Nothing
older than these weights is needed to go on, so a resumed run equals an undisturbed one. Those batches are
complete only later: the checkpoint is whole then, and until then the one before is the latest.
"""

from __future__ import annotations

import contextlib
import logging
from collections import ChainMap, deque
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from strop.checkpoint.store import IN_FLIGHT, AwaitedError, awaiting
from strop.columns import REWARD_TEXT
from strop.config.roles import Schedule
from strop.controller.group import Future
from strop.data.loader import PromptLoader
from strop.errors import WorkerError, is_interrupt
from strop.files import crash_point
from strop.protocol import DataProto
from strop.rollout.in_flight import packed_files, unpacked_files
from strop.tracking.timeline import Interval
from strop.trainer.group_filter import GroupFilter
from strop.trainer.metrics import PhaseTimer
from strop.trainer.ppo import PPO, Generation
from strop.trainer.scores import Samples

logger = logging.getLogger(__name__)

KEPT = "kept.pt"
"""File of samples that passed the filter of groups and that no iteration has used."""
ROLLOUT_PROCESSES = "rollout processes"
"""What has changed where no key says so: a node that was lost."""
SCHEDULE = "schedule.pt"
"""File with the number of the last batch whose prompts the rollout had."""


def keeps_groups(changed: Collection[str]) -> bool:
    """Return True if groups carried over are used after a resume with these keys changed.

    They depend on all that samples in flight depend on but the schedule.
    """
    return {*changed} <= {"trainer.async_steps", ROLLOUT_PROCESSES}


def lost_of(folder: Path, changed: Collection[str]) -> list[str]:
    """Return in words what a resume with these keys ``changed`` does not use of samples in ``folder``."""
    names = {path.name for path in folder.iterdir()} if changed and folder.is_dir() else set()
    lost = []
    if names - {KEPT}:
        lost += ["samples in flight are not used, and their prompts are generated again, with newer weights"]
    if KEPT in names and not keeps_groups(changed):
        lost += ["groups carried over are dropped, and their prompts come again in the next epoch"]
    return lost


class BatchAhead:
    """A batch that is generated ahead, or was read from a checkpoint."""

    def __init__(self, number: int, source: Generation | Samples) -> None:
        self.number, self._source = number, source

    def is_done(self) -> bool:
        """Return True if it is generated."""
        return isinstance(self._source, Samples) or self._source.is_done()

    def samples(self, ppo: PPO, *, timer: PhaseTimer | None = None) -> Samples:
        """Wait until it is generated; ``timer`` gets the time, None: the batch's own."""
        if isinstance(self._source, Generation):
            self._source = ppo.finish(self._source, timer=timer)
        return self._source

    def is_scored(self, ppo: PPO) -> bool:
        """Return True if it is generated and scored; never wait."""
        # another timer: the learner does not wait here
        return self.is_done() and self.samples(ppo, timer=PhaseTimer()).is_scored()

    def cancel(self) -> None:
        self._source.cancel()


class LatePart:
    """The part of a checkpoint with the batches in flight; it is written when they are complete."""

    def __init__(self, ppo: PPO, folder: Path, batches: list[BatchAhead], *, with_tail: bool) -> None:
        self._ppo, self._folder, self._batches = ppo, folder, batches
        self._with_tail = with_tail
        self._tail: Future | None = None

    def cut(self) -> None:
        """Have the rollout write its unfinished samples, before it takes the weights of the checkpoint."""
        if self._with_tail and self._tail is None:
            self._tail = self._ppo.groups.rollout.save_in_flight.start(self._folder)

    def save_is_done(self) -> bool:
        """Return True if ``finish_save`` will not wait."""
        with self._left_out_if_they_fail():
            if not all(batch.is_scored(self._ppo) for batch in self._batches):
                return False
        self.cut()
        return self._tail is None or self._tail.is_done()

    def finish_save(self) -> None:
        """Wait for the batches, and write them."""
        self.cut()
        for number, scored in self._scored():
            crash_point("in_flight", number)
            _save(scored, self._folder / f"batch_{number}.pt")
        if self._tail is not None:
            self._tail.get()
            self._tail, self._with_tail = None, False  # idempotent: an interrupted save calls this again

    def _scored(self) -> list[tuple[int, DataProto]]:
        """Wait for the batches; return their numbers and samples, of none if one fails."""
        timer = PhaseTimer()  # not the learner's wait
        with self._left_out_if_they_fail():
            return [(batch.number, batch.samples(self._ppo, timer=timer).scored()) for batch in self._batches]
        return []

    @contextlib.contextmanager
    def _left_out_if_they_fail(self) -> Generator[None]:
        """Leave all samples in flight out if an error of a batch, as of its reward, ends the body.

        The models are whole, and the same error ends the run. A resume generates the samples again.
        """
        try:
            with awaiting():
                yield
        except AwaitedError as error:
            if isinstance(error.__cause__, WorkerError) or is_interrupt(error):
                raise  # a restart resumes from the checkpoint before, with the same samples
            logger.warning("warning: a checkpoint is saved without its samples in flight, as one fails")
            if self._tail is not None:
                self._tail.get()
            for path in self._folder.glob("*"):
                if path.name != KEPT:  # groups of earlier batches
                    path.unlink()
            with contextlib.suppress(OSError):  # it is not empty
                self._folder.rmdir()
            self._batches, self._tail, self._with_tail = [], None, False


class _Mark(NamedTuple):
    """Batches and samples in flight after an iteration."""

    batches: list[BatchAhead]
    admitted: int
    """Number of the last batch whose prompts the rollout has."""
    kept: list[DataProto]


class RolloutClock:
    """The rollout's own account of its time, by batch (``meta_info["generation"]``)."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        """Since the last ``take``."""
        self._before: float | None = None  # the end of the last batch
        self._busy = self._whole = 0.0

    def add(self, samples: Samples, batch: int) -> None:
        """Add a batch; one from a checkpoint was generated in another run."""
        for name, key in (("gen", "generation"), ("gen_greedy", "generation_greedy")):
            spent = samples.batch.meta_info.get(key)
            if spent is None:
                continue
            begun, ended, loading, version = (
                spent[part] for part in ("begun", "ended", "loading", "version")
            )
            samples.timer.record(name, ended - begun)
            samples.timer.record("take_weights", loading)
            self.intervals += [
                Interval("rollout", "take_weights", begun - loading, begun, batch, version),
                Interval("rollout", name, begun, ended, batch, version),
            ]
            if self._before is not None:
                self._busy += min(loading + ended - begun, ended - self._before)
                self._whole += ended - self._before
            self._before = ended

    def take(self) -> dict[str, float]:
        """Return the share of its time in which the rollout waited, from the end of a batch to the next."""
        idle = {"async/rollout_idle": 1 - self._busy / self._whole} if self._whole else {}
        self._busy = self._whole = 0.0
        self.intervals = []
        return idle


class Pipeline:
    """The batches between rollout and learner.

    Args:
        loader: of the prompts; its position is that of the batches that were learned from.
        total_iterations: of the run; nothing is begun that these do not need.
        kept: groups that passed the filter and that no iteration has used.
    """

    def __init__(
        self, ppo: PPO, loader: PromptLoader, *, total_iterations: int, kept: Sequence[DataProto] = ()
    ) -> None:
        self.ppo, self.loader, self.total = ppo, loader, total_iterations
        config = ppo.config
        self.ahead, self.beside = Schedule.of(config)
        self.n = config.actor_rollout_ref.rollout.n
        self._filter: GroupFilter | None = None
        if (settings := config.algorithm.filter_groups).enable:
            self._filter = GroupFilter(settings, size=config.data.train_batch_size, n=self.n)
            self._filter.kept = [*kept]
        self._batches: deque[BatchAhead] = deque()  # begun
        self._in_use: BatchAhead | None = None  # the last one taken
        self._admitted: deque[DataProto] = deque()  # prompts of the batches after these
        self._loading: list[Future] = []
        self._coming: Iterator[DataProto] = loader.ahead()
        self._taken = self._last = loader.yielded  # number of the last batch taken, and begun
        self._cut: LatePart | None = None
        self._mark: _Mark
        self.rollout = RolloutClock()
        self.ready_batches = 0
        """Complete batches when the learner took the last one."""

    @property
    def is_ahead(self) -> bool:
        """True if batches were begun, or their prompts sent to the rollout, that no iteration has taken."""
        return bool(self._batches or self._admitted)

    @property
    def kept(self) -> list[DataProto]:
        """Groups that passed the filter and that no iteration has used."""
        return [] if self._filter is None else [*self._filter.kept]

    @property
    def is_used(self) -> bool:
        """True if a batch was taken, in this run or before its checkpoint."""
        return self._taken > 0

    def take(self, iteration: int) -> Samples:
        """Begin what the schedule has before the update of ``iteration``; wait for its samples.

        With ``algorithm.filter_groups`` an iteration takes as many batches as it needs.
        """
        if self._cut is not None:
            # the rollout runs calls in order: it writes its samples, then takes newer weights
            self._cut.cut()
            self._cut = None
        if self._filter is None:
            return self._next(iteration)
        self._filter.add(self._next(iteration))
        while not self._filter.is_full:
            next(iter(self.loader.batches))  # the loop has moved the loader by one batch
            self._filter.add(self._next(iteration))
        return self._filter.take()

    def _next(self, iteration: int) -> Samples:
        left = self.total - iteration
        while self._last < self._taken + 1 + min(self.ahead, left):
            self._admit(up_to=self._taken + 1 + min(self.ahead + self.beside, left))
            self._last += 1
            generation = self.ppo.start(self._admitted.popleft(), self._last)
            # an error of admit_prompts is raised where this batch is awaited
            generation.loading.extend(self._loading)
            self._loading = []
            self._batches.append(BatchAhead(self._last, generation))
        self.ready_batches = sum(batch.is_done() for batch in self._batches)
        samples = self._batches[0].samples(self.ppo)
        self._in_use = self._batches.popleft()
        self._taken += 1
        if self.ahead:
            self.rollout.add(samples, self._taken)
        return samples

    def _admit(self, *, up_to: int) -> None:
        """Send the prompts of batches up to this number to the rollout."""
        while self._last + len(self._admitted) < up_to:
            self._admitted.append(next(self._coming))
            if self.beside:
                number = self._last + len(self._admitted)
                self._loading.append(self.ppo.admit(self._admitted[-1], number))

    def mark(self) -> None:
        """Note what a checkpoint of the present state has; call it after each iteration."""
        self._mark = _Mark(list(self._batches), self._last + len(self._admitted), self.kept)

    def leave_out(self) -> None:
        """Leave samples in flight out of what ``mark`` noted: the rollout has overwritten its part."""
        self._mark = self._mark._replace(batches=[], admitted=0)

    def save(self, checkpoint: Path) -> LatePart | None:
        """Return the part of a checkpoint that is complete later; None if nothing was in flight at ``mark``.

        It may be finished after the next ``take``. If the rollout takes part (``beside``), ``save`` itself
        comes before that.
        """
        batches, admitted, kept = self._mark
        is_ahead = bool(batches) or admitted > self._taken
        if not (is_ahead or kept):
            return None
        folder = checkpoint / IN_FLIGHT
        folder.mkdir()
        for rows in kept:  # at most one
            _save(rows, folder / KEPT)
        if not is_ahead:
            return None
        torch.save({"admitted": admitted}, folder / SCHEDULE)
        self._cut = LatePart(self.ppo, folder, batches, with_tail=self.beside > 0)
        return self._cut

    def restore(self, checkpoint: Path, *, changed: Collection[str] = ()) -> None:
        """Continue from a checkpoint; the loader has its position.

        Batches in flight are generated again if keys that they depend on have ``changed``; groups carried
        over are dropped then, see ``keeps_groups``.
        """
        self._taken = self._last = self.loader.yielded
        self._coming = self.loader.ahead()
        folder = checkpoint / IN_FLIGHT
        if self._filter is not None:
            is_kept = (folder / KEPT).exists() and keeps_groups(changed)
            self._filter.kept = [self._load(folder / KEPT)] if is_kept else []
        if changed:
            return
        while (path := folder / f"batch_{self._last + 1}.pt").exists():
            self._last += 1
            next(self._coming)
            self._batches.append(BatchAhead(self._last, Samples(self._load(path))))
        if self.beside and (folder / SCHEDULE).exists():
            # Exactly what the rollout held, whatever the number of iterations was.
            self._admit(up_to=torch.load(folder / SCHEDULE, weights_only=True)["admitted"])
            for call in (*self._loading, self.ppo.groups.rollout.load_in_flight.start(folder)):
                call.get()
            self._loading = []

    def _load(self, path: Path) -> DataProto:
        """Return saved samples; columns that were not saved are those of their prompts."""
        saved = torch.load(path, weights_only=True)
        places = [(int(batch), int(row)) for batch, row in (uid.split("-") for uid in saved["uids"])]
        numbers = {number for number, _ in places}
        prompts = {number: self.ppo.named(self.loader.batch(number), number) for number in numbers}
        rows = [prompts[number][[row]] for number, row in places[:: self.n]]
        columns = DataProto.concat(rows).repeat(self.n).non_tensor_batch
        columns |= {name: np.array(values, object) for name, values in saved.get("texts", {}).items()}
        if "files" in saved:
            columns["image_files"] = np.full(len(saved["uids"]), unpacked_files(saved["files"]), object)
        return DataProto(saved["tensors"], columns, saved["meta_info"])

    def wait(self) -> None:
        """Wait for the batches that are being generated, one by one, so that each has its time limit."""
        for batch in self._batches:
            batch.samples(self.ppo, timer=PhaseTimer())

    def cancel(self) -> None:
        """Cancel scoring of all batches, also of the last one taken; their samples will not be read.

        Call it when no checkpoint waits for them.
        """
        for batch in (self._in_use, *self._batches):
            if batch is not None:
                batch.cancel()


def _save(scored: DataProto, path: Path) -> None:
    # a clone: torch.save would write the whole storage of a view
    tensors = {name: column.clone() for name, column in scored.batch.items()}
    uids = scored.non_tensor_batch["uid"].tolist()
    meta_info = {name: value for name, value in scored.meta_info.items() if not name.startswith("generation")}
    texts = {
        name: column.tolist()
        for name, column in scored.non_tensor_batch.items()
        if (name == "conversation" and "n_turns" in scored.batch) or name.startswith(REWARD_TEXT)
    }
    found = {"tensors": tensors, "uids": uids, "meta_info": meta_info, "texts": texts}
    if "images_at" in scored.batch:
        found["files"] = packed_files(dict(ChainMap(*scored.non_tensor_batch["image_files"])))
    torch.save(found, path)

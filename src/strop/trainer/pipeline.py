"""Generate later batches while an earlier one is learned from (``trainer.async_steps``).

The schedule is a function of batch numbers, never of the clock. With S = ``async_steps``, A = S // 2 and
k = S - A, before the update of iteration b the rollout is sent the weights of iteration b - 1, then the
prompts of batch b + k + A, and then told to complete batch b + k. It does so in order, each when the calls
before are done: so batch b is completed with the weights of iteration max(0, b - 1 - k), and samples of A
further batches are generated beside it. No token is older than S updates when it is learned from. Every batch
of prompts is generated and learned from once, in the order of the loader; none is begun after the last.

A checkpoint of iteration b has what the rollout holds when it takes the weights of b: the complete batches
b + 1 ... b + k with their scores, and the tokens of unfinished samples of the A batches that follow. Nothing
older than these weights is needed to go on, so a resumed run equals an undisturbed one. Those batches are
complete only later: the checkpoint is whole then, and until then the one before is the latest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from strop.checkpoint.store import IN_FLIGHT
from strop.controller.group import Future
from strop.data.loader import PromptLoader
from strop.files import crash_point
from strop.protocol import DataProto
from strop.trainer.ppo import PPO, Generation
from strop.trainer.scores import Samples


class Batch:
    """A batch that is generated ahead, or was read from a checkpoint."""

    def __init__(self, number: int, source: Generation | Samples) -> None:
        self.number, self._source = number, source

    def samples(self, ppo: PPO) -> Samples:
        """Wait until it is generated."""
        if isinstance(self._source, Generation):
            self._source = ppo.finish(self._source, phase="wait_samples")
        return self._source

    def is_scored(self, ppo: PPO) -> bool:
        """Return True if it is generated and scored; never wait."""
        if isinstance(self._source, Generation) and not self._source.is_done():
            return False
        return self.samples(ppo).is_scored()

    def cancel(self) -> None:
        """Cancel scoring."""
        self._source.cancel()


class InFlight:
    """The part of a checkpoint with the batches in flight; it is written when they are complete."""

    def __init__(self, ppo: PPO, folder: Path, batches: list[Batch]) -> None:
        self._ppo, self.folder, self._batches = ppo, folder, batches
        self.tail: Future | None = None
        """Call by which the rollout writes its unfinished samples."""

    def save_is_done(self) -> bool:
        """Return True if ``finish_save`` will not wait."""
        return all(batch.is_scored(self._ppo) for batch in self._batches) and (
            self.tail is None or self.tail.is_done()
        )

    def finish_save(self) -> None:
        """Wait for the batches, and write them."""
        for batch in self._batches:
            scored = batch.samples(self._ppo).scored()
            tensors = {name: column.clone() for name, column in scored.batch.items()}
            crash_point("in_flight", batch.number)
            path = self.folder / f"batch_{batch.number}.pt"
            torch.save({"tensors": tensors, "meta_info": scored.meta_info}, path)
        if self.tail is not None:
            self.tail.get()


class Pipeline:
    """The batches between rollout and learner.

    Args:
        loader: of the prompts; its position stays that of the batches that were learned from.
        async_steps: S of the module's schedule.
    """

    def __init__(self, ppo: PPO, loader: PromptLoader, *, async_steps: int, total_iterations: int) -> None:
        self.ppo, self.loader, self.total = ppo, loader, total_iterations
        self.async_steps, self.tail = async_steps, async_steps // 2
        self.ahead = async_steps - self.tail
        self._batches: deque[Batch] = deque()  # begun
        self._prompts: deque[DataProto] = deque()  # admitted, of the batches after these
        self._loading: list[Future] = []
        self._coming: Iterator[DataProto] = loader.ahead()
        self._last = 0  # number of the last batch begun
        self._cut: InFlight | None = None

    def take(self, iteration: int) -> Samples:
        """Begin what the schedule has before the update of ``iteration``; wait for its samples."""
        if self._cut is not None and self.tail:  # before the rollout takes the weights of the checkpoint
            self._cut.tail = self.ppo.groups.rollout.save_in_flight.start(self._cut.folder)
        self._cut = None
        while self._last < min(iteration + self.ahead, self.total):
            self._admit(up_to=min(self._last + 1 + self.tail, self.total))
            self._last += 1
            generation = self.ppo.start(self._prompts.popleft(), self._last)
            generation.loading.extend(self._loading)
            self._loading = []
            self._batches.append(Batch(self._last, generation))
        samples = self._batches[0].samples(self.ppo)
        self._batches.popleft()
        return samples

    def _admit(self, *, up_to: int) -> None:
        """Send the prompts of batches up to this number to the rollout."""
        while self._last + len(self._prompts) < up_to:
            prompts = next(self._coming)
            self._prompts.append(prompts)
            if self.tail:
                self._loading.append(self.ppo.admit(prompts, self._last + len(self._prompts)))

    def save(self, checkpoint: Path) -> InFlight | None:
        """Return the part of a checkpoint that is complete later; None if nothing is in flight.

        Call it after an update; the part may be finished after the next ``take``.
        """
        if not self._batches and not self._prompts:
            return None
        folder = checkpoint / IN_FLIGHT
        folder.mkdir()
        self._cut = InFlight(self.ppo, folder, list(self._batches))
        return self._cut

    def restore(self, checkpoint: Path, iteration: int) -> None:
        """Continue from a checkpoint after ``iteration``, with the batches that were in flight."""
        self._last = iteration
        self._coming = self.loader.ahead()
        folder = checkpoint / IN_FLIGHT
        while (path := folder / f"batch_{self._last + 1}.pt").exists():
            saved = torch.load(path, weights_only=True)
            self._last += 1
            prompts = self.ppo.named(next(self._coming), self._last)
            columns = prompts.repeat(self.ppo.config.actor_rollout_ref.rollout.n).non_tensor_batch
            batch = DataProto(saved["tensors"], columns, saved["meta_info"])
            self._batches.append(Batch(self._last, Samples(batch)))
        if self.tail and folder.is_dir() and self._last < self.total:
            self._admit(up_to=min(self._last + self.tail, self.total))
            for call in (*self._loading, self.ppo.groups.rollout.load_in_flight.start(folder)):
                call.get()
            self._loading = []

    def cancel(self) -> None:
        """Cancel scoring of all batches; their samples will not be read."""
        for batch in self._batches:
            batch.cancel()

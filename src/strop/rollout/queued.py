"""``QueuedRollout``: the samples of a rollout, whatever generates them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from strop.protocol import DataProto
from strop.rollout.base import LOOK_S, Advanced, Finished, GenerationStopped, SamplingParams
from strop.rollout.in_flight import InFlight, Queue

if TYPE_CHECKING:
    from strop.rollout.episodes import Episodes


Item = TypeVar("Item")
Wave = Callable[[Sequence[InFlight], int], None]
"""Generate batches with weights of a version until the first one is complete."""


class QueuedRollout:
    """Methods of ``RolloutEngine`` for prompts and samples; ``_complete`` of a subclass generates."""

    def __init__(
        self,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        hidden_token_ids: Sequence[int] | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        """``hidden_token_ids``: counted in a column, see ``answer``. ``episodes``: samples have turns."""
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_ids: dict[str, Any] = {
            "pad_token_id": pad_token_id,
            "eos_token_ids": self.eos_token_ids,
            "hidden_token_ids": hidden_token_ids,
        }
        self._episodes = episodes
        self.advanced: Advanced = lambda done, tokens: None
        self._stopping = threading.Event()
        self._queue = Queue[InFlight]()

    def generate(
        self, prompts: DataProto, params: SamplingParams, finished: Finished | None = None
    ) -> DataProto:
        """See ``RolloutEngine.generate``; ``ModelError`` before an update is complete."""
        batch = self._begun(prompts, params)
        self._complete([batch], 0, finished)
        turns = self.columns_of(batch)
        return batch.result(**self.special_ids).union(turns)

    def admit(self, batch: int, prompts: DataProto, params: SamplingParams) -> None:
        """See ``RolloutEngine.admit``; raises like ``generate``."""
        self._queue.admit(batch, self._begun(prompts, params))

    def finish(self, batch: int, version: int, finished: Finished | None = None) -> DataProto:
        """See ``RolloutEngine.finish``; ``ModelError`` before an update is complete."""
        batches = self._queue.from_oldest(batch)
        self._complete(batches, version, finished)
        oldest = batches[0]
        turns, result = self.columns_of(oldest), oldest.result(**self.special_ids)
        versions = oldest.versions[oldest.own].to(result.batch["responses"].device)
        self._queue.forget(batch)
        return result.union(DataProto({"rollout_versions": versions})).union(turns)

    @property
    def stopping(self) -> threading.Event:
        """See ``RolloutEngine``."""
        return self._stopping

    @stopping.setter
    def stopping(self, flag: threading.Event) -> None:
        self._stopping = flag
        if self._episodes is not None:
            self._episodes.stopping = flag

    def require_going_on(self) -> None:
        """Raise ``GenerationStopped`` once ``stopping`` is set; engines call it before each step."""
        if self.stopping.is_set():
            raise GenerationStopped

    def _arrival(self, arrived: SimpleQueue[Item]) -> Item:
        """Wait for the next item; raises like ``require_going_on``."""
        while True:
            self.require_going_on()
            with contextlib.suppress(Empty):
                return arrived.get(timeout=LOOK_S)

    def close(self) -> None:
        """End what runs in other processes."""

    def in_flight(self) -> dict[str, Any]:
        return self._queue.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._queue.restore(state)

    @contextlib.contextmanager
    def waves(self, params: SamplingParams, *, keeps: bool = False) -> Generator[Wave]:
        """Yield a function that may be called several times; the weights do not change in the body.

        ``keeps``: keep keys and values from one call to the next with the same batches, or fewer of them.
        """
        yield lambda batches, version: self._complete(batches, version, None)

    def _begun(self, prompts: DataProto, params: SamplingParams) -> InFlight:
        """Return a batch without tokens."""
        if self._episodes is None:
            return InFlight(prompts, params)
        return self._episodes.begin(InFlight(prompts, params, **self._episodes.options))

    def _complete(self, batches: Sequence[InFlight], version: int, finished: Finished | None) -> None:
        """Generate until the first of ``batches`` is complete."""
        raise NotImplementedError

    def columns_of(self, batch: InFlight) -> DataProto:
        """Return what else is known of the samples of a batch that is complete."""
        return DataProto() if self._episodes is None else self._episodes.columns(batch)

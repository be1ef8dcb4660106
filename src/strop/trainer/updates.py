"""Optimizer steps of one role in one iteration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from strop.protocol import DataProto
from strop.trainer.metrics import UpdateRecord, merge_updates
from strop.trainer.seeds import permutation


def mini_batches(
    batch: DataProto,
    *,
    size: int,
    epochs: int,
    shuffle_seed: tuple[int, str] | None,
    iteration: int,
    total_iterations: int,
) -> Iterator[DataProto]:
    """Yield the mini-batches of an iteration, before rows are spread over ranks.

    Cutting here makes membership independent of the number of ranks. Each mini-batch of ``size`` rows
    carries the denominators of its losses over all ranks (tokens, sequences), so no all-reduce of counts is
    needed. ``shuffle_seed``: the run's seed and the role, to draw a new order every epoch. ``iteration``
    counts from 1.
    """
    for epoch in range(epochs):
        rows = batch
        if shuffle_seed is not None and size < len(batch):  # one mini-batch has no order
            rows = batch[permutation(*shuffle_seed, len(batch), iteration, epoch)]
        for mini_batch in rows.split(size):
            mini_batch.meta_info |= {
                "n_tokens": float(mini_batch.batch["response_mask"].sum()),
                "n_seqs": float(len(mini_batch)),
                "iteration": iteration - 1,  # schedules count from 0
                "total_iterations": total_iterations,
            }
            yield mini_batch


class PendingUpdates:
    """Optimizer steps in flight; those of a role in another pool may run at the same time."""

    def __init__(self, update: Any, mini_batches: Iterable[DataProto], *, loss_agg_mode: str) -> None:
        """Start ``update``, a worker group's method, for each mini-batch.

        A call is one optimizer step. It returns metrics, or columns with ``metrics`` in ``meta_info``.
        """
        self._loss_agg_mode = loss_agg_mode
        self._calls = [(update.start(mini_batch), mini_batch.meta_info) for mini_batch in mini_batches]

    def get(self) -> tuple[dict[str, float], DataProto]:
        """Wait for all steps; return their merged metrics, and the columns of an on-policy step."""
        records, columns = [], DataProto()
        for call, meta in self._calls:
            metrics = call.get()
            if isinstance(metrics, DataProto):
                columns, metrics = DataProto(metrics.batch), metrics.meta_info["metrics"]
            records.append(UpdateRecord(metrics, meta["n_tokens"], meta["n_seqs"]))
        return merge_updates(records, loss_agg_mode=self._loss_agg_mode), columns

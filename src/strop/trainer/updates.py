"""Optimizer steps of one role in one iteration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

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
    first_update: int = 0,
    record: bool = False,
) -> Iterator[DataProto]:
    """Yield the mini-batches of an iteration, before rows are spread over ranks.

    Cutting here makes membership independent of the number of ranks. Each mini-batch of ``size`` rows
    carries the denominators of its losses over all ranks (tokens, sequences), so no all-reduce of counts is
    needed. ``shuffle_seed``: the run's seed and the role, to draw a new order every epoch. ``iteration``
    counts from 1, ``first_update`` from 0. With ``record``, ``meta_info["rows"]`` of the last epoch's
    mini-batches has the numbers of their rows in ``batch``: the update returns per-token columns of them.
    """
    for epoch in range(epochs):
        rows, order = batch, list(range(len(batch)))
        if shuffle_seed is not None and size < len(batch):  # one mini-batch has no order
            shuffled = permutation(*shuffle_seed, len(batch), iteration, epoch)
            rows, order = batch[shuffled], shuffled.tolist()
        for number, mini_batch in enumerate(rows.split(size)):
            if record and epoch == epochs - 1:
                mini_batch.meta_info["rows"] = order[number * size :][:size]
            mini_batch.meta_info |= {
                # of the whole mini-batch, so that a split over ranks and micro-batches gives one gradient
                # a sample that its environment lost has no tokens, and counts nowhere; all may be lost
                "n_tokens": max(float(mini_batch.batch["response_mask"].sum()), 1.0),
                "n_seqs": max(float(mini_batch.batch["response_mask"].bool().any(1).sum()), 1.0),
                "iteration": iteration - 1,  # schedules count from 0
                "total_iterations": total_iterations,
                "first_update": first_update,
            }
            yield mini_batch


class PendingUpdates:
    """Optimizer steps in flight; those of a role in another pool may run at the same time."""

    def __init__(self, update: Any, mini_batches: Iterable[DataProto], *, loss_agg_mode: str) -> None:
        """Start ``update``, a worker group's method, for each mini-batch.

        A call is one optimizer step. It returns metrics, or columns with ``metrics`` in ``meta_info``.
        """
        self._loss_agg_mode = loss_agg_mode
        # all at once: a process runs its calls in order, and the next mini-batch waits there already
        self._calls = [(update.start(mini_batch), mini_batch.meta_info) for mini_batch in mini_batches]

    def get(self) -> tuple[dict[str, float], DataProto]:
        """Wait for all steps; return their merged metrics, and the columns that they return, in row order."""
        records, columns, rows = [], [], []
        for call, meta in self._calls:
            metrics = call.get()
            if isinstance(metrics, DataProto):
                columns.append(DataProto(metrics.batch))
                rows += meta.get("rows", ())
                metrics = metrics.meta_info["metrics"]
            records.append(UpdateRecord(metrics, meta["n_tokens"], meta["n_seqs"]))
        joined = DataProto.concat(columns)
        if rows != sorted(rows):
            joined = joined[np.argsort(rows)]
        return merge_updates(records, loss_agg_mode=self._loss_agg_mode), joined

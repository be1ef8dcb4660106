"""The optimizer steps of one role in one iteration: started together, finished together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from strop.protocol import DataProto
from strop.trainer.metrics import UpdateRecord, merge_updates


@dataclass(frozen=True)
class Updates:
    """What the optimizer steps of an iteration reported."""

    metrics: dict[str, float]
    columns: DataProto
    """Per-token figures from before the step, of an update that computes them on the way; else empty."""


class PendingUpdates:
    """Optimizer steps under way; another role's may run at the same time, in processes of its own."""

    def __init__(self, update: Any, mini_batches: Iterable[DataProto], *, loss_agg_mode: str) -> None:
        """``update``: a worker group's method; one call, one mini-batch, one optimizer step.

        It returns its metrics; or columns of all rows of the iteration, with ``metrics`` in ``meta_info``.
        """
        self._loss_agg_mode = loss_agg_mode
        self._calls = [(update.start(mini_batch), mini_batch.meta_info) for mini_batch in mini_batches]

    def get(self) -> Updates:
        """Wait for the last one; the metrics of all."""
        records, columns = [], DataProto()
        for call, meta in self._calls:
            metrics = call.get()
            if isinstance(metrics, DataProto):
                columns, metrics = DataProto(metrics.batch), metrics.meta_info["metrics"]
            records.append(UpdateRecord(metrics, meta["n_tokens"], meta["n_seqs"]))
        return Updates(merge_updates(records, loss_agg_mode=self._loss_agg_mode), columns)

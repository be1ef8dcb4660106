"""The optimizer steps of one role in one iteration: started together, finished together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from strop.protocol import DataProto
from strop.trainer.metrics import UpdateRecord, merge_updates


class PendingUpdates:
    """Optimizer steps under way; another role's may run at the same time, in processes of its own."""

    def __init__(self, update: Any, mini_batches: Iterable[DataProto], *, loss_agg_mode: str) -> None:
        """``update``: a worker group's method; one call, one mini-batch, one optimizer step."""
        self._loss_agg_mode = loss_agg_mode
        self._calls = [(update.start(mini_batch), mini_batch.meta_info) for mini_batch in mini_batches]

    def get(self) -> dict[str, float]:
        """Wait for the last one; the metrics of all."""
        records = [UpdateRecord(call.get(), meta["n_tokens"], meta["n_seqs"]) for call, meta in self._calls]
        return merge_updates(records, loss_agg_mode=self._loss_agg_mode)

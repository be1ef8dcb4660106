"""Which rows form which batch.

Both samplers give lists of row numbers. The order of an epoch is a pure function of (seed, epoch), so two
integers are the whole state and a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from strop.errors import CheckpointError, DataError


class EpochSampler:
    """Batches of row numbers for ever, in a new seeded order every epoch.

    ``epoch`` (epochs completed) and ``position`` (batches handed out in the present one) always describe
    the batch that comes next: after the last batch of an epoch they are (epoch + 1, 0). There is one state,
    so all iterators over one sampler share it. ``len()`` is the number of batches of one epoch.

    Raises :class:`DataError` when the data do not fill one batch.
    """

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        if batch_size < 1 or seed < 0:
            raise DataError(
                f"sampler: expected batch_size >= 1 and seed >= 0, found batch_size={batch_size}, seed={seed}"
            )
        if num_rows < (batch_size if drop_last else 1):
            raise DataError(
                f"the data set has {num_rows} rows and a batch takes {batch_size}: "
                "lower data.train_batch_size or add data"
            )
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = 0
        self.position = 0
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.batch_size)
        return full if self.drop_last or rest == 0 else full + 1

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        start = self.position * self.batch_size
        rows = self._epoch_order()[start : start + self.batch_size].tolist()
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands, and what that position depends on."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; :class:`CheckpointError` when it belongs to other data, batches or
        another seed.
        """
        changed = [
            f"{name}: {state.get(name)} in the checkpoint, {value} now"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if changed:
            raise CheckpointError(
                "the order of the training data cannot be continued: " + "; ".join(changed)
                + ". Restore the old values, or start anew with trainer.resume_mode=disable"
            )  # fmt: skip
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < len(self):
            raise CheckpointError(
                f"sampler state: epoch {epoch}, position {position} of {len(self)} is not possible"
            )
        self.epoch, self.position = epoch, position

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _epoch_order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        if self._order is None or self._order[0] != self.epoch:
            stream = np.random.default_rng(np.random.SeedSequence((self.seed, self.epoch)))
            self._order = (self.epoch, stream.permutation(self.num_rows))
        return self._order[1]


class SequentialBatches:
    """Every row once, in order; the last batch may be smaller. ``batch_size=None``: all rows in one batch."""

    def __init__(self, num_rows: int, batch_size: int | None) -> None:
        if batch_size is not None and batch_size < 1:
            raise DataError(f"batch size {batch_size}: expected at least 1 (data.val_batch_size)")
        self.num_rows = num_rows
        self.batch_size = batch_size or max(num_rows, 1)

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.num_rows, self.batch_size):
            yield list(range(start, min(start + self.batch_size, self.num_rows)))

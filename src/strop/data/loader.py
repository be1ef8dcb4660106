"""Samplers, collation and the loaders of training and validation.

Shapes: B rows, P = max_prompt_length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from strop.errors import CheckpointError, DataError
from strop.protocol import DataProto


def collate(rows: Sequence[dict[str, Any]], *, pad_token_id: int, max_prompt_length: int) -> DataProto:
    """Return one left-padded batch from rows of :class:`~strop.data.rl_dataset.RLHFDataset`.

    Tensors, all int64 [B, P]: ``input_ids``, ``attention_mask`` and ``position_ids`` = clip(cumsum(mask) -
    1, 0). Prompts end at column P in every row, so that generation continues there; P does not depend
    on the batch. All other fields become object columns [B].

    Raises :class:`DataError` when a prompt is longer than P, or when the rows have different fields.
    """
    if not rows:
        raise DataError("collate: a batch needs at least one row")
    input_ids_BP = torch.full((len(rows), max_prompt_length), pad_token_id, dtype=torch.int64)
    attention_mask_BP = torch.zeros_like(input_ids_BP)
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() != names:
            raise DataError(
                f"collate: row {number} of the batch differs in the fields {sorted(row.keys() ^ names)}"
            )
        length = len(row["input_ids"])
        if length > max_prompt_length:
            raise DataError(
                f"collate: row {number} of the batch has {length} prompt tokens, "
                f"the limit is {max_prompt_length}"
            )
        # Not -length: a slice from -0 would be the whole row.
        input_ids_BP[number, max_prompt_length - length :] = row["input_ids"]
        attention_mask_BP[number, max_prompt_length - length :] = 1
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids_BP,
            "attention_mask": attention_mask_BP,
            "position_ids": (attention_mask_BP.cumsum(dim=-1) - 1).clamp(min=0),
        },
        non_tensors={name: [row[name] for row in rows] for name in names if name != "input_ids"},
    )


class EpochSampler:
    """Endless batches of row numbers, in a new seeded order every epoch.

    ``epoch`` (completed epochs) and ``position`` (batches yielded in the current epoch) describe the next
    batch: after the last batch of an epoch they are (epoch + 1, 0). All iterators over one sampler share this
    state. ``len()`` is the number of batches per epoch. The order is a function of (seed, epoch), so a resume
    needs no generator state.

    Raises :class:`DataError` when the data does not fill one batch.
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
        """Return the position of the sampler and the settings that it depends on."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; :class:`CheckpointError` if data, batch size or seed have changed."""
        changed = [
            f"{name}: {state.get(name)} in the checkpoint, {value} now"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if changed:
            raise CheckpointError(
                "the order of the training data cannot be continued: " + "; ".join(changed)
                + ". Restore the old values, or start from scratch with trainer.resume_mode=disable"
            )  # fmt: skip
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < len(self):
            raise CheckpointError(
                f"sampler state: epoch {epoch}, position {position} of {len(self)} is impossible"
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


CollateFn = Callable[[list[dict[str, Any]]], DataProto]


class RowDataset(Protocol):
    """Interface of a data set for loaders."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> dict[str, Any]: ...

    def data_sources(self) -> set[str]: ...


class PromptLoader:
    """Batches of ``dataset``, one per list of row numbers in ``batches``.

    With an :class:`EpochSampler` iteration never ends (the trainer counts its steps); with
    :class:`SequentialBatches` it is one pass. Nothing is prefetched, so the sampler's state is that after the
    last batch yielded. ``len()`` is the number of batches per epoch.
    """

    def __init__(
        self, dataset: RowDataset, batches: EpochSampler | SequentialBatches, collate_fn: CollateFn
    ) -> None:
        self.dataset, self.batches, self.collate_fn = dataset, batches, collate_fn

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[DataProto]:
        for rows in self.batches:
            yield self.collate_fn([self.dataset[row] for row in rows])

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state; empty for a loader that makes one pass."""
        return self.batches.state_dict() if isinstance(self.batches, EpochSampler) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        if isinstance(self.batches, EpochSampler):
            self.batches.load_state_dict(state)
        elif state:
            raise CheckpointError("a loader that makes one pass has no state to restore")


def train_loader(
    dataset: RowDataset,
    *,
    batch_size: int,
    seed: int,
    pad_token_id: int,
    max_prompt_length: int,
    shuffle: bool = True,
) -> PromptLoader:
    """Return endless seeded batches of exactly ``batch_size`` rows; an epoch's remainder is skipped."""
    sampler = EpochSampler(len(dataset), batch_size, seed, shuffle=shuffle, drop_last=True)
    pad = partial(collate, pad_token_id=pad_token_id, max_prompt_length=max_prompt_length)
    return PromptLoader(dataset, sampler, pad)


def validation_loader(
    dataset: RowDataset, *, batch_size: int | None, pad_token_id: int, max_prompt_length: int
) -> PromptLoader:
    """Return one pass in the order of the file; the last batch may be smaller."""
    pad = partial(collate, pad_token_id=pad_token_id, max_prompt_length=max_prompt_length)
    return PromptLoader(dataset, SequentialBatches(len(dataset), batch_size), pad)

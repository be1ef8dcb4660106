"""The sampler of training rows, collation and the loader of batches.

Shapes: B rows, P = max_prompt_length.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from strop.errors import CheckpointError, DataError
from strop.protocol import DataProto, sequence_columns

logger = logging.getLogger(__name__)


def collate(rows: Sequence[dict[str, Any]], *, pad_token_id: int, max_prompt_length: int) -> DataProto:
    """Return one left-padded batch from rows of :class:`~strop.data.rl_dataset.RLHFDataset`.

    Tensors, all int64 [B, P]: ``input_ids``, ``attention_mask`` and ``position_ids`` = clip(cumsum(mask) -
    1, 0). Prompts end at column P in every row, so that generation continues there; P does not depend
    on the batch. ``images`` int64 [B, I], of rows that may have pictures. All other fields become object
    columns [B]. Rows that are padded, as those of verl's data sets, have a tensor ``attention_mask``.

    Raises :class:`DataError` when a prompt is longer than P, or when the rows have different fields.
    """
    input_ids_BP = torch.full((len(rows), max_prompt_length), pad_token_id, dtype=torch.int64)
    attention_mask_BP = torch.zeros_like(input_ids_BP)
    names = rows[0].keys()
    # without pictures images may be a column of the user
    tensors = {"input_ids"} | ({"images"} if torch.is_tensor(rows[0].get("images")) else set())
    is_padded = torch.is_tensor(rows[0].get("attention_mask"))
    computed = {"attention_mask", "position_ids"} if is_padded else set()
    for number, row in enumerate(rows):
        if row.keys() != names:
            raise DataError(
                f"collate: row {number} of the batch differs in the fields {sorted(row.keys() ^ names)}"
            )
        ids = torch.as_tensor(row["input_ids"])
        if is_padded:
            ids = ids[row["attention_mask"].bool()]
        length = len(ids)
        if length > max_prompt_length:
            raise DataError(
                f"collate: row {number} of the batch has {length} prompt tokens, "
                f"the limit is {max_prompt_length}"
            )
        # Not -length: a slice from -0 would be the whole row.
        input_ids_BP[number, max_prompt_length - length :] = ids
        attention_mask_BP[number, max_prompt_length - length :] = 1
    return DataProto.from_dict(
        tensors={
            **sequence_columns(input_ids_BP, attention_mask_BP),
            **{name: torch.stack([row[name] for row in rows]) for name in tensors - {"input_ids"}},
        },
        non_tensors={name: [row[name] for row in rows] for name in names - tensors - computed},
    )


class EpochSampler:
    """Endless batches of ``batch_size`` row numbers, in a new seeded order every epoch.

    ``epoch`` (completed epochs) and ``position`` (batches yielded in the current epoch) describe the next
    batch: after the last batch of an epoch they are (epoch + 1, 0). All iterators over one sampler share this
    state. ``len()`` is the number of batches per epoch; rows that fill no batch are left out, or, with
    ``keep_rest``, are a last, smaller one. The order is a function of (seed, epoch), so a resume needs no
    generator state. ``pictures``: a digest of the rows' pictures, which may not change before a resume.

    Raises :class:`DataError` when the data does not fill one batch.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        *,
        keep_rest: bool = False,
        pictures: str | None = None,
    ) -> None:
        if num_rows < batch_size:
            raise DataError(
                f"the data set has {num_rows} rows and a batch takes {batch_size}: "
                "lower data.train_batch_size or add data"
            )
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self.pictures = pictures
        self._keep_rest = keep_rest
        self.epoch = 0
        self.position = 0
        self.has_another_order = False
        """True if it goes on from a state with other data, batch size or seed."""
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._batches_of(self.num_rows, self.batch_size)

    def _batches_of(self, num_rows: int, batch_size: int) -> int:
        return -(-num_rows // batch_size) if self._keep_rest else num_rows // batch_size

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

    def load_state_dict(self, state: dict[str, Any], *, may_differ: bool = False) -> None:
        """Continue from ``state``; :class:`CheckpointError` if data, batch size or seed have changed.

        If these ``may_differ``, the next batch has the same number, in the order that they give now.
        """
        changed = [
            f"{name}: {state.get(name)} in the checkpoint, {value} now"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if "sampler" in state:
            raise CheckpointError(
                "the order of the training data cannot be continued: the checkpoint has the state of a "
                "train_sampler. Pass it again, or start from scratch with trainer.resume_mode=disable"
            )
        what = "; ".join(changed)
        if changed and not may_differ:
            raise CheckpointError(
                f"the order of the training data cannot be continued: {what}. Restore the old values, set "
                "trainer.resume_mode to the path of the checkpoint to go on with the new ones, or start from "
                "scratch with trainer.resume_mode=disable"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self.has_another_order = bool(changed)
        if changed:
            before = self._batches_of(state["num_rows"], state["batch_size"])
            self.epoch, self.position = divmod(self.epoch * before + self.position, len(self))
            logger.warning("warning: the training data has another order than before the resume: %s", what)

    def _identity(self) -> dict[str, Any]:
        known = {name: vars(self)[name] for name in ("num_rows", "batch_size", "seed", "shuffle")}
        return known | ({} if self.pictures is None else {"pictures": self.pictures})

    def _epoch_order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        if self._order is None or self._order[0] != self.epoch:
            stream = np.random.default_rng(np.random.SeedSequence((self.seed, self.epoch)))
            self._order = (self.epoch, stream.permutation(self.num_rows))
        return self._order[1]


class SampledBatches:
    """Endless batches of ``batch_size`` row numbers from a user's sampler, in place of ``EpochSampler``.

    An iteration over ``sampler`` is an epoch; rows at its end that fill no batch are left out. Nothing is
    read ahead, so after a batch ``sampler.state_dict()`` is that of the rows yielded.

    Raises :class:`DataError` when an epoch does not fill one batch.
    """

    has_another_order = False
    """The order is the sampler's, which has its own state."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        if len(sampler) < batch_size:
            raise DataError(
                f"train_sampler yields {len(sampler)} rows and a batch takes {batch_size}: lower "
                "data.train_batch_size"
            )
        self.sampler, self.batch_size = sampler, batch_size
        self.epoch = self.position = 0
        self._rows: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        for _ in range(2):  # a sampler restored at the end of its epoch may yield nothing first
            self._rows = iter(self.sampler) if self._rows is None else self._rows
            rows = [int(row) for row in itertools.islice(self._rows, self.batch_size)]
            if len(rows) == self.batch_size:
                self.position += 1
                if self.position == len(self):
                    # To the end of the iteration, where the sampler's state is that before an epoch.
                    list(itertools.islice(self._rows, len(self.sampler) % self.batch_size + 1))
                    self.epoch, self.position, self._rows = self.epoch + 1, 0, None
                return rows
            self._rows = None
        raise DataError(
            f"train_sampler={type(self.sampler).__name__} yields {len(rows)} rows, fewer than its length of "
            f"{len(self.sampler)} and than data.train_batch_size={self.batch_size}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the sampler's state: tensors and plain values."""
        # copied: a sampler may return what it goes on to change
        sampler = copy.deepcopy(self.sampler.state_dict())
        return {"epoch": self.epoch, "position": self.position, "sampler": sampler}

    def load_state_dict(self, state: dict[str, Any], *, may_differ: bool = False) -> None:
        """Continue from ``state``; :class:`CheckpointError` if it is not of a user's sampler."""
        if "sampler" not in state:
            raise CheckpointError(
                "the checkpoint was saved without a train_sampler, so its order cannot be continued with "
                f"{type(self.sampler).__name__}; start from scratch with trainer.resume_mode=disable"
            )
        self.sampler.load_state_dict(state["sampler"])
        self.epoch, self.position, self._rows = state["epoch"], state["position"], None


def lacks_for_resume(sampler: Any) -> list[str]:
    """Return the methods that a user's sampler needs for a resume and does not have."""
    return [name for name in ("state_dict", "load_state_dict") if not hasattr(sampler, name)]


def one_pass(num_rows: int, batch_size: int) -> list[list[int]]:
    """Return batches of every row once, in order; the last one may be smaller."""
    return [[*range(num_rows)[start : start + batch_size]] for start in range(0, num_rows, batch_size)]


class RowDataset(Protocol):
    """Interface of a data set for loaders."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> dict[str, Any]: ...

    def data_sources(self) -> set[str]: ...


class PromptLoader:
    """Batches of ``dataset``, one per list of row numbers in ``batches``.

    With an :class:`EpochSampler` iteration never ends (the trainer counts its steps); with ``one_pass`` it
    does. Nothing is prefetched, so the sampler's state is that after the last batch yielded. ``len()`` is the
    number of batches per epoch.
    """

    def __init__(
        self,
        dataset: RowDataset,
        batches: EpochSampler | SampledBatches | list[list[int]],
        collate_fn: Callable[[list[dict[str, Any]]], DataProto],
    ) -> None:
        self.dataset, self.batches, self.collate_fn = dataset, batches, collate_fn

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def yielded(self) -> int:
        """Number of batches that an :class:`EpochSampler` has yielded, over all epochs."""
        batches: Any = self.batches
        return batches.epoch * len(batches) + batches.position

    def batch(self, number: int) -> DataProto:
        """Return batch ``number``, from 1, of the endless sequence of an :class:`EpochSampler`."""
        # a copy with another position; the order is a function of (seed, epoch)
        batches: Any = copy.copy(self.batches)
        batches.epoch, batches.position = divmod(number - 1, len(batches))
        return next(iter(PromptLoader(self.dataset, batches, self.collate_fn)))

    def ahead(self) -> Iterator[DataProto]:
        """Return the batches that follow; iterating over them leaves the position of this loader as it is."""
        return iter(PromptLoader(self.dataset, copy.copy(self.batches), self.collate_fn))

    def __iter__(self) -> Iterator[DataProto]:
        for rows in self.batches:
            yield self.collate_fn([self.dataset[row] for row in rows])

"""From row numbers to batches: the loaders of training and validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from strop.data.collate import collate
from strop.data.sampler import EpochSampler, SequentialBatches
from strop.errors import CheckpointError
from strop.protocol import DataProto

CollateFn = Callable[[list[dict[str, Any]]], DataProto]


class RowDataset(Protocol):
    """What a loader needs of a data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> dict[str, Any]: ...

    def data_sources(self) -> set[str]: ...


class PromptLoader:
    """Batches of ``dataset``, one for each list of row numbers that ``batches`` gives.

    With an :class:`EpochSampler` the iteration never ends (the trainer counts its steps); with
    :class:`SequentialBatches` it is one pass. Nothing is prefetched, so the sampler's state is that of the
    last batch that was handed out. ``len()`` is the number of batches of one epoch.
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
        """The sampler's state; empty for a loader that makes one pass."""
        return self.batches.state_dict() if isinstance(self.batches, EpochSampler) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
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
    """Endless seeded batches of exactly ``batch_size`` rows; what is left of an epoch is skipped."""
    sampler = EpochSampler(len(dataset), batch_size, seed, shuffle=shuffle, drop_last=True)
    pad = partial(collate, pad_token_id=pad_token_id, max_prompt_length=max_prompt_length)
    return PromptLoader(dataset, sampler, pad)


def validation_loader(
    dataset: RowDataset, *, batch_size: int | None, pad_token_id: int, max_prompt_length: int
) -> PromptLoader:
    """One pass in the order of the file; the last, smaller batch is kept."""
    pad = partial(collate, pad_token_id=pad_token_id, max_prompt_length=max_prompt_length)
    return PromptLoader(dataset, SequentialBatches(len(dataset), batch_size), pad)

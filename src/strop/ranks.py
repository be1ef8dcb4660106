"""Agreement between the ranks of the default process group; in one process every function is the identity."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar

import torch
import torch.distributed as dist

from strop.errors import portable

_Number = TypeVar("_Number", int, float)


def several() -> bool:
    """Return True if there is a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first() -> bool:
    """Return True on rank zero, and in a single process."""
    return not several() or dist.get_rank() == 0


def largest(number: _Number, device: torch.device) -> _Number:
    """Return the maximum over all ranks, for which NaN counts as infinite. Collective."""
    if not several():
        return number
    numbers = torch.tensor(number, device=device).nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return type(number)(numbers)


def total(
    figures: dict[str, float], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return the sum of every figure over the ranks of ``group`` (None: all). Collective.

    All have figures of the same names.
    """
    if not several():
        return figures
    # one order on all ranks: the sum is by position
    names = sorted(figures)
    sums = torch.tensor([figures[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    return dict(zip(names, sums.tolist(), strict=True))


def gathered(value: str) -> list[str]:
    """Return the ``value`` of every rank. Collective."""
    if not several():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_together(error: Exception | None) -> None:
    """Raise rank zero's exception on every rank, so that none waits in a collective. Collective."""
    if not several():
        if error is not None:
            raise error
        return
    # an error that cannot be pickled would raise in the broadcast, on rank zero alone
    box = [error and portable(error)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise box[0]


def cpu_group(name: str) -> dist.ProcessGroup | None:
    """Return the gloo group of all ranks for checkpoints called ``name``. Collective.

    A separate group, so that a background save cannot mix its collectives with those of training or of
    another role's save in this process. None without a default process group.
    """
    return _cpu_group(dist.group.WORLD, name) if dist.is_available() and dist.is_initialized() else None


@lru_cache(maxsize=8)
def _cpu_group(world: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    del world, name  # cache key: another default group needs another group
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))  # a shared disk may be slow

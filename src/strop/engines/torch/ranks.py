"""What the ranks of the default process group agree on; with one process every function is the identity."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.errors import portable


def several() -> bool:
    """Whether there is a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first() -> bool:
    """Whether this process is rank zero, or the only one."""
    return not several() or dist.get_rank() == 0


def largest(number: int, device: torch.device) -> int:
    """The maximum over all ranks; collective."""
    if not several():
        return number
    numbers = torch.tensor(number, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return int(numbers)


def total(figures: dict[str, float], device: torch.device) -> dict[str, float]:
    """The sum of every figure over all ranks, which have the same names; collective."""
    if not several():
        return figures
    names = sorted(figures)
    sums = torch.tensor([figures[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return {name: float(figure) for name, figure in zip(names, sums, strict=True)}


def gathered(value: str) -> list[str]:
    """The ``value`` of every rank; collective."""
    if not several():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (collective), and any other as it is; detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def raise_together(error: Exception | None) -> None:
    """Raise rank zero's exception on every rank, which would otherwise wait for it for ever; collective."""
    if not several():
        if error is not None:
            raise error
        return
    box = [error and portable(error)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise box[0]


def cpu_group(name: str) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for the checkpoints called ``name``; collective.

    Its collectives cannot mix with those of training, nor with those of another role in this process that
    saves in the background at the same time.
    """
    return _cpu_group(dist.group.WORLD, name) if several() else None


@lru_cache(maxsize=8)
def _cpu_group(world: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    del world, name  # the key: another default group needs another group
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))  # a shared disk may be slow


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradients to a global norm of at most ``max_norm``; returns the norm before; collective.

    Every rank gets the same number: the squares of all shards are added up over the ranks that share a copy.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = [part(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(parts)
    sharded = next((gradient for gradient in gradients if isinstance(gradient, DTensor)), None)
    if sharded is not None:
        mesh = sharded.device_mesh
        square = norm.double().square()
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
        norm = square.sqrt().to(norm.dtype)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ does it
    torch._foreach_mul_(parts, scale)
    return float(norm)

"""Bytes that the collectives of a rank send, counted below everything that calls them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RINGS = {  # sent by one of R ranks, for the largest tensor of a call, which is the whole
    "allgather": lambda whole, ranks: whole * (ranks - 1) // ranks,
    "reduce_scatter": lambda whole, ranks: whole * (ranks - 1) // ranks,
    "allreduce": lambda whole, ranks: 2 * whole * (ranks - 1) // ranks,
    "broadcast": lambda whole, ranks: whole if ranks > 1 else 0,
    "send": lambda whole, ranks: whole,
    "recv": lambda whole, ranks: 0,
}


class Traffic(TorchDispatchMode):
    """Context manager that counts, by kind and dtype, what this rank sends in ring algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, torch.dtype]] = Counter()

    def total(self, *kinds: str) -> int:
        """Bytes of these kinds; of all if none is named."""
        return sum(count for (kind, _), count in self.sent.items() if not kinds or kind in kinds)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = function.name().partition("::")
        if space == "c10d":
            self._count(name.strip("_"), args)
        elif space == "_c10d_functional" and name.startswith("all_gather_into_tensor"):
            part, ranks, _ = args
            self.sent["allgather", part.dtype] += part.nbytes * (ranks - 1)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        objects = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
        [group] = [dist.ProcessGroup.unbox(leaf) for leaf in objects if "ProcessGroup" in str(leaf._type())]
        if name.startswith("alltoall_base"):
            _, given, _, _, sizes = args[:5]
            others = len(given) - (sizes[group.rank()] if sizes else len(given) // group.size())
            self.sent["alltoall", given.dtype] += others * given[:1].nbytes
            return
        kind = next(kind for kind in _RINGS if name.startswith(kind))
        whole = max(tensor.nbytes for tensor in tensors)
        self.sent[kind, tensors[0].dtype] += _RINGS[kind](whole, group.size())

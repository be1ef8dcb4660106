"""Verification of a rollout's copy of the weights: completeness (``WeightLedger``) and checksums.

A checksum is the sum over a weight's elements of their bits times an odd number hashed from the element's
position, modulo 2^64. Any one changed element changes it, and practically any two. The checksums of shards
add up to that of the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from strop.errors import ModelError

_CHUNK = 1 << 20
"""Elements processed at a time; temporaries take 8 bytes per element."""
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: 2^64 over the golden ratio
UNREADABLE = -2
"""Stands for the checksum of a weight that the engine holds in an unreadable form."""
UNEQUAL = -1
"""Stands for the checksum of a weight of which the engine holds two copies that differ."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """Position of a shard [rows, width] in its weight, whose rows have ``columns`` elements."""

    row: int = 0
    column: int = 0
    columns: int | None = None
    """None: the shard has whole rows."""


@torch.no_grad()
def checksum(weight: Tensor, place: Place = Place()) -> int:
    """Return the checksum; -0.0 and subnormal numbers (which kernels may flush) count as 0."""
    if not weight.numel():  # a rank's part past the end of the vocabulary
        return 0
    rows = weight.detach().reshape(weight.shape[0] if weight.dim() else 1, -1)
    width = rows.shape[1]
    columns = place.columns or width
    step = max(1, _CHUNK // max(1, width))
    offsets = torch.arange(place.column, place.column + width, device=rows.device)
    total = 0
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        part = part.masked_fill(part.abs() < torch.finfo(part.dtype).tiny, 0)
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        first = torch.arange(len(part), device=part.device) + place.row + start
        mixed = (first[:, None] * columns + offsets) * _ODD
        # int64 products wrap around, modulo 2^64; an odd factor is invertible there: no single change is lost
        mixed = (mixed ^ (mixed >> 29)) | 1
        total += int((bits * mixed).sum())
    return total % (1 << 64)


def checksums(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, int]:
    """Return name -> checksum of the weights converted to ``dtype``."""
    return {name: checksum(weight.to(dtype)) for name, weight in weights}


def add_up(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up the parts of all ranks to checksums of whole weights."""
    total: dict[str, int] = {}
    for name, value in chain.from_iterable(part.items() for part in parts):
        both = (value, total.get(name, 0))
        total[name] = UNEQUAL if UNEQUAL in both else sum(both) % (1 << 64)
    return total


def require_equal_checksums(expected: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Raise ``ModelError`` naming weights that differ from the trainer's or are missing in the rollout.

    Constants of the rollout's model are held only if they differ: as ``UNEQUAL``.
    """
    wrong = [name for name in expected if held.get(name) not in (expected[name], UNREADABLE)]
    wrong += [name for name, value in held.items() if value == UNEQUAL and name not in expected]
    if not wrong:
        return
    absent = [name for name in wrong if name not in held]
    raise ModelError(
        f"the rollout's weights are not the actor's of version {version}: {len(wrong)} of "
        f"{len(expected)} parameters differ, {_few(wrong)}"
        + (f"; missing: {_few(absent)}" if absent else "")
        + ". Its samples would not come from the policy that is trained"
    )


class WeightLedger:
    """Check an update: ``ModelError`` names a weight that is unknown, misshapen, duplicated or missing."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        """Expect these ``shapes``: every parameter by Hugging Face name, tied ones once."""
        self._shapes = dict(shapes)
        self._missing: set[str] = set()
        self.complete = False
        """True after a complete update."""
        self.open = False
        """True during an update."""

    def begin(self) -> None:
        """Begin an update: expect every weight."""
        self._missing = set(self._shapes)
        self.open, self.complete = True, False

    def take(self, name: str, weight: Tensor) -> None:
        """Check and count one weight of the update."""
        if name not in self._missing:
            problem = "came twice" if name in self._shapes else "is no parameter of the rollout's model"
            raise ModelError(f"weight transfer: {name} {problem}")
        if self._shapes[name] != weight.shape:
            raise ModelError(
                f"weight transfer: {name} has shape {list(weight.shape)}, "
                f"the rollout's model expects {list(self._shapes[name])}"
            )
        self._missing.discard(name)

    def end(self) -> None:
        """End the update; ``ModelError`` if a weight is missing."""
        if self._missing:
            raise ModelError(f"weight transfer: it ended without {_few(sorted(self._missing))}")
        self.open, self.complete = False, True

    def require_complete(self) -> None:
        """Raise ``ModelError`` unless an update is complete."""
        if not self.complete:
            raise ModelError("generate: the rollout has incomplete weights; finish update_weights first")

    def forget(self) -> None:
        """Record that the weights were freed."""
        self.open = self.complete = False


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

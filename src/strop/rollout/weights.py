"""What a rollout with weights of its own has to know of them: that all have come, and that they are right.

A checksum is a sum over a weight's elements of their bits times an odd number drawn from the element's place,
modulo 2^64: any one changed element changes it, and practically any two. A sum, so that shards of a
weight add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import ModelError

_CHUNK = 1 << 20
"""Elements at a time: the temporaries are 8 bytes an element."""
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: 2^64 over the golden ratio
UNREADABLE = -2
"""In the place of a checksum: of a weight that the engine holds in a form that cannot be read."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """Where a shard [rows, width] lies in its weight, whose rows have ``columns`` elements."""

    row: int = 0
    column: int = 0
    columns: int | None = None
    """None: the shard has whole rows."""


@torch.no_grad()
def checksum(weight: Tensor, place: Place = Place()) -> int:
    """Of the values: zeros of both signs and subnormal numbers (which kernels may flush) count as 0."""
    if not weight.numel():  # a rank's part of a vocabulary that ends before it
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
        mixed = (mixed ^ (mixed >> 29)) | 1
        total += int((bits * mixed).sum())
    return total % (1 << 64)


def checksums(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, int]:
    """By name, of the weights as they are in ``dtype``."""
    return {name: checksum(weight.to(dtype)) for name, weight in weights}


def require_equal_checksums(expected: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Raises ``ModelError`` that names what the rollout holds otherwise than the trainer, or not at all."""
    wrong = [name for name in expected if held.get(name) not in (expected[name], UNREADABLE)]
    if not wrong:
        return
    absent = [name for name in wrong if name not in held]
    raise ModelError(
        f"the rollout does not hold the actor's weights of version {version}: {len(wrong)} of "
        f"{len(expected)} parameters differ, {_few(wrong)}"
        + (f"; it has no {_few(absent)}" if absent else "")
        + ". Samples would come from another policy than the one that is trained"
    )


class WeightLedger:
    """Counts an update's weights: ``ModelError`` names one that is unknown, misshapen, double or missing."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        """``shapes``: every parameter by its Hugging Face name, tied ones once."""
        self._shapes = dict(shapes)
        self._missing: set[str] = set()
        self.complete = False
        """Whether a whole update has come."""
        self.open = False
        """Whether an update has begun and not ended."""

    @property
    def names(self) -> Set[str]:
        """Of all weights."""
        return self._shapes.keys()

    def begin(self) -> None:
        """Expect every weight anew."""
        self._missing = set(self._shapes)
        self.open, self.complete = True, False

    def take(self, name: str, weight: Tensor) -> None:
        """One weight of the update has come."""
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
        """The update is over."""
        if self._missing:
            raise ModelError(f"weight transfer: it ended without {_few(sorted(self._missing))}")
        self.open, self.complete = False, True

    def require_complete(self) -> None:
        """Raises ``ModelError`` before all weights have come."""
        if not self.complete:
            raise ModelError("generate: the rollout has no whole set of weights; finish update_weights first")

    def forget(self) -> None:
        """The weights are gone."""
        self.open = self.complete = False


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

"""Buckets of weights in CPU memory, which Ray's object store carries; the driver passes on references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

BUCKET_BYTES = 256 << 20
"""Size of a bucket of weights in transfer: bounds the memory in addition to the two models."""


def weight_buckets(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, *, keep: bool = True, copy: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of weights, of up to ``max_bytes`` or of one larger weight.

    ``copy`` them to CPU memory. Without ``keep`` (a rank that only takes part in the gathers) yield equally
    many empty lists.
    """
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, weight in weights:
        if used and used + weight.nbytes > max_bytes:
            yield bucket
            bucket, used = [], 0
        used += weight.nbytes
        if keep:  # a copy is not changed by later updates
            bucket.append((name, weight.to("cpu", copy=True) if copy else weight))
        del weight  # free it before the next one is gathered
    if used:
        yield bucket

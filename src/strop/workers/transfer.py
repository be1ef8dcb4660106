"""Weights on their way to a rollout with a copy of its own: in buckets, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

BUCKET_BYTES = 256 << 20


def weight_buckets(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, *, keep: bool
) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of weights in CPU memory of up to ``max_bytes``, or of one weight that is larger.

    Without ``keep`` (a rank that only takes part in the gathers) the lists are as many, and empty.
    """
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, weight in weights:
        if used and used + weight.nbytes > max_bytes:
            yield bucket
            bucket, used = [], 0
        used += weight.nbytes
        if keep:
            bucket.append((name, weight.to("cpu", copy=True)))  # a later update must not change it
    if used:
        yield bucket

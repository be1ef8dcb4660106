"""Tokens of later batches while the oldest is generated: a function of the queue alone."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def due(oldest: Sequence[int], later: Sequence[tuple[int, bool]], slots: int) -> tuple[list[int], bool]:
    """Return how many new tokens each later sample is due, and whether all have got as many.

    On an imaginary schedule ``slots`` samples at a time gain a token a tick, in the order of the queue, until
    the oldest batch is complete. ``oldest`` are the new tokens of its samples, ``later`` those of the others
    so far, and whether the sample has ended. Dues are final once all have got as many.
    """
    busy: list[int] = []  # the ticks at which samples that have a slot end

    def begin() -> int:
        return heapq.heappop(busy) if len(busy) >= slots else 0

    ends = []
    for length in oldest:
        ends.append(begin() + length)
        heapq.heappush(busy, ends[-1])
    end, dues, are_there = max(ends, default=0), [], True
    for got, has_ended in later:
        begun = begin()
        wanted = max(end - begun, 0)
        if has_ended and got <= wanted:
            dues.append(got)
            heapq.heappush(busy, begun + got)
        else:
            are_there &= got >= wanted
            dues.append(wanted)
            heapq.heappush(busy, max(end, begun))
    return dues, are_there

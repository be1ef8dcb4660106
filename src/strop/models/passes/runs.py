"""Groups of sequences, or of pieces of them, that attend in one padded call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import itemgetter

_ALIKE = 0.8
"""Pieces of sequences of at least this share of the longest are padded to it and attend in one call."""
_ONE_CALL = 2048
"""Pairs of a query and a key that take about the time of a call's fixed cost, in a small model on a CPU."""
_LARGEST_MASK = 1 << 20
"""Numbers in a mask of its own for each sequence of a run."""


@dataclass
class Run:
    """Pieces of sequences that attend in one call: from ``firsts`` on, to all tokens before them."""

    rows: list[int]
    firsts: list[int]
    lengths: list[int]
    queries: int
    """The longest piece, to which the others are padded."""
    keys: int
    """The last end of a piece; the others have more keys, which none of their queries attends to."""
    begin_together: bool = True

    def add(self, row: int, first: int, end: int) -> None:
        """Add a piece."""
        self.begin_together &= first == self.firsts[0]
        self.rows.append(row)
        self.firsts.append(first)
        self.lengths.append(end - first)
        self.queries, self.keys = max(self.queries, end - first), max(self.keys, end)

    def padding_with(self, first: int, end: int) -> int | None:
        """Return the pairs of a query and a key that one more piece adds to its own; None: too many."""
        queries, keys = max(self.queries, end - first), max(self.keys, end)
        pairs = (len(self.rows) + 1) * queries * keys
        added = pairs - len(self.rows) * self.queries * self.keys - (end - first) * end
        same = self.begin_together and self.firsts[0] == first
        if same and min(self.queries, end - first) >= _ALIKE * queries:
            return added
        return added if added <= _ONE_CALL and (same or pairs <= _LARGEST_MASK) else None


def pieces_of(starts: list[list[int]], lengths: list[int]) -> list[tuple[int, int, int]]:
    """Return (first, end, row) of the tokens that attend together, to all tokens of the row before them."""
    return [
        (first, end, row)
        for row, (begins, length) in enumerate(zip(starts, lengths, strict=True))
        for first, end in itertools.pairwise([*begins, length])
        if end > first
    ]


def runs_of(starts: list[list[int]], lengths: list[int]) -> list[Run]:
    """Group pieces in which padding costs little, or less than a call for each of them."""
    runs: list[Run] = []
    before, run = None, None
    for first, end, row in sorted(pieces_of(starts, lengths), key=lambda piece: (-piece[1], piece[0])):
        if run is not None and before == (first, end) and run.padding_with(first, end) is not None:
            run.add(row, first, end)  # an equal piece has the same best run
            continue
        before = first, end
        fitting = [(padding, run) for run in runs if (padding := run.padding_with(first, end)) is not None]
        if fitting:
            run = min(fitting, key=itemgetter(0))[1]
            run.add(row, first, end)
        else:
            run = Run([row], [first], [end - first], end - first, end)
            runs.append(run)
    return runs

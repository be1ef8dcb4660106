"""Sessions whose tokens form a tree: rows in which a token need not follow the one before it.

Column ``follows`` [B, T] has for each response token the response token before it in its own sequence: t - 1
in a plain row and on padding, ``PROMPT`` (-1) after the prompt, ``NOTHING`` (-2) where a sequence begins from
nothing, as with another system prompt or a compacted history. Two calls after the prompt, and one that
continues the first, where "i" is inserted and "s" sampled::

    response   s  s | s  s | i  s
    follows   -1  0  -1  2   1  4

A *leaf* is a token that no other follows, with the tokens before it: one sequence of a forward pass.

Shapes: B rows of L = P + T columns, N response tokens of a row, K tokens of a leaf.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

PROMPT, NOTHING = -1, -2


class Call(NamedTuple):
    """A call of a session: tokens that the policy sampled, and those between them and what they continue."""

    continues: int
    """Number of the call whose tokens come before, or ``PROMPT`` or ``NOTHING``."""
    inserted: Sequence[int]
    sampled: Sequence[int]


class Row(NamedTuple):
    """Response tokens of a session: ids, True for those that were sampled, and ``follows``."""

    ids: list[int]
    sampled: list[bool]
    follows: list[int]


def row_of(calls: Sequence[Call]) -> Row:
    """Return the tokens of a session's calls, call after call, each with its inserted tokens first.

    Columns of sampled tokens (log-probs, versions) are those of the calls, joined, where ``sampled`` is True.
    The order of the calls is that in which estimators discount; a call comes after the one that it continues.

    Raises:
        ValueError: a call continues a later one, or begins from nothing without a token to sample after.
    """
    row, ends = Row([], [], []), dict[int, int]()
    for number, call in enumerate(calls):
        if call.continues >= number or (call.continues == NOTHING and not call.inserted):
            raise ValueError(
                f"call {number} continues {call.continues} with {len(call.inserted)} tokens inserted"
            )
        before = ends.get(call.continues, call.continues)
        for token in (*call.inserted, *call.sampled):
            row.follows.append(before)
            before = len(row.ids)
            row.ids.append(token)
        row.sampled.extend([False] * len(call.inserted) + [True] * len(call.sampled))
        ends[number] = before
    return row


def plain(rows: int, width: int) -> Tensor:
    """Return ``follows`` [rows, width] int32 of plain rows."""
    return torch.arange(-1, width - 1, dtype=torch.int32).repeat(rows, 1)


def has_branches(follows_BT: Tensor) -> Tensor:
    """Return True for the rows [B] that are not plain."""
    return (follows_BT != torch.arange(-1, follows_BT.shape[1] - 1, device=follows_BT.device)).any(1)


def paths(follows_N: Tensor) -> list[tuple[int, list[range]]]:
    """Return for each leaf, in their order: ``PROMPT`` or ``NOTHING``, and the ranges of its tokens."""
    breaks_N = follows_N[1:] != torch.arange(len(follows_N) - 1, device=follows_N.device)
    starts = [0, *(breaks_N.nonzero()[:, 0] + 1).tolist()]
    before = dict(zip(starts, follows_N[starts].tolist(), strict=True))
    ends, followed, found = [*starts[1:], len(follows_N)], set(before.values()), []
    for start, end in zip(starts, ends, strict=True):
        if end - 1 in followed:
            continue
        path = [range(start, end)]
        while (last := before[path[-1].start]) >= 0:
            path.append(range(starts[bisect_right(starts, last) - 1], last + 1))
        found.append((last, path[::-1]))
    return found


class Leaf(NamedTuple):
    """A sequence of a forward pass."""

    row: int
    columns_K: Tensor
    """Columns of its tokens in the row, from the first of the prompt on."""
    own_K: Tensor
    """Sampled tokens that no leaf before it has: each is learned from once."""
    first: int
    """Place of the first sampled token, also of another leaf; K without one."""


def leaves(batch: Mapping[str, Tensor]) -> list[Leaf]:
    """Return the sequences of rows on the CPU, row by row; of a plain row, the row.

    Leaves without a sampled token of their own are left out, but for the first of a row without any.
    """
    real_BL, mask_BT = batch["attention_mask"].bool(), batch["response_mask"].bool()
    width, is_tree_B, found = real_BL.shape[1] - mask_BT.shape[1], has_branches(batch["follows"]), []
    for row, (real_L, mask_T, follows_T) in enumerate(zip(real_BL, mask_BT, batch["follows"], strict=True)):
        prompt, length = real_L[:width].nonzero()[:, 0], int(real_L[width:].sum())
        whole = [(PROMPT, [range(length)])]
        free_T, learns, first_of_row = mask_T.clone(), bool(mask_T.any()), len(found)
        for root, ranges in paths(follows_T[:length]) if is_tree_B[row] and length else whole:
            response = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
            own = free_T[response]
            if own.any() or (not learns and len(found) == first_of_row):
                free_T[response] = False
                before = prompt if root == PROMPT else prompt[:0]
                sampled = mask_T[response].nonzero()
                first = int(sampled[0]) if len(sampled) else len(response)
                own_K = torch.cat([torch.zeros(len(before), dtype=torch.bool), own])
                columns_K = torch.cat([before, width + response])
                found.append(Leaf(row, columns_K, own_K, len(before) + first))
    return found


def computed_tokens(batch: Mapping[str, Tensor]) -> list[int]:
    """Return the tokens that a pass computes for each row, of all its sequences."""
    tokens = [0] * len(batch["follows"])
    for leaf in leaves(batch):
        tokens[leaf.row] += len(leaf.columns_K)
    return tokens

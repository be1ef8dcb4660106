"""Random sessions whose tokens form trees, and what they mean, token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import torch

from strop.algorithms.token_tree import NOTHING, PROMPT, Call, plain, row_of

Columns = dict[str, torch.Tensor]


def calls_of(draw: random.Random, most: int = 5) -> list[Call]:
    """Return the calls of a session: continued, repeated and begun from nothing."""
    calls: list[Call] = []
    for number in range(draw.randint(1, most)):
        continues = PROMPT if number == 0 else draw.choice([PROMPT, NOTHING, *range(number)])
        if number == 0 and draw.random() < 0.1:
            continues = NOTHING
        inserted = draw.randint(0 if continues == PROMPT else 1, 3)
        tokens = [draw.randint(4, 18) for _ in range(inserted + draw.randint(1, 4))]
        calls.append(Call(continues, tokens[:inserted], tokens[inserted:]))
    return calls


def batch_of(sessions: list[list[Call]], *, prompts: int = 6, width: int = 40, seed: int = 0) -> Columns:
    """Return the rows of sessions in the layout of rollouts, after random prompts."""
    draw, rows = random.Random(seed), len(sessions)
    ids, mask = torch.zeros(rows, prompts + width, dtype=torch.long), torch.zeros(rows, width)
    present, follows = torch.zeros_like(ids), plain(rows, width)
    for number, calls in enumerate(sessions):
        row, length = row_of(calls), draw.randint(1, prompts)
        end = prompts + len(row.ids)
        present[number, prompts - length : end] = 1
        ids[number, prompts - length : end] = torch.tensor(
            [draw.randint(4, 18) for _ in range(length)] + row.ids
        )
        mask[number, : len(row.ids)] = torch.tensor(row.sampled).float()
        follows[number, : len(row.ids)] = torch.tensor(row.follows)
    return {
        "input_ids": ids,
        "attention_mask": present,
        "position_ids": (present.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, prompts:],
        "response_mask": mask,
        "follows": follows,
    }


def random_batch(rows: int, seed: int = 0, **options: int) -> Columns:
    """Return rows of random sessions, some of them plain."""
    draw = random.Random(seed)
    return batch_of([calls_of(draw) for _ in range(rows)], seed=seed, **options)


def sequences(batch: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, list[int], list[tuple[int, int]]]]:
    """Yield for each leaf: its row, its token ids, and (place there, place in the response) of own tokens.

    By definition: from each token that no other follows, back to the one that follows none.
    """
    width = batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    for row in range(len(batch["input_ids"])):
        ids, real = batch["input_ids"][row].tolist(), batch["attention_mask"][row].tolist()
        follows, sampled = batch["follows"][row].tolist(), batch["response_mask"][row].tolist()
        tokens = [t for t in range(len(follows)) if real[width + t]]
        followed, seen = {follows[t] for t in tokens}, set()
        for leaf in tokens:
            if leaf in followed:
                continue
            path = [leaf]
            while follows[path[0]] >= 0:
                path.insert(0, follows[path[0]])
            before = [ids[c] for c in range(width) if real[c]] if follows[path[0]] == PROMPT else []
            own = [(len(before) + k, t) for k, t in enumerate(path) if sampled[t] and t not in seen]
            seen.update(path)
            if own:
                yield row, [*before, *(ids[width + t] for t in path)], own

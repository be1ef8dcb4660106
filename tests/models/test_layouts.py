"""A mini-batch has one gradient: padded, packed or shared among ranks, cut by rows or by tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import ulysses_jobs as jobs

from strop.controller.pools import Role
from strop.engines.micro_batches import MicroBatching

from ranks import Ranks

LONGEST = 13
DYNAMIC = MicroBatching(max_tokens=LONGEST + 3)
HSDP = (
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
    "critic.model.fsdp_config.fsdp_size=2",
)
LAYOUTS = {
    "padded, by rows": (1, MicroBatching(rows=2), jobs.PADDED),
    "padded, by tokens": (1, DYNAMIC, jobs.PADDED),
    "packed, whole": (1, MicroBatching(rows=8), jobs.PACKED),
    "packed, by tokens": (1, DYNAMIC, jobs.PACKED),
    "padded, by tokens, on 2 ranks": (2, DYNAMIC, jobs.PADDED),
    "packed, by tokens, on 2 ranks": (2, DYNAMIC, (*jobs.PACKED, *jobs.CHECKPOINTING)),
    "packed, row by row, on 2 ranks": (2, MicroBatching(rows=1), jobs.PACKED),
    "shared by 2 ranks": (2, MicroBatching(rows=8), jobs.sharing(2)),
    "shared in 2 pairs": (4, DYNAMIC, (*jobs.sharing(2), *HSDP, *jobs.CHECKPOINTING)),
    "shared by 4 ranks, by rows": (4, MicroBatching(rows=3), jobs.sharing(4)),
}
ON_ONE = tuple(name for name in LAYOUTS if LAYOUTS[name][0] == 1)
EDGES = [
    [(1, 1), (3, 1), (2, 1)],  # single-token responses
    [(1, 1)],  # fewer tokens than ranks
    [(4, 3), (2, 2), (1, 1)],  # an odd number of tokens
    [(7, 6)] * 3,  # every response is cut at the limit, and every sequence as long as can be
    [(3, 0), (7, 6), (2, 0)],  # rows with nothing to learn from
    [(7, 6), (7, 6), (7, 6), (1, 1)],  # by tokens, the rank with the short row has a pass less
]


def random_batches(number: int) -> Iterator[jobs.Lengths]:
    """Up to six rows, one at least with something to learn from; in half of the batches all are truncated."""
    draw = random.Random(0)
    for index in range(number):
        lengths = [(draw.randint(1, 7), draw.randint(0, 6)) for _ in range(draw.randint(1, 6))]
        if index % 2:
            lengths = [(prompt, 6) for prompt, _ in lengths]
        yield lengths if any(response for _, response in lengths) else [*lengths, (2, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs.save_model(tmp_path_factory.mktemp("model"), "Llama", **jobs.ONE_KV_HEAD)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as processes:
        yield processes


@pytest.mark.parametrize(
    ("role", "mode", "names"),
    [
        (
            *(Role.Critic, "token-mean"),
            ("padded, by tokens", "packed, by tokens, on 2 ranks", "shared in 2 pairs"),
        ),
        *(
            pytest.param(role, mode, names, marks=pytest.mark.slow)
            for role, mode in ((Role.Actor, "seq-mean-token-mean"), (Role.Critic, "token-mean"))
            for names in (ON_ONE, (ON_ONE[0], *(name for name in LAYOUTS if name not in ON_ONE)))
        ),
    ],
    ids=[
        "critic",
        *(f"{role}, {ranks}" for role in ("actor", "critic") for ranks in ("one rank", "several")),
    ],
)
def test_one_gradient_whatever_the_layout(ranks, folder, role, mode, names):
    layouts = {name: LAYOUTS[name] for name in names}
    jobs.require_equal_gradients(ranks, folder, role, [*EDGES, *random_batches(2)], layouts, mode)


@pytest.mark.fast("packed, high")
@pytest.mark.parametrize(
    ("keys", "cap"),
    [
        (jobs.PADDED, LONGEST),
        pytest.param(jobs.PADDED, LONGEST + 7, marks=pytest.mark.slow),
        pytest.param(jobs.PACKED, LONGEST, marks=pytest.mark.slow),
        (jobs.PACKED, LONGEST + 7),
    ],
    ids=["padded, low", "padded, high", "packed, low", "packed, high"],
)
def test_ranks_take_equally_many_passes_and_none_above_the_cap(ranks, folder, keys, cap):
    batches, empty = [*EDGES, *random_batches(4)], 0
    by_rank = ranks.run(2, jobs.passes, folder, batches, MicroBatching(max_tokens=cap), *keys)
    for lengths, *of_ranks in zip(batches, *by_rank, strict=True):
        assert len({len(passes) for passes in of_ranks}) == 1
        learned = 0
        for tokens, places, to_learn in (one for passes in of_ranks for one in passes):
            assert (tokens if keys == jobs.PACKED else places) <= cap
            learned += to_learn
            empty += to_learn == 0
        assert learned == sum(response for _, response in lengths)
    assert empty  # else no rank had to run a pass for the others' collectives

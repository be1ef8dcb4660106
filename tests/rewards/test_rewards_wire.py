from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Iterator

import pytest

from strop.rewards.worker import wire


def close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    close(*ends)


def test_a_pipe_is_closed_when_its_last_writer_is(pipe: tuple[int, int]):
    assert not wire.is_closed(pipe[0])
    os.write(pipe[1], b"half")
    os.close(pipe[1])
    assert wire.is_closed(pipe[0])


Ends = tuple[wire.Lane, int, int]


@pytest.fixture
def lane(pipe: tuple[int, int]) -> Iterator[Ends]:
    """A lane, and the other side's ends: where requests arrive, and where answers are written."""
    requests, to_requests = os.pipe()
    os.set_blocking(to_requests, False)
    yield wire.Lane(to_requests, pipe[0]), requests, pipe[1]
    close(requests, to_requests)


def exchange(here: wire.Lane, seconds: float = 0.15) -> bytes | None:
    return here.exchange(time.monotonic() + seconds, lambda: True)


def test_both_directions_flow_although_neither_pipe_holds_it_all(lane: Ends):
    here, requests, answers = lane
    os.set_blocking(answers, True)
    messages = [os.urandom(300_000).hex().encode() for _ in range(5)]

    def echo() -> None:
        with os.fdopen(requests, "rb", closefd=False) as arriving, os.fdopen(answers, "wb") as leaving:
            for _ in messages:
                leaving.write(pickle.load(arriving)[::-1] + b"\n")

    there = threading.Thread(target=echo)
    there.start()
    for message in messages:
        here.post(pickle.dumps(message))
    found = []
    while len(found) < len(messages):
        if (answer := exchange(here, 20)) is not None:
            found.append(answer)
    there.join()
    assert found == [message[::-1] for message in messages]
    assert here.is_idle


def test_a_lane_returns_when_there_is_room_and_then_waits_for_answers(lane: Ends):
    here, requests, _ = lane
    here.post(b"one")
    assert not here.is_idle
    assert exchange(here) is None
    assert here.is_idle
    assert os.read(requests, 10) == b"one"
    with pytest.raises(TimeoutError):
        exchange(here)


def test_an_answer_in_the_pipe_counts_although_its_reader_is_late(lane: Ends):
    """A program that was busy all the time is no fault of the other side's."""
    here, _, answers = lane
    os.write(answers, b"in time\n")
    assert exchange(here, -1) == b"in time"
    with pytest.raises(TimeoutError):
        exchange(here, -1)

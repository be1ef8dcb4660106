from __future__ import annotations

import contextlib
import os
import struct
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


def test_messages_of_any_size_arrive_whole_and_in_order(pipe: tuple[int, int]):
    messages = [os.urandom(size) for size in (0, 1, 65_536, 0, 3_000_000)]

    def send() -> None:
        for message in messages:
            wire.send(pipe[1], message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [wire.receive(pipe[0]) for _ in messages] == messages
    sender.join()


def test_a_closed_end_is_an_error_on_both_sides(pipe: tuple[int, int]):
    assert not wire.is_closed(pipe[0])
    os.write(pipe[1], struct.pack(">Q", 10) + b"half")
    os.close(pipe[1])
    assert wire.is_closed(pipe[0])
    with pytest.raises(EOFError):
        wire.receive(pipe[0])
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        wire.send(writer, b"x")
    os.close(writer)


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
    messages = [os.urandom(300_000) for _ in range(5)]

    def echo() -> None:
        for _ in messages:
            wire.send(answers, wire.receive(requests)[::-1])

    there = threading.Thread(target=echo)
    there.start()
    for message in messages:
        here.post(message)
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
    assert wire.receive(requests) == b"one"
    with pytest.raises(TimeoutError):
        exchange(here)


def test_an_answer_in_the_pipe_counts_although_its_reader_is_late(lane: Ends):
    """A program that was busy all the time is no fault of the other side's."""
    here, _, answers = lane
    wire.send(answers, b"in time")
    assert exchange(here, -1) == b"in time"
    with pytest.raises(TimeoutError):
        exchange(here, -1)

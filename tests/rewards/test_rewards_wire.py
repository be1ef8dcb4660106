from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from strop.rewards.worker import wire


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:  # the test has closed it
            continue


def soon() -> float:
    return time.monotonic() + 0.15


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
def test_a_message_of_any_size_arrives_whole(pipe: tuple[int, int], size: int):
    message = os.urandom(size)
    sender = threading.Thread(target=wire.send, args=(pipe[1], message))
    sender.start()
    assert wire.receive(pipe[0]) == message
    sender.join()


def test_messages_keep_their_order_and_borders(pipe: tuple[int, int]):
    for message in (b"one", b"", b"three"):
        wire.send(pipe[1], message)
    assert [wire.receive(pipe[0]) for _ in range(3)] == [b"one", b"", b"three"]


def test_a_closed_end_is_an_error_on_both_sides(pipe: tuple[int, int]):
    assert not wire.is_closed(pipe[0])
    os.write(pipe[1], struct.pack(">Q", 10) + b"half")
    os.close(pipe[1])
    assert wire.is_closed(pipe[0])
    with pytest.raises(EOFError):
        wire.receive(pipe[0])


def test_writing_to_nobody_is_an_error(pipe: tuple[int, int]):
    os.close(pipe[0])
    with pytest.raises(BrokenPipeError):
        wire.send(pipe[1], b"x")


def test_a_length_that_no_message_has_is_refused(pipe: tuple[int, int]):
    os.write(pipe[1], b"print this")
    with pytest.raises(ValueError, match="not a message"):
        wire.receive(pipe[0])


@pytest.fixture
def lane(pipe: tuple[int, int]) -> Iterator[tuple[wire.Lane, int, int]]:
    """A lane, and the other side's ends: where requests arrive, and where answers are written."""
    requests, to_requests = os.pipe()
    os.set_blocking(to_requests, False)
    yield wire.Lane(to_requests, pipe[0]), requests, pipe[1]
    for end in (requests, to_requests):
        try:
            os.close(end)
        except OSError:  # the test has closed it
            continue


def alive() -> bool:
    return True


def test_both_directions_flow_although_neither_pipe_holds_it_all(lane: tuple[wire.Lane, int, int]):
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
        if (answer := here.exchange(time.monotonic() + 20, alive)) is not None:
            found.append(answer)
    there.join()
    assert found == [message[::-1] for message in messages]
    assert here.is_idle


def test_a_lane_tells_when_there_is_room_and_then_waits_for_answers(lane: tuple[wire.Lane, int, int]):
    here, requests, _ = lane
    here.post(b"one")
    assert not here.is_idle
    assert here.exchange(soon(), alive) is None
    assert here.is_idle
    assert wire.receive(requests) == b"one"
    with pytest.raises(TimeoutError):
        here.exchange(soon(), alive)


def test_an_answer_in_the_pipe_counts_although_its_reader_is_late(lane: tuple[wire.Lane, int, int]):
    """A program that was busy all the time is no fault of the other side's."""
    here, _, answers = lane
    wire.send(answers, b"in time")
    assert here.exchange(time.monotonic() - 1, alive) == b"in time"
    with pytest.raises(TimeoutError):
        here.exchange(time.monotonic() - 1, alive)


def test_answers_come_before_the_news_that_the_other_side_is_gone(lane: tuple[wire.Lane, int, int]):
    here, requests, answers = lane
    wire.send(answers, b"one")
    wire.send(answers, b"two")
    os.close(requests)
    os.close(answers)
    here.post(b"to nobody")
    assert here.exchange(soon(), alive) == b"one"
    assert here.exchange(soon(), alive) == b"two"
    with pytest.raises(EOFError):
        here.exchange(soon(), alive)


def test_a_lane_notices_a_dead_process_and_what_is_no_message(lane: tuple[wire.Lane, int, int]):
    here, _, answers = lane
    with pytest.raises(EOFError, match="ended"):
        here.exchange(time.monotonic() + 30, lambda: False)
    os.write(answers, b"print this")
    with pytest.raises(ValueError, match="message"):
        here.exchange(soon(), alive)

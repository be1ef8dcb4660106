"""Whole messages over a pipe: 8 bytes of length, then as many bytes; with a deadline where one is given.

A deadline needs a descriptor in non-blocking mode. Deadlines are values of ``time.monotonic()``.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable

_HEADER = struct.Struct(">Q")
_CHUNK = 1 << 16
_LOOK_S = 0.2
MAX_BYTES = 1 << 30


def send(descriptor: int, message: bytes, deadline: float | None = None) -> None:
    """Write one message. Raises ``TimeoutError`` past the deadline, ``BrokenPipeError`` without a reader."""
    unsent = memoryview(_HEADER.pack(len(message)) + message)
    while unsent:
        if deadline is not None:
            _wait(descriptor, select.POLLOUT, deadline)
        try:
            unsent = unsent[os.write(descriptor, unsent[:_CHUNK]) :]
        except BlockingIOError:  # less room than poll promised: wait again
            continue


def receive(
    descriptor: int, deadline: float | None = None, *, is_alive: Callable[[], bool] = lambda: True
) -> bytes:
    """Read one message.

    Raises:
        TimeoutError: past the deadline.
        EOFError: the other side is gone. A child that it left behind may hold the pipe open, so ``is_alive``
            is asked as well, a few times a second.
        ValueError: a length that no message has.
    """
    (length,) = _HEADER.unpack(_read_exactly(descriptor, _HEADER.size, deadline, is_alive))
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes: what came through the pipe is not a message")
    return _read_exactly(descriptor, length, deadline, is_alive)


def is_closed(descriptor: int) -> bool:
    """Whether nobody holds the other end of a pipe that we read."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))


def _read_exactly(descriptor: int, count: int, deadline: float | None, is_alive: Callable[[], bool]) -> bytes:
    pieces, missing = [], count
    while missing:
        if deadline is not None:
            _wait(descriptor, select.POLLIN, deadline, is_alive)
        piece = os.read(descriptor, min(missing, _CHUNK))
        if not piece:
            raise EOFError("the pipe is closed")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _wait(descriptor: int, event: int, deadline: float, is_alive: Callable[[], bool] = lambda: True) -> None:
    """Until the descriptor is ready (or its other end is gone, which the next call finds out)."""
    poll = select.poll()
    poll.register(descriptor, event)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        if poll.poll(min(remaining, _LOOK_S) * 1000):
            return
        if not is_alive():
            raise EOFError("the process has ended")

"""Whole messages over a pipe: 8 bytes of length, then as many bytes; with a deadline where one is given.

A deadline needs a descriptor in non-blocking mode. Deadlines are values of ``time.monotonic()``.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
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
    _require_length(length)
    return _read_exactly(descriptor, length, deadline, is_alive)


def _require_length(length: int) -> None:
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes: what came through the pipe is not a message")


class Lane:
    """Both pipes of a conversation, in which many messages may be on their way at once.

    The descriptors are in non-blocking mode. What does not fit into a pipe waits here.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(answers, select.POLLIN)

    @property
    def is_idle(self) -> bool:
        """Whether everything posted is in the pipe, so that there may be room for more."""
        return not self._unsent

    def post(self, message: bytes) -> None:
        """Send the message when ``exchange`` finds room for it."""
        if not self._unsent:
            self._poll.register(self._requests, select.POLLOUT)
        self._unsent.append(memoryview(_HEADER.pack(len(message)) + message))

    def exchange(self, deadline: float, is_alive: Callable[[], bool]) -> bytes | None:
        """Send and receive until an answer is whole, or (None) until all that was posted is in the pipe.

        Raises ``TimeoutError``, ``EOFError`` and ``ValueError`` as ``receive`` does. Answers that were
        written in time, or before the other side went, come first.
        """
        while (answer := self._next_answer()) is None:
            remaining = deadline - time.monotonic()
            ready = dict(self._poll.poll(max(0.0, min(remaining, _LOOK_S)) * 1000))
            if self._answers in ready:
                self._read()
            elif self._requests in ready:
                self._write()
                if not self._unsent:
                    return None
            elif remaining <= 0:
                raise TimeoutError("the deadline has passed")
            elif not is_alive() and not self._poll.poll(0):
                raise EOFError("the process has ended")
        return answer

    def _next_answer(self) -> bytes | None:
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        _require_length(length)
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        answer = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        return answer

    def _read(self) -> None:
        piece = os.read(self._answers, _CHUNK)
        if not piece:
            raise EOFError("the pipe is closed")
        self._received += piece

    def _write(self) -> None:
        try:
            while self._unsent:
                rest = self._unsent[0][os.write(self._requests, self._unsent[0][:_CHUNK]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except BrokenPipeError:  # its answers so far may still be in the other pipe, and then its end
            self._unsent.clear()
        self._poll.unregister(self._requests)


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

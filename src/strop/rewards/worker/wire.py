"""Messages over a pipe: 8 bytes of length, then the content. Deadlines are values of ``time.monotonic()``."""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable

_HEADER = struct.Struct(">Q")
_CHUNK = 1 << 16
_POLL_S = 0.2
MAX_BYTES = 1 << 30


def send(descriptor: int, message: bytes) -> None:
    """Write one message; block until it is in the pipe. Raises ``BrokenPipeError`` without a reader."""
    unsent = _framed(message)
    while unsent:
        unsent = unsent[os.write(descriptor, unsent[:_CHUNK]) :]


def receive(descriptor: int) -> bytes:
    """Read one message; block until it is complete.

    Raises:
        EOFError: the pipe is closed.
        ValueError: an impossible length.
    """
    (length,) = _HEADER.unpack(_read_exactly(descriptor, _HEADER.size))
    _require_length(length)
    return _read_exactly(descriptor, length)


def _framed(message: bytes) -> memoryview:
    return memoryview(_HEADER.pack(len(message)) + message)


def _read_exactly(descriptor: int, count: int) -> bytes:
    pieces, missing = [], count
    while missing:
        piece = os.read(descriptor, min(missing, _CHUNK))
        if not piece:
            raise EOFError("the pipe is closed")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _require_length(length: int) -> None:
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes: the pipe holds something that is not a message")


class Lane:
    """Both pipes of a conversation, with any number of messages in flight.

    The descriptors must be in non-blocking mode. Messages that do not fit into the pipe wait here.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(answers, select.POLLIN)

    @property
    def is_idle(self) -> bool:
        """True if everything posted is in the pipe, so that there may be room for more."""
        return not self._unsent

    def post(self, message: bytes) -> None:
        """Queue a message for ``exchange`` to send."""
        if not self._unsent:
            self._poll.register(self._requests, select.POLLOUT)
        self._unsent.append(_framed(message))

    def exchange(self, deadline: float, is_alive: Callable[[], bool]) -> bytes | None:
        """Send and receive until an answer is complete; return None once all posted messages are sent.

        Answers written before the deadline, or before the process ended, come before the error.

        Raises:
            TimeoutError: past the deadline. EOFError: the process is gone. A child of it may hold the pipe
            open, so ``is_alive`` is polled too. ValueError: an impossible length.
        """
        while (answer := self._next_answer()) is None:
            remaining = deadline - time.monotonic()
            ready = dict(self._poll.poll(max(0.0, min(remaining, _POLL_S)) * 1000))
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
        except BrokenPipeError:  # answers may still be in the other pipe; its end is the error
            self._unsent.clear()
        self._poll.unregister(self._requests)


def is_closed(descriptor: int) -> bool:
    """Return True if no process holds the other end of a pipe that this one reads."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

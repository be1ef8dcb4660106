"""The conversation with a scoring process: pickles one way, lines of JSON the other.

Deadlines are values of ``time.monotonic()``.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

_CHUNK = 1 << 16
_POLL_S = 0.2
_LONGEST_LINE = 1 << 20


class Lane:
    """Both pipes of a conversation, with any number of messages in flight.

    The descriptors must be in non-blocking mode. Messages that do not fit into the pipe wait here.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._unsent = bytearray()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(answers, select.POLLIN)

    @property
    def has_rest(self) -> bool:
        """True if bytes were received behind the last answer."""
        return bool(self._received)

    @property
    def is_idle(self) -> bool:
        """True if everything posted is in the pipe, so that there may be room for more."""
        return not self._unsent

    def post(self, message: bytes) -> None:
        """Queue a message for ``exchange`` to send."""
        if not self._unsent:
            self._poll.register(self._requests, select.POLLOUT)
        self._unsent += message

    def exchange(self, deadline: float, is_alive: Callable[[], bool]) -> bytes | None:
        """Send and receive until an answer is complete; return None once all posted messages are sent.

        Answers written before the deadline, or before the process ended, come before the error.

        Raises:
            TimeoutError: past the deadline. EOFError: the process is gone. A child of it may hold the pipe
            open, so ``is_alive`` is polled too. ValueError: a line too long for an answer.
        """
        while (end := self._received.find(b"\n")) < 0:
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
        answer = bytes(self._received[:end])
        del self._received[: end + 1]
        return answer

    def _read(self) -> None:
        piece = os.read(self._answers, _CHUNK)
        if not piece:
            raise EOFError("the pipe is closed")
        self._received += piece
        if len(self._received) > _LONGEST_LINE:
            raise ValueError(f"a line exceeds {_LONGEST_LINE} bytes")

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._requests, self._unsent[:_CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # answers may still be in the other pipe; its end is the error
            self._unsent.clear()
        self._poll.unregister(self._requests)


def is_quiet(descriptor: int) -> bool:
    """Return True if a pipe that this process reads is empty, and open at its other end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)

"""JSON messages between two sandboxes, encoding of values, first and last steps of a sandboxed process.

A message is its length in 4 bytes, then JSON.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import os
import resource
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_LENGTH_BYTES = 4
_PENDING_SIGNALS = 64  # of all processes, and timers: memory of the kernel

STDIN, STDOUT = "/dev/shm/stdin", "/dev/shm/stdout"
"""Targets of the links ``/dev/stdin`` and ``/dev/stdout``: there is no ``/proc/self/fd`` for them."""


class Closed(Exception):
    """The other end is gone, or violates the protocol. ``Channel.is_closed`` tells so for ever after."""


class Channel:
    """Blocking messages over a pair of pipes, of at most ``limit`` bytes each."""

    def __init__(self, reader: int, writer: int, limit: int) -> None:
        self._reader = reader
        self._writer = writer
        self._limit = limit
        self.is_closed = False

    def send(self, message: Any) -> None:
        """Send a message. Raises ``Closed``, or ``ValueError`` if it is too long."""
        content = json.dumps(message).encode()
        if len(content) > self._limit:
            raise ValueError(f"a value of {len(content)} bytes exceeds the limit of {self._limit}")
        rest = memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
        try:
            while rest:
                rest = rest[os.write(self._writer, rest) :]
        except OSError as error:
            raise self.closed() from error

    def receive(self) -> Any:
        """Wait for a message. Raises ``Closed``."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if length > self._limit:
            raise self.closed()
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError, MemoryError) as error:
            raise self.closed() from error

    def closed(self) -> Closed:
        """Return the exception, and remember it: code in between may ignore exceptions."""
        self.is_closed = True
        return Closed()

    def _read(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            chunk = os.read(self._reader, min(count - len(content), 1 << 20))
            if not chunk:
                raise self.closed()
            content += chunk
        return bytes(content)


_SAFE_INTEGER = 1 << 53
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, dict)}
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """Encode ``value`` as JSON; ``refer`` returns a number for an object that is not a plain value.

    Calls the methods of the built-in types directly, because a program's subclass may override them.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        exact = int.__add__(value, 0)
        return exact if -_SAFE_INTEGER < exact < _SAFE_INTEGER else {"int": hex(exact)}
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer) for item in kind.__iter__(value)]}
    if type(value) is range:
        return {"range": [encode(part, refer) for part in (value.start, value.stop, value.step)]}
    if type(value) in (Decimal, Fraction):
        return {type(value).__name__: str(value)}
    for name, kind in _TYPES.items():
        if value is kind:
            return {"type": name}
    return {"object": refer(value)}


def decode(message: Any, find: Callable[[int], Any]) -> Any:
    """Decode a message; ``find`` returns the stand-in for an object's number.

    Raises ``ValueError`` (or ``TypeError``) for a message that ``encode`` does not write.
    """
    if message is None or type(message) in (bool, int, str):
        return message
    if type(message) is not dict or len(message) != 1:
        raise ValueError("a message that is not a value")
    ((name, content),) = message.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, find) for item in content)
    match name:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(*map(float.fromhex, content))
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {decode(key, find): decode(item, find) for key, item in content}
        case "range":
            return range(*(decode(part, find) for part in content))
        case "Decimal":
            return Decimal(content)
        case "Fraction":
            return Fraction(content)
        case "type" if content in _TYPES:
            return _TYPES[content]
        case "object":
            return find(content)
    raise ValueError("a message of an unknown kind")


def read_job(descriptor: int) -> dict[str, Any]:
    """Read the job, close its file, and set the job's limits irrevocably."""
    with open(descriptor, "rb") as file:
        job = json.loads(file.read())
    limits = job["limits"]
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        resource.setrlimit(kind, (value, value))
    return job


def offer_exit() -> None:
    """Define ``exit()`` and ``quit()``, which are missing without the module ``site``."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)


def end_program() -> bool:
    """Take the interpreter's last steps, which ``os._exit`` leaves out; return True if all output is written.

    Threads that are not joined, functions of ``atexit`` and a replaced ``sys.stdout`` may print the answer.
    """
    is_written = True
    with contextlib.suppress(BaseException):  # a program may have changed any of these
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads that are not daemons
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    try:
        if not getattr(sys.stdout, "closed", sys.stdout is None):  # a replacement need not have it
            sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - it may have replaced it
        is_written = False
    with contextlib.suppress(BaseException):  # without a buffer, if the replacement has taken it
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    return is_written


def leave_streams() -> None:
    """Redirect standard error, ``/dev/stdin`` and ``/dev/stdout`` to null, where the streams 0 and 1 are."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    for path in (STDIN, STDOUT):
        os.symlink(os.devnull, path)

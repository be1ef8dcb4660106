"""Messages of JSON over a pair of pipes, each behind its length."""

from __future__ import annotations

import json
import os
from typing import Any

_LENGTH_BYTES = 4


class Closed(Exception):
    """The other end is gone, or does not keep to the rules."""


class Channel:
    """``receive`` and ``send`` block; neither takes a message of more than ``limit`` bytes."""

    def __init__(self, reader: int, writer: int, limit: int) -> None:
        self._reader = reader
        self._writer = writer
        self._limit = limit

    def send(self, message: Any) -> None:
        """Raises ``Closed``; ``ValueError`` for a message that is too long."""
        content = json.dumps(message).encode()
        if len(content) > self._limit:
            raise ValueError(f"a value of {len(content)} bytes as text; at most {self._limit} may cross")
        rest = memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
        try:
            while rest:
                rest = rest[os.write(self._writer, rest) :]
        except OSError as error:
            raise Closed from error

    def receive(self) -> Any:
        """Raises ``Closed``."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if length > self._limit:
            raise Closed
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise Closed from error

    def _read(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            chunk = os.read(self._reader, min(count - len(content), 1 << 20))
            if not chunk:
                raise Closed
            content += chunk
        return bytes(content)

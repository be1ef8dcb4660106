"""Messages checked by the keys, values and names in them, in any wording and order."""

from __future__ import annotations

import re


def naming(*parts: object) -> str:
    """Return a pattern for ``match=`` that requires all ``parts``."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts)


def mentions(text: object, *parts: object) -> bool:
    """Return True if ``text`` contains all ``parts``."""
    return all(str(part) in str(text) for part in parts)


class Message:
    """Value equal to any text that contains all ``parts``, for comparing lists of messages."""

    __hash__ = None

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __eq__(self, text: object) -> bool:
        return mentions(text, *self.parts)

    def __repr__(self) -> str:
        return f"Message{self.parts}"

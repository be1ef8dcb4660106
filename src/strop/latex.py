"""What data preparation and scoring both must know of LaTeX."""

from __future__ import annotations


def closing_brace(text: str) -> int | None:
    r"""Position of the brace that closes the one at position 0, or None when it stays open.

    ``\{`` and ``\}`` are characters, not braces.
    """
    depth, position = 0, 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None

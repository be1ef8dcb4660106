"""The nearest numbers that work, for errors about numbers that do not."""

from __future__ import annotations

from collections.abc import Iterable


def nearest_in_words(value: int, working: Iterable[int]) -> str:
    """`nearest: 64, 128`: the largest of `working` below `value` and the smallest above it."""
    candidates = sorted(working)
    below = [number for number in candidates if number < value][-1:]
    above = [number for number in candidates if number > value][:1]
    return (
        f"nearest: {', '.join(str(number) for number in below + above)}" if candidates else "no value works"
    )


def divisors(number: int) -> list[int]:
    """Every positive divisor of `number`, in order."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})

"""``Scorer``: all functions that score a sample, called for one sample or for a whole batch.

Its methods are coroutines. Without ``async def`` functions they never wait, and ``run`` completes them
without an event loop. ``Outcome`` is what they return, also for a sample that could not be scored.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from strop.config.reward_parts import KEY, RESERVED, RULE
from strop.errors import traceback_of
from strop.rewards.arguments import Function, Sample, ScoreFunction

Found = TypeVar("Found")

_LONGEST_TEXT = 20_000  # characters; the answer of a scoring process is a line of at most 1 MiB
LARGEST = 3.4028234663852886e38  # of float32, the type of the columns of scores


@dataclass(frozen=True)
class Outcome:
    """The result for one sample: a score, or the reason why there is none."""

    status: Literal["scored", "raised", "timeout", "crashed"]
    score: float | None = 0.0
    """Valid for ``scored``; None if the function does not apply to the sample."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Further named values, which ``score`` does not include; those of a ``Scorer`` are numbers, and texts or
    None, which are only recorded."""
    error: str = ""
    """The traceback, or how the process ended; "" for ``scored`` alone."""


def timed_out(timeout_s: float, *, batch: int | None = None, notes: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a sample whose deadline has passed; ``batch``: of a call for so many samples.

    ``notes``: what is known of the reason.
    """
    found = f"the reward function took longer than {timeout_s:g} s (reward_model.timeout_s) and was cut off"
    if batch is not None:
        found += f": a batch of {batch} samples is one call"
    return Outcome("timeout", error="; ".join([found, *notes]))


class Scorer:
    """The function of the data source, and those of the parts of a score (``reward_model.parts``)."""

    def __init__(self, own: Function, parts: Mapping[str, Function] | None = None) -> None:
        self.own, self.parts = own, dict(parts or {})
        functions = [own, *self.parts.values()]
        self.is_batch = any(function.is_batch for function in functions)
        """True if it scores a whole batch in one call."""
        self.is_async = any(function.is_async for function in functions)
        self.waits = any(function.waits() for function in functions)
        """True if it needs the complete batch."""
        self.takes_all = any(function.takes_all for function in functions)
        self.wanted = frozenset().union(*(function.wanted() for function in functions))
        """Names of the values that the functions name; they get others with ``takes_all``."""

    @classmethod
    def of(cls, function: ScoreFunction | Scorer) -> Scorer:
        """Return the scorer of a function alone."""
        return function if isinstance(function, Scorer) else cls(Function(function, "the reward function"))

    async def score(self, sample: Sample) -> Outcome:
        """Score one sample; exceptions of the functions propagate."""
        found = {}
        for name, function in self._functions(sample).items():
            found[name] = _read(function, await _called(function, function.of_sample(sample)))
        return _combined(found)

    async def score_all(self, samples: Sequence[Sample], *, limit: int = 1) -> list[Outcome]:
        """Score a batch: each function for a batch is called once, on the samples that it scores.

        Async functions run concurrently, those for one sample at most ``limit`` times. An exception of a
        function for a batch propagates; one of a function for one sample is the outcome of its sample.
        """
        needed = [self._functions(sample) for sample in samples]
        functions = {RULE: self.own, **self.parts}
        rows = {name: [row for row, own in enumerate(needed) if name in own] for name in functions}
        calls = {
            name: _column(functions[name], [samples[row] for row in of_it], limit)
            for name, of_it in rows.items()
            if of_it
        }
        if self.is_async:
            import asyncio  # only here: it would double the start time of a scoring process

            columns = await asyncio.gather(*calls.values())
        else:
            columns = [await call for call in calls.values()]
        found: list[dict[str, Outcome | None]] = [{} for _ in samples]
        for name, column in zip(calls, columns, strict=True):
            for row, outcome in zip(rows[name], column, strict=True):
                found[row][name] = outcome
        return [_combined_or_error(own) for own in found]

    @staticmethod
    def checked(outcome: Outcome) -> Outcome:
        """Return an outcome that came through the pipe of a scoring process.

        A number that is NaN, infinite or beyond float32 gives the status ``raised``; a part whose name does
        not consist of printable characters, ``crashed``. Raises ``ValueError`` for other parts than those of
        ``recorded``.
        """
        for name, value in outcome.parts.items():
            if isinstance(value, str):
                value.encode()  # raises for lone surrogates, which no file takes
            if name in RESERVED or not isinstance(value, float | str | None):
                raise ValueError(f"the part {name!r:.80} is {value!r:.80}")
            if not name.isprintable():  # files of metrics and samples, and terminals, do not take all
                found = f"the reward function named a part {name!r:.80}: expected printable characters"
                return Outcome("crashed", error=found)
        numbers = {name: value for name, value in outcome.parts.items() if isinstance(value, float)}
        numbers |= {} if outcome.score is None else {"score": outcome.score}
        if bad := [f"{name}={value}" for name, value in numbers.items() if not abs(value) <= LARGEST]:
            found = f"the reward function returned {', '.join(bad)}: expected finite numbers"
            return Outcome("raised", error=found)
        return outcome

    def _functions(self, sample: Sample) -> dict[str, Function]:
        if sample.parts is None:
            return {RULE: self.own}
        return {name: self.own if name == RULE else self.parts[name] for name in sample.parts}


async def _column(function: Function, samples: Sequence[Sample], limit: int) -> list[Outcome | None]:
    """Return a function's outcome for each sample; None where a function for a batch returned None."""
    if function.is_batch:
        found = await _called(function, function.of_batch(samples))
        if not isinstance(found, Iterable) or isinstance(found, Mapping | Set | str):
            raise TypeError(
                f"{function.place} returned {found!r:.80}: expected a list with a score for each of the "
                f"{len(samples)} samples, found {type(found).__name__}"
            )
        values = list(found)
        if len(values) != len(samples):
            raise ValueError(
                f"{function.place} returned {len(values)} scores for {len(samples)} samples: expected a list "
                "with one for each"
            )
        return [None if value is None else _read(function, value) for value in values]
    if not function.is_async:
        return [await _outcome(function, sample) for sample in samples]
    import asyncio

    places = asyncio.Semaphore(limit)

    async def in_turn(sample: Sample) -> Outcome:
        async with places:
            return await _outcome(function, sample)

    return await asyncio.gather(*map(in_turn, samples))


async def _outcome(function: Function, sample: Sample) -> Outcome:
    try:
        return _read(function, await _called(function, function.of_sample(sample)))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return Outcome("raised", error=traceback_of(error))


async def _called(function: Function, arguments: Mapping[str, Any]) -> Any:
    """Return what a function returns; at an error of types, note which columns are numbers and not text."""
    try:
        result = function.function(**arguments)
        if inspect.iscoroutine(result) and not function.is_async:
            result.close()
            raise TypeError(
                f"{function.place} returned a coroutine of {result.__qualname__}: expected a number, or a "
                "function that is declared with async def itself"
            )
        return await result if inspect.isawaitable(result) else result
    except (TypeError, AttributeError) as error:
        for remark in function.numbers(arguments):
            error.add_note(remark)
        raise


def _read(function: Function, result: Any) -> Outcome:
    """Return what a function returned as an outcome; the error of a wrong result names the function."""
    try:
        return outcome_of(result)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{function.place}: {error}") from error


def _combined_or_error(found: Mapping[str, Outcome | None]) -> Outcome:
    for outcome in found.values():
        if outcome is not None and outcome.error:
            return outcome
    try:
        return _combined(found)
    except ValueError as error:
        return Outcome("raised", error=traceback_of(error))


def _combined(found: Mapping[str, Outcome | None]) -> Outcome:
    """Return the score of the data source's function, with its parts and the scores of the others."""
    own = found.get(RULE)
    if len(found) == 1 and own is not None:
        return own
    numbers = {} if own is None else dict(own.parts)
    for name, outcome in found.items():
        if name in numbers:
            raise ValueError(f"the reward function returns a part {name!r}, which {KEY}.{name} also computes")
        if name != RULE and outcome is not None:
            numbers |= {} if outcome.score is None else {name: outcome.score}
            numbers |= {f"{name}/{part}": value for part, value in outcome.parts.items()}
    return Outcome("scored", None if own is None else own.score, numbers)


def outcome_of(result: Any) -> Outcome:
    """Convert a returned number, or a mapping with a number as "score" and further values (``recorded``).

    None as "score" leaves the sample out; None alone is an error, as of a function without ``return``.
    """
    if not isinstance(result, Mapping):
        return Outcome("scored", _number(result, "the score"))
    if "score" not in result:
        raise ValueError(f"the returned dict has no key 'score'; it has {sorted(map(str, result))}")
    parts = {
        str(name): recorded(value, f"part {name!r}") for name, value in result.items() if name != "score"
    }
    if taken := [name for name in RESERVED if name in parts]:
        raise ValueError(
            f"the returned dict names a part {taken[0]!r}, which is reserved; choose another name"
        )
    score = None if result["score"] is None else _number(result["score"], "the score")
    return Outcome("scored", score, parts)


def recorded(value: Any, name: str) -> float | str | None:
    """Return a part of a score: a number, None, or text; lists and mappings become JSON. Text is cut."""
    if value is None or not isinstance(value, str | list | tuple | Mapping):
        return None if value is None else _number(value, name)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text[:_LONGEST_TEXT].encode(errors="replace").decode()  # without lone surrogates


def _number(value: Any, name: str) -> float:
    # float() accepts strings: a function that returns its answer instead of a score would go unnoticed.
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r:.80}: expected a number, found text")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{name} is {value!r:.80}: expected a number, found {type(value).__name__}"
        ) from error


def run(scoring: Coroutine[Any, Any, Found]) -> Found:
    """Complete a coroutine that never waits."""
    try:
        scoring.send(None)
    except StopIteration as end:
        return end.value
    scoring.close()
    raise TypeError("the reward function waits, but it is not declared with async def")

"""Messages between a run and its scoring process: samples one way, outcomes the other."""

from __future__ import annotations

import json
import pickle
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from strop.config.reward_parts import RESERVED

_LARGEST = 3.4028234663852886e38  # of float32, the type of the columns of scores

Status = Literal["scored", "raised", "timeout", "crashed"]

ScoreFunction = Callable[..., Any]
"""Returns a number, or a dict with one under "score"; its parameters select what it is called with."""

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keywords of verl's reward functions."""


class Sample(NamedTuple):
    """The input of a scorer: one response with its reference."""

    data_source: str
    solution_str: str
    """The response alone, decoded, without special tokens."""
    ground_truth: Any = None
    extra_info: Any = None
    parts: tuple[str, ...] | None = None
    """Parts of the score to compute; None for a function without parts."""
    n_tokens: int | None = None
    """Sampled tokens of the response, with its stop token; None where only its text is known."""
    named: Mapping[str, Any] | None = None
    """Further values by name (``strop.rewards.arguments``), those that the functions take."""


class Request(NamedTuple):
    """A sample on its way to a scoring process, and the token that its answer must have."""

    token: str
    content: bytes
    """The pickled sample."""


@dataclass(frozen=True)
class Outcome:
    """The result for one sample: a score, or the reason why there is none."""

    status: Status
    score: float | None = 0.0
    """Valid for ``scored``; None if the function does not apply to the sample."""
    parts: dict[str, float] = field(default_factory=dict)
    """Further named numbers that the scorer returned; ``score`` does not include them."""
    error: str = ""
    """The traceback, or how the process ended; "" for ``scored`` alone."""


def encode(sample: Sample) -> Request | Outcome:
    """Return the request for a sample, or its outcome if it cannot be pickled."""
    try:
        return Request(secrets.token_hex(8), pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL))
    # Pickling runs user code, which may raise anything; treat it as a sample that raises in the scorer.
    except Exception as error:  # noqa: BLE001
        return Outcome("raised", error=f"the sample cannot be sent to the scoring process: {error}")


def timed_out(timeout_s: float, *, batch: int | None = None) -> Outcome:
    """Return the outcome of a sample whose deadline has passed; ``batch``: of a call for so many samples."""
    found = f"the reward function took longer than {timeout_s:g} s and was cut off"
    if batch is not None:
        found += f": a batch of {batch} samples is one call; reward_model.timeout_s is its limit"
    return Outcome("timeout", error=found)


def read_outcome(line: bytes, token: str) -> Outcome:
    """Read the answer of a scoring process to the request with this token (``read_answer``)."""
    return read_answer(line, (token,))[1]


def read_answer(line: bytes, tokens: Collection[str]) -> tuple[str, Outcome]:
    """Read an answer of a scoring process to one of the requests with these tokens; return token and outcome.

    A number that is NaN, infinite or beyond float32 gives the status ``raised``; a part whose name does not
    consist of printable characters, ``crashed``. Raises ``ValueError`` for anything that ``child`` does not
    send: a scorer can find and use the pipe of its process.
    """
    try:
        answer = json.loads(line)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
    match answer:
        case {
            "token": str(given),
            "status": "scored" | "raised" | "timeout" | "crashed" as status,
            "score": float() | None as score,
            "parts": dict(parts),
            "error": str(error),
        } if given in tokens and bool(error) == (status != "scored"):
            error.encode()  # raises for lone surrogates, which no file or terminal takes
        case _:
            raise ValueError(f"{line!r:.80} is no answer to the sample")
    for name, value in parts.items():
        if name in RESERVED or not isinstance(value, float):
            raise ValueError(f"the part {name!r:.80} is {value!r:.80}")
        if not name.isprintable():  # files of metrics and samples, and terminals, do not take all characters
            found = f"the reward function named a part {name!r:.80}: expected printable characters"
            return given, Outcome("crashed", error=found)
    numbers = parts if score is None else {"score": score, **parts}
    if bad := [f"{name}={value}" for name, value in numbers.items() if not abs(value) <= _LARGEST]:
        found = f"the reward function returned {', '.join(bad)}: expected finite numbers"
        return given, Outcome("raised", error=found)
    return given, Outcome(status, score, parts, error)


def outcome_of(result: Any) -> Outcome:
    """Convert a returned number, or a mapping with a number under "score" and further named numbers."""
    if not isinstance(result, Mapping):
        return Outcome("scored", _number(result, "the score"))
    if "score" not in result:
        raise ValueError(f"the returned dict has no key 'score'; it has {sorted(map(str, result))}")
    parts = {str(name): _number(value, f"part {name!r}") for name, value in result.items() if name != "score"}
    if taken := [name for name in RESERVED if name in parts]:
        raise ValueError(
            f"the returned dict names a part {taken[0]!r}, which is reserved; choose another name"
        )
    return Outcome("scored", _number(result["score"], "the score"), parts)


def _number(value: Any, name: str) -> float:
    # float() accepts strings: a function that returns its answer instead of a score would go unnoticed.
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r:.80}: expected a number, found text (leave such parts out)")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is {value!r:.80}: expected a number, found {type(value).__name__}"
        ) from error

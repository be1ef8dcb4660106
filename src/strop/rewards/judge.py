"""A judge: a language model on a server that rates responses (``reward_model.judge``).

The server speaks OpenAI's chat completions: vLLM, ``strop serve``, or a service. Its number is the part
``judge`` of the score; the prompt that it got, and its answer, stand beside it in the samples files.
"""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from strop.config.paths import expand
from strop.config.reward_parts import JUDGE, KEY
from strop.connection import Connection, Lost, Refused
from strop.errors import ConfigError, RewardError, raised_as
from strop.rewards.arguments import text_of_content

_RUBRIC = """\
Rate an answer to a task.

[Task]
{prompt}
[End of the task]
"""
_WITH_TRUTH = """
[Reference answer]
{ground_truth}
[End of the reference answer]
"""
_END = """
[Answer]
{response}
[End of the answer]

Say in a few sentences what is right in the answer and what is wrong. Then write a number from LOW to HIGH
on a line of its own, at the end: LOW for an answer that is wrong or of no use, HIGH for one that is right.
"""
_PLACE = re.compile(r"\{(prompt|response|ground_truth)\}")
_WORD = re.compile(r"[^\s/()\[\]:;=\"']+")
_PLAIN = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"{_PLAIN}%?")
_RANGE = re.compile(rf"(?<![\w.,])({_PLAIN})\s{{0,3}}(?:to|and|-|–)\s{{0,3}}({_PLAIN})(?![\w.,]*\d)")
_OF = re.compile(
    r"\s*(?:points?|marks?|stars?)?\s*[(,]?\s*(?:/|(?:out\s+)?of|on\s+a\s+scale\s+(?:of|to)|max(?:imum)?\.?(?:\s+is)?:?)"
    r"(?:\s+(?:an?|the))?(?:\s+(?:full|possible|maximum|total))?(?:\s+of)?\s*",
    re.IGNORECASE,
)
_UNCLEAR = re.compile(
    r"[^\n]*(?:(?:\(|\bscale|\b(?<!score )(?<!rating )(?<!grade )(?<!mark )(?<!total )of\b)"
    r"(?:\s+(?:an?|the|full|best|whole))*[\s:=]*|(?:\bmax\w*|\bfull marks?)[^\n\d]{0,20})",
    re.IGNORECASE,
)
"""Between two numbers, of which the second is the end of the scale: it may name the scale."""
_PAUSES_S = (0.5, 2.0)
"""Before a lost request is made again; the sample's deadline is ``reward_model.timeout_s``."""
_BUSY_S = 8.0
"""Longest pause before one that a server with too many requests has turned away, again and again."""
_NO_LIMIT_S, _CHECK_S = 86_400.0, 10.0
_LONGEST_SHOWN = 20_000
"""Characters of an answer in the files of samples: its end, where the number is."""

_connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Connection]]
_connections = weakref.WeakKeyDictionary()
"""By event loop. Each reads the certificates of services, which takes 20 ms of CPU time."""
_served: dict[str, str] = {}
"""Name of the model of a server that is to name it itself."""


def with_judge(parts: dict[str, Any], judge: Any) -> dict[str, Any]:
    """Return ``reward_model.parts`` with the part of the section ``judge``, of which they may have a weight.

    Raises ``ConfigError`` for a rubric without ``{response}``, and a part of this name with another scorer.
    """
    entry = parts.get(JUDGE, {})
    entry = dict(entry) if isinstance(entry, dict) else {"weight": entry}
    if entry.keys() & {"scorer", "kwargs"}:
        raise ConfigError(
            f"{KEY}.{JUDGE}: reward_model.judge.url gives it; give your own scorer another name"
        )
    url = judge.url.rstrip("/").removesuffix("/chat/completions")
    options = {
        "url": url if urlsplit(url).path else f"{url}/v1",
        "token_env": judge.token_env,
        "model": judge.model,
        "rubric": rubric_of(judge.rubric),
        "scale": tuple(judge.scale),
        "temperature": judge.temperature,
    }
    return {**parts, JUDGE: {**entry, "scorer": rate, "kwargs": options}}


def rubric_of(rubric: str | None) -> str | None:
    """Return the text of ``reward_model.judge.rubric``, of a file its content; None: the built-in one."""
    if rubric is None:
        return None
    if "{response}" in rubric:
        return rubric
    if os.path.isfile(file := expand(rubric)):
        with raised_as(ConfigError, f"reward_model.judge.rubric={file}", OSError, UnicodeDecodeError):
            rubric = Path(file).read_text(encoding="utf-8")
    if "{response}" not in rubric:
        raise ConfigError(
            f"reward_model.judge.rubric={rubric[:80]!r}: there is no such file, and as a text it has no "
            "{response}; expected a text, or a file with one, in which {prompt}, {response} and "
            "{ground_truth} are replaced"
        )
    return rubric


def reason_of_silence(judge: Any) -> str | None:
    """Return why the server of the section ``judge`` does not answer; None if it does."""
    options = with_judge({}, judge)[JUDGE]["kwargs"]

    async def ask() -> None:
        await Connection(options["url"], os.environ.get(judge.token_env or "")).call("/models", _CHECK_S)

    try:
        asyncio.run(ask())
    except (Lost, Refused) as error:
        return f"reward_model.judge.url={judge.url} does not answer: {error}"
    return None


async def rate(
    messages: Sequence[Mapping[str, Any]],
    response: str,
    ground_truth: Any = None,
    *,
    url: str,
    token_env: str | None,
    model: str | None,
    rubric: str | None,
    scale: tuple[float, float],
    temperature: float | None,
) -> dict[str, Any]:
    """Return the score of a response, 0 to 1, with the judge's ``prompt`` and ``answer``.

    Raises ``RewardError`` if the judge does not answer, or without a number of its scale.
    """
    (low, high), has_truth = scale, ground_truth not in (None, "")
    if rubric is None:
        rubric = _RUBRIC + (_WITH_TRUTH if has_truth else "") + _END
        rubric = rubric.replace("LOW", f"{low:g}").replace("HIGH", f"{high:g}")
    elif not has_truth and "{ground_truth}" in rubric:
        raise RewardError("reward_model.judge.rubric has {ground_truth}, and this row has none")
    values = {"prompt": text_of(messages), "response": response, "ground_truth": str(ground_truth)}
    asked = _PLACE.sub(lambda place: values[place[1]], rubric)  # in one pass: a response may have {prompt}
    connection, pauses, busy_s = _connection(url, token_env), list(_PAUSES_S), 0.5
    while True:
        try:
            answer = await _chat(connection, model, asked, temperature)
            break
        except Lost as lost:
            if not lost.is_busy and not pauses:
                raise RewardError(f"the judge at {url} does not answer: {lost}") from None
            try:
                await asyncio.sleep(busy_s if lost.is_busy else pauses.pop(0))
            except asyncio.CancelledError as cancelled:  # by the deadline, which would say nothing of a quota
                cancelled.add_note(f"the last answer of the judge at {url}: {lost}")
                raise
            busy_s = min(2 * busy_s, _BUSY_S)
        except Refused as refused:
            _served.pop(url, None)  # another model may be there
            raise RewardError(f"the judge at {url} refuses: {refused}") from None
    score = (number_in(answer, low, high) - low) / (high - low)
    return {"score": score, "prompt": asked, "answer": answer[-_LONGEST_SHOWN:]}


rate.of_any_source = True  # ty: ignore[missing-attribute]


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as a judge reads it: a single message as it is, of several each with its role."""
    texts = [text_of_content(message.get("content")) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def number_in(answer: str, low: float, high: float) -> float:
    """Return the last number of an answer; in "7/10" and "7 out of 10" that is 7.

    Raises ``RewardError`` if there is none, if it is beyond the scale, or if it is not plain, as in "7-8": a
    policy would learn whatever makes a judge write what is misread.
    """
    _, _, said = answer.rpartition("</think>")
    said = re.sub(r"[*_`$]", "", said.replace("\u2212", "-")).strip()
    if "<think>" in said:
        raise RewardError(f"the judge thought, and did not answer: {said[-200:]!r}")
    said = _RANGE.sub(lambda ends: "" if [*map(_value, ends.groups())] == [low, high] else ends[0], said)
    words = [word for word in _WORD.finditer(said) if re.search(r"\d", word[0])]
    numbers = [_value(word[0].rstrip(",.!?")) for word in words[-2:]]
    if len(numbers) == 2 and numbers[1] == high:
        between = said[words[-2].end() : words[-1].start()]
        if _OF.fullmatch(between):
            numbers.pop()
        elif _UNCLEAR.fullmatch(between):
            raise RewardError(f"the judge's answer may end with its scale: {said[-200:]!r}")
    if not numbers or numbers[-1] is None:
        raise RewardError(f"the judge's answer ends with no plain number: {said[-200:]!r}")
    if not low <= numbers[-1] <= high:
        raise RewardError(
            f"the judge's number {numbers[-1]:g} is beyond {low:g} to {high:g}: {said[-200:]!r}"
        )
    return numbers[-1]


def _value(word: str) -> float | None:
    return float(word.rstrip("%").replace(",", "")) if _NUMBER.fullmatch(word) else None


async def _chat(connection: Connection, model: str | None, text: str, temperature: float | None) -> str:
    """Return the answer to one user message. Raises ``Lost`` and ``Refused``."""
    if model is None and (model := _served.get(connection.url)) is None:
        models: Any = (await connection.call("/models", _NO_LIMIT_S)).get("data")
        try:
            model = _served[connection.url] = str(models[0]["id"])
        except (TypeError, LookupError):
            raise Refused(f"/models names no model: {str(models)[:200]}") from None
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        **({} if temperature is None else {"temperature": temperature, "seed": 0}),
    }
    found = await connection.call("/chat/completions", _NO_LIMIT_S, body)
    try:
        choice = found["choices"][0]
        answer, end = choice["message"]["content"], choice.get("finish_reason")
    except (TypeError, LookupError, AttributeError):
        raise Lost(f"an answer of another form: {str(found)[:200]}") from None
    if end == "length":
        raise RewardError(f"the judge's answer was cut at the server's limit: {str(answer)[-200:]!r}")
    return "" if answer is None else str(answer)


def _connection(url: str, token_env: str | None) -> Connection:
    known = _connections.setdefault(asyncio.get_running_loop(), {})
    if (url, token_env) not in known:
        known[url, token_env] = Connection(url, os.environ.get(token_env or ""))
    return known[url, token_env]

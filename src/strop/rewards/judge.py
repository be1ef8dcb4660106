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

from strop.config.paths import expand
from strop.config.reward_parts import JUDGE, KEY
from strop.connection import Connection, Lost, Refused
from strop.errors import ConfigError, RewardError

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
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?")
_PAUSES_S = (0.5, 2.0)
"""Before a lost request is made again; the sample's deadline is ``reward_model.timeout_s``."""
_NO_LIMIT_S = 86_400.0

_connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Connection]]
_connections = weakref.WeakKeyDictionary()
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
    options = {
        "url": judge.url.rstrip("/").removesuffix("/v1"),
        "token_env": judge.token_env,
        "model": judge.model,
        "rubric": rubric_of(judge.rubric),
        "scale": tuple(judge.scale),
    }
    return {**parts, JUDGE: {**entry, "scorer": rate, "kwargs": options}}


def rubric_of(rubric: str | None) -> str | None:
    """Return the text of ``reward_model.judge.rubric``, of a file its content; None: the built-in one."""
    if rubric is None:
        return None
    if (file := Path(expand(rubric))) and os.path.isfile(file):
        rubric = file.read_text(encoding="utf-8")
    if "{response}" not in rubric:
        raise ConfigError(
            f"reward_model.judge.rubric={rubric[:80]!r}: there is no such file, and as a text it has no "
            "{response}; expected a text, or a file with one, in which {prompt}, {response} and "
            "{ground_truth} are replaced"
        )
    return rubric


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
) -> dict[str, Any]:
    """Return the score of a response, 0 to 1, with the judge's ``prompt`` and ``answer``.

    Raises ``RewardError`` if the judge does not answer, or without a number of its scale.
    """
    low, high = scale
    if rubric is None:
        rubric = _RUBRIC + (_WITH_TRUTH if ground_truth is not None else "") + _END
        rubric = rubric.replace("LOW", f"{low:g}").replace("HIGH", f"{high:g}")
    elif ground_truth is None and "{ground_truth}" in rubric:
        raise RewardError("reward_model.judge.rubric has {ground_truth}, and this row has none")
    values = {"prompt": text_of(messages), "response": response, "ground_truth": str(ground_truth)}
    asked = _PLACE.sub(lambda place: values[place[1]], rubric)  # in one pass: a response may have {prompt}
    connection = _connection(url, token_env)
    for pause_s in (*_PAUSES_S, None):
        try:
            answer = await _chat(connection, model, asked)
            break
        except Lost as lost:
            if pause_s is None:
                raise RewardError(f"the judge at {url} does not answer: {lost}") from None
            await asyncio.sleep(pause_s)
        except Refused as refused:
            raise RewardError(f"the judge at {url} refuses: {refused}") from None
    return {"score": (number_in(answer, low, high) - low) / (high - low), "prompt": asked, "answer": answer}


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as a judge reads it: a single message as it is, of several each with its role."""
    texts = []
    for message in messages:
        parts = message.get("content") or ""
        parts = [{"text": parts}] if isinstance(parts, str) else parts
        texts.append("".join(str(part.get("text", "[picture]")) for part in parts))
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def number_in(answer: str, low: float, high: float) -> float:
    """Return the last number of an answer; in "7/10" and "7 out of 10" that is 7.

    Raises ``RewardError`` if there is none, or if it is beyond the scale.
    """
    found = _NUMBER.findall(re.sub(rf"\s*(?:/|\bout of\b)\s*{high:g}(?![\d.]*\d)", "", answer))
    if not found:
        raise RewardError(f"the judge's answer has no number: {answer[-200:]!r}")
    if not low <= float(found[-1]) <= high:
        raise RewardError(f"the judge's number is {found[-1]}, beyond {low:g} to {high:g}: {answer[-200:]!r}")
    return float(found[-1])


async def _chat(connection: Connection, model: str | None, text: str) -> str:
    """Return the answer to one user message, by greedy decoding. Raises ``Lost`` and ``Refused``."""
    if model is None and (model := _served.get(connection.url)) is None:
        models: Any = (await connection.call("/v1/models", _NO_LIMIT_S)).get("data")
        try:
            model = _served[connection.url] = str(models[0]["id"])
        except (TypeError, LookupError):
            raise Refused(f"/v1/models names no model: {str(models)[:200]}") from None
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "seed": 0,
    }
    found = await connection.call("/v1/chat/completions", _NO_LIMIT_S, body)
    try:
        answer = found["choices"][0]["message"]["content"]
    except (TypeError, LookupError):
        raise Lost(f"an answer of another form: {str(found)[:200]}") from None
    return "" if answer is None else str(answer)


def _connection(url: str, token_env: str | None) -> Connection:
    known = _connections.setdefault(asyncio.get_running_loop(), {})
    if (url, token_env) not in known:
        known[url, token_env] = Connection(url, os.environ.get(token_env or ""))
    return known[url, token_env]

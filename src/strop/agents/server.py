"""The endpoint: chat completions over HTTP, in a thread of its own.

A ``Handler`` answers the requests; this module reads and writes them as OpenAI's API has them. Refusals are
final: the official client sends 408, 409, 429 and 5xx again, and others not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from strop.agents.chat import ChatAnswer, Refusal
from strop.errors import traceback_of
from strop.listening import BACKLOG, Address, bearer

_LARGEST_BODY = 16 << 20
_BODY_S = 60.0
"""Seconds in which a body has to arrive."""
_CLOSE_S = 10.0
_FINAL = {"x-should-retry": "false"}


_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Reply(NamedTuple):
    """An answer to a request."""

    name: str
    answer: ChatAnswer
    message: dict[str, Any]
    n_prompt: int
    n_answer: int
    is_cut: bool
    """It has no stop token, and none of the request's stops."""


class Handler(Protocol):
    """Answer requests; its methods are called in the server's thread."""

    async def answer(self, key: str, body: dict[str, Any], retry: int | None, mark: str | None) -> Reply:
        """Answer a request of the session ``key``; ``Refusal`` if it cannot be.

        ``retry``: number of times that it was sent before; None: its client does not count them.
        ``mark``: its idempotency key. Cancelled if the client is gone.
        """
        ...

    def models(self) -> Sequence[str]:
        """Return the names of models."""
        ...


class Server:
    """An endpoint at an address."""

    def __init__(self, handler: Handler, address: Address, *, key_in_path: bool) -> None:
        """``key_in_path``: the key stands in /s/KEY/v1; else requests are those of ``Address.refusal``."""
        self._handler, self._address, self._key_in_path = handler, address, key_in_path
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="strop-endpoint", daemon=True).start()
        self._runner = asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result()
        self._closing = weakref.finalize(self, _close, self.loop, self._runner)

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=_LARGEST_BODY)
        before = "/s/{key}" if self._key_in_path else ""
        app.router.add_post(f"{before}/v1/chat/completions", self._with_token(self._complete))
        app.router.add_get(f"{before}/v1/models", self._with_token(self._models))
        app.router.add_get(f"{before}/v1/models/{{name:.+}}", self._with_token(self._model))
        app.router.add_route("*", "/{path:.*}", _unknown)
        # a handler is cancelled when its client is gone
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self._address.socket, backlog=BACKLOG).start()
        return runner

    def close(self, *, wait: bool = True) -> None:
        """Stop listening; requests in work are cancelled. ``wait``: until the address is free."""
        if (ending := self._closing()) is not None and wait:
            ending.result(_CLOSE_S)

    def _with_token(self, answer: _Answer) -> _Answer:
        """Return a function that calls ``answer`` for requests with the token, and answers a ``Refusal``."""

        async def handle(request: web.Request) -> web.StreamResponse:
            given = [bearer(request.headers.get("Authorization", ""))]
            try:
                if not self._key_in_path and (refused := self._address.refusal(request.host, given)):
                    raise Refusal(*refused, code="invalid_api_key" if refused[0] == 401 else None)
                return await answer(request)
            except Refusal as refusal:
                return _refused(refusal.status, str(refusal), refusal.code)

        return handle

    async def _models(self, request: web.Request) -> web.StreamResponse:
        models = [_model_named(name) for name in self._handler.models()]
        return web.json_response({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name, names = request.match_info["name"], self._handler.models()
        if name not in names:
            raise Refusal(
                404, f"there is no model {name[:80]!r}; the models are {', '.join(names)}", "model_not_found"
            )
        return web.json_response(_model_named(name))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await _body_of(request)
            sent = request.headers.get("x-stainless-retry-count", "")  # by OpenAI's clients
            retry, mark = int(sent) if sent.isdecimal() else None, request.headers.get("Idempotency-Key")
            reply = await self._handler.answer(request.match_info.get("key", ""), body, retry, mark)
        except Refusal:
            raise
        except RecursionError:
            return _refused(400, "arguments of calls are nested too deep")
        except Exception as error:  # noqa: BLE001 - a fault of strop: the client shows it
            return _refused(500, traceback_of(error))
        if body.get("stream"):
            return await _streamed(request, body, reply)
        return web.json_response(_completion(body, reply))


def _model_named(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "strop"}


async def _unknown(request: web.Request) -> web.StreamResponse:
    served = "POST /chat/completions and GET /models are served; set the chat completions of your library"
    return _refused(404, f"{request.method} {request.path[-80:]} is not served: {served}")


def _close(loop: asyncio.AbstractEventLoop, runner: web.AppRunner) -> Future[None]:
    async def end() -> None:
        await runner.cleanup()
        loop.call_soon(loop.stop)

    return asyncio.run_coroutine_threadsafe(end(), loop)


async def _body_of(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(_BODY_S):
            body = await request.json(loads=_json_of)
    except web.HTTPRequestEntityTooLarge as error:
        raise Refusal(413, f"the body exceeds {_LARGEST_BODY >> 20} MiB") from error
    except TimeoutError as error:
        raise Refusal(400, f"the body did not arrive within {_BODY_S:g} s") from error
    except (ValueError, RecursionError, LookupError, web.RequestPayloadError) as error:
        raise Refusal(400, f"the body is no JSON: {error!s:.200}") from error
    return body


def _json_of(text: str) -> Any:
    if "\\ud" in text.lower():  # lone surrogates, which neither tokenizers nor files take
        text = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace").decode()
    return json.loads(text)


def _refused(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers=_FINAL)


def _reason(reply: Reply) -> str:
    if reply.is_cut:
        return "length"
    return "tool_calls" if reply.answer.calls else "stop"


def _head(body: dict[str, Any], reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.name}",
        "object": kind,
        "created": 0,
        "model": str(body.get("model") or "policy"),
    }


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.n_prompt + reply.n_answer
    return {"prompt_tokens": reply.n_prompt, "completion_tokens": reply.n_answer, "total_tokens": total}


def _completion(body: dict[str, Any], reply: Reply) -> dict[str, Any]:
    message = {**reply.message}
    if reply.answer.thinking:
        message["reasoning_content"] = reply.answer.thinking
    if reply.answer.calls and not message["content"]:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": _reason(reply), "logprobs": None}
    return {**_head(body, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


async def _streamed(request: web.Request, body: dict[str, Any], reply: Reply) -> web.StreamResponse:
    """Send a finished answer as a stream of pieces."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    pieces: list[dict[str, Any]] = [{"role": "assistant"}]
    if reply.answer.thinking:
        pieces.append({"reasoning_content": reply.answer.thinking})
    if reply.message["content"]:
        pieces.append({"content": reply.message["content"]})
    for index, call in enumerate(reply.message.get("tool_calls", ())):
        named = {"name": call["function"]["name"], "arguments": ""}
        begun = {"index": index, "id": call["id"], "type": "function", "function": named}
        rest = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
        pieces += [{"tool_calls": [begun]}, {"tool_calls": [rest]}]
    head = _head(body, reply, "chat.completion.chunk")
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces
    ]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _reason(reply)}]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage(reply)})
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks]
    with contextlib.suppress(ConnectionResetError):  # the client is gone
        await response.prepare(request)
        await response.write("".join([*lines, "data: [DONE]\n\n"]).encode())
        await response.write_eof()
    return response

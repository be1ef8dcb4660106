"""``mcp:COMMAND`` and ``mcp:URL``: the tools of a server of the Model Context Protocol.

A sample has a connection, and of a command a server, of its own, from its first call to its end; with
``mcp-shared:`` the samples of a process have one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TextIO

from strop.errors import ConfigError, MissingExtraError

_LIST_S = 120.0
_shared: dict[str, _Connection] = {}


class ToolError(Exception):
    """A tool of the server answered with an error."""


class Server:
    """The tools of a server; subclasses have its name."""

    given: ClassVar[str] = ""
    """``mcp:COMMAND``, ``mcp-shared:URL``."""
    folder: ClassVar[str] = ""
    """The folder in which a command runs."""
    json_schemas: ClassVar[list[dict[str, Any]]] = []

    def __init__(self) -> None:
        self._own: _Connection | None = None

    def reset(self) -> None:
        """Wait for the first call: many samples make none."""

    async def call(self, name: str, /, **arguments: Any) -> str:
        """Call a tool; return the texts of its result, a line each."""
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        if self.given.startswith("mcp-shared:"):
            if self.given not in _shared:
                _shared[self.given] = _Connection(self.given, self.folder)
            connection = _shared[self.given]
        else:
            connection = self._own = self._own or _Connection(self.given, self.folder)
        try:
            result = await (await connection.client).call_tool(name, arguments)
        except Exception as error:
            code = getattr(error, "code", None)
            # of a server that was started again and does not know the session
            is_forgotten = code == INVALID_REQUEST and "session" in str(error).lower()
            has_ended = connection.has_failed() or code == CONNECTION_CLOSED or is_forgotten
            if has_ended and _shared.get(self.given) is connection:  # without state, another one is as good
                _shared.pop(self.given).end()
            raise
        texts = [_text_of(part) for part in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        if result.is_error:
            raise ToolError("\n".join(texts))
        return "\n".join(texts)

    async def close(self) -> None:
        """Close the sample's own connection."""
        if self._own is not None:
            await self._own.end()


class _Connection:
    """A client in a task of its own: it must be left in the task in which it was entered."""

    def __init__(self, given: str, folder: str) -> None:
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._hold(given, folder))

    async def _hold(self, given: str, folder: str) -> None:
        try:
            async with _client(given, folder) as client:
                self.client.set_result(client)
                await self._end.wait()
        # A server may fail in any way; its calls raise it, and after them it does not matter.
        except Exception as error:  # noqa: BLE001
            if not self.client.done():
                self.client.set_exception(_first(error))

    def has_failed(self) -> bool:
        """Return True if there is no client."""
        return self.client.done() and self.client.exception() is not None

    def end(self) -> asyncio.Task[None]:
        """Leave the client; return the task, which ends then."""
        self._end.set()
        return self._task


def _first(error: Exception) -> Exception:
    """Return the first error of a group of them."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _client(given: str, folder: str, errors: TextIO | None = None) -> Any:
    """Return a client that is not connected yet; ``errors`` gets what a command prints there."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    where = given.partition(":")[2]
    if where.startswith(("http://", "https://")):
        return Client(where)
    command, *arguments = shlex.split(where)
    program = StdioServerParameters(command=command, args=arguments, env=dict(os.environ), cwd=folder)
    return Client(stdio_client(program) if errors is None else stdio_client(program, errors))


def load_mcp(given: str, key: str) -> type[Server]:
    """Return the class for ``mcp:...`` or ``mcp-shared:...``, with the tools that the server lists.

    Raises ``ConfigError`` if it does not.
    """
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("mcp", "mcp", f"{key}={given}") from error
    folder = os.getcwd()
    with tempfile.TemporaryFile("w+") as errors:
        try:
            with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop
                tools = thread.submit(asyncio.run, _tools(given, folder, errors)).result()
        except Exception as given_error:  # of the library, the system, or groups of these
            error = _first(given_error)
            errors.seek(0)
            printed = errors.read()[-2000:].strip()
            raise ConfigError(
                f"{key}={given}: the server lists no tools: {type(error).__name__}: {error}"
                + (f"; the last it printed:\n{printed}" if printed else "")
            ) from given_error
    if not tools:
        raise ConfigError(f"{key}={given}: the server has no tools")
    return type(given, (Server,), {"given": given, "folder": folder, "json_schemas": tools})


async def _tools(given: str, folder: str, errors: Any) -> list[dict[str, Any]]:
    found, cursor = [], None
    async with asyncio.timeout(_LIST_S), _client(given, folder, errors) as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                break
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in found
    ]


def _text_of(part: Any) -> str:
    """Return the text of a part of an answer, also of a resource in it; of a link its URI."""
    text = getattr(getattr(part, "resource", part), "text", None)
    return text if text is not None else str(getattr(part, "uri", None) or f"[{part.type}]")

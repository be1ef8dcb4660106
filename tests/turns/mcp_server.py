"""A server of the package ``mcp`` with a state: on standard input, or over HTTP on a given port."""

import os
import sys

from mcp.server import MCPServer

server = MCPServer("counter", log_level="ERROR")
count = 0


@server.tool()
def add(number: int) -> int:
    """Add to the counter, and return it."""
    global count
    count += number
    return count


@server.tool()
def close(function: str, self: str = "") -> str:
    """Return arguments whose names Python uses."""
    return f"{function} {self}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no such thing")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()

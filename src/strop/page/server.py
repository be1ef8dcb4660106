"""``strop view RUN --web``: the page of a run over HTTP, by the standard library.

A request names entries of tables that are fixed at the start (the page's files, the API's functions, the
runs by number), never a path. Only ``GET`` is served. A request needs the token of the printed address, or
the cookie that the first one sets.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from strop.errors import DataError, in_one_line
from strop.listening import Address
from strop.page import SCRIPTS, STATIC, STYLES, page_file
from strop.page.files import RunFiles

DEFAULT_PORT = 8390
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_GZIP_FROM = 1 << 16
_ROWS_AT_ONCE = 256


class BadRequestError(Exception):
    """A parameter is missing or malformed."""


Parameters = Mapping[str, str]


def _number(parameters: Parameters, name: str, default: int | None = None) -> int:
    text = parameters.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.removeprefix("-").isdecimal() or len(text) > 12:
        raise BadRequestError(f"{name}={text!r}: expected a number")
    return int(text)


def _samples_of(parameters: Parameters) -> tuple[str, int]:
    return parameters.get("kind", ""), _number(parameters, "step")


def _rows(run: RunFiles, parameters: Parameters) -> list[dict[str, Any]]:
    rows = [_number({"rows": row}, "rows") for row in parameters.get("rows", "").split(",")]
    if len(rows) > _ROWS_AT_ONCE:
        raise BadRequestError(f"{len(rows)} rows: expected at most {_ROWS_AT_ONCE}")
    return run.rows(*_samples_of(parameters), rows, tokens=parameters.get("tokens") == "1")


def _history(run: RunFiles, parameters: Parameters) -> list[dict[str, Any]]:
    kind, step = _samples_of(parameters)
    [sample] = run.rows(kind, step, [_number(parameters, "row")])
    return run.history(kind, sample["prompt"], sample["images"])


API: Mapping[str, Callable[[RunFiles, Parameters], Any]] = {
    "summary": lambda run, parameters: run.summary(),
    "metrics": lambda run, parameters: run.metrics(_number(parameters, "after", -1)),
    "facts": lambda run, parameters: run.facts(),
    "validation": lambda run, parameters: run.validation(),
    "distributions": lambda run, parameters: run.distributions(parameters.get("kind", "")),
    "columns": lambda run, parameters: run.columns(*_samples_of(parameters)),
    "search": lambda run, parameters: run.search(*_samples_of(parameters), parameters.get("text", "")),
    "rows": _rows,
    "pictures": lambda run, parameters: run.pictures(parameters.get("names", "").split(",")),
    "history": _history,
}


def page_html() -> str:
    """Return the page that loads its styles and scripts from the server."""
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script defer src="/static/{name}"></script>\n' for name in SCRIPTS)
    return page_file("index.html").replace("<!-- files -->", styles + scripts)


class PageServer(ThreadingHTTPServer):
    """Serve the page of ``runs`` at an address."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunFiles], address: Address) -> None:
        self.runs, self.address = list(runs), address
        self.path = f"/?token={address.token}" if address.token else "/"
        """For a browser, which then keeps the token."""
        self.pages = {"/": ("text/html", page_html().encode())}
        for name in (*STYLES, *SCRIPTS):
            path = STATIC / name
            self.pages[f"/static/{name}"] = (_TYPES[path.suffix], path.read_bytes())
        super().__init__((address.host, address.port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = address.socket

    @property
    def cookie(self) -> str:
        """Name of the cookie with the token.

        Browsers send a host's cookies to all its ports, and pages of several machines may be forwarded to
        one: each token has a name of its own.
        """
        return f"strop-{hashlib.sha256((self.address.token or '').encode()).hexdigest()[:12]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that left in the midst of a request; print the traceback of other errors."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    @property
    def _page(self) -> PageServer:
        assert isinstance(self.server, PageServer)
        return self.server

    def do_GET(self) -> None:
        """Answer a request for the page, one of its files or data."""
        try:
            address = urlsplit(self.path)
        except ValueError:
            self._fail(HTTPStatus.BAD_REQUEST, "malformed address")
            return
        cookies = re.findall(rf"(?:^|; ?){self._page.cookie}=(\w+)", self.headers.get("Cookie", ""))
        tokens = [*parse_qs(address.query).get("token", []), *cookies]
        if refused := self._page.address.refusal(self.headers.get("Host", ""), tokens):
            self._fail(*refused)
        elif address.path in self._page.pages:
            self._send(HTTPStatus.OK, *self._page.pages[address.path])
        elif (name := address.path.removeprefix("/api/")) == "runs":
            names = json.dumps([run.folder.name for run in self._page.runs])
            self._send(HTTPStatus.OK, "application/json", names.encode())
        elif address.path.startswith("/api/") and name in API:
            self._answer(API[name], {key: values[-1] for key, values in parse_qs(address.query).items()})
        else:
            self._fail(HTTPStatus.NOT_FOUND, "not a part of the page")

    def _answer(self, read: Callable[[RunFiles, Parameters], Any], parameters: Parameters) -> None:
        try:
            number = _number(parameters, "run", 0)
            if not 0 <= number < len(self._page.runs):
                raise BadRequestError(f"run={number}: expected 0 to {len(self._page.runs) - 1}")
            text = json.dumps(
                read(self._page.runs[number], parameters), allow_nan=False, separators=(",", ":")
            )
        except BadRequestError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        except DataError as error:
            self._fail(HTTPStatus.NOT_FOUND, str(error))
        except Exception as error:  # noqa: BLE001 - a damaged file of the run, in ways that nothing lists
            self._fail(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"a file of the run is damaged: {in_one_line(error)}"
            )
        else:
            self._send(HTTPStatus.OK, "application/json", text.encode())

    def _fail(self, status: int, message: str) -> None:
        self._send(status, "application/json", json.dumps({"error": message}).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}
        if status == HTTPStatus.OK and kind == _TYPES[".html"] and (token := self._page.address.token):
            headers["Set-Cookie"] = f"{self._page.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
        if len(body) > _GZIP_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; see ``strop.listening``."""

"""Requests to servers of a rollout, a teacher or a judge: a lost one may be made again, a refused one not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx2

from strop.errors import ConfigError

_LARGEST = 64 << 20


class Lost(Exception):
    """No usable answer: no connection, none within the deadline, a failure of the server, or an abort."""

    def __init__(
        self,
        why: str,
        *,
        by_deadline: bool = False,
        is_stale: bool = False,
        is_error: bool = False,
        is_busy: bool = False,
        tokens: int = 0,
    ) -> None:
        """``is_stale``: the server has been started again, without the run's weights.

        ``is_error``: the server itself says that it failed. ``is_busy``: that it has too many requests.
        """
        super().__init__(why)
        self.by_deadline, self.is_stale, self.is_error, self.tokens = by_deadline, is_stale, is_error, tokens
        self.is_busy = is_busy


class Refused(Exception):
    """The request is wrong, or forbidden: another attempt would be, too."""


class Connection:
    """Requests to a server, as many at once as are made, each on a connection for it alone.

    Connections that are kept would save less than a millisecond, and the server may close one as it is used.
    """

    def __init__(self, url: str, token: str | None, proxy: str | None = None) -> None:
        """``url``: http or https, or ``unix:`` and the path of a socket.

        Raises ``ConfigError`` for a token that no header takes, and for an address that is no URL.
        """
        token = None if token is None else token.strip()  # files of secrets end with a new line
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ConfigError(f"the token of {url} has characters that no header takes")
        self.url, self.has_token, self._secret = url, token is not None, (token or "").encode()
        socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        try:
            verify = httpx2.create_ssl_context() if url.startswith("https:") else True
        except OSError as error:
            raise ConfigError(f"{url}: SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {error}") from None
        try:
            # of the environment only certificates: a proxy for the internet is none for these servers
            transport = httpx2.AsyncHTTPTransport(
                verify=verify,
                limits=limits,
                trust_env=False,
                uds=socket,
                proxy=None if socket else proxy,  # which httpx2 would take instead of the socket
            )
        except ImportError as error:
            raise ConfigError(f"{url}: http.proxy: {error}") from None
        except (ValueError, httpx2.InvalidURL):  # the error's text may have a login
            raise ConfigError(f"{url}: http.proxy is no URL; expected http://HOST:PORT") from None
        try:
            self._client = httpx2.AsyncClient(
                base_url="http://server" if socket else url,
                transport=transport,
                trust_env=False,
                timeout=None,  # the deadline below is the only clock
                headers={"authorization": f"Bearer {token}"} if token else None,
            )
        except httpx2.InvalidURL as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from None

    async def call(
        self,
        path: str,
        deadline_s: float,
        body: Any = None,
        max_bytes: int = _LARGEST,
        *,
        with_token: bool = True,
    ) -> dict[str, Any]:
        """Return the JSON object of an answer, {} if it is empty; without a ``body`` the method is GET.

        Raises ``Lost``, or ``Refused`` for a status from 300 to 499 but 408 and 429.
        """
        method, raw = "GET" if body is None else "POST", bytearray()
        headers = None if with_token else {"authorization": ""}
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._client.stream(method, path, json=body, headers=headers) as response,
            ):
                async for part in response.aiter_bytes():
                    raw += part
                    if len(raw) > max_bytes:
                        raise Lost(f"{path}: an answer of more than {max_bytes:,} bytes")
        except TimeoutError:
            raise Lost(f"{path}: no answer within {deadline_s:.0f} s", by_deadline=True) from None
        except httpx2.HTTPError as error:
            raise Lost(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code >= 300:
            is_busy = response.status_code in (408, 429)
            # gateways repeat what they refuse
            said = raw.replace(self._secret, b"***") if self._secret else raw
            text = f"{path} answers {response.status_code}: {said[:300].decode(errors='replace')}"
            if response.status_code >= 500 or is_busy:
                raise Lost(text, is_error=not is_busy, is_busy=is_busy)
            raise Refused(text)
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(raw or b"{}"), dict):
                return found
        raise Lost(f"{path}: no JSON object: {bytes(raw[:100])!r}")

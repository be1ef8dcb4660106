"""The address of a server, and which requests it answers: the page, ``strop serve`` and the endpoint.

None of them logs requests, whose addresses may have a token or a key.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from strop.errors import ConfigError

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
"""Clients that wait to be accepted: hundreds of agent programs may begin at once."""


class Address:
    """A socket that listens; a server answers its requests."""

    def __init__(self, host: str, port: int | None, token: str | None = None, *, usual: int = 0) -> None:
        """Listen; ``port`` 0 is a free one, and None is ``usual``, or a free one where that is taken.

        ``token``: of requests that are answered; None: see ``refusal``. Raises ``ConfigError`` if the
        system refuses the address.
        """
        try:
            try:
                self.socket = _listening(host, usual if port is None else port)
            except OSError as error:
                if port is not None or error.errno != errno.EADDRINUSE:
                    raise
                self.socket = _listening(host, 0)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(f"cannot listen on host {host}, port {port}: {error}") from error
        self.host, self.port = self.socket.getsockname()[:2]
        self.token = token
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        return self._url({"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host))

    @property
    def url_outside(self) -> str | None:
        """The address for other machines, if it is another one: the server listens at all addresses.

        It is the address of the interface that packets to other networks leave by; without one, the name.
        """
        elsewhere = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # any address outside would do
        if (far := elsewhere.get(self.host)) is None:
            return None
        try:
            return self._url(address_toward(far))
        except OSError:
            return self._url(socket.gethostname())

    def _url(self, host: str) -> str:
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def refusal(self, host: str, tokens: Iterable[str]) -> tuple[int, str] | None:
        """Return status and reason for a request that is not answered, by its ``Host`` and its tokens.

        The port is open to every account of the machine: requests need the token. Without one, a page of
        another site, whose name its owner lets resolve to this machine (DNS rebinding), is refused.
        """
        if self.token is None:
            return (
                None if self._is_own(host) else (403, "not a name of this machine: use the printed address")
            )
        if any(is_token(token, self.token) for token in tokens):
            return None
        return 401, "the token is missing or wrong: use the printed address and key"

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True  # an address is not resolved, so it cannot be rebound


def _listening(host: str, port: int) -> socket.socket:
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_v6)


def address_toward(host: str) -> str:
    """Return the address of this machine that a process at ``host`` reaches."""
    family, kind, _, _, where = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return probe.getsockname()[0]


def is_token(given: str, token: str) -> bool:
    """Return True if they are equal, in a time that does not show where they differ; False if empty."""
    token = token.strip()  # files of secrets end with a new line, which no header can have
    return bool(token) and hmac.compare_digest(given.encode(errors="replace"), token.encode())


def bearer(authorization: str) -> str:
    """Return the token of an ``Authorization`` header; empty if it has none."""
    return authorization.removeprefix("Bearer ") if authorization.startswith("Bearer ") else ""


def is_loopback(url: str) -> bool:
    """Return True for an address of this machine that others cannot reach."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # the name of a host
        return False


def distinct_urls(urls: Iterable[str]) -> list[str]:
    """Return the URLs of servers without a slash at their ends, each once."""
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def server_faults(
    urls: Iterable[str],
    token_key: str,
    token_env: str | None,
    *,
    is_open: bool = False,
    open_key: str = "",
    risk: str = "",
) -> Iterator[str]:
    """Yield what is wrong with the URLs of servers; those of other machines need a token, or ``is_open``.

    ``token_key`` names the variable with their token, ``token_env``; ``open_key`` sets ``is_open``; ``risk``
    says what servers without a token are open to.
    """
    for url in urls:
        if fault := _fault_of_url(url, token_key):
            yield fault
        elif not (is_loopback(url) or token_env or is_open):
            or_open = f", or set {open_key}=True" if open_key else ""
            yield (
                f"{url} is another machine{risk}; name the environment variable with its token in "
                f"{token_key}{or_open}"
            )


def fault_of_token(token_key: str, token_env: str | None) -> str | None:
    """Return what is wrong with the variable that ``token_key`` names; None if it names none."""
    if token_env and not os.environ.get(token_env):
        return f"{token_key}={token_env}: this variable is not set"
    return None


def _fault_of_url(url: str, token_key: str) -> str | None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets that are no address, or a port beyond 65535
        is_url = False
    if not is_url:
        return f"{url!r} is no URL; expected http://HOST:PORT"
    if "@" in parts.netloc or parts.query or parts.fragment:
        what = "a login" if "@" in parts.netloc else "a query"
        return f"{parts.hostname} has {what}, which config.yaml would show; name a token in {token_key}"
    return None

"""Names of this machine, for servers: a page of another site whose name resolves to it is refused."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit


class HostNames:
    """The names by which clients may reach a server; a rebound one (DNS rebinding) is none of them."""

    def __init__(self, host: str) -> None:
        """``host``: the address or name at which the server listens."""
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def __contains__(self, header: str) -> bool:
        """Return True if a ``Host`` header names this machine: by an address, or by a name that it has."""
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True  # an address is not resolved, so it cannot be rebound

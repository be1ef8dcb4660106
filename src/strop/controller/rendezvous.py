"""Stores through which processes find each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

from strop.listening import LOOPBACK, address_toward

_SIOCGIFADDR = 0x8915  # of Linux
PATIENCE = timedelta(days=7)
"""Timeout of a wait that the driver watches: it names the rank that hangs."""


def open_store(address: str) -> tuple[Any, int]:
    """Start a store at an address of this node; return it and its port.

    Clients need no password, so the store does not listen on other interfaces, as it would by default.
    """
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # bound here and handed over: a free port that is looked up first may be taken meanwhile
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def choose_interfaces(address: str) -> None:
    """Let gloo and NCCL use the loopback interface if ``address`` is on it; else gloo the one towards it.

    Gloo takes the address of this machine's name otherwise, which stock Debian has at 127.0.1.1.
    """
    if address == LOOPBACK:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        return
    with contextlib.suppress(OSError):  # no way there, which connecting reports
        if name := _interface_of(address_toward(address)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; None for others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None

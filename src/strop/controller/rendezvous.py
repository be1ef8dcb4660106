"""Stores through which processes find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from strop.listening import LOOPBACK

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


def stay_on_this_machine(address: str) -> None:
    """Let gloo and NCCL use the loopback interface if ``address`` is on it."""
    if address == LOOPBACK:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)

"""Processes that run on this machine (``ps`` is in no minimal system)."""

from __future__ import annotations

import os

import psutil


def commands() -> list[str]:
    """Return the command lines of all processes."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def own_and_orphans(name: str) -> set[str]:
    """Return ids and commands, with ``name`` in them, of children of this process and of orphans."""
    return {
        f"{process.pid} {command}"
        for process in psutil.process_iter(["ppid", "cmdline"])
        if process.info["ppid"] in (os.getpid(), 1)
        and name in (command := " ".join(process.info["cmdline"] or ()))
    }

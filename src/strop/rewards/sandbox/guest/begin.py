"""The trusted first steps of every sandboxed process."""

from __future__ import annotations

import builtins
import json
import os
import resource
import sys
from typing import Any


def read_job(descriptor: int) -> dict[str, Any]:
    """Take the job from its file and close that, and give up for good what the job does not allow."""
    with open(descriptor, "rb") as file:
        job = json.loads(file.read())
    limits = job["limits"]
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    return job


def offer_exit() -> None:
    """``exit()`` and ``quit()``, which programs use and a start without the module ``site`` leaves out."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)


def take_over_streams() -> tuple[int, int]:
    """Standard input and output under other numbers; all three streams are empty afterwards."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    return requests, answers

"""Engines on several ranks: these have met in ``torch.distributed``, and vLLM is to use that."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from vllm.distributed import get_tp_group
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Generator[None]:
    """Inside, all ranks build their engines.

    Ranks of one engine share memory. On a CPU vLLM names it after the address at which processes meet; here
    they meet nowhere, and the name would be the same for every run on the machine: it gets one of its own.
    All names are removed when all ranks have opened them, so that nothing stays behind however they end.
    """
    if world_size == 1:
        yield
        return
    name: list[Any] = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0"}
    address = (f"tcp://strop:{name[0]}", rank, 0)
    with mock.patch.object(ExecutorWithExternalLauncher, "_distributed_args", return_value=address):
        yield
    queue = get_tp_group().mq_broadcaster
    buffer = None if queue is None else queue.buffer
    dist.barrier()
    names = [path.name for path in _SHARED_MEMORY.glob(f"{name[0]}-*")]
    names += [] if buffer is None else [buffer.shared_memory.name]
    for left in names:
        (_SHARED_MEMORY / left).unlink(missing_ok=True)

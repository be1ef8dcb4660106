"""Workers without a model, for tests of the groups that hold them."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist

from strop.controller.group import Dispatch, register
from strop.controller.pools import ResourcePoolManager, Role
from strop.controller.ray.group import RayWorkerGroup
from strop.errors import LostServersError, MissingExtraError, ModelError
from strop.protocol import DataProto


class ToyWorker:
    """Returns its place and its arguments, and can fail in every way."""

    def __init__(self, start: int = 0, *, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size, self.value = rank, world_size, start

    def _of_all_ranks(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    @register(Dispatch.ONE_TO_ALL)
    def pids(self) -> list[int]:
        return self._of_all_ranks(os.getpid())

    @register(Dispatch.ONE_TO_ALL)
    def nodes(self) -> list[str]:
        return self._of_all_ranks(ray.get_runtime_context().get_node_id())

    @register(Dispatch.ONE_TO_ALL)
    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times + self.rank
        return self.value

    @register(Dispatch.ONE_TO_ALL)
    def values(self) -> list[int]:
        return self._of_all_ranks(self.value)

    @register(Dispatch.RANK_ZERO)
    def add_on_rank_zero(self, amount: int) -> int:
        self.value += amount
        return self.value

    @register(Dispatch.RANK_ZERO)
    def bucket(self) -> dict[str, Any]:
        return {"name": "layer", "weights": [torch.arange(1000.0).bfloat16()]}

    @register(Dispatch.ONE_TO_ALL)
    def sum_of(self, bucket: dict[str, Any]) -> float:
        return float(bucket["weights"][0].float().sum())

    @register(Dispatch.DATA_PARALLEL)
    def double(self, batch: DataProto, factor: int = 2) -> DataProto:
        """Return also the rank that each row went to, and how many of its tokens count."""
        columns = {
            "doubled": batch.batch["input_ids"] * factor,
            "counted": batch.batch["response_mask"].sum(dim=1),
            "rank": torch.full((len(batch),), self.rank),
            "half": batch.batch["input_ids"].bfloat16() / 2,
        }
        return DataProto.from_dict(columns, {"rows": [len(batch)] * len(batch)}, {"rank": self.rank})

    @register(Dispatch.DATA_PARALLEL)
    def samples(self, batch: DataProto, n: int) -> DataProto:
        repeated = batch.select("input_ids").repeat(n)
        numbers = torch.arange(n).repeat(len(batch))
        rank = torch.full((len(repeated),), self.rank)
        return DataProto({**repeated.batch, "sample": numbers, "rank": rank}, repeated.non_tensor_batch)

    @register(Dispatch.DATA_PARALLEL)
    def tell(self, batch: DataProto, report: Callable[..., None], go: Path) -> DataProto:
        """Report each row with its id and the rank; the last one only when ``go`` exists."""
        for row, ids in enumerate(batch.batch["input_ids"]):
            if row == len(batch) - 1:
                self.meet(go, go.with_suffix(".go"))
            report(row, int(ids[0]), self.rank)
        return batch.select("input_ids")

    @register(Dispatch.DATA_PARALLEL)
    def count(self, batch: DataProto) -> dict[str, float]:
        """Count over all ranks, as a loss would."""
        tokens = batch.batch["response_mask"].sum()
        if self.world_size > 1:
            dist.all_reduce(tokens)
        return {"tokens": float(tokens), "rank": float(self.rank)}

    def unmarked(self) -> int:
        return self.value

    # ------------------------------------------------------------------------------- talking to other pools

    @register(Dispatch.ONE_TO_ALL)
    def meet(self, mine: Path, other: Path) -> bool:
        """Write one file and wait for the other: two groups that do so must work at the same time."""
        mine.touch()
        for _ in range(600):
            if other.exists():
                return True
            time.sleep(0.05)
        return False

    # ------------------------------------------------------------------------------- saving in the background

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path, background: bool) -> None:
        """The thread communicates with those of the other ranks, as in a real save."""
        apart = dist.new_group() if self.world_size > 1 else None

        def write() -> None:
            if apart is not None:
                dist.barrier(apart)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.rank}").write_text(str(self.value))

        self.saving = threading.Thread(target=write)
        self.saving.start()

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def save_is_done(self) -> bool:
        return not self.saving.is_alive()

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def finish_save(self) -> None:
        self.saving.join()

    # -------------------------------------------------------------------------------------------- failures

    @register(Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> None:
        print(text, flush=True)
        print(f"rank {self.rank} warns", file=sys.stderr, flush=True)

    @register(Dispatch.ONE_TO_ALL)
    def start_child(self) -> list[int]:
        """Start a process, as a generator or a data loader may."""
        child = subprocess.Popen(["sleep", "600"])
        return [os.getpid(), child.pid]

    @register(Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        if self.rank == rank:
            print("about to end", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self._wait_for_all()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int, fault: str = "division") -> None:
        if self.rank == rank:
            match fault:
                case "division":
                    raise ZeroDivisionError("no such number")
                case "our error":
                    raise ModelError("the folder has no weights")
                case "lost servers":
                    raise LostServersError("1 is needed")
                case "missing package":
                    raise MissingExtraError("wonder", "all", "this")
                case "more arguments":
                    raise FussyError("too long", limit=3)
                case "lock":
                    raise ValueError("held by", threading.Lock())
        self._wait_for_all()

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(600)
        self._wait_for_all()

    @register(Dispatch.ONE_TO_ALL)
    def hold_the_interpreter(self, rank: int) -> None:
        if self.rank == rank:
            ctypes.PyDLL(None).sleep(600)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))


class FussyError(Exception):
    """Cannot be made again from its ``args``."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class SlowToLoad(ToyWorker):
    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        time.sleep(600)


class PairedWorker(ToyWorker):
    """Two ranks share data, as in tensor or sequence parallelism; ``samples`` gives each its own."""

    def data_parallel_place(self, method: str) -> tuple[int, int]:
        size = 1 if method == "samples" else 2
        return self.rank // size, self.world_size // size


class BrokenWorker(ToyWorker):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        raise ModelError("this worker cannot be built")


def pools(**processes_per_node: list[int]) -> list[Any]:
    """Return the pools of one run, in this order."""
    every_one_is_used = dict(zip(Role, itertools.cycle(processes_per_node)))
    manager = ResourcePoolManager(processes_per_node, every_one_is_used)
    return list(manager.pools.values())


def ray_group(
    pool: Any,
    name: str = "toy",
    *,
    worker_cls: type = ToyWorker,
    handles: bool = True,
    phase_timeout_s: float = 100.0,
    **init_kwargs: Any,
) -> RayWorkerGroup:
    """Start workers in the processes of ``pool``."""
    settings = SimpleNamespace(handles=handles, device="cpu", phase_timeout_s=phase_timeout_s)
    return RayWorkerGroup(
        worker_cls=worker_cls, init_kwargs=init_kwargs, resource_pool=pool, name=name, settings=settings
    )


def limit(group: RayWorkerGroup, seconds: float) -> None:
    """Set the time limit of calls from now on: those that prepare a test may be slow on a busy machine."""
    group._processes.timeout_s = seconds

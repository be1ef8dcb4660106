"""The processes of one pool, and what becomes of a call to them: results, a death, an exception, a hang."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError

from strop.controller.pools import ResourcePool
from strop.controller.ray import cluster
from strop.controller.ray.cluster import HeadWatch, end_without_head
from strop.controller.ray.failure import Failure, Stack, describe_hang, last_lines, stack_by_signal, worst
from strop.controller.ray.host import RemoteHost
from strop.errors import WorkerError

_LIVE: dict[ResourcePool, Processes] = {}
_PLACES: dict[ResourcePool, list[Any]] = {}
_GRACE_S = 2.0
"""After the first failure: others of the same moment may say more about its cause."""
_CHECK_S = 1.0
_STACKS_S = 5.0
_READING = "the reading of its results"
START_S = 600.0
"""At least so long may it take to start processes and load models: that is no phase of a step."""


@dataclass(frozen=True, eq=False)
class Call:
    """One method in flight on some ranks of a pool."""

    processes: Processes
    role: str
    method: str
    references: dict[int, Any]
    """Rank -> what it will return."""


def processes_of(pool: ResourcePool, *, gpus: bool, timeout_s: float | None) -> Processes:
    """The processes of a pool; the first group that asks starts them, once there is room for all pools."""
    if pool not in _PLACES:
        _PLACES.update(cluster.take_places(pool.all_of_run, gpus=gpus))
    if pool not in _LIVE:
        _LIVE[pool] = Processes(pool, gpus=gpus, timeout_s=timeout_s)
    return _LIVE[pool]


def end_all(failure: WorkerError | None = None) -> None:
    """Kill the processes of all pools and give their places back: without one rank a run cannot go on."""
    for processes in list(_LIVE.values()):
        processes.kill(failure)
    for pool in list(_PLACES):
        _release(pool)


def _release(pool: ResourcePool) -> None:
    with contextlib.suppress(RayError):
        cluster.release(_PLACES.pop(pool, []))


class Processes:
    """``pool.world_size`` processes, with ``torch.distributed`` between them if they are several."""

    def __init__(self, pool: ResourcePool, *, gpus: bool, timeout_s: float | None) -> None:
        self.pool, self.timeout_s = pool, timeout_s
        self.groups: set[str] = set()
        self.hosts: list[Any] = []
        self.in_flight: list[Call] = []
        self.failure: WorkerError | None = None
        self._head = HeadWatch()
        try:
            self._start(gpus)
        except BaseException:
            self.kill()
            raise

    def _start(self, gpus: bool) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for place, count in zip(_PLACES[self.pool], self.pool.processes_per_node, strict=True):
            for bundle in range(count):
                strategy = PlacementGroupSchedulingStrategy(place, bundle)
                options = {"num_cpus": 1, "num_gpus": int(gpus), "scheduling_strategy": strategy}
                self.hosts.append(RemoteHost.options(**options).remote())
        self.facts: list[dict[str, Any]] = [{} for _ in self.hosts]
        self.lifetimes = {host.lifetime.remote(): rank for rank, host in enumerate(self.hosts)}
        self.facts = self.all("prepare", sys.path, os.getcwd(), _threads(self.pool), gpus, starting=True)
        if len(self.hosts) > 1:
            asked = self.begin(self.pool.name, "open_store", {0: self.hosts[0].open_store.remote()})
            where = self.facts[0]["ip"], self.wait(asked, starting=True)[0]
            joins = {
                rank: host.join.remote(*where, rank, len(self.hosts), gpu=gpus, timeout_s=self.timeout_s)
                for rank, host in enumerate(self.hosts)
            }
            self.wait(self.begin(self.pool.name, "join", joins), starting=True)

    def begin(self, role: str, method: str, references: dict[int, Any]) -> Call:
        """Note down a call that was sent to ranks; ``wait`` for it."""
        call = Call(self, role, method, references)
        self.in_flight.append(call)
        return call

    def all(self, method: str, *args: Any, starting: bool = False) -> list[Any]:
        """A method of every host itself; the results by rank."""
        self.require_alive()
        calls = {rank: getattr(host, method).remote(*args) for rank, host in enumerate(self.hosts)}
        return list(self.wait(self.begin(self.pool.name, method, calls), starting=starting).values())

    def read(self, role: str, references: dict[int, Any]) -> dict[int, Any]:
        """What ranks put into the object store, where it lives as long as they do; see ``wait``."""
        return self.wait(self.begin(role, _READING, references))

    def wait(self, call: Call, *, starting: bool = False) -> dict[int, Any]:
        """The results by rank.

        Raises ``WorkerError`` when a rank of any pool dies, raises or is not done after ``timeout_s`` (or
        ``START_S`` where processes start, if that is longer); all processes of the run are ended then.
        """
        references = list(call.references.values())
        limit_s = math.inf if self.timeout_s is None else self.timeout_s
        limit_s = max(limit_s, START_S) if starting else limit_s
        deadline = time.monotonic() + limit_s
        pending = references
        self._head.restart()
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=_CHECK_S)
            if pending and (failures := _failures(call, done)):
                self._fail(call, failures, references)
            if pending and time.monotonic() > deadline:
                self._fail_by_hanging(call, pending, limit_s)
            if pending and self._head.is_lost():
                self._fail_without_head(call)
        try:
            results = dict(zip(call.references, ray.get(references), strict=True))
        except RayError:
            self._fail(call, _failures(call, references), references)
        self.in_flight.remove(call)
        return results

    def _fail(self, call: Call, failures: list[Failure], references: list[Any]) -> NoReturn:
        """End everything, and say what happened, where, and what that process printed last."""
        self.require_alive()  # else another failure has ended them, of which this is but a consequence
        others = [
            own for pool in _LIVE.values() for other in pool.in_flight for own in other.references.values()
        ]
        every = list({*references, *others})  # a rank may have died in another call than the one waited for
        ray.wait(every, num_returns=len(every), timeout=_GRACE_S)
        if all(failure.is_a_loss for failure in failures):  # somebody died, of which the news is on its way
            lifetimes = [reference for processes in _LIVE.values() for reference in processes.lifetimes]
            ray.wait(lifetimes, timeout=_GRACE_S)
        if not self._head.answers():  # the whole session is gone, and every question to it would wait
            self._fail_without_head(call)
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        failure = worst(_failures(call, done) or failures)
        error = WorkerError(failure.describe(last_lines(failure.facts)), is_final=failure.is_final)
        end_all(error)
        raise error from None

    def _fail_by_hanging(self, call: Call, pending: list[Any], limit_s: float) -> NoReturn:
        """The same for ranks that do not return: with the stack of each, and of the other pools' ranks."""
        late = [rank for rank, reference in call.references.items() if reference in pending]
        pools = [self, *(processes for processes in _LIVE.values() if processes is not self)]
        asked = {
            host.stack.remote(): (processes, rank)
            for processes in pools
            for rank, host in enumerate(processes.hosts)
        }
        ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_S)
        stacks: dict[Processes, list[Stack]] = {processes: [] for processes in pools}
        for reference, (processes, rank) in asked.items():
            facts = processes.facts[rank]
            stacks[processes].append(Stack(rank, facts, _answer(reference) or stack_by_signal(facts)))
        others = {"+".join(sorted(processes.groups)): stacks[processes] for processes in pools[1:]}
        message = describe_hang(call.role, call.method, limit_s, late, stacks[self], others)
        error = WorkerError(message, is_final=False)
        end_all(error)
        raise error

    def _fail_without_head(self, call: Call) -> NoReturn:
        """The same when the cluster is gone: nothing there can be asked, nor ended through Ray."""
        error = WorkerError(
            f"the head of the Ray cluster at {self._head.address} does not answer any more, in {call.method} "
            f"of {call.role}: it was ended, or cannot be reached. Start the run again when it is back: with "
            "trainer.resume_mode=auto it goes on from its last checkpoint",
            is_final=True,
        )
        end_without_head([facts for processes in _LIVE.values() for facts in processes.facts])
        _PLACES.clear()
        for processes in list(_LIVE.values()):
            processes.hosts = []
            processes.kill(error)
        raise error

    def last_phase(self, rank: int) -> tuple[str, str]:
        """Role and method that a dead process was in: of its calls, in order, the first without a result.

        The news that a call has failed may come later than that of the death.
        """
        for call in self.in_flight:
            reference = call.references.get(rank)
            if reference is None or call.method == _READING:
                continue
            if not ray.wait([reference], timeout=0)[0] or isinstance(_error(reference), RayActorError):
                return call.role, call.method
        return "+".join(sorted(self.groups)), "a wait for the next call"

    def require_alive(self) -> None:
        """``WorkerError`` when they have ended: the failure that ended them, which is still the cause."""
        if not self.hosts:
            raise self.failure or WorkerError(f"the processes of the pool {self.pool.name!r} have ended")

    def kill(self, failure: WorkerError | None = None) -> None:
        """End the processes at once, and give their places back."""
        _LIVE.pop(self.pool, None)
        self.failure = self.failure or failure
        for host in self.hosts:
            with contextlib.suppress(RayError):
                ray.kill(host)
        self.hosts = []
        for pool in [self.pool] if _LIVE else list(_PLACES):
            _release(pool)


def _failures(call: Call, done: list[Any]) -> list[Failure]:
    """What went wrong among the results that are there, and which processes of any pool are gone."""
    failures = []
    ranks = {reference: rank for rank, reference in call.references.items()}
    for reference in done:
        if (error := _error(reference)) is not None:
            rank = ranks[reference]
            failures.append(Failure(call.role, rank, call.method, call.processes.facts[rank], error))
    for processes in _LIVE.values():
        lifetimes = processes.lifetimes
        for reference in ray.wait(list(lifetimes), num_returns=len(lifetimes), timeout=0)[0]:
            if (error := _error(reference)) is not None:
                rank = lifetimes[reference]
                role, method = processes.last_phase(rank)
                failures.insert(0, Failure(role, rank, method, processes.facts[rank], error))
    return failures


def _error(reference: Any) -> RayError | None:
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None


def _answer(reference: Any) -> str | None:
    """What ``WorkerHost.stack`` said, if it did."""
    try:
        return ray.get(reference, timeout=0)
    except RayError:
        return None


def _threads(pool: ResourcePool) -> int:
    """Threads of a process: the driver's, divided among all processes that may share its machine."""
    import torch

    neighbours = sum(max(other.processes_per_node) for other in pool.all_of_run)
    return max(torch.get_num_threads() // neighbours, 1)

"""The processes of one pool, and the outcome of calls to them: results, a death, an exception, a hang.

A death fails the process's lifetime call, which the driver polls while it waits for any result. Peers of a
lost rank would wait in a collective for minutes, so the first failure ends all pools of the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError

from strop.controller.pools import ResourcePool
from strop.controller.ray import cluster
from strop.controller.ray.cluster import HeadWatch, end_without_head
from strop.controller.ray.failure import (
    Failure,
    Stack,
    describe_hang,
    last_lines,
    last_phase,
    stack_by_signal,
)
from strop.controller.ray.host import RemoteHost
from strop.errors import WorkerError
from strop.listening import LOOPBACK

_LIVE: dict[ResourcePool, Processes] = {}
_PLACES: dict[ResourcePool, list[Any]] = {}
_GRACE_S = 2.0
"""Wait after the first failure: a simultaneous one may be nearer to the cause."""
_CHECK_S = 1.0
_STACKS_S = 5.0
_READING = "the reading of its results"
START_S = 600.0
"""Lower bound of the time limit for starting processes and loading models."""


@dataclass(frozen=True, eq=False)
class Call:
    """A method in flight on some ranks of a pool."""

    processes: Processes
    role: str
    method: str
    references: dict[int, Any]
    """Rank -> reference of its result."""

    def is_done(self) -> bool:
        """Return True if every rank has returned, raised or died."""
        references = list(self.references.values())
        return len(ray.wait(references, num_returns=len(references), timeout=0)[0]) == len(references)


def processes_of(pool: ResourcePool, *, gpus: bool, timeout_s: float | None) -> Processes:
    """Return the processes of a pool; the first call reserves places for all pools and starts them."""
    if pool not in _PLACES:
        _PLACES.update(cluster.take_places(pool.all_of_run, gpus=gpus))
    if pool not in _LIVE:
        _LIVE[pool] = Processes(pool, gpus=gpus, timeout_s=timeout_s)
    return _LIVE[pool]


def end_all(failure: WorkerError) -> None:
    """Kill the processes of all pools and release their places: a run cannot continue without a rank."""
    for processes in list(_LIVE.values()):
        processes.kill(failure)
    for pool in list(_PLACES):
        _release(pool)


def _release(pool: ResourcePool) -> None:
    with contextlib.suppress(RayError):
        cluster.release(_PLACES.pop(pool, []))


class Processes:
    """``pool.world_size`` processes, connected by ``torch.distributed`` if more than one."""

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
        self.facts: list[dict[str, Any]] = [{} for _ in self.hosts]  # until prepare has returned
        self.lifetimes = {host.lifetime.remote(): rank for rank, host in enumerate(self.hosts)}
        self.facts = self.all("prepare", sys.path, os.getcwd(), _threads(self.pool), gpus, starting=True)
        nodes = {facts["node_id"] for facts in self.facts}
        if len(self.pool.all_of_run) > 1:  # libraries choose their interface once, and pools may connect
            nodes |= {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        self.address = LOOPBACK if len(nodes) == 1 else self.facts[0]["ip"]
        if len(self.hosts) > 1:
            opened = self.begin(
                self.pool.name, "open_store", {0: self.hosts[0].open_store.remote(self.address)}
            )
            where = self.address, self.wait(opened, starting=True)[0]
            joins = {
                rank: host.join.remote(*where, rank, len(self.hosts), gpu=gpus, timeout_s=self.timeout_s)
                for rank, host in enumerate(self.hosts)
            }
            self.wait(self.begin(self.pool.name, "join", joins), starting=True)

    def begin(self, role: str, method: str, references: dict[int, Any]) -> Call:
        """Register a call that was sent to ranks; ``wait`` returns its results."""
        call = Call(self, role, method, references)
        self.in_flight.append(call)
        return call

    def all(self, method: str, *args: Any, starting: bool = False) -> list[Any]:
        """Call a method of every host; return the results by rank."""
        self.require_alive()
        calls = {rank: getattr(host, method).remote(*args) for rank, host in enumerate(self.hosts)}
        return list(self.wait(self.begin(self.pool.name, method, calls), starting=starting).values())

    def read(self, role: str, references: dict[int, Any]) -> dict[int, Any]:
        """Fetch objects that ranks put into the object store; lost when a rank dies, see ``wait``."""
        return self.wait(self.begin(role, _READING, references))

    def wait(self, call: Call, *, starting: bool = False) -> dict[int, Any]:
        """Wait for a call and return its results by rank.

        Raises ``WorkerError`` and ends all processes of the run when a rank of any pool dies, raises or
        exceeds ``timeout_s`` (``starting``: at least ``START_S``).
        """
        references = list(call.references.values())
        limit_s = math.inf if self.timeout_s is None else self.timeout_s
        limit_s = max(limit_s, START_S) if starting else limit_s
        deadline = time.monotonic() + limit_s
        pending = references
        if self._head.is_lost():  # also where no call takes long enough to be polled
            self._fail_without_head(f"{call.method} of {call.role}")
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=_CHECK_S)
            if pending and (failures := _failures(call, done)):
                self._fail(call, failures, references)
            if pending and time.monotonic() > deadline:
                self._fail_by_hanging(call, pending, limit_s)
            if pending and self._head.is_lost():
                self._fail_without_head(f"{call.method} of {call.role}")
        try:
            results = dict(zip(call.references, ray.get(references), strict=True))
        except RayError:
            self._fail(call, _failures(call, references), references)
        if call in self.in_flight:  # not if an interrupt came between an earlier wait and its caller
            self.in_flight.remove(call)
        return results

    def _fail(self, call: Call, failures: list[Failure], references: list[Any]) -> NoReturn:
        """End all pools; raise an error with what failed, where, and the last output of that process."""
        self.require_alive()  # if already ended by another failure, raise that one
        others = [
            own for pool in _LIVE.values() for other in pool.in_flight for own in other.references.values()
        ]
        every = list({*references, *others})  # a rank may have died in another call
        ray.wait(every, num_returns=len(every), timeout=_GRACE_S)
        if all(failure.is_a_loss for failure in failures):  # a process died, but its failure has not arrived
            lifetimes = [reference for processes in _LIVE.values() for reference in processes.lifetimes]
            ray.wait(lifetimes, timeout=_GRACE_S)
        if not cluster.answers(self._head.address):  # requests to a lost cluster would block
            self._fail_without_head(f"{call.method} of {call.role}")
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        failure = max(_failures(call, done) or failures, key=lambda failure: failure.weight)
        if failure.is_a_death and (phase := last_phase(failure.facts)):
            failure = replace(failure, role=phase[0], method=phase[1])
        error = WorkerError(failure.describe(last_lines(failure.facts)), is_final=failure.is_final)
        end_all(error)
        raise error from None

    def _fail_by_hanging(self, call: Call, pending: list[Any], limit_s: float) -> NoReturn:
        """End all pools because ranks did not return; the error has the stacks of all ranks of all pools."""
        late = [rank for rank, reference in call.references.items() if reference in pending]
        pools = [self, *(processes for processes in _LIVE.values() if processes is not self)]
        stacks_of = {
            host.stack.remote(): (processes, rank)
            for processes in pools
            for rank, host in enumerate(processes.hosts)
        }
        ray.wait(list(stacks_of), num_returns=len(stacks_of), timeout=_STACKS_S)
        stacks: dict[Processes, list[Stack]] = {processes: [] for processes in pools}
        for reference, (processes, rank) in stacks_of.items():
            facts = processes.facts[rank]
            stacks[processes].append(Stack(rank, facts, _answer(reference) or stack_by_signal(facts)))
        others = {"+".join(sorted(processes.groups)): stacks[processes] for processes in pools[1:]}
        message = describe_hang(call.role, call.method, limit_s, late, stacks[self], others)
        error = WorkerError(message, is_final=False)
        end_all(error)
        raise error

    def _fail_without_head(self, during: str) -> NoReturn:
        """End all pools after the loss of the cluster's head, without requests to Ray."""
        error = WorkerError(
            f"the head of the Ray cluster at {self._head.address} stopped answering during {during}: "
            "it was ended, or cannot be reached. Start the run again when it is back: with "
            "trainer.resume_mode=auto it resumes from its last checkpoint",
            is_final=True,
        )
        end_without_head([facts for processes in _LIVE.values() for facts in processes.facts])
        _PLACES.clear()
        for processes in list(_LIVE.values()):
            processes.hosts = []
            processes.kill(error)
        raise error

    def _first_unfinished(self, rank: int) -> tuple[str, str]:
        """Return role and method of a dead process's first call, in order, without a result.

        An actor's death can be observed before its call's failure.
        """
        for call in self.in_flight:
            reference = call.references.get(rank)
            if reference is None or call.method == _READING:
                continue
            if not ray.wait([reference], timeout=0)[0] or isinstance(_error(reference), RayActorError):
                return call.role, call.method
        return "+".join(sorted(self.groups)), "a wait for the next call"

    def require_alive(self) -> None:
        """Raise the failure that ended the processes, if they have ended."""
        if not self.hosts:
            raise self.failure or WorkerError(f"the processes of the pool {self.pool.name!r} have ended")

    def kill(self, failure: WorkerError | None = None) -> None:
        """Kill the processes and release their places."""
        # requests to a lost head would block for a minute, and then native code would end this process
        if self.hosts and not self._head.wait():
            self._fail_without_head(f"the end of the pool {self.pool.name}")
        _LIVE.pop(self.pool, None)
        self.failure = self.failure or failure
        for host in self.hosts:
            with contextlib.suppress(RayError):
                ray.kill(host)
        self.hosts = []
        # with the last processes also the places that none took
        for pool in [self.pool] if _LIVE else list(_PLACES):
            _release(pool)


def _failures(call: Call, done: list[Any]) -> list[Failure]:
    """Return failures among finished results, and deaths in any pool."""
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
                role, method = processes._first_unfinished(rank)
                # before the failures of peers, as the first of equal weight is the one reported
                failures.insert(0, Failure(role, rank, method, processes.facts[rank], error))
    return failures


def _error(reference: Any) -> RayError | None:
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None


def _answer(reference: Any) -> str | None:
    """Return the result of ``WorkerHost.stack`` if it has arrived."""
    try:
        return ray.get(reference, timeout=0)
    except RayError:
        return None


def _threads(pool: ResourcePool) -> int:
    """Return threads per process: the driver's, divided among processes that may share a machine."""
    import torch

    neighbours = sum(max(other.processes_per_node) for other in pool.all_of_run)
    return max(torch.get_num_threads() // neighbours, 1)

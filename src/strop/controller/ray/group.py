"""The workers of one role as processes on a Ray cluster."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from strop.config.schema.trainer import RunConfig
from strop.controller.group import Dispatch, Future, GroupMethod, Mark, plain_class, require_mark
from strop.controller.pools import ResourcePool
from strop.controller.ray import cluster, processes
from strop.controller.ray.handles import Columns, Layout, RemoteColumns, RemoteTensor, RemoteValue
from strop.controller.ray.host import Listener, Reporter
from strop.controller.ray.wire import Packed, pack, unpack
from strop.controller.shards import shard
from strop.passed import PASSED, dumps
from strop.protocol import DataProto

_WORTH_A_PUT = 100_000
"""Arguments for several ranks with more bytes than this are put into the object store once."""


@dataclass
class Traffic:
    """Bytes of tensors that passed through the driver."""

    sent: int = 0
    received: int = 0


class RayWorkerGroup:
    """One worker in each process of ``resource_pool``; groups with the same pool share its processes.

    Calls to one process run in order, except methods marked with ``beside_calls``. Batches that workers
    return stay in the object store, and the driver fetches only the columns that it reads
    (``settings.handles``).

    Raises ``ConfigError`` when the cluster lacks the resources of the pool, and ``WorkerError`` from any call
    when a worker dies, raises or hangs.
    """

    def __init__(
        self,
        *,
        worker_cls: type,
        init_kwargs: Mapping[str, Any],
        resource_pool: ResourcePool,
        name: str = "",
        settings: RunConfig | None = None,
    ) -> None:
        self.worker_cls = worker_cls = plain_class(worker_cls)
        self.name = name or worker_cls.__name__
        self.traffic = Traffic()
        self._read: set[str] = set()  # columns that the driver has read and will probably read again
        self._handles = settings is None or settings.handles
        self._pool = resource_pool
        device = "auto" if settings is None else settings.device
        cluster.connect(sum(pool.world_size for pool in resource_pool.all_of_run))
        self._processes = processes.processes_of(
            resource_pool,
            gpus=device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0),
            timeout_s=None if settings is None else settings.phase_timeout_s,
        )
        self._processes.groups.add(self.name)
        # cloudpickle sends a class of a notebook or of __main__ by value: workers cannot import it
        worker = dumps((worker_cls, dict(init_kwargs), PASSED))
        hosts = self._processes.hosts
        added = {
            rank: host.add.remote(self.name, worker, rank, len(hosts)) for rank, host in enumerate(hosts)
        }
        places = self._processes.wait(self._processes.begin(self.name, "__init__", added), starting=True)
        self._places: list[dict[str, tuple[int, int]]] = [places[rank] for rank in range(len(hosts))]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._pool.world_size

    def address_for(self, other: Any) -> str | None:
        """Return rank zero's address for connections from the group ``other``; None if it is in its pool."""
        return None if other._processes is self._processes else self._processes.address

    def nodes_without(self, path: Path) -> list[str]:
        """Return the nodes of this group that do not see a file written by the driver."""
        seen = zip(self._processes.facts, self._processes.all("sees", str(path)), strict=True)
        return sorted({f"{facts['host']} ({facts['ip']})" for facts, sees in seen if not sees})

    def shutdown(self) -> None:
        """Drop the workers after the calls in flight; processes end with the last group of their pool.

        Does not wait: after Ctrl-C a call in flight may take hours.
        """
        processes = self._processes
        processes.groups.discard(self.name)
        if not processes.groups:
            processes.kill()
        else:
            for host in processes.hosts:
                host.remove.remote(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("worker_cls", "name"):
            raise AttributeError(name)
        mark = require_mark(self.worker_cls, name, self.name)
        return GroupMethod(lambda *args, **kwargs: self._start(name, mark, args, kwargs))

    def _start(self, method: str, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future:
        self._processes.require_alive()
        functions = {name: value for name, value in kwargs.items() if callable(value)}
        reporters = {name: Reporter() for name in functions}
        kwargs |= reporters
        ranks = [0] if mark.dispatch is Dispatch.RANK_ZERO else range(self.world_size)
        shards, answers = None, [0]
        if mark.dispatch is Dispatch.DATA_PARALLEL:
            part_of, sizes = zip(*(places[method] for places in self._places), strict=True)
            batch, args, kwargs = self._batch_of(method, args, kwargs)
            shards = shard(batch, sizes[0])
            answers = [part_of.index(part) for part in range(sizes[0])]  # the lowest rank of each part
            parts = [self._pack(((part, *args), kwargs)) for part in shards.parts]
            messages = [parts[part] for part in part_of]
        else:
            packed, references = self._pack((args, kwargs))
            message = ray.put(packed) if packed.nbytes > _WORTH_A_PUT and len(ranks) > 1 else packed
            messages = [(message, references)] * len(ranks)
        infos, objects = {}, {}
        how = "call_beside" if mark.beside_calls else "call"
        for rank, (message, references) in zip(ranks, messages, strict=True):
            remote = getattr(self._processes.hosts[rank], how).remote
            # references as arguments of the call, not inside a value: Ray then fetches them before it runs
            infos[rank], objects[rank] = remote(self.name, method, message, self._read, *references)
        listeners = []
        if shards is not None:
            hosts = {rank: self._processes.hosts[rank] for rank in answers}
            rows = {rank: own.tolist() for rank, own in zip(answers, shards.rows, strict=True)}
            for name, function in functions.items():
                listeners.append(Listener(function, reporters[name].key, hosts, rows))
        call = self._processes.begin(self.name, method, infos)

        def result() -> Any:
            """Wait for every rank; return the result as defined by ``Dispatch``."""
            descriptions = self._processes.wait(call, starting=method == "init_model")
            for listener in listeners:
                listener.finish()
            results = [self._receive(rank, descriptions[rank], objects[rank]) for rank in answers]
            if shards is not None and isinstance(results[0], DataProto):
                return shards.join(results)
            return results[0]

        return Future(result, call.is_done)

    def _batch_of(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[DataProto, tuple[Any, ...], dict[str, Any]]:
        """Return the batch of a data-parallel call (its first argument, by position or name) and the rest."""
        if args:
            return args[0], args[1:], kwargs
        _, first, *_ = inspect.signature(getattr(self.worker_cls, method)).parameters
        if first not in kwargs:
            raise TypeError(f"{self.name}.{method} needs a batch, the argument {first!r}")
        return kwargs[first], (), {name: value for name, value in kwargs.items() if name != first}

    def _pack(self, value: Any) -> tuple[Packed, list[Any]]:
        packed, references = pack(value)
        self.traffic.sent += packed.nbytes
        return packed, references

    def _receive(self, rank: int, info: tuple[Any, ...], reference: Any) -> Any:
        """Return the batch, plain value or handle that a rank's description and reference stand for."""
        match info:
            case ("value", value):
                return value
            case ("tensors",):
                if self._handles:
                    return RemoteValue(reference)
                packed = self._processes.read(self.name, {rank: reference})[rank]
                self.traffic.received += packed.nbytes
                return unpack(packed, ())
        _, rows, shapes, apart, non_tensors, meta_info = info
        layout = Layout([RemoteColumns(rank, reference, rows, self._fetch, apart, self._read)])
        columns = {
            name: RemoteTensor.of(name, layout, row_shape=shape, dtype=dtype)
            for name, (shape, dtype) in shapes.items()
        }
        if not self._handles:
            return DataProto(
                {name: column.fetch() for name, column in columns.items()}, non_tensors, meta_info
            )
        return DataProto(dict(columns), non_tensors, meta_info)

    def _fetch(self, references: dict[int, Any]) -> dict[int, Columns]:
        found = self._processes.read(self.name, references)
        self.traffic.received += sum(array.nbytes for own in found.values() for array, _ in own.values())
        return found


NVMegatronRayWorkerGroup = RayWorkerGroup
"""verl's name for Megatron workers; a worker class has ``data_parallel_place`` for ranks that share rows."""

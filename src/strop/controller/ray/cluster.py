"""The Ray cluster of a run: join or start it, reserve resources on its nodes, and watch its head."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from ray.exceptions import AuthenticationError
from ray.util.placement_group import placement_group, remove_placement_group

from strop.controller.pools import ResourcePool
from strop.controller.ray.private import PrivateCluster
from strop.controller.ray.ray_private import (
    available_resources_per_node,
    find_bootstrap_address,
    find_gcs_addresses,
    maybe_enable_token_auth_if_token_available,
)
from strop.errors import ConfigError, WorkerError, raised_as

logger = logging.getLogger(__name__)

_ANSWERS_S = 2.0
_PATIENCE_S = 5.0
_ASKED_EVERY_S = 1.0
_PLACEMENT_S = 120.0
_RELEASE_S = 15.0
"""Resources of a run that has just ended become free within a moment, or seconds on a busy machine."""


def answers(address: str) -> bool:
    """Return True if a server accepts connections at ``host:port``."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
    except OSError:
        return False
    return True


class HeadWatch:
    """Detect the loss of the cluster's head, if polled; it is asked at most once a second."""

    def __init__(self) -> None:
        self.address = ray.get_runtime_context().gcs_address
        self._asked = time.monotonic()
        self._silent_since: float | None = None

    def is_lost(self) -> bool:
        """Return True if the head has not answered for ``_PATIENCE_S``.

        The time counts from a failed attempt, not from the last answer: the driver may have been stopped.
        """
        now = time.monotonic()
        if now - self._asked >= _ASKED_EVERY_S:
            self._asked = now
            self._silent_since = None if answers(self.address) else self._silent_since or now
        return self._silent_since is not None and now - self._silent_since > _PATIENCE_S

    def wait(self) -> bool:
        """Return True when the head answers, or False when it is lost."""
        while not answers(self.address):
            if self.is_lost():
                return False
            time.sleep(_ASKED_EVERY_S / 10)
        return True


def end_without_head(processes: Iterable[Mapping[str, Any]]) -> None:
    """Kill the given processes on this node; other nodes end theirs when they miss the head.

    Also kill the children of a raylet that this run started: left alone, they would linger for a minute.
    """
    here = ray.get_runtime_context().get_node_id()
    for facts in processes:
        if facts.get("node_id") == here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(facts["pid"], signal.SIGKILL)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.parent().name() == "raylet":
                child.kill()


def connect(processes: int) -> None:
    """Join the cluster of ``RAY_ADDRESS`` or ``ray start``; if there is none, start one on this machine.

    A cluster started here ends with this process and has a slot for each of ``processes``, even if these
    outnumber the cores: on a laptop four ranks are slow, not refused.
    """
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # failures are reported once, by strop
    if ray.is_initialized() and any(node["Alive"] for node in ray.nodes()):
        return
    disconnect()  # in a restart after the node itself was lost
    address, on_sigterm = running_cluster(), signal.getsignal(signal.SIGTERM)
    if address is None:
        _start(processes)
    else:
        _join(address)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would abort, or exit with status 15


def _start(processes: int) -> None:
    cores = os.cpu_count() or 1
    if processes > cores:
        logger.warning("warning: %d processes share the %d cores of this machine", processes, cores)
    try:
        cluster = PrivateCluster(max(cores, processes))
    except WorkerError as error:  # a process of Ray has died, as where another one has taken its port
        logger.warning("warning: %s; starting it once more", str(error).partition("\n")[0])
        cluster = PrivateCluster(max(cores, processes))
    _PRIVATE.append(cluster)
    cluster.connect()


def _join(address: str) -> None:
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS={address}: expected HOST:PORT, as of `ray start` (6379); the address of jobs is "
            "for `ray job submit`, and Ray's client (ray://) is not supported. RAY_ADDRESS=local starts a "
            "private cluster"
        )
    if re.fullmatch(r".+:\d+", address) and not answers(address):
        raise ConfigError(  # Ray itself would retry for minutes
            f"no Ray cluster answers at {address}: start it with `ray start --head`, or unset "
            "RAY_ADDRESS to start a private cluster"
        )
    if "RAY_ADDRESS" not in os.environ:  # Ray does this for the clusters that it finds itself
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    # Show the output of workers; Ray's own messages are in its log files.
    with raised_as(
        ConfigError,
        f"cannot connect to the Ray cluster at {address}",
        *(ConnectionError, AuthenticationError, RuntimeError),  # the last of another version of Ray
        remedy="if it is not meant, set RAY_ADDRESS=local; if it requires a token, set RAY_AUTH_MODE=token, "
        "and RAY_AUTH_TOKEN_PATH if the token is not in ~/.ray/auth_token",
    ):
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)


_PRIVATE: list[PrivateCluster] = []


@atexit.register
def disconnect() -> None:
    """Disconnect from Ray, and end the private cluster."""
    ray.shutdown()
    while _PRIVATE:
        _PRIVATE.pop().stop()


def running_cluster() -> str | None:
    """Return the address in ``RAY_ADDRESS``, or of the cluster that ``ray start`` started or joined here.

    Ray's own search (``address="auto"``) would also find the private cluster of another run, and end with it.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        return None if address == "local" else address
    started = find_bootstrap_address(None)  # from a file that outlives a killed cluster
    return started if started in find_gcs_addresses() else None


def take_places(pools: Sequence[ResourcePool], *, gpus: bool) -> dict[ResourcePool, list[Any]]:
    """Reserve placement groups by pool: one per node of a pool, with one bundle per process.

    Different entries of ``processes_per_node`` are on different nodes. If not all pools fit, nothing is
    reserved and ``ConfigError`` lists the request and what each node has.
    """
    resources = ("CPU", "GPU") if gpus else ("CPU",)
    places: dict[ResourcePool, list[Any]] = {pool: [] for pool in pools}
    nodes = _choose_nodes(pools, resources)
    try:
        for pool in pools:
            for node, count in zip(nodes[pool], pool.processes_per_node, strict=True):
                # a share of a resource that one node has: the group cannot be placed elsewhere
                bundle = dict.fromkeys(resources, 1.0) | {node.own_resource: 0.001}
                places[pool].append(placement_group([bundle] * count, strategy="STRICT_PACK"))
        for pool in pools:
            for node, group in zip(nodes[pool], places[pool], strict=True):
                if not group.wait(_PLACEMENT_S):
                    raise ConfigError(
                        f"pool {pool.name!r}: could not reserve free {_in_words(resources)} of node "
                        f"{node.name} within {_PLACEMENT_S:.0f} s; is another run starting there?"
                    )
    except BaseException:  # Ctrl-C, too: in a notebook the job of Ray goes on, and would keep them
        for taken in places.values():
            release(taken)
        raise
    return places


def release(groups: Sequence[Any]) -> None:
    """Free placement groups."""
    for group in groups:
        remove_placement_group(group)


@dataclass
class Node:
    """A machine of the cluster and the number of processes that fit on it."""

    name: str
    own_resource: str
    """Ray's resource that only this node has."""
    free: int
    total: int
    """Including those in use by others."""


def living_nodes(resources: Sequence[str]) -> list[Node]:
    """Return the nodes of the cluster; a process takes one of each of ``resources``."""
    free, nodes = available_resources_per_node(), []
    for node in ray.nodes():
        if node["Alive"]:
            names = [name for name in node["Resources"] if name.startswith("node:") and "__" not in name]
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            room = [
                min(int(counts.get(resource, 0)) for resource in resources)
                for counts in (free.get(node["NodeID"], {}), node["Resources"])
            ]
            nodes.append(Node(name, names[0], *room))
    return nodes


def _choose_nodes(pools: Sequence[ResourcePool], resources: Sequence[str]) -> dict[ResourcePool, list[Node]]:
    """Choose a separate node for each entry of a pool; wait a while for resources being released."""
    deadline = time.monotonic() + _RELEASE_S
    while True:
        nodes = living_nodes(resources)
        present = ", ".join(f"{node.name}: {node.free} of {node.total}" for node in nodes)
        whole = [replace(node, free=node.total) for node in nodes]
        if chosen := _fit(pools, nodes):
            return chosen
        if not _fit(pools, whole) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    asked = ", ".join(f"{pool.name}: {list(pool.processes_per_node)}" for pool in pools)
    raise ConfigError(
        "the cluster lacks resources. Requested processes per node, each with one of "
        f"{_in_words(resources)}: {asked}; free now, by node: {present or 'no node'}. Lower "
        "trainer.n_gpus_per_node, trainer.nnodes or trainer.resource_pools, or add nodes with "
        "`ray start --address=...`"
    )


def _in_words(resources: Sequence[str]) -> str:
    return " and ".join(f"{resource}s" for resource in resources)


def _fit(pools: Sequence[ResourcePool], nodes: Sequence[Node]) -> dict[ResourcePool, list[Node]] | None:
    """Place the largest entries first, each on the fullest node with room; None if one does not fit."""
    entries = [(count, pool, index) for pool in pools for index, count in enumerate(pool.processes_per_node)]
    chosen: dict[ResourcePool, dict[int, Node]] = {pool: {} for pool in pools}
    for count, pool, index in sorted(entries, key=lambda entry: -entry[0]):
        others = chosen[pool].values()
        fitting = [node for node in nodes if node.free >= count and all(node is not used for used in others)]
        if not fitting:
            return None
        node = min(fitting, key=lambda node: node.free)
        node.free -= count
        chosen[pool][index] = node
    return {pool: [places[index] for index in sorted(places)] for pool, places in chosen.items()}

"""Functions that ranks of two pools run in ``test_transfer.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import worker_jobs
from sharded_jobs import rank, world_size

from strop.controller.pools import Role
from strop.controller.rendezvous import open_store
from strop.errors import ModelError
from strop.listening import LOOPBACK
from strop.rollout.transfer.broadcast import Channel

Weights = dict[str, torch.Tensor]


def pools(folder: Path, meeting: Path, actors: int, dtype: str) -> tuple[Weights, dict[str, int] | None]:
    """Two transfers from a pool of ``actors`` ranks that train to the rest, which generates.

    Return an actor's current weights in float32, or what a rollout then holds, with its checksums.
    """
    place, size = rank(), world_size() - actors
    dist.destroy_process_group()
    pool = "actor" if place < actors else "rollout"
    if (actors if pool == "actor" else size) > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting / pool}",
            rank=place if pool == "actor" else place - actors,
            world_size=actors if pool == "actor" else size,
        )
    extra = (
        f"actor_rollout_ref.model.compute_dtype={dtype}",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.weight_transfer=broadcast",
    )
    ports = dist.FileStore(str(meeting / "port"), world_size=-1)
    if pool == "actor":
        built = worker_jobs.worker(folder, Role.Actor, *extra)
        if place == 0:
            ports.set("port", str(built.open_channel(LOOPBACK)))
        built.join_channel(LOOPBACK, int(ports.get("port")), 1 + size)
        for _ in range(2):
            worker_jobs.update(built, times=1)
            built.send_weights()
        return {
            name: weight.clone() for name, weight in built.engine.named_weights()
        }, built.weight_checksums()
    built = worker_jobs.worker(folder, Role.Rollout, *extra)
    built.join_channel(LOOPBACK, int(ports.get("port")), 1 + size)
    for version in (1, 2):
        built.receive_weights(version)
        assert built.rollout_version == version
    held = {name: weight.detach().clone() for name, weight in built.rollout.model.named_parameters()}
    return held, built.rollout.checksums()


def weights(transfer: int) -> list[tuple[str, torch.Tensor]]:
    """Weights of one transfer; one is larger than a bucket, one is a transposed view."""
    generator = torch.Generator().manual_seed(transfer)
    shapes = [(5,), (7, 3), (300, 11), (1,), (64, 2), (3, 3, 3)]
    made = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    made[4] = made[4].T
    return [(f"weight {number}", weight) for number, weight in enumerate(made)]


def buckets() -> list[list[tuple[str, torch.Tensor]]]:
    """Receive three transfers in small buckets."""
    port: list[Any] = [None]
    if rank() == 0:
        store, port[0] = open_store(LOOPBACK)
        dist.broadcast_object_list(port, src=0)
        channel = Channel(store, 0, world_size(), torch.device("cpu"))
        for transfer in range(3):
            channel.send(iter(weights(transfer)), max_bytes=300)
        assert store.num_keys() < 12  # those of the group alone
        return []
    dist.broadcast_object_list(port, src=0)
    channel = Channel.to_sender(LOOPBACK, port[0], rank(), world_size(), torch.device("cpu"))
    found: list[list[tuple[str, torch.Tensor]]] = []
    for _ in range(3):
        found.append([(name, weight.clone()) for name, weight in channel.receive()])
    return found


def give_up(folder: Path) -> str:
    """Receive weights that do not fit; return the error."""
    port: list[Any] = [None]
    if rank() == 0:
        store, port[0] = open_store(LOOPBACK)
        dist.broadcast_object_list(port, src=0)
        Channel(store, 0, world_size(), torch.device("cpu")).send(weights(0), max_bytes=300)
        return "sent"
    dist.broadcast_object_list(port, src=0)
    place, size = rank(), world_size()
    dist.destroy_process_group()
    built = worker_jobs.worker(folder, Role.Rollout)
    built._channel = Channel.to_sender(LOOPBACK, port[0], place, size, torch.device("cpu"))
    try:
        built.receive_weights(1)
    except ModelError as error:
        assert built.rollout_version is None
        return str(error)
    return "loaded"


_UNFINISHED: list[Channel] = []  # gloo ends a group only with its collectives


def run_out_of_memory(buckets: int) -> str:
    """Send weights to a rank that has no memory for a bucket; return the error."""
    port: list[Any] = [None]
    if rank() == 0:
        store, port[0] = open_store(LOOPBACK)
    dist.broadcast_object_list(port, src=0)
    try:
        if rank() == 0:
            _UNFINISHED.append(Channel(store, 0, 2, torch.device("cpu")))
            _UNFINISHED[-1].send(weights(0), max_bytes=300 if buckets > 1 else 1 << 20)
        else:
            channel = Channel.to_sender(LOOPBACK, port[0], 1, 2, torch.device("cpu"))
            with mock.patch.object(torch, "empty", side_effect=torch.OutOfMemoryError("no room")):
                list(channel.receive())
    except (ModelError, torch.OutOfMemoryError) as error:
        return str(error)
    return "complete"

"""Weights from the actor's first rank to all ranks of another pool by broadcast (NCCL on GPUs, else gloo).

``send_file`` and ``received_file`` are for a file of weights to the processes of a server.

Two pools have no common process group, so these processes form one. Weights travel in flat buckets: one is
under way while the next one is gathered, and while the one before is loaded. Names and shapes go through the
group's store, so that no device waits for the CPU.

vLLM's own transfer engine for NCCL is not used: its sender needs vLLM in the actor's processes, and its
receiver loads weights past the checks of ``VLLMRollout.update_weights``, which every transport feeds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.controller.rendezvous import PATIENCE, choose_interfaces, open_store
from strop.errors import ModelError
from strop.listening import address_toward
from strop.rollout.transfer.object_store import BUCKET_BYTES, weight_buckets
from strop.torch_private import gloo_options, nccl_options

logger = logging.getLogger(__name__)

PART_BYTES = 32 << 20
"""Size of a bucket of a file, of which several are in memory for each server."""
_POLL_S = 5e-4
"""Seconds between two looks for a receiver that failed: NCCL itself would wait until its timeout."""

_CONNECT = timedelta(minutes=1)
_CPU = torch.device("cpu")
Entry = tuple[str, torch.dtype, list[int]]
"""Name, dtype and shape of a weight in a bucket."""


class Channel:
    """The process group of one sender, rank zero, and the receivers."""

    def __init__(
        self,
        store: dist.TCPStore,
        rank: int,
        size: int,
        device: torch.device,
        patience: timedelta = PATIENCE,
    ) -> None:
        """Join through the sender's ``store``. Collective over sender and receivers.

        ``patience`` bounds every wait for the others.
        """
        store.set_timeout(patience)
        self._store, self._device, self._size = dist.PrefixStore("weights", store), device, size
        groups = dist.PrefixStore("group", store)
        if device.type == "cuda":
            choose_interfaces(store.host)
            options = nccl_options(patience)  # a rollout may still generate
            self._group: Any = dist.ProcessGroupNCCL(groups, rank, size, options)
        else:
            options = gloo_options(address_toward(store.host), patience)
            self._group = dist.ProcessGroupGloo(groups, rank, size, options)
        self._transfers = 0

    @classmethod
    def to_sender(
        cls,
        address: str,
        port: int,
        rank: int,
        size: int,
        device: torch.device,
        patience: timedelta = PATIENCE,
    ) -> Channel:
        """Join as a receiver, through the store that the sender has opened. Collective."""
        store = dist.TCPStore(address, port, timeout=min(patience, _CONNECT))
        return cls(store, rank, size, device, patience)

    def send(self, weights: Iterable[tuple[str, Tensor]], max_bytes: int = BUCKET_BYTES) -> None:
        """Broadcast weights of one dtype, in buckets of ``max_bytes`` or of one larger weight.

        Return when all receivers have them; ``ModelError`` if one fails to take part.
        """
        number, before = 0, None
        for number, bucket in enumerate(weight_buckets(weights, max_bytes, copy=False), start=1):
            entries = [(name, str(weight.dtype), list(weight.shape)) for name, weight in bucket]
            flat = torch.cat([weight.flatten().view(torch.uint8) for _, weight in bucket]).to(self._device)
            bucket.clear()
            # before the broadcast: receivers allocate the bucket from it
            self._store.set(self._key(number), json.dumps(entries))
            work = self._group.broadcast(flat, 0)
            if before is not None:
                self._complete(before[0])
            before = work, flat  # NCCL reads it until then
        self._store.set(self._key(number + 1), "[]")
        if before is not None:
            self._complete(before[0])
        self._require_receivers()
        # the store would grow with every transfer
        for key in (*range(1, number + 2), "received", "receivers"):
            self._store.delete_key(self._key(key))
        self._transfers += 1

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the sender's next transfer. Iterate to the end: the others wait for it."""
        try:
            yield from self._arriving()
        except BaseException as error:  # the sender would wait for this rank
            self._store.set(self._key("received"), f"{type(error).__name__}: {error}")
            raise
        # the last receiver answers for all
        if self._store.add(self._key("receivers"), 1) == self._size - 1:
            self._store.set(self._key("received"), "")
        self._transfers += 1

    def _complete(self, work: Any) -> None:
        """Wait for a broadcast, in which a receiver that has failed takes no part."""
        while not work.is_completed():
            if self._store.check([self._key("received")]):
                self._require_receivers()
            time.sleep(_POLL_S)
        work.wait()

    def _require_receivers(self) -> None:
        """Wait until all receivers are done; ``ModelError`` if one failed."""
        if problem := self._store.get(self._key("received")).decode():
            raise ModelError(
                f"weight transfer: a process of the rollout failed to receive weights: {problem}"
            )

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        number = 1
        arriving = self._begin(number)
        while arriving is not None:
            entries, flat, work = arriving
            work.wait()
            number += 1
            arriving = self._begin(number)
            parts = flat.split([_size(entry) for entry in entries])
            for (name, dtype, shape), part in zip(entries, parts, strict=True):
                yield name, part.view(dtype).view(shape)

    def _key(self, part: int | str) -> str:
        return f"{self._transfers}/{part}"

    def _begin(self, number: int) -> tuple[list[Entry], Tensor, Any] | None:
        """Begin to receive a bucket; None after the last."""
        found = json.loads(self._store.get(self._key(number)))
        if not found:
            return None
        entries = [(name, getattr(torch, kind.removeprefix("torch.")), shape) for name, kind, shape in found]
        flat = torch.empty(sum(map(_size, entries)), dtype=torch.uint8, device=self._device)
        return entries, flat, self._group.broadcast(flat, 0)


def send_file(path: str, host: str, receivers: int, patience_s: float) -> dict[str, Any]:
    """Begin to broadcast a file to processes at ``host``, in a thread; return what ``received_file`` needs.

    A receiver that dies ends the thread at once, a silent one after ``patience_s``. Nobody waits for it.
    """
    address, file = address_toward(host), open(path, "rb")  # noqa: SIM115 - the path may go before the thread
    store, port = open_store(address)

    def parts() -> Iterator[tuple[str, Tensor]]:
        digest, left = 0, os.fstat(file.fileno()).st_size
        while left:
            part = torch.empty(min(left, PART_BYTES), dtype=torch.uint8)
            left -= file.readinto(part.numpy())
            yield str(digest := zlib.crc32(part.numpy(), digest)), part

    def send() -> None:
        try:
            with file:
                patience = timedelta(seconds=patience_s)
                Channel(store, 0, 1 + receivers, _CPU, patience).send(parts(), PART_BYTES)
        except (RuntimeError, ModelError, OSError) as error:  # the receivers tell theirs themselves
            logger.warning("weights on their way to %s did not arrive: %s", host, error)

    threading.Thread(target=send, name="weights", daemon=True).start()
    return {"address": address, "port": port, "size": 1 + receivers, "patience_s": patience_s}


@contextlib.contextmanager
def received_file(sender: Mapping[str, Any], rank: int) -> Generator[str]:
    """Receive a file of ``send_file`` into memory; yield its path. ``ModelError`` if it is another one."""
    with os.fdopen(os.memfd_create("strop-weights", os.MFD_CLOEXEC), "wb") as file:
        patience, digest, expected = timedelta(seconds=sender["patience_s"]), 0, ""
        where = sender["address"], sender["port"], 1 + rank, sender["size"]
        for digest_so_far, part in Channel.to_sender(*where, _CPU, patience).receive():
            file.write(part.numpy())
            digest, expected = zlib.crc32(part.numpy(), digest), digest_so_far
        if str(digest) != expected:
            raise ModelError(f"weight transfer: what arrived has the checksum {digest}, expected {expected}")
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _size(entry: Entry) -> int:
    _, dtype, shape = entry
    return torch.Size(shape).numel() * dtype.itemsize

"""Weights from the actor's first rank to all ranks of another pool by broadcast (NCCL on GPUs, else gloo).

Two pools have no common process group, so these processes form one. Weights travel in flat buckets: one is
under way while the next one is gathered, and while the one before is loaded. Names and shapes go through the
group's store, so that no device waits for the CPU.

vLLM's own transfer engine for NCCL is not used: its sender needs vLLM in the actor's processes, and its
receiver loads weights past the checks of ``VLLMRollout.update_weights``, which every transport feeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.controller.rendezvous import PATIENCE, stay_on_this_machine
from strop.errors import ModelError
from strop.rollout.transfer.object_store import BUCKET_BYTES, weight_buckets
from strop.torch_private import nccl_options

_POLL_S = 5e-4
"""Seconds between two looks for a receiver that failed: NCCL itself would wait until its timeout."""

Entry = tuple[str, torch.dtype, list[int]]
"""Name, dtype and shape of a weight in a bucket."""


class Channel:
    """The process group of one sender, rank zero, and the receivers."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        """Join through the sender's ``store``. Collective over sender and receivers."""
        store.set_timeout(PATIENCE)
        self._store, self._device, self._size = dist.PrefixStore("weights", store), device, size
        groups = dist.PrefixStore("group", store)
        if device.type == "cuda":
            options = nccl_options(PATIENCE)  # a rollout may still generate
            self._group: Any = dist.ProcessGroupNCCL(groups, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(groups, rank, size, timeout=PATIENCE)
        self._transfers = 0

    @classmethod
    def to_sender(cls, address: str, port: int, rank: int, size: int, device: torch.device) -> Channel:
        """Join as a receiver, through the store that the sender has opened. Collective."""
        stay_on_this_machine(address)
        return cls(dist.TCPStore(address, port, timeout=PATIENCE), rank, size, device)

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


def _size(entry: Entry) -> int:
    _, dtype, shape = entry
    return torch.Size(shape).numel() * dtype.itemsize

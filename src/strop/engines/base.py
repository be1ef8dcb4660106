"""The seam between a role (actor, critic, reference, reward model) and whatever runs its model."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from strop.engines.micro_batches import MicroBatching
from strop.errors import ConfigError
from strop.models.base import RoleModel
from strop.protocol import DataProto

Outputs = dict[str, Tensor]


Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


"""(outputs of the model, columns of the micro-batch) -> (loss to differentiate, metrics).

The loss and the metrics are sums over this micro-batch divided by the denominators of the whole mini-batch,
so that adding up micro-batches (and ranks) gives the figure of the mini-batch, however it was split.
"""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: the gradient norm before clipping, and whether it was skipped."""

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """Runs forward and backward passes over a batch and keeps the optimizer.

    A new back-end is one new class with these methods; workers know nothing else about it.
    """

    autocast_dtype: torch.dtype | None

    def infer(self, batch: DataProto, micro: MicroBatching, **options: Any) -> Outputs:
        """Forward passes without gradient; outputs have the batch's rows in the batch's order."""
        ...

    def forward_backward(
        self, batch: DataProto, loss: Loss, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        """Accumulate the gradient of ``loss`` over a mini-batch; returns the sums of metrics and loss."""
        ...

    def optimizer_step(self, learning_rate: float) -> StepResult:
        """Clip, step and clear the gradients; when they are not finite, skip the step."""
        ...

    def on_device(self) -> AbstractContextManager[None]:
        """Inside, the weights are on the device, for an in-process rollout that shares them."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's whole weights by Hugging Face name, one at a time, tied ones once, detached.

        Collective: every rank iterates to the end.
        """
        ...

    def save(self, folder: Path, *, background: bool = False) -> None:
        """Write model and optimizer state, so that training can go on exactly.

        With ``background`` the state of now is written while training goes on; ``finish_save`` ends it and
        tells its failure. The next save waits for it.
        """
        ...

    def save_is_done(self) -> bool:
        """Whether no background save is under way; does not wait. Any thread may ask."""
        ...

    def finish_save(self) -> None:
        """Wait for the latest background save; ``CheckpointError`` when it failed, however often asked.

        Any thread may call it, beside one that computes.
        """
        ...

    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote, on any number of ranks."""
        ...

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase, *, weights: bool = True) -> None:
        """Write a Hugging Face folder; without ``weights``, its configuration and tokenizer only."""
        ...


ENGINES: dict[str, str] = {"fsdp": "strop.engines.torch.engine:TorchEngine"}


"""Name in ``actor.strategy`` and ``critic.strategy`` -> "module:class", imported when it is asked for."""


def build_engine(strategy: str, module: RoleModel, **options: Any) -> Engine:
    """Import the back-end of that name and construct it; ``ConfigError`` names the known ones."""
    if strategy not in ENGINES:
        raise ConfigError(f"strategy={strategy!r} has no engine (known: {', '.join(ENGINES)})")
    module_name, _, class_name = ENGINES[strategy].partition(":")
    return getattr(importlib.import_module(module_name), class_name)(module, **options)


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU when there is one; ``ConfigError`` for ``cuda`` where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch sees no GPU here; expected auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of forward passes. ``auto``: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


# What a worker tells an engine about optimizer, sharding and memory.


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and gradient clipping by global norm."""

    betas: tuple[float, float]
    weight_decay: float
    eps: float
    grad_clip: float


@dataclass(frozen=True)
class ShardingSettings:
    """Which modules are units, and how many ranks share one copy of the parameters, or one sequence."""

    layer_classes: tuple[str, ...] = ()
    """Names of the classes to shard as units; none: the model's own decoder layers."""
    min_num_params: int = 0
    """Instead, units of at least this many parameters; 0: by class."""
    fsdp_size: int = -1
    """Ranks that share one copy; -1: all. 1: every rank has its own."""
    sequence_parallel_size: int = 1
    """Neighbouring ranks that get the same batches and run passes over them together."""


@dataclass(frozen=True)
class OffloadSettings:
    """What waits in CPU memory; on a CPU nothing moves."""

    parameters: bool = False
    optimizer: bool = False


# The learning rate as a pure function of the iteration (NUMERICS: schedules and steps).


def learning_rate_factor(
    iteration: int, *, total: int, warmup_ratio: float, style: str, min_ratio: float | None
) -> float:
    """What the base learning rate is multiplied with at ``iteration`` (counted from 0) of ``total``.

    Warm-up: (iteration + 1) / W over the first W = int(warmup_ratio x total) iterations. After it: 1
    (``constant``), a half cosine (``cosine``) or a line (``linear``) from 1 towards ``min_ratio`` (null: 0).
    """
    warmup = int(warmup_ratio * total)
    if iteration < warmup:
        return (iteration + 1) / warmup
    if style == "constant":
        return 1.0
    floor = min_ratio or 0.0
    progress = min((iteration - warmup) / max(total - warmup, 1), 1.0)
    if style == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * (1 - progress)


# One number for all weights: what runs that must be equal are compared by.


def weights_hash(named_weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names and the SHA-256 of bytes, in name order; one tensor at a time is held.

    Equal exactly when every parameter is bit-identical, in whatever order and from how many ranks they come.
    """
    digests = {
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).digest()
        for name, weight in named_weights
    }
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(name.encode() + digests[name])
    return whole.hexdigest()

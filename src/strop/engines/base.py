"""Interface between a role (actor, critic, reference, reward model) and the back-end that runs its model.

``ModelSpec`` and ``EngineSpec`` describe what a worker needs; ``engine_class`` finds the ``Engine`` that is
built from them. Also here: the learning-rate schedule, and the hash of a model's weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strop.config.backends import ENGINES
from strop.engines.micro_batches import MicroBatching
from strop.errors import ConfigError
from strop.models.lora import LoraSettings
from strop.models.teaching import Teaching
from strop.protocol import DataProto

Outputs = dict[str, Tensor]

Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""(outputs of the model, columns of the micro-batch) -> (loss to differentiate, metrics).

Loss and metrics are sums over this micro-batch divided by the denominators of the whole mini-batch, so they
add up over micro-batches and ranks to the figures of the mini-batch.
"""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Description of a role's model, which the engine builds."""

    role: str = "model"
    """Name for errors."""
    kind: Literal["policy", "value", "score", "pairs", "policy_pairs"]
    """Forward pass: log-probs, values, scores of sequences, or scores or log-probs of pairs of answers."""
    path: Path
    """Local Hugging Face folder or GGUF file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loader: override_config, trust_remote_code, attn_implementation."""
    image_processor: Any | None = None
    """The model's image processor, of transformers, where rows have pictures."""
    head_seed: int | None = None
    """Seed of a new scalar head where the folder has none; None: that is an error."""
    compute_dtype: str = "float32"
    """auto, float32 or bfloat16; weights are float32."""
    packed: Literal["auto"] | bool = False
    """Run passes on the real tokens alone; auto: where the model supports it."""
    packing_key: str = "actor_rollout_ref.model.use_remove_padding"
    """Configuration key of ``packed``, for errors."""
    gradient_checkpointing: Literal["selective"] | bool = False
    """Recompute layers in the backward pass; selective: all but matrix products and attention."""
    compile: Literal["auto"] | bool = False
    """Compile the decoder layers; auto: on a GPU, where that is possible."""
    freeze: Sequence[Literal["encoder", "projector"]] | None = None
    """Parts of a trained model with pictures that keep their weights; None: the model is not trained."""
    lora: LoraSettings | None = None
    """Adapters that are trained instead of the weights, but for a scalar head and ``modules_to_save``."""
    keeps_reference_head: bool = False
    """Keep a frozen copy of the output layer as loaded, for the full KL."""
    teaching: Teaching | None = None
    """Comparison with a teacher in passes ``with_teacher``."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and gradient clipping by global norm."""

    betas: tuple[float, float]
    weight_decay: float
    eps: float
    grad_clip: float


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Placement, sharding and optimizer of an engine."""

    device: torch.device
    world_size: int = 1
    """Size of the worker group; above 1, ``torch.distributed`` is initialized."""
    section: Any = None
    """The strategy's configuration section (``EngineKind.section``)."""
    sequence_parallel_size: int = 1
    """Neighbouring ranks that get the same rows and share their sequences."""
    optimizer: OptimizerSettings | None = None
    """None: inference only."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimizer step: gradient norm before clipping, and True if the step was skipped."""

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """Run forward and backward passes over a batch, and keep the optimizer.

    A new back-end is one class with these methods and an entry in ``ENGINES``.
    """

    compute_dtype: torch.dtype | None
    """Dtype of passes; None: that of the weights."""

    @classmethod
    def build(cls, model: ModelSpec, spec: EngineSpec) -> Engine:
        """Load the model and construct its engine. Collective."""
        ...

    @staticmethod
    def data_parallel_place(
        rank: int, world_size: int, *, section: Any, sequence_parallel_size: int
    ) -> tuple[int, int]:
        """Return the part of a batch's rows that ``rank`` gets, and the number of parts."""
        ...

    @property
    def shareable_model(self) -> PreTrainedModel | None:
        """The module that a rollout in this process may generate with; None if the weights are sharded."""
        ...

    def infer(self, batch: DataProto, micro: MicroBatching, **options: Any) -> Outputs:
        """Run forward passes without gradient; outputs have the batch's rows in the batch's order."""
        ...

    def forward_backward(
        self, batch: DataProto, loss: Loss, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        """Accumulate the gradient of ``loss`` over a mini-batch; return the sums of metrics and loss."""
        ...

    def agree(self, value: Any) -> Any:
        """Return the ``value`` of the rank with the model's outputs, on all ranks with the same rows."""
        ...

    def optimizer_step(self, learning_rate: float) -> StepResult:
        """Clip, step and clear the gradients; skip the step if they are not finite."""
        ...

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the weights on the device in the body, for a rollout that shares them."""
        ...

    def base_model(self) -> AbstractContextManager[None]:
        """Run the base model, without LoRA adapters, in the body: its passes and its weights."""
        ...

    def named_weights(
        self, *, as_saved: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by their names in the model, one at a time, tied ones once, detached.

        LoRA adapters are merged into them. With ``dtype`` they are converted, before they are sent between
        ranks where possible; None: float32, as they are trained.

        ``as_saved``: by the names and in the shapes of a checkpoint (``strop.models.checkpoint_layout``).
        Collective: every rank must iterate to the end.
        """
        ...

    def set_config(self, entries: Mapping[str, Any]) -> None:
        """Set entries of the exported ``config.json``; None removes one."""
        ...

    def save(self, folder: Path, *, background: bool = False) -> None:
        """Write model and optimizer state for an exact resume.

        With ``background`` the current state is copied and written while training goes on; ``finish_save``
        waits for it and raises its failure. The next save waits for it.
        """
        ...

    def save_is_done(self) -> bool:
        """Return True if no background save is running. Does not block; thread-safe."""
        ...

    def finish_save(self) -> None:
        """Wait for the latest background save; every call raises ``CheckpointError`` if it failed.

        Thread-safe, also while another thread computes.
        """
        ...

    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote, on any number of ranks."""
        ...

    def export(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weights: bool = True,
        merged: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a Hugging Face folder; without ``weights``, only its configuration and tokenizer.

        ``dtype`` is that of the weights in the files; None: that of the folder which the model was read from.
        Its configuration and tokenizer have that folder's values.

        Of a model with LoRA adapters the folder holds these alone, in any case (they are small); with
        ``merged``, the whole model with the adapters in its weights.
        """
        ...


def engine_class(strategy: str) -> type[Engine]:
    """Import the engine of ``strategy``; ``ConfigError`` with the known names if there is none."""
    if strategy not in ENGINES:
        raise ConfigError(f"strategy={strategy!r} has no engine (known: {', '.join(ENGINES)})")
    return ENGINES[strategy].load(ENGINES[strategy].engine)


def learning_rate_factor(
    iteration: int, *, total: int, ratio: float, steps: int, first: int, style: str, min_ratio: float | None
) -> float:
    """Return the factor of the rate at ``iteration`` (from 0) of ``total`` (``strop docs algorithms``).

    Warm-up: (iteration - s + 1) / W over W iterations from s on: ``steps`` from the model's ``first`` update
    if 0 or more, else int(``ratio`` x total) from 0. After it: 1 (``constant``), a half cosine (``cosine``)
    or a line (``linear``) from 1 towards ``min_ratio`` (null: 0).
    """
    first, steps = (first, steps) if steps >= 0 else (0, int(ratio * total))
    warmup = first + steps
    if iteration < warmup:
        # from 1 / W: a factor of 0 would leave the weights as they are in the first iteration
        return (iteration - first + 1) / steps
    if style == "constant":
        return 1.0
    floor = min_ratio or 0.0
    # below 1 in the last iteration, total - 1: with a floor of 0 it still changes the weights
    progress = min((iteration - warmup) / max(total - warmup, 1), 1.0)
    if style == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * (1 - progress)


def weights_hash(named_weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return SHA-256 over names and the SHA-256 of bytes, in name order, holding one tensor at a time.

    Equal if and only if every parameter is bit-identical, independent of their order and sharding.
    """
    digests = {
        # as bytes: numpy has no bfloat16, and -0.0 differs from 0.0
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).digest()
        for name, weight in named_weights
    }
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(name.encode() + digests[name])
    return whole.hexdigest()

"""One process of plain torch: float32 master weights, optional bfloat16 autocast, fused AdamW."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from strop.engines.base import Loss, OptimizerSettings, Outputs, StepResult
from strop.engines.micro_batches import MicroBatching, restore, trim
from strop.engines.torch import state
from strop.errors import CheckpointError
from strop.models.base import RoleModel
from strop.models.loader import no_progress_bars
from strop.protocol import DataProto


def pick_autocast(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of forward passes, None for float32. ``auto``: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if name == "bfloat16" else None


class TorchEngine:
    """Holds one model in this process; with ``optimizer=None`` it only infers (reference, reward model)."""

    def __init__(
        self,
        module: RoleModel,
        *,
        device: torch.device,
        compute_dtype: str = "float32",
        optimizer: OptimizerSettings | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.module = module
        module.to(device)
        self.device = device
        self.autocast_dtype = pick_autocast(compute_dtype, device)
        self._settings = optimizer
        self._optimizer: torch.optim.AdamW | None = None
        if optimizer is None:
            module.requires_grad_(False)
            return
        if gradient_checkpointing:
            module.hugging_face_model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        # The fused kernel does the whole step in one pass over memory: 5-8 times faster than foreach on a
        # CPU.
        self._optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=0.0,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            eps=optimizer.eps,
            fused=True,
        )
        state.materialize(self._optimizer)

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def _columns(self, batch: DataProto, rows: Tensor) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in trim(batch[rows]).items()}

    @torch.no_grad()
    def infer(self, batch: DataProto, micro: MicroBatching, **options: Any) -> Outputs:
        """See ``Engine.infer``; the outputs are on the CPU."""
        self.module.eval()
        batch = DataProto(batch.batch)
        pieces, rows = [], micro.split(batch)
        for piece_rows in rows:
            with self._autocast():
                outputs = self.module(self._columns(batch, piece_rows), **options)
            pieces.append({name: tensor.cpu() for name, tensor in outputs.items()})
        width = batch.batch["response_mask"].shape[1] if "response_mask" in batch else 0
        return restore(pieces, rows, width)

    def forward_backward(
        self, batch: DataProto, loss: Loss, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        """See ``Engine.forward_backward``."""
        self.module.train()
        batch = DataProto(batch.batch)
        totals: dict[str, Tensor] = {}
        for rows in micro.split(batch):
            columns = self._columns(batch, rows)
            with self._autocast():
                outputs = self.module(columns, **options)
            value, metrics = loss(outputs, columns)
            value.backward()
            for name, metric in {"loss": value, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + metric.detach().double()
        return {name: float(total) for name, total in totals.items()}

    def optimizer_step(self, learning_rate: float) -> StepResult:
        """See ``Engine.optimizer_step``."""
        if self._optimizer is None or self._settings is None:
            raise RuntimeError("this engine was built without an optimizer")
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._settings.grad_clip)
        grad_norm = float(norm)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm=grad_norm, skipped=skipped)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Engine.named_weights``; tied weights come once."""
        for name, weight in self.module.hugging_face_model.named_parameters():
            yield name, weight.detach()

    def save(self, folder: Path) -> None:
        """See ``Engine.save``."""
        state.save(self.module, self._optimizer, folder)

    def load(self, folder: Path) -> None:
        """See ``Engine.load``."""
        state.load(self.module, self._optimizer, folder)

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """See ``Engine.export``; weights are written in float32, as they are trained."""
        with no_progress_bars():  # one bar a checkpoint would break into the run's own display
            try:
                self.module.hugging_face_model.save_pretrained(folder, safe_serialization=True)
                tokenizer.save_pretrained(folder)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot write the model to {folder}: {error}") from error

"""Plain torch: float32 master weights, bfloat16 on demand, fused AdamW; sharded when there are more ranks.

Everything that ranks have to agree on is in ``ranks``, whose functions are the identity in one process.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from strop.engines.base import Loss, OffloadSettings, OptimizerSettings, Outputs, ShardingSettings, StepResult
from strop.engines.base import compute_dtype as dtype_of
from strop.engines.micro_batches import MicroBatching, restore, trim
from strop.engines.torch import ranks, state
from strop.engines.torch.export import write_weights
from strop.engines.torch.sharding import Offload, materialize, reshard, sequence_group, shard
from strop.errors import CheckpointError
from strop.models.base import RoleModel
from strop.models.deferred import WeightSource
from strop.models.loader import no_progress_bars
from strop.protocol import DataProto


class TorchEngine:
    """Holds one model, or this rank's part of it; with ``optimizer=None`` it only infers.

    One process computes in bfloat16 by autocast; sharded, the gathered copies of the weights are bfloat16.
    """

    def __init__(
        self,
        module: RoleModel,
        *,
        device: torch.device,
        compute_dtype: str = "float32",
        optimizer: OptimizerSettings | None = None,
        gradient_checkpointing: bool = False,
        sharding: ShardingSettings | None = None,
        weights: WeightSource | None = None,
        offload: OffloadSettings | None = None,
    ) -> None:
        """``sharding`` needs a process group, and a module on the meta device with its ``weights``."""
        self.module = module
        self.device = device
        dtype = dtype_of(compute_dtype, device)
        self.autocast_dtype = None if dtype == torch.float32 else dtype
        self._settings = optimizer
        self._optimizer: torch.optim.AdamW | None = None
        self._saving: tuple[Future, Path] | None = None
        self._beginning_save = threading.Lock()
        self._sharded = sharding is not None
        if optimizer is None:
            module.requires_grad_(False)
        elif gradient_checkpointing:
            module.enable_gradient_checkpointing()
        if sharding is None or weights is None:
            module.to(device)
        else:
            if sharding.sequence_parallel_size > 1:
                module.share_sequences(sequence_group(sharding.sequence_parallel_size))
            shard(module, sharding, device, self.autocast_dtype)
            materialize(module, weights, device)
            module.check()
            reshard(module)
        if optimizer is not None:
            # The fused kernel does the whole step in one pass over memory: 5-8 times faster than foreach on
            # a CPU.
            self._optimizer = torch.optim.AdamW(
                module.parameters(),
                lr=0.0,
                betas=optimizer.betas,
                weight_decay=optimizer.weight_decay,
                eps=optimizer.eps,
                fused=True,
            )
            state.materialize(self._optimizer)
        self._offload = Offload(offload or OffloadSettings(), module, self._optimizer, device)
        self._offload.park_moments()
        self._offload.park_parameters()

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.autocast_dtype is None or self._sharded:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def _split(self, batch: DataProto, micro: MicroBatching) -> list[Tensor]:
        """The rows of each micro-batch, as many on every rank: each is a round of collectives."""
        self._require_one_batch(batch)
        pieces = micro.split(batch, packed=self.module.packed)
        wanted = ranks.largest(len(pieces), self.device)
        if wanted == len(pieces):
            return pieces
        return micro.split(batch, at_least=wanted, packed=self.module.packed)

    def _require_one_batch(self, batch: DataProto) -> None:
        """Ranks that share sequences would otherwise mix those of different batches, or wait for ever."""
        group, mask_BL = self.module.sequence_group, batch.batch["attention_mask"]
        if group is None:
            return
        places_L = torch.arange(1, mask_BL.shape[1] + 1)
        ids_B = (batch.batch["input_ids"] * mask_BL * places_L).sum(dim=1)
        fingerprint = int((ids_B * torch.arange(1, len(ids_B) + 1)).sum()) + len(mask_BL)
        if not group.is_same(fingerprint, self.device):
            raise RuntimeError(
                f"the {group.size} ranks that share sequences were given different batches; a method that "
                "runs passes must be among its worker's shared_passes"
            )

    def _columns(self, batch: DataProto, rows: Tensor) -> dict[str, Tensor]:
        if len(rows) == 0:  # another rank has a micro-batch here: take part, with nothing to learn from
            batch = batch[torch.zeros(1, dtype=torch.long)]
            rows = torch.zeros(1, dtype=torch.long)
            if "response_mask" in batch:
                batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
        return {name: tensor.to(self.device) for name, tensor in trim(batch[rows]).items()}

    @torch.no_grad()
    def infer(self, batch: DataProto, micro: MicroBatching, **options: Any) -> Outputs:
        """See ``Engine.infer``; the outputs are on the CPU."""
        self._offload.bring_parameters()
        self.module.eval()
        batch = DataProto(batch.batch)
        pieces, rows = [], self._split(batch, micro)
        for piece_rows in rows:
            with self._autocast():
                outputs = self.module(self._columns(batch, piece_rows), **options)
            pieces.append({name: tensor[: len(piece_rows)].cpu() for name, tensor in outputs.items()})
        reshard(self.module)
        self._offload.park_parameters()
        width = batch.batch["response_mask"].shape[1] if "response_mask" in batch else 0
        return restore(pieces, rows, width)

    def forward_backward(
        self, batch: DataProto, loss: Loss, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        """See ``Engine.forward_backward``."""
        self._offload.bring_parameters()
        self.module.train()
        batch = DataProto(batch.batch)
        totals: dict[str, Tensor] = {}
        for rows in self._split(batch, micro):
            columns = self._columns(batch, rows)
            with self._autocast():
                outputs = self.module(columns, **options)
            value, metrics = loss(outputs, columns)
            value.backward()
            for name, metric in {"loss": value, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + metric.detach().double()
        group = self.module.sequence_group
        counts = group is None or group.rank == 0  # ranks that share sequences all have their figures
        return ranks.total({name: float(figure) * counts for name, figure in totals.items()}, self.device)

    def optimizer_step(self, learning_rate: float) -> StepResult:
        """See ``Engine.optimizer_step``."""
        if self._optimizer is None or self._settings is None:
            raise RuntimeError("this engine was built without an optimizer")
        grad_norm = self._clip(self._settings.grad_clip)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._offload.bring_moments()
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._offload.park_moments()
        self._optimizer.zero_grad(set_to_none=True)
        self._offload.park_parameters()
        return StepResult(grad_norm=grad_norm, skipped=skipped)

    def _clip(self, max_norm: float) -> float:
        if self._sharded:
            return ranks.clip_gradients(self.module.parameters(), max_norm)
        return float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm))

    @contextlib.contextmanager
    def on_device(self) -> Generator[None]:
        """See ``Engine.on_device``."""
        self._offload.bring_parameters()
        try:
            yield
        finally:
            self._offload.park_parameters()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Engine.named_weights``."""
        with self.on_device():
            for name, weight in self.module.hugging_face_model.named_parameters():
                yield name, ranks.whole(weight)

    def save(self, folder: Path, *, background: bool = False) -> None:
        """See ``Engine.save``."""
        self._wait_for_save()
        with self._beginning_save:
            self._saving = None
            saving = state.save(self.module, self._optimizer, folder, background=background)
            self._saving = None if saving is None else (saving, folder)

    def save_is_done(self) -> bool:
        """See ``Engine.save_is_done``."""
        saving = self._saving
        return saving is None or saving[0].done()

    def finish_save(self) -> None:
        """See ``Engine.finish_save``.

        The future stays: who was interrupted while it waited has not heard of a failure, and asks again.
        """
        with self._beginning_save:
            saving = self._saving
        if saving is not None:
            state.finish(*saving)

    def _wait_for_save(self) -> None:
        if self._saving is not None:
            wait([self._saving[0]])

    def load(self, folder: Path) -> None:
        """See ``Engine.load``."""
        self._wait_for_save()
        state.load(self.module, self._optimizer, folder)

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase, *, weights: bool = True) -> None:
        """See ``Engine.export``; weights are written in float32, as they are trained."""
        model = self.module.hugging_face_model
        if weights and not self._sharded:
            with _writing(folder):
                model.save_pretrained(folder, safe_serialization=True)
                tokenizer.save_pretrained(folder)
            return
        if ranks.is_first():
            with _writing(folder):
                model.config.architectures = [type(model).__name__]  # as save_pretrained of the model does
                model.config.save_pretrained(folder)
                if model.can_generate() and model.generation_config is not None:
                    model.generation_config.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
        if weights:
            self._export_weights(folder)

    def _export_weights(self, folder: Path) -> None:
        """Rank zero writes; the others take part in the gathers, whatever becomes of rank zero's disk."""
        model = self.module.hugging_face_model
        buffers = dict(state.persistent_buffers(model))
        tensors = itertools.chain(self.named_weights(), buffers.items())
        if not ranks.is_first():
            collections.deque(tensors, maxlen=0)
            return
        sizes = {name: t.nbytes for name, t in itertools.chain(model.named_parameters(), buffers.items())}
        try:
            write_weights(folder, tensors, sizes)
        finally:
            collections.deque(tensors, maxlen=0)


@contextlib.contextmanager
def _writing(folder: Path) -> Generator[None]:
    with no_progress_bars():  # one bar a checkpoint would break into the run's own display
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the model to {folder}: {error}") from error

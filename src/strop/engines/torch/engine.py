"""``TorchEngine``: float32 master weights, optional bfloat16, fused AdamW; FSDP2 on several ranks.

One rank runs plain torch: whole weights, cast to the compute dtype once for all micro-batches. FSDP2 over one
rank would shard nothing. On several ranks FSDP2 gathers copies of float32 shards in the compute dtype and
reduces gradients in float32.

Shapes: B rows of L columns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strop import ranks
from strop.config.names import sets_noise
from strop.config.paths import MERGED_CONFIG
from strop.engines.base import EngineSpec, Loss, ModelSpec, OptimizerSettings, Outputs, StepResult
from strop.engines.micro_batches import MicroBatching, columns_of, require_no_tree, restore
from strop.engines.torch import state
from strop.engines.torch.export import in_dtype, set_entries, write_folder, writing
from strop.engines.torch.offload import Offload
from strop.engines.torch.sharding import (
    ShardingSettings,
    clip_gradients,
    keep_part,
    materialize,
    reshard,
    sequence_group,
    set_gradient_reduction,
    shard,
    whole,
)
from strop.errors import ModelError
from strop.models.attention import is_flash, leave_out_cudnn
from strop.models.base import RoleModel
from strop.models.comparison import few_rows, require_eager_figures, try_kept_results
from strop.models.deferred import Weights, WeightSource, defer_causal_lm, defer_scorer
from strop.models.flex_attention import FLEX
from strop.models.loader import dtype_named, load_causal_lm, load_scorer
from strop.models.pair_policy import PairPolicy
from strop.models.passes.compiled import reason_not_compiled
from strop.models.passes.low_precision import low_precision
from strop.models.policy import PolicyModel
from strop.models.routing import learning_rows
from strop.models.scorer import PairScorer, SequenceScorer, ValueModel
from strop.models.transformers_private import attention_name
from strop.models.vision import freeze, log_trained, reader_of
from strop.protocol import DataProto

_MODULES: dict[str, type[RoleModel]] = {
    "policy": PolicyModel,
    "value": ValueModel,
    "score": SequenceScorer,
    "pairs": PairScorer,
    "policy_pairs": PairPolicy,
}


def build_module(spec: ModelSpec, *, sharded: bool) -> tuple[RoleModel, WeightSource | None]:
    """Load the model of ``spec``; if ``sharded``, build it on the meta device, with a weight source."""
    options: dict[str, Any] = {"path": spec.path, **spec.options}
    source: WeightSource | None = None
    module_cls = _MODULES[spec.kind]
    is_policy = issubclass(module_cls, PolicyModel)
    if not is_policy:
        options["fresh_head_seed"] = spec.head_seed
    if sharded:
        model, source = defer_causal_lm(**options) if is_policy else defer_scorer(**options)
    else:
        model = load_causal_lm(**options) if is_policy else load_scorer(**options)
    module = module_cls(model, packed=spec.packed, packing_key=spec.packing_key)
    module.reader = reader_of(model, spec.image_processor)
    if spec.freeze:
        freeze(model, spec.freeze)
    return module, source


class TorchEngine:
    """The ``Engine`` of one model, or of this rank's part of it; without an optimizer, only infer."""

    def __init__(
        self,
        module: RoleModel,
        *,
        device: torch.device,
        compute_dtype: str = "float32",
        optimizer: OptimizerSettings | None = None,
        gradient_checkpointing: Literal["selective"] | bool = False,
        compiled: bool = False,
        sharding: ShardingSettings | None = None,
        weights: Weights | None = None,
        offload_parameters: bool = False,
        offload_moments: bool = False,
    ) -> None:
        """Move ``module`` to ``device``, or with ``sharding`` shard it over the default process group.

        ``sharding`` needs a module on the meta device, and ``weights`` to fill it.
        """
        leave_out_cudnn()
        self.module = module
        self.device = device
        dtype = dtype_named(compute_dtype, device)
        self.compute_dtype = None if dtype == torch.float32 else dtype
        self._settings = optimizer
        self._optimizer: torch.optim.AdamW | None = None
        self._saving = state.BackgroundSave()
        self._has_pictures = False
        """The mini-batch is of a data set with pictures."""
        self._sharded = sharding is not None
        self._reduces_once = sharding is not None and sharding.reduce_once
        if compiled:
            module.compile_layers()
        if optimizer is None:
            module.requires_grad_(False)
        elif gradient_checkpointing:
            module.enable_gradient_checkpointing(selective=gradient_checkpointing == "selective")
        if sharding is None or weights is None:
            module.to(device)
        else:
            if sharding.sequence_parallel_size > 1:
                module.share_sequences(sequence_group(sharding.sequence_parallel_size))
            shard(module, sharding, device, self.compute_dtype)
            materialize(module, weights, device)
            module.check(sharded=True)
            reshard(module)
        if optimizer is not None:
            # The fused kernel makes one pass over memory: 5-8 times faster than foreach on a CPU.
            self._optimizer = torch.optim.AdamW(
                module.trainable(),
                lr=0.0,  # set in every step
                betas=optimizer.betas,
                weight_decay=optimizer.weight_decay,
                eps=optimizer.eps,
                fused=True,
            )
        self._offload = Offload(
            module, self._optimizer, device, parameters=offload_parameters, moments=offload_moments
        )
        if self._optimizer is not None:
            state.materialize(self._optimizer, self._offload.parked_moments)
        self._offload.park_parameters()

    @classmethod
    def build(cls, model: ModelSpec, spec: EngineSpec) -> TorchEngine:
        """See ``Engine.build``; ``spec.section`` is a section ``fsdp_config``."""
        sharding = None
        if spec.world_size > 1:
            sharding = ShardingSettings.from_section(
                spec.section, sequence_parallel_size=spec.sequence_parallel_size
            )
        reason = reason_not_compiled(spec.device)
        flex = model.options.get("attn_implementation") == FLEX
        for key, value, is_set, other in (
            ("compile", True, model.compile is True, "False"),
            ("attn_implementation", FLEX, flex, "null"),
        ):
            if is_set and reason:
                raise ModelError(
                    f"{model.role}: {key}={value}: {reason}; install it, or set {key} to {other}"
                )
        module, base = build_module(model, sharded=sharding is not None)
        compiled = model.compile is True
        if model.compile == "auto":
            compiled = spec.device.type == "cuda" and not reason and not module.is_mixture
            compiled = compiled and model.gradient_checkpointing != "selective"
        weights: Weights | None = base
        if model.lora is not None:
            adapters = module.adapt(model.lora)
            weights = None if base is None else adapters.source(base)
        if model.freeze or (model.freeze is not None and model.image_processor is not None):
            log_trained(module.hugging_face_model)
        engine = cls(
            module,
            device=spec.device,
            compute_dtype=model.compute_dtype,
            optimizer=spec.optimizer,
            gradient_checkpointing=model.gradient_checkpointing,
            compiled=compiled,
            sharding=sharding,
            weights=weights,
            offload_parameters=spec.section.param_offload,
            # absent for a frozen model
            offload_moments=spec.section.model_dump().get("optimizer_offload", False),
        )
        with engine.on_device():
            if module.adapters is not None:
                module.adapters.keep_base(keep_part)
            engine._require_eager_figures(model)
            if module.kept_results is not None:
                with engine._low_precision():
                    try_kept_results(module)
                reshard(module)
            if model.keeps_reference_head and isinstance(module, PolicyModel):
                with engine.base_model():
                    module.keep_reference_head()
            if model.teaching is not None and isinstance(module, PolicyModel):
                module.teaching = model.teaching
                module.teacher_heads = model.teaching.read_heads(spec.device, engine.compute_dtype)
        return engine

    def _require_eager_figures(self, spec: ModelSpec) -> None:
        """Compare passes with the family's eager one at start-up (``strop.models.comparison``).

        An unsharded model has float32 weights, so in float32 a bound is not widened by rounding;
        flash-attention needs 16 bits. With noise that the user set, updates cannot be compared.
        """
        exact = not (self._sharded or is_flash(attention_name(self.module.hugging_face_model.config)))
        attention_key = f"{spec.packing_key.removesuffix('use_remove_padding')}attn_implementation"
        compare = partial(
            require_eager_figures,
            self.module,
            name=spec.role,
            updates=self._settings is not None and not sets_noise(spec.options.get("override_config") or {}),
            remedy=attention_key if "attn_implementation" in spec.options else "",
            sharded=self._sharded,
        )
        compare(
            dtype=(None if exact else self.compute_dtype) or torch.float32,
            precision=contextlib.nullcontext if exact else self._low_precision,
        )
        if exact and self.compute_dtype is not None:
            self._require_low_precision(spec)
            if self.device.type == "cuda":  # other kernels of attention
                compare(dtype=self.compute_dtype, precision=self._low_precision)
        reshard(self.module)

    @torch.no_grad()
    def _require_low_precision(self, spec: ModelSpec) -> None:
        """Raise ``ModelError`` if the family mixes dtypes in 16 bits (MiniMax, xLSTM, XGLM and GPT do)."""
        model = self.module.hugging_face_model
        rows = few_rows(model.config.get_text_config().vocab_size, self.device)
        try:
            with self._low_precision():
                self.module.figures(rows)
        except torch.OutOfMemoryError:  # a RuntimeError too; 32 bits would take more
            raise
        except RuntimeError as error:
            key = f"{spec.packing_key.removesuffix('use_remove_padding')}compute_dtype"
            raise ModelError(
                f"{spec.role}: {type(model).__name__} fails in {key}={spec.compute_dtype} with "
                f"{type(error).__name__}: {error}; set {key}=float32"
            ) from error

    @staticmethod
    def data_parallel_place(
        rank: int, world_size: int, *, section: Any, sequence_parallel_size: int
    ) -> tuple[int, int]:
        """See ``Engine.data_parallel_place``; neighbouring ranks share sequences."""
        del section
        return rank // sequence_parallel_size, world_size // sequence_parallel_size

    @property
    def shareable_model(self) -> PreTrainedModel | None:
        return None if self._sharded else self.module.hugging_face_model

    def set_config(self, entries: Mapping[str, Any]) -> None:
        set_entries(self.module.hugging_face_model.config, entries)

    def _low_precision(self) -> contextlib.AbstractContextManager[None]:
        return low_precision(self.module, None if self._sharded else self.compute_dtype)

    def _split(self, batch: DataProto, micro: MicroBatching) -> list[Tensor]:
        """Return the rows of each micro-batch, equally many on every rank: each is a round of collectives."""
        self._require_one_batch(batch)
        pieces = micro.split(batch, packed=self.module.packed)
        wanted = ranks.largest(len(pieces), self.device)
        if wanted == len(pieces):
            return pieces
        return micro.split(batch, at_least=wanted, packed=self.module.packed)

    def _require_one_batch(self, batch: DataProto) -> None:
        """Raise ``RuntimeError`` if ranks that share sequences got different batches; they would deadlock."""
        group, mask_BL = self.module.sequence_group, batch.batch["attention_mask"]
        if group is None:
            return
        require_no_tree(batch, f"ulysses_sequence_parallel_size={group.size}", "set it to 1")
        places_L = torch.arange(1, mask_BL.shape[1] + 1)
        # weighted by place, so that another order of tokens or rows gives another number
        ids_B = (batch.batch["input_ids"] * mask_BL * places_L).sum(dim=1)
        fingerprint = int((ids_B * torch.arange(1, len(ids_B) + 1)).sum()) + len(mask_BL)
        if not group.is_same(fingerprint, self.device):
            raise RuntimeError(
                f"the {group.size} ranks that share sequences got different batches; list every method that "
                "runs passes in its worker's shared_passes"
            )

    @torch.no_grad()
    def infer(self, batch: DataProto, micro: MicroBatching, **options: Any) -> Outputs:
        """See ``Engine.infer``; the outputs are on the CPU."""
        self._offload.bring_parameters()
        self.module.eval()
        batch = DataProto(batch.batch)  # object columns would be indexed for every micro-batch
        pieces, rows = [], self._split(batch, micro)
        with self._low_precision():
            for piece_rows in rows:
                outputs = self.module(columns_of(batch, piece_rows, self.device), **options)
                found = {name: tensor[: len(piece_rows)] for name, tensor in outputs.items()}
                # A copy to the CPU waits for the pass; hidden states alone are too large to stay here.
                pieces.append({name: out if out.dim() < 3 else out.cpu() for name, out in found.items()})
        reshard(self.module)
        restored = restore(pieces, rows, batch)
        self._offload.park_parameters()
        return restored

    def forward_backward(
        self, batch: DataProto, loss: Loss, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        self._offload.bring_parameters()
        self.module.train()
        batch = DataProto(batch.batch)  # as in infer
        self._has_pictures = not batch.batch.keys().isdisjoint(("images", "images_at"))
        totals: dict[str, Tensor] = {}
        group, routers = self.module.sequence_group, self.module.routers
        counts = group is None or group.rank == 0  # ranks that share sequences have equal figures: count once
        if routers is not None:
            sequences = float(learning_rows(self.module.sequences(batch.batch)).sum()) * counts
            routers.begin(ranks.total({"n": sequences}, self.device)["n"], self.device)
        pieces = self._split(batch, micro)
        with self._low_precision():
            for number, rows in enumerate(pieces, 1):
                if self._reduces_once:
                    set_gradient_reduction(self.module, number == len(pieces))
                columns = columns_of(batch, rows, self.device)
                outputs = self.module(columns, **options)
                value, metrics = loss(outputs, columns)
                if routers is not None:
                    value = value + routers.take_loss()
                value.backward()
                for name, metric in {"loss": value, **metrics}.items():
                    # summed on the device: float() would wait for the GPU in every micro-batch
                    totals[name] = totals.get(name, 0.0) + metric.detach().double()
        # parameters stay on the device for optimizer_step, which parks them; one read, which waits for a GPU
        figures = torch.cat([figure.reshape(1).to(self.device) for figure in totals.values()]).cpu()
        found = {name: figure * counts for name, figure in zip(totals, figures.tolist(), strict=True)}
        found = ranks.total(found, self.device)
        return found if routers is None else found | routers.end()

    def agree(self, value: Any) -> Any:
        """See ``Engine.agree``; every rank has the outputs of its rows."""
        return value

    def optimizer_step(self, learning_rate: float) -> StepResult:
        if self._optimizer is None or self._settings is None:
            raise RuntimeError("this engine was built without an optimizer")
        if self._has_pictures:
            for weight in self.module.trainable():
                if weight.grad is None:  # no picture in the mini-batch: 0, as ranks beside others have it
                    weight.grad = torch.zeros_like(weight)
        clip = clip_gradients if self._sharded else torch.nn.utils.clip_grad_norm_
        grad_norm = float(clip(self.module.trainable(), self._settings.grad_clip))
        # one NaN in a gradient makes the norm NaN, by which clipping has scaled every gradient
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._offload.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._offload.park_parameters()
        return StepResult(grad_norm=grad_norm, skipped=skipped)

    @contextlib.contextmanager
    def on_device(self) -> Generator[None]:
        self._offload.bring_parameters()
        try:
            yield
        finally:
            self._offload.park_parameters()

    def base_model(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.module.adapters is None else self.module.adapters.off()

    def named_weights(
        self, *, as_saved: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        gather = partial(whole, dtype=dtype) if self.module.adapters is None else whole  # merged in float32
        with self.on_device():
            weights = in_dtype(dtype, self.module.export_weights(gather))
            yield from self.module.layout.convert(weights) if as_saved else weights

    def save(self, folder: Path, *, background: bool = False) -> None:
        start = partial(state.save, self.module, self._optimizer, folder, background=background)
        self._saving.begin(start, folder)

    def save_is_done(self) -> bool:
        return self._saving.is_done()

    def finish_save(self) -> None:
        self._saving.finish()

    def load(self, folder: Path) -> None:
        self._saving.wait()
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)  # of an update that broke off
        state.load(self.module, self._optimizer, folder)

    def export(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weights: bool = True,
        merged: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        model, adapters, layout = self.module.hugging_face_model, self.module.adapters, self.module.layout
        if adapters is None or merged:
            tensors = self.named_weights(as_saved=True) if weights else None
            write_folder(folder, model, tokenizer, layout, tensors, dtype)
        else:
            # Gathered first: rank zero may fail to write, and the others would wait for it.
            with self.on_device():
                parameters = model.named_parameters()
                trained = {name: whole(weight) for name, weight in parameters if adapters.is_trained(name)}
            write_folder(folder, model, tokenizer, layout, None, dtype)
            if ranks.is_first():
                with writing(folder):
                    # a folder with config.json is a whole model for transformers
                    (folder / "config.json").rename(folder / MERGED_CONFIG)
                    adapters.save(folder, trained)

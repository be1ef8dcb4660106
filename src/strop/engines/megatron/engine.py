"""``MegatronEngine``: a model over tensor-parallel, pipeline and data-parallel ranks, by megatron-core.

Weights, gradients and moments are float32; passes run under autocast to the compute dtype, with
the residual stream in float32. Passes are always packed. Checkpoints have the names and shapes of the
Hugging Face model, in the format of the engine ``fsdp``, so either engine reads them on any layout.

Shapes: M tokens of a packed row with its padding, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from strop import ranks
from strop.engines.base import EngineSpec, Loss, ModelSpec, Outputs, StepResult
from strop.engines.megatron.attention import Row
from strop.engines.megatron.build import build_chunks, require_supported, transformer_config
from strop.engines.megatron.checkpoint import Checkpoints
from strop.engines.megatron.convert import places
from strop.engines.megatron.experts import ExpertLayer
from strop.engines.megatron.optimizer import Optimizer
from strop.engines.megatron.parallel import from_last_stage, open_groups
from strop.engines.megatron.roles import StagedPolicy, VocabularyShard, staged
from strop.engines.megatron.settings import ParallelSettings
from strop.engines.megatron.weights import Weights, weights_on_demand
from strop.engines.micro_batches import MicroBatching, columns_of, require_no_tree, restore
from strop.engines.torch.export import set_entries, write_folder
from strop.errors import ConfigError, ModelError
from strop.models.comparison import TOLERANCE, chosen_figures, few_rows
from strop.models.deferred import defer_causal_lm, defer_scorer
from strop.models.heads import decoder_of
from strop.models.loader import dtype_named
from strop.models.packing import Packing
from strop.models.routing import Balance, learning_rows
from strop.models.transformers_private import attention_name
from strop.protocol import DataProto

Columns = Mapping[str, Tensor]


class MegatronEngine:
    """The ``Engine`` of this rank's part of one model; without an optimizer, only infer."""

    def __init__(self, model: ModelSpec, spec: EngineSpec) -> None:
        """Build the model and read its weights. Collective.

        Raises ``ConfigError`` or ``ModelError`` for what this engine cannot hold, or computes differently.
        """
        settings = ParallelSettings.from_section(spec.section)
        if model.lora is not None:
            raise ConfigError(
                f"{model.lora.key}: strategy=megatron trains no LoRA adapters; set strategy=fsdp, or "
                "lora_rank=0 and lora_adapter_path=null"
            )
        if model.freeze:
            raise ConfigError(
                f"{model.role}: strategy=megatron trains all weights, and model.freeze={list(model.freeze)}; "
                "set it to []"
            )
        if model.keeps_reference_head:
            raise ConfigError(
                "the full KL needs whole logits, which strategy=megatron never computes; use another "
                "kl_penalty or kl_loss_type, for example k3, or strategy=fsdp"
            )
        open_groups(settings, spec.device)
        self.device = spec.device
        dtype = dtype_named(model.compute_dtype, spec.device)
        self.compute_dtype = None if dtype == torch.float32 else dtype
        options: dict[str, Any] = {"path": model.path, **model.options}
        if model.kind == "policy":
            hugging_face_model, source = defer_causal_lm(**options)
        else:
            hugging_face_model, source = defer_scorer(**options, fresh_head_seed=model.head_seed)
        require_supported(hugging_face_model.config, settings, model.path)
        if not source.readable:
            raise ModelError(
                f"model {model.path}: strategy=megatron reads safetensors files that hold every weight; "
                "convert the model with save_pretrained"
            )
        self.module = staged(model.kind, hugging_face_model, packing_key=model.packing_key)
        self._mcore = transformer_config(
            hugging_face_model.config,
            settings,
            recompute=model.gradient_checkpointing is True,
            layer_dtype=dtype,
        )
        self._chunks: list[Any] = build_chunks(
            hugging_face_model.config,
            self._mcore,
            scalar_head=model.kind != "policy",
            implementation=attention_name(hugging_face_model.config),
            padding=vars(hugging_face_model.get_input_embeddings())["padding_idx"],
        )
        for chunk in self._chunks:
            chunk.to(spec.device)
            if self.compute_dtype is not None:
                if chunk.pre_process:
                    # megatron-core 0.16 adds in the layers' dtype, 0.19 in that of the embeddings
                    chunk.embedding.register_forward_hook(lambda *call: call[-1].to(dtype))
                for layer in chunk.decoder.layers:
                    # around each layer, as megatron-core computes layers again outside the forward pass
                    layer.forward = self._autocast()(layer.forward)
            for parameter in chunk.parameters():
                parameter.data.zero_()  # rows that pad the vocabulary stay 0
                parameter.requires_grad_(spec.optimizer is not None)
        layers = [layer for chunk in self._chunks for layer in chunk.decoder.layers]
        self._routers = [layer.mlp.router for layer in layers if isinstance(layer, ExpertLayer)]
        self._weights = Weights(hugging_face_model, places(hugging_face_model, self._chunks, self._mcore))
        self._rotary = decoder_of(hugging_face_model).get_submodule("rotary_emb").to(spec.device)
        self._read_head()
        self._optimizer: Optimizer | None = None
        if spec.optimizer is not None:
            self._optimizer = Optimizer(self._chunks, self._mcore, spec.optimizer, settings)
            self._chunks = list(self._optimizer.chunks)
        self._checkpoints = Checkpoints(self._weights, self._optimizer)
        self._weights.load(source)
        if self._optimizer is not None:
            self._optimizer.reload_parameters()
        self._require_own_figures(source, model)

    @classmethod
    def build(cls, model: ModelSpec, spec: EngineSpec) -> MegatronEngine:
        """See ``Engine.build``; ``spec.section`` is a section ``megatron``."""
        return cls(model, spec)

    @staticmethod
    def data_parallel_place(
        rank: int, world_size: int, *, section: Any, sequence_parallel_size: int
    ) -> tuple[int, int]:
        """See ``Engine.data_parallel_place``; the ranks of a copy of the model get the same rows."""
        del sequence_parallel_size
        return ParallelSettings.from_section(section).data_parallel_place(rank, world_size)

    @property
    def shareable_model(self) -> PreTrainedModel | None:
        """See ``Engine.shareable_model``: transformers cannot generate with these layers."""
        return None

    def _read_head(self) -> None:
        """Let the role read the weight of the last chunk's head."""
        last = self._chunks[-1]
        if not last.post_process:
            return
        if not isinstance(self.module, StagedPolicy):
            self.module.head_weight = lambda: last.output_layer.weight
            return
        place = next(
            p
            for p in reversed(self._weights.places)
            if p.name in ("lm_head.weight", "model.embed_tokens.weight")
        )
        parameter, words = place.parameter, place.chunk_shape[0]
        self.module.projection = VocabularyShard(
            # without the rows that pad the vocabulary, which would be words with a probability
            lambda: parameter if len(parameter) == words else parameter[:words],
            place.start,
            parallel_state.get_tensor_model_parallel_group(),
        )

    def _require_own_figures(self, source: Any, spec: ModelSpec) -> None:
        """Compare a pass with the Hugging Face model's own, on a few rows. Collective.

        Rank zero computes the latter, with the weights of one module in memory at a time.
        """
        batch = few_rows(self.module.hugging_face_model.config.vocab_size, torch.device("cpu"))
        columns = {name: column.to(self.device) for name, column in batch.items()}
        with torch.no_grad():
            [figures] = self._pass(
                [columns], lambda found: (0.0, self.module.figures(found).cpu()), as_rows=True
            )
        error: Exception | None = None
        if ranks.is_first():
            with torch.no_grad(), weights_on_demand(self.module.hugging_face_model, source):
                expected = self.module.own_figures(batch)
            difference = float(chosen_figures(figures - expected, batch).abs().max())
            # 16 bits round each of the layers' sums; a wrong weight changes log-probs by far more
            bound = TOLERANCE if self.compute_dtype is None else 0.1 * float(expected.abs().max())
            if not difference <= bound:
                error = ModelError(
                    f"{spec.role}: the passes of strategy=megatron differ from those of "
                    f"{type(self.module.hugging_face_model).__name__} by {difference:.2g}, expected at most "
                    f"{bound:.2g}; set strategy=fsdp"
                )
        ranks.raise_together(error)

    def set_config(self, entries: Mapping[str, Any]) -> None:
        set_entries(self.module.hugging_face_model.config, entries)

    def _autocast(self) -> Any:
        if self.compute_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _split(self, batch: DataProto, micro: MicroBatching) -> list[Tensor]:
        """Return the rows of each micro-batch, equally many on every rank.

        An interleaved pipeline needs a multiple of its stages.
        """
        require_no_tree(batch, "strategy=megatron", "set it to fsdp")
        wanted = ranks.largest(len(micro.split(batch, packed=True)), self.device)
        if self._mcore.virtual_pipeline_model_parallel_size:
            wanted += -wanted % self._mcore.pipeline_model_parallel_size
        return micro.split(batch, at_least=wanted, packed=True)

    def _pass(
        self,
        batches: Sequence[Columns],
        finish: Callable[[Columns], tuple[Any, Any]],
        *,
        backward: bool = False,
        as_rows: bool = False,
    ) -> list[Any]:
        """Run micro-batches through the pipeline; return what ``finish`` found for each. Collective.

        ``finish`` is called with the columns of a micro-batch on the last stage, and returns a loss and what
        to return; other stages return what the last one did. ``as_rows``: a row is one sequence in any role.
        """
        several, multiple = (
            self._mcore.virtual_pipeline_model_parallel_size,
            self._mcore.tensor_model_parallel_size,
        )
        if as_rows and several:
            # an interleaved pipeline takes a multiple of its stages; the copies' results are dropped below
            batches = list(batches) * self._mcore.pipeline_model_parallel_size

        def laid(columns: Columns) -> tuple[Mapping[str, Tensor], Packing]:
            sequences = columns if as_rows else self.module.sequences(columns)
            packing = self.module.packing(sequences)
            assert packing is not None
            return sequences, packing

        longest = 0
        if several:  # an interleaved pipeline needs rows of one length
            for sequences, packing in map(laid, batches):
                length = packing.pack(sequences["input_ids"]).shape[1]
                longest = max(longest, length + -length % multiple)
        zero = torch.zeros((), dtype=torch.int, device=self.device)

        def step(columns: Iterator[Columns], chunk: nn.Module) -> tuple[Tensor, Any]:
            mine = next(columns)
            sequences, packing = laid(mine)
            row = Row(
                sequences,
                packing,
                rotary=self._rotary,
                implementation=attention_name(self.module.hugging_face_model.config),
                multiple=multiple,
                at_least=longest,
            )
            # neither positions nor a mask: PackedAttention takes both from the row
            output = chunk(row.ids_1M, None, None, packed_seq_params=row)

            def loss(hidden_1MH: Tensor) -> tuple[Tensor, Tensor, Any]:
                self.module.hidden_MH = hidden_1MH[0]
                with self._autocast():
                    value, found = finish(mine)
                del self.module.hidden_MH
                # With 0 tokens, megatron-core scales neither loss nor gradients: denominators are global.
                return torch.as_tensor(value, device=self.device), zero, found

            return output, loss

        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self._chunks] if several else iter(batches),
            model=self._chunks if several else self._chunks[0],
            num_microbatches=len(batches),
            seq_length=longest or 1,  # without an interleaved pipeline, rows have lengths of their own
            micro_batch_size=1,
            forward_only=not backward,
        )
        found = from_last_stage(found)
        return found[:1] if as_rows else found

    @torch.no_grad()
    def infer(self, batch: DataProto, micro: MicroBatching, **options: Any) -> Outputs:
        """See ``Engine.infer``; the outputs are on the CPU."""
        if options.pop("with_full_kl", False) or options.pop("with_hidden", False):
            raise ConfigError("the full KL needs strategy=fsdp")
        self.module.eval()
        batch = DataProto(batch.batch)
        rows = self._split(batch, micro)

        def outputs(columns: Columns) -> tuple[float, Outputs]:
            return 0.0, {name: output.cpu() for name, output in self.module(columns, **options).items()}

        found = self._pass([columns_of(batch, piece, self.device) for piece in rows], outputs)
        pieces = [
            {name: output[: len(piece)] for name, output in part.items()}
            for part, piece in zip(found, rows, strict=True)
        ]
        return restore(pieces, rows, batch)

    def forward_backward(
        self, batch: DataProto, loss: Loss, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        options.pop("with_full_kl", None)
        self.module.train()
        batch = DataProto(batch.batch)

        def metrics_of(columns: Columns) -> tuple[Tensor, dict[str, Tensor]]:
            value, metrics = loss(self.module(columns, **options), columns)
            return value, {
                "loss": value.detach().clone(),
                **{name: m.detach() for name, m in metrics.items()},
            }

        batches = [columns_of(batch, rows, self.device) for rows in self._split(batch, micro)]
        routers, balance = self.module.routers, None
        copies = parallel_state.get_data_parallel_group()
        if routers is not None:
            sequences = float(learning_rows(self.module.sequences(batch.batch)).sum())
            n_sequences = ranks.total({"n": sequences}, self.device, copies)["n"]
            balance = routers.begin(n_sequences, self.device)
        self._balance(balance)
        found = self._pass(batches, metrics_of, backward=True)
        totals = {name: sum(float(metrics[name].double()) for metrics in found) for name in found[0]}
        totals = ranks.total(totals, self.device, copies)
        if routers is not None and balance is not None:
            self._balance(None)
            totals |= routers.end()
            # every stage adds its layers' loss in its backward pass; the value of the last one lacks it
            totals["loss"] += balance.coefficient * totals["router_aux_loss"]
        return totals

    def _balance(self, balance: Balance | None) -> None:
        """Let routers add the auxiliary loss of an update, or none."""
        for router in self._routers:
            router.balance = balance

    def agree(self, value: Any) -> Any:
        """See ``Engine.agree``; the last pipeline stage has the outputs."""
        return from_last_stage(value)

    def optimizer_step(self, learning_rate: float) -> StepResult:
        if self._optimizer is None:
            raise RuntimeError("this engine was built without an optimizer")
        return self._optimizer.step(learning_rate)

    @contextlib.contextmanager
    def on_device(self) -> Generator[None]:
        yield

    def base_model(self) -> contextlib.AbstractContextManager[None]:
        """See ``Engine.base_model``; there are no adapters."""
        return contextlib.nullcontext()

    def named_weights(
        self, *, as_saved: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        weights = self._weights.whole(lambda parameter: parameter.detach().to(dtype), dtype)
        yield from self.module.layout.convert(weights) if as_saved else weights

    def save(self, folder: Path, *, background: bool = False) -> None:
        self._checkpoints.save(folder, background=background)

    def save_is_done(self) -> bool:
        return self._checkpoints.saving.is_done()

    def finish_save(self) -> None:
        self._checkpoints.saving.finish()

    def load(self, folder: Path) -> None:
        self._checkpoints.load(folder)

    def export(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weights: bool = True,
        merged: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        del merged  # there are no adapters
        tensors = self.named_weights(as_saved=True) if weights else None
        write_folder(folder, self.module.hugging_face_model, tokenizer, self.module.layout, tensors, dtype)

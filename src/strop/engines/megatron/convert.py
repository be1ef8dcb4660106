"""The correspondence of Hugging Face weights and megatron-core's parameters: one table for both directions.

Every Hugging Face tensor is a view of a parameter here: the query, key and value rows of a group of heads
lie next to each other in one parameter, gate and up projection in another. A rank holds one chunk of a tensor
along one dimension, so a ``Place`` is where a whole tensor's chunk lies, for loading, transfers, gradients
and checkpoints alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.errors import ModelError

Part = Literal["all", "query", "key", "value", "gate", "up", "words"]


class Rule(NamedTuple):
    """A weight's name in megatron-core, the part of the parameter, and the dimension that ranks divide."""

    name: str
    part: Part = "all"
    dim: int | None = None
    by_expert: bool = False
    """The ranks that share experts divide it, not those that share tensors."""


_LAYER = {
    "input_layernorm.weight": Rule("input_layernorm.weight"),
    "post_attention_layernorm.weight": Rule("pre_mlp_layernorm.weight"),
    "self_attn.q_proj.weight": Rule("self_attention.linear_qkv.weight", "query", 0),
    "self_attn.k_proj.weight": Rule("self_attention.linear_qkv.weight", "key", 0),
    "self_attn.v_proj.weight": Rule("self_attention.linear_qkv.weight", "value", 0),
    "self_attn.q_proj.bias": Rule("self_attention.linear_qkv.bias", "query", 0),
    "self_attn.k_proj.bias": Rule("self_attention.linear_qkv.bias", "key", 0),
    "self_attn.v_proj.bias": Rule("self_attention.linear_qkv.bias", "value", 0),
    "self_attn.q_norm.weight": Rule("self_attention.q_layernorm.weight"),
    "self_attn.k_norm.weight": Rule("self_attention.k_layernorm.weight"),
    "self_attn.o_proj.weight": Rule("self_attention.linear_proj.weight", dim=1),
    "mlp.gate_proj.weight": Rule("mlp.linear_fc1.weight", "gate", 0),
    "mlp.up_proj.weight": Rule("mlp.linear_fc1.weight", "up", 0),
    "mlp.down_proj.weight": Rule("mlp.linear_fc2.weight", dim=1),
    "mlp.gate.weight": Rule("mlp.router.weight"),
    "mlp.experts.gate_up_proj": Rule("mlp.experts.gate_up_proj", dim=0, by_expert=True),
    "mlp.experts.down_proj": Rule("mlp.experts.down_proj", dim=0, by_expert=True),
    "mlp.shared_expert.gate_proj.weight": Rule("mlp.shared_experts.linear_fc1.weight", "gate", 0),
    "mlp.shared_expert.up_proj.weight": Rule("mlp.shared_experts.linear_fc1.weight", "up", 0),
    "mlp.shared_expert.down_proj.weight": Rule("mlp.shared_experts.linear_fc2.weight", dim=1),
    "mlp.shared_expert_gate.weight": Rule("mlp.shared_experts.gate_weight"),
}
_OUTSIDE = {
    "model.embed_tokens.weight": Rule("embedding.word_embeddings.weight", "words", 0),
    "model.norm.weight": Rule("decoder.final_layernorm.weight"),
    "lm_head.weight": Rule("output_layer.weight", "words", 0),
    "score.weight": Rule("output_layer.weight"),
}


@dataclass(frozen=True)
class Place:
    """Place of this rank's chunk of a Hugging Face tensor."""

    name: str
    """Name of the tensor in the Hugging Face model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None
    """Dimension that the ranks of ``group`` divide; None: all hold the whole."""
    parameter: nn.Parameter
    cut: Callable[[Tensor], Tensor]
    """View of a tensor shaped like ``parameter``: the entries of this rank's chunk."""
    by_expert: bool = False
    """The ranks that share experts divide it, not those that share tensors."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks with the chunks of the tensor."""
        if self.by_expert:
            return parallel_state.get_expert_model_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def copies(self) -> dist.ProcessGroup:
        """Ranks with the same chunk, over which the distributed optimizer divides its state."""
        return copies(self.parameter)

    def chunk(self, values: Tensor) -> Tensor:
        """Return this rank's chunk of the tensor from ``values``, shaped like the parameter."""
        return self.cut(values).reshape(self.chunk_shape)

    def write(self, chunk: Tensor, values: Tensor) -> None:
        """Write this rank's chunk of the tensor into ``values``, shaped like the parameter."""
        view = self.cut(values)
        view.copy_(chunk.reshape(view.shape))

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return this rank's chunk of the whole tensor."""
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, self.start, self.chunk_shape[self.dim])

    @property
    def width(self) -> int:
        """Length of a chunk along ``dim``; the last ones may be shorter."""
        return -(-self.shape[self.dim or 0] // self.group.size())

    @property
    def start(self) -> int:
        """First entry of this rank's chunk along ``dim``."""
        return min(self.group.rank() * self.width, self.shape[self.dim or 0])

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of this rank's chunk."""
        if self.dim is None:
            return self.shape
        size = min(self.width, self.shape[self.dim] - self.start)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def gathered(self, chunk: Tensor) -> Tensor:
        """Return the whole tensor from every rank's chunk. Collective over ``group``."""
        group = self.group
        if self.dim is None or group.size() == 1:
            return chunk
        rows = chunk.movedim(self.dim, 0)
        # all_gather_into_tensor takes parts of one size; the last rank's words may be fewer
        padded = rows.new_zeros(self.width, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = padded.new_empty(group.size() * self.width, *rows.shape[1:])
        dist.all_gather_into_tensor(parts, padded, group=group)
        return parts[: self.shape[self.dim]].movedim(0, self.dim).contiguous()


def copies(parameter: nn.Parameter) -> dist.ProcessGroup:
    """Return the data-parallel ranks of a parameter; experts have others than the rest of a model."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group()
    return parallel_state.get_expert_data_parallel_group()


def places(model: PreTrainedModel, chunks: Sequence[nn.Module], mcore: TransformerConfig) -> list[Place]:
    """Return the places of this rank, in the order of the model's parameters.

    A tied embedding has places on two stages. Raises ``ModelError`` for a weight without a rule, and for a
    parameter of ``chunks`` that no weight fills.
    """
    here: dict[str, Any] = {name: weight for chunk in chunks for name, weight in _global_names(chunk)}
    found: list[Place] = []
    tied = model.config.tie_word_embeddings and hasattr(model, "lm_head")
    for name, weight in model.named_parameters():
        for rule in _rules(name, tied=tied):
            if rule.name in here:
                cut = _cut(rule.part, mcore, weight.shape)
                place = Place(name, tuple(weight.shape), rule.dim, here[rule.name], cut, rule.by_expert)
                # megatron-core marks it in the initialization that is skipped; the norm needs the mark
                here[rule.name].tensor_model_parallel = rule.dim is not None
                found.append(place)
    filled = {id(place.parameter) for place in found}
    if unfilled := [name for name, weight in here.items() if id(weight) not in filled]:
        raise ModelError(f"{type(model).__name__} has no weights for megatron-core's {unfilled[:5]}")
    return found


def _rules(name: str, *, tied: bool) -> Iterator[Rule]:
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        if rule := _LAYER.get(match[2]):
            yield rule._replace(name=f"decoder.layers.{match[1]}.{rule.name}")
            return
    elif rule := _OUTSIDE.get(name):
        yield rule
        if name == "model.embed_tokens.weight" and tied:  # the last stage has a copy
            yield _OUTSIDE["lm_head.weight"]
        return
    raise ModelError(f"strategy=megatron has no place for the weight {name}; set strategy=fsdp")


def _global_names(chunk: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a chunk's parameters with the numbers of layers in the whole model."""
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    for name, weight in chunk.named_parameters():
        yield re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(numbers[int(found[0])]), name), weight


def _cut(part: Part, mcore: TransformerConfig, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    if part == "all":
        return lambda values: values
    if part == "words":  # megatron-core pads the vocabulary to a multiple of the ranks
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        width, rank = -(-shape[0] // ranks), parallel_state.get_tensor_model_parallel_rank()
        return lambda values: values[: max(min(width, shape[0] - rank * width), 0)]
    if part in ("gate", "up"):
        return lambda values: values.chunk(2)[("gate", "up").index(part)]
    groups, size = mcore.num_query_groups, mcore.kv_channels
    queries = mcore.num_attention_heads // groups
    first, end = {
        "query": (0, queries),
        "key": (queries, queries + 1),
        "value": (queries + 1, queries + 2),
    }[part]
    # rows of a group of heads: its queries, its key, its value
    return lambda values: values.view(-1, queries + 2, size, *values.shape[1:])[:, first:end]

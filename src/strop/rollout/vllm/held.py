"""Checksums of the weights that vLLM's model computes with, by name in a checkpoint.

They are read back from the model, not from what was sent: vLLM 0.32 kept a stale packed output layer of tied
models, and left experts unpacked. vLLM fuses projections (``qkv_proj``) and experts, pads vocabularies,
shards over tensor-parallel ranks and, on a CPU, packs a linear layer's weight into an unreadable form and
drops the original. Such a layer is applied to the identity, which gives its weight exactly: every sum has one
nonzero term. Packed experts are permuted, and the permutation is read from packed numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from strop.rollout.weights import UNEQUAL, Place, checksum

_BASE = 256
"""Integers below it are exact in every floating-point type; three digits number 16 million elements."""
_READABLE = (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels for experts whose weights are as loaded, or packed by ``cpu_prepack_moe_weight``."""
_PROBES = 64
"""Rows of the identity at a time; outputs of a large vocabulary are wide."""


@dataclass(frozen=True)
class Held:
    """A part of one weight or bias on this rank."""

    name: str
    tensor: Tensor
    place: Place = field(default_factory=Place)
    counts: bool = True
    """False if another rank holds the same part and counts it."""
    again: bool = False
    """True for a second copy, in another form."""


@torch.no_grad()
def held_checksums(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Return this rank's part of every weight's checksum by name in a checkpoint; parts add up over ranks.

    ``names`` are those of the checkpoint: parts of models with pictures, for one, have others in vLLM.
    ``UNEQUAL`` where two copies of a weight differ (an output layer as received, and packed).
    """
    found: dict[str, int] = {}
    again: dict[str, int] = {}
    for held in _held(model):
        value = checksum(held.tensor, held.place) if held.counts else 0
        kept = again if held.again else found
        kept[held.name] = (kept.get(held.name, 0) + value) % (1 << 64)
    found |= {name: UNEQUAL for name, value in again.items() if found[name] != value}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    map_name = str if mapper is None else mapper.get_rename_mapper().map_name
    saved = {map_name(name): name for name in names}
    return {saved.get(name, name): value for name, value in found.items()}


def constants(model: nn.Module) -> dict[str, int]:
    """Return this rank's checksums of buffers by name, such as those that normalize pixels (``input_norm``).

    No checkpoint has them, so no transfer mends them. Buffers outside the state dictionary are left out:
    tables of positions change their dtype and grow.
    """
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return {name: checksum(buffer) for name, buffer in buffers if buffer.is_floating_point()}


def _held(model: nn.Module) -> Iterator[Held]:
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        parent, _, own = path.rpartition(".")
        if isinstance(module, LinearBase):
            names = [".".join(filter(None, (parent, part))) for part in fused.get(own, [own])]
            yield from _linear(module, names)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _embedding(module, path)
        elif isinstance(module, RoutedExperts):
            yield from _experts(module, path)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                yield Held(f"{path}.{name}" if path else name, parameter, counts=_first(model))


def _linear(layer: Any, names: list[str]) -> Iterator[Held]:
    split = isinstance(layer, RowParallelLinear)
    inputs = layer.input_size_per_partition if split else layer.input_size
    weight = layer.weight if layer.weight.numel() else _through_identity(layer, inputs)
    bias = layer.bias
    if split:
        width = weight.shape[1]
        place = Place(column=layer.tp_rank * width, columns=layer.tp_size * width)
        yield Held(f"{names[0]}.weight", weight, place)
        if bias is not None:
            yield Held(f"{names[0]}.bias", bias, counts=layer.tp_rank == 0)
        return
    shards = _row_shards(layer, len(weight))
    fused_already = len(names) == 1 and len(shards) > 1  # the checkpoint has one fused weight
    if not fused_already and len(names) != len(shards):
        return  # an unknown layout: its weights are reported as not verified
    start = before = 0
    for number, shard in enumerate(shards):
        name = names[0] if fused_already else names[number]
        place = Place(row=shard.first + before)
        rows = slice(start, start + shard.rows)
        yield Held(f"{name}.weight", weight[rows], place, shard.counts)
        if bias is not None:
            yield Held(f"{name}.bias", bias[rows], place, shard.counts)
        start += shard.rows
        before += shard.whole if fused_already else 0


class _RowShard(NamedTuple):
    """This rank's part of one of a layer's fused weights."""

    rows: int
    first: int
    """First row in the whole weight."""
    whole: int
    """Rows of the whole weight."""
    counts: bool = True


def _row_shards(layer: Any, rows: int) -> list[_RowShard]:
    rank, ranks = layer.tp_rank, layer.tp_size
    if isinstance(layer, QKVParallelLinear):
        # with fewer key-value heads than ranks several ranks hold one head, and one of them counts it
        group, counts = rank // layer.num_kv_head_replicas, rank % layer.num_kv_head_replicas == 0
        groups = ranks // layer.num_kv_head_replicas
        query = layer.num_heads * layer.head_size
        key, value = layer.num_kv_heads * layer.head_size, layer.num_kv_heads * layer.v_head_size
        return [
            _RowShard(query, rank * query, ranks * query),
            _RowShard(key, group * key, groups * key, counts),
            _RowShard(value, group * value, groups * value, counts),
        ]
    if isinstance(layer, MergedColumnParallelLinear):
        sizes = [size // ranks for size in layer.output_sizes]
        return [_RowShard(size, rank * size, ranks * size) for size in sizes]
    if isinstance(layer, ColumnParallelLinear):
        return [_RowShard(rows, rank * rows, ranks * rows)]
    return [_RowShard(rows, 0, rows, rank == 0)]


def _embedding(layer: Any, path: str) -> Iterator[Held]:
    shard = layer.shard_indices
    rows, place = shard.num_org_elements, Place(row=shard.org_vocab_start_index)
    yield Held(f"{path}.weight", layer.weight[:rows], place)
    if hasattr(layer, "cpu_linear"):  # logits are computed with the packed form
        yield Held(
            f"{path}.weight", _through_identity(layer, layer.weight.shape[1])[:rows], place, again=True
        )


def _experts(layer: Any, path: str) -> Iterator[Held]:
    """Yield the experts' weights in the layouts that are known; others are reported as not verified."""
    method = layer.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod) or method.unquantized_backend not in _READABLE:
        return
    stacked = {"w13": layer.w13_weight, "w2": layer.w2_weight}
    packing = getattr(method.moe_kernel.fused_experts, "isa", None)
    if packing is not None:
        stacked = {name: _unpacked(weight, packing) for name, weight in stacked.items()}
    config = layer.moe_config
    width, padded = config.intermediate_size_per_partition, stacked["w2"].shape[2]
    rows = Place(row=config.tp_rank * width)
    columns = Place(column=config.tp_rank * width, columns=config.tp_size * width)
    above = path.rpartition("experts.")[0]  # of the path's last part, as the mapping's names begin with it
    for _, name, expert, shard in layer.get_expert_mapping():
        part = stacked["w2" if shard == "w2" else "w13"][expert]
        # w13 is w1 (gate) on top of w3 (up), each padded to the same rows
        first = padded if shard == "w3" else 0
        held = part[:, :width] if shard == "w2" else part[first : first + width]
        yield Held(f"{above}{name}weight", held, columns if shard == "w2" else rows)


def _unpacked(packed: Tensor, isa: str) -> Tensor:
    """Return experts [E, out, in] that ``cpu_prepack_moe_weight`` has permuted, each in the same way."""
    size = packed[0].numel()
    digits = [torch.arange(size) // _BASE**digit % _BASE for digit in range(3)]
    numbers = torch.stack(digits).to(packed.dtype).view(3, *packed.shape[1:])
    read = cpu_prepack_moe_weight(numbers, isa).view(3, size).long()
    origin = sum(read[digit] * _BASE**digit for digit in range(3))
    weight = torch.empty_like(packed).view(len(packed), size)
    weight[:, origin] = packed.view(len(packed), size)
    return weight.view(packed.shape)


def _through_identity(layer: Any, width: int) -> Tensor:
    """Return the weight [out, in] of a layer that is a plain product."""
    columns = []
    for start in range(0, width, _PROBES):
        probes = torch.zeros(min(_PROBES, width - start), width, dtype=layer.weight.dtype)
        probes[torch.arange(len(probes)), torch.arange(start, start + len(probes))] = 1
        columns.append(layer.quant_method.apply(layer, probes.to(layer.weight.device), None).T)
    return torch.cat(columns, dim=1)


def _first(model: nn.Module) -> bool:
    """Return True on the first rank of the tensor-parallel group."""
    ranks = [module.tp_rank for module in model.modules() if isinstance(module, LinearBase)]
    return not ranks or ranks[0] == 0

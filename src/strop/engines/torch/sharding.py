"""FSDP2: sharding of a model, its weights and gradients.

Every decoder layer is a unit of sharding; the root holds the rest (embeddings, last norm, head).
``materialize`` allocates a sharded model and reads its weights one whole tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from strop import ranks
from strop.errors import ConfigError, StropError
from strop.models.base import RoleModel
from strop.models.deferred import Weights
from strop.models.heads import decoder_of
from strop.models.transformers_private import layer_classes
from strop.models.ulysses import SequenceGroup
from strop.torch_private import scale_in_place


@dataclass(frozen=True)
class ShardingSettings:
    """Units of sharding, and the number of ranks that share parameters or sequences."""

    layer_classes: tuple[str, ...] = ()
    """Classes to shard as units; empty: the model's own decoder layers."""
    min_num_params: int = 0
    """Instead, shard modules of at least this many parameters as units; 0: by class."""
    fsdp_size: int = -1
    """Ranks that share one copy of the parameters; -1: all; 1: every rank has a whole copy."""
    sequence_parallel_size: int = 1
    """Neighbouring ranks that get the same batches and share their sequences."""
    reshard_after_forward: bool = True
    """Free gathered parameters after a layer's forward pass, and gather them again for its backward pass."""
    reduce_once: bool = False
    """Reduce gradients after the last micro-batch of a step; until then every rank keeps whole ones."""

    @classmethod
    def from_section(cls, fsdp: Any, *, sequence_parallel_size: int) -> ShardingSettings:
        """Read a section ``fsdp_config``; that of a frozen model has fewer keys."""
        keys = fsdp.model_dump()
        wrap = keys.get("wrap_policy", {"min_num_params": keys.get("min_num_params", 0)})
        classes = wrap.get("transformer_layer_cls_to_wrap") or ()
        return cls(
            layer_classes=(classes,) if isinstance(classes, str) else tuple(classes),
            min_num_params=wrap["min_num_params"],
            fsdp_size=keys.get("fsdp_size", -1),
            sequence_parallel_size=sequence_parallel_size,
            reshard_after_forward=keys.get("reshard_after_forward", True),
            reduce_once=bool(keys.get("use_no_sync_for_gradient_accumulation")),
        )


def shard(
    module: RoleModel, settings: ShardingSettings, device: torch.device, compute_dtype: torch.dtype | None
) -> None:
    """Shard ``module`` in place over the default process group. Collective.

    With ``compute_dtype`` forward and backward passes run in that dtype on float32 masters, and gradients are
    reduced in float32. Gradients are summed over the ranks, not averaged: losses have global denominators.

    Raises ``ConfigError`` for a size that does not divide the ranks, and for classes that the model lacks.
    """
    mesh = _mesh(dist.group.WORLD, device.type, _ranks_per_copy(settings.fsdp_size))
    policy, root_policy = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        # The root's inputs are the columns of the batch, which must not be rounded.
        root_policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for unit in _units(module, settings):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
    fully_shard(module, mesh=mesh, mp_policy=root_policy)
    # FSDP2 gathers the root's parameters in forward() and in methods that are registered
    for method in ("check", "figures", "own_figures"):
        register_fsdp_forward_method(module, method)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            # FSDP2 averages by default; a factor alone would be NCCL's PreMulSum, which gloo does not have
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def reshard(module: nn.Module) -> None:
    """Free gathered parameters; after a forward pass the root keeps its own for a backward pass."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def set_gradient_reduction(module: nn.Module, enabled: bool) -> None:
    """Set whether backward passes reduce gradients over the ranks, or add up whole ones in float32."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(enabled)


def _ranks_per_copy(fsdp_size: int) -> int:
    world = dist.get_world_size()
    size = world if fsdp_size == -1 else min(fsdp_size, world)
    if world % size:
        divisors = [number for number in range(1, world + 1) if world % number == 0]
        raise ConfigError(
            f"fsdp_size={fsdp_size} does not divide the {world} ranks; set it to one of {divisors}, or -1"
        )
    return size


def sequence_group(size: int) -> SequenceGroup:
    """Return this rank's group of ``size`` neighbouring ranks. Collective.

    Raises ``ConfigError`` for a size that does not divide the number of ranks.
    """
    if dist.get_world_size() % size:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size} does not divide the {dist.get_world_size()} ranks; "
            "set it to 1 or another divisor"
        )
    return SequenceGroup(_neighbours(dist.group.WORLD, size))


@lru_cache(maxsize=8)
def _neighbours(world: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Open the groups once for all models of these processes."""
    del world  # cache key: another default group needs other groups
    # A rank may write files while its neighbour waits in a collective; the controller detects hangs.
    return dist.new_subgroups(size, timeout=timedelta(days=7))[0]


@lru_cache(maxsize=8)
def _mesh(world: dist.ProcessGroup, device_type: str, ranks_per_copy: int) -> DeviceMesh:
    """Make the mesh once for all models of these processes: a 2-D mesh opens process groups."""
    size = world.size()
    if ranks_per_copy == size:
        return init_device_mesh(device_type, (size,))
    # fully_shard replicates over the first of two dimensions and shards over the second
    return init_device_mesh(
        device_type, (size // ranks_per_copy, ranks_per_copy), mesh_dim_names=("copy", "shard")
    )


def _units(module: RoleModel, settings: ShardingSettings) -> list[nn.Module]:
    """Return the modules to shard, inner ones first."""
    model = module.hugging_face_model
    decoder = decoder_of(model)
    inside = [unit for unit in decoder.modules() if unit is not decoder]
    if settings.min_num_params:
        return list(_large(decoder, settings.min_num_params))
    classes = set(settings.layer_classes) or layer_classes(model)
    # modules() yields outer modules first; fully_shard takes what inner units have left
    units = [unit for unit in reversed(inside) if type(unit).__name__ in classes]
    if unknown := set(settings.layer_classes) - {type(unit).__name__ for unit in units}:
        found = sorted({type(unit).__name__ for unit in inside})
        raise ConfigError(
            f"wrap_policy.transformer_layer_cls_to_wrap: {type(model).__name__} has no {sorted(unknown)}; "
            f"its modules are {found}"
        )
    return units


def _large(decoder: nn.Module, min_num_params: int) -> Iterator[nn.Module]:
    """Yield modules of the decoder with that many parameters outside their inner units.

    Embeddings stay with the root: an output layer may be tied to them, and runs once per chunk of tokens.
    """
    # not of a language model inside one with pictures either, which reads them before it runs
    embeddings = [unit for unit in decoder.modules() if isinstance(unit, nn.Embedding)]
    taken = {id(weight) for unit in embeddings for weight in unit.parameters()}
    inner = [unit for unit in decoder.modules() if unit is not decoder]
    for unit in reversed(inner):
        if isinstance(unit, nn.ModuleList | nn.ModuleDict | nn.Embedding):
            continue
        own = [weight for weight in unit.parameters() if id(weight) not in taken]
        if sum(weight.numel() for weight in own) >= min_num_params:
            taken.update(map(id, own))
            yield unit


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the full tensor of a sharded one (collective), any other as it is; detached.

    With ``dtype``, this rank's part is converted before it is sent.
    """
    tensor = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale sharded gradients to a global norm of at most ``max_norm``; return the norm before. Collective.

    All ranks get the same number: squares are summed over the ranks that share a copy.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = [part(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(parts)
    sharded = next((gradient for gradient in gradients if isinstance(gradient, DTensor)), None)
    if sharded is not None:
        mesh = sharded.device_mesh
        square = norm.double().square()
        # the last dimension shards; ranks of a first one have copies, whose squares must not count again
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
        norm = square.sqrt().to(norm.dtype)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
    scale_in_place(parts, scale)
    return float(norm)


def materialize(module: RoleModel, source: Weights, device: torch.device) -> None:
    """Allocate this rank's part of every parameter on ``device`` and fill it. Collective.

    Every rank reads safetensors files. Of other files rank zero reads the whole model on the CPU and
    broadcasts it; its failure is raised on every rank.
    """
    _allocate(module, device)
    places = dict(module.hugging_face_model.named_parameters())
    weights = source.stream() if source.readable else _from_first_rank(places, source, device)
    for name, weight in weights:
        keep_part(places.pop(name), weight)
        del weight  # free it before the next one is read
    if places:
        raise StropError(f"the model's files have no weights for {sorted(places)[:5]}")


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Do what ``Module.to_empty`` does, but keep the values of the buffers."""
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    module.to_empty(device=device)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer.to(device))


@torch.no_grad()
def keep_part(parameter: Tensor, weight: Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter or moment, which may be sharded."""
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank has the tensor, so nothing is sent.
        mesh, placements = parameter.device_mesh, parameter.placements
        mine = distribute_tensor(
            weight.to(parameter.to_local().device), mesh, placements, src_data_rank=None
        ).to_local()
        parameter.to_local().copy_(mine)
    else:
        parameter.copy_(weight)


def _from_first_rank(
    places: dict[str, nn.Parameter], source: Weights, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    failure: Exception | None = None
    if ranks.is_first():
        try:
            weights = dict(source.stream())
        except StropError as error:
            failure = error
    ranks.raise_together(failure)
    for name, parameter in list(places.items()):
        if ranks.is_first():
            weight = weights.pop(name).to(device)  # pop: memory shrinks as weights are sent
        else:
            weight = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        dist.broadcast(weight, src=0)
        yield name, weight

"""FSDP2: every decoder layer a unit of sharding, the rest (embeddings, last norm, head) the root's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache

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

from strop.engines.base import OffloadSettings, ShardingSettings
from strop.engines.torch import ranks
from strop.errors import ConfigError, StropError
from strop.models.base import RoleModel
from strop.models.deferred import WeightSource
from strop.models.ulysses import SequenceGroup


def shard(
    module: RoleModel, settings: ShardingSettings, device: torch.device, compute_dtype: torch.dtype | None
) -> None:
    """Shard ``module`` in place over the default process group; collective.

    With ``compute_dtype`` the forward and backward passes run in it, on float32 masters, and gradients are
    reduced in float32. Gradients are summed over the ranks, not averaged: losses have global denominators.

    Raises ``ConfigError`` for a size that does not divide and for classes that the model lacks.
    """
    mesh = _mesh(dist.group.WORLD, device.type, _ranks_per_copy(settings.fsdp_size))
    policy, root_policy = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        # The root's inputs are the columns of the batch: not to be rounded.
        root_policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for unit in _units(module, settings):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=root_policy)
    register_fsdp_forward_method(module, "check")
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters: the root keeps its own after a forward pass, for a backward pass."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


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
    """The group of ``size`` neighbouring ranks that this rank is in; collective.

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
    """One group for all models of these processes."""
    del world  # part of the key: another default group needs other ones
    # A rank may write files while its neighbour waits for it; who hangs is for the controller to notice.
    return dist.new_subgroups(size, timeout=timedelta(days=7))[0]


@lru_cache(maxsize=8)
def _mesh(world: dist.ProcessGroup, device_type: str, ranks_per_copy: int) -> DeviceMesh:
    """One mesh for all models of these processes: a mesh of two dimensions opens process groups."""
    size = world.size()
    if ranks_per_copy == size:
        return init_device_mesh(device_type, (size,))
    return init_device_mesh(
        device_type, (size // ranks_per_copy, ranks_per_copy), mesh_dim_names=("copy", "shard")
    )


def _units(module: RoleModel, settings: ShardingSettings) -> list[nn.Module]:
    """The modules to shard, inner ones first."""
    model = module.hugging_face_model
    inside = [unit for unit in model.base_model.modules() if unit is not model.base_model]
    if settings.min_num_params:
        return list(_large(model.base_model, settings.min_num_params))
    classes = set(settings.layer_classes) or set(model._no_split_modules or ())
    units = [unit for unit in reversed(inside) if type(unit).__name__ in classes]
    if unknown := set(settings.layer_classes) - {type(unit).__name__ for unit in units}:
        found = sorted({type(unit).__name__ for unit in inside})
        raise ConfigError(
            f"wrap_policy.transformer_layer_cls_to_wrap: {type(model).__name__} has no {sorted(unknown)}; "
            f"its modules are {found}"
        )
    return units


def _large(decoder: nn.Module, min_num_params: int) -> Iterator[nn.Module]:
    """Modules inside the decoder with that many parameters which are not in an inner one of them.

    Embeddings stay with the root: an output layer may be tied to them, and it runs once a chunk of tokens.
    """
    taken: set[int] = set()
    inner = [unit for unit in decoder.modules() if unit is not decoder]
    for unit in reversed(inner):
        if isinstance(unit, nn.ModuleList | nn.ModuleDict | nn.Embedding):
            continue
        own = [weight for weight in unit.parameters() if id(weight) not in taken]
        if sum(weight.numel() for weight in own) >= min_num_params:
            taken.update(map(id, own))
            yield unit


# Give a sharded model its memory and its weights, one full tensor at a time.


def materialize(module: RoleModel, source: WeightSource, device: torch.device) -> None:
    """Allocate this rank's part of every parameter on ``device`` and fill it; collective.

    Every rank reads safetensors files for itself; of other files rank zero reads the whole model, on the
    CPU, and hands it round. Raises what the source raises, then on every rank.
    """
    _allocate(module, device)
    places = dict(module.hugging_face_model.named_parameters())
    weights = source.stream() if source.readable else _from_first_rank(places, source, device)
    for name, weight in weights:
        _keep_part(places.pop(name), weight)
        del weight  # before the next one comes
    if places:
        raise StropError(f"no weights came for {sorted(places)[:5]}")


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Like ``Module.to_empty``, which would also throw away the values of the buffers."""
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    module.to_empty(device=device)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer.to(device))


@torch.no_grad()
def _keep_part(parameter: Tensor, weight: Tensor) -> None:
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank has the tensor already, nothing is sent
        mesh, placements = parameter.device_mesh, parameter.placements
        mine = distribute_tensor(
            weight.to(parameter.to_local().device), mesh, placements, src_data_rank=None
        ).to_local()
        parameter.to_local().copy_(mine)
    else:
        parameter.copy_(weight)


def _from_first_rank(
    places: dict[str, nn.Parameter], source: WeightSource, device: torch.device
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
        weight = weights.pop(name).to(device) if ranks.is_first() else _empty(parameter, device)
        dist.broadcast(weight, src=0)
        yield name, weight


def _empty(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.empty(parameter.shape, dtype=torch.float32, device=device)


# Keep parameters or optimizer state in CPU memory between the phases that use them.


class Offload:
    """Moves a module and its optimizer's moments between the device and the CPU."""

    def __init__(
        self,
        settings: OffloadSettings,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        self._parameters = settings.parameters and device.type != "cpu"
        self._moments = settings.optimizer and device.type != "cpu"
        self._module, self._optimizer, self._device = module, optimizer, device

    def bring_parameters(self) -> None:
        """To the device, if they are not there."""
        if self._parameters:
            self._module.to(self._device)

    def park_parameters(self) -> None:
        """To the CPU, if they are to wait there."""
        if self._parameters:
            self._module.to("cpu")

    def bring_moments(self) -> None:
        """To the device, if they are not there."""
        if self._moments:
            self._move_moments(self._device)

    def park_moments(self) -> None:
        """To the CPU, if they are to wait there."""
        if self._moments:
            self._move_moments(torch.device("cpu"))

    def _move_moments(self, device: torch.device) -> None:
        if self._optimizer is None:
            return
        for moments in self._optimizer.state.values():
            for name, tensor in moments.items():
                moments[name] = tensor.to(device)

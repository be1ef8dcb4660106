"""Give a sharded model its memory and its weights, one full tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from strop.engines.torch import ranks
from strop.errors import StropError
from strop.models.base import RoleModel
from strop.models.deferred import WeightSource


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

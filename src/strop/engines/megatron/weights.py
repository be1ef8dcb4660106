"""Weights of a model that is spread over ranks, by their names in the Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from strop.engines.megatron.convert import Place
from strop.errors import ModelError
from strop.models.deferred import WeightSource


class Weights:
    """The places of one model's weights on this rank, and where the others are."""

    def __init__(self, model: PreTrainedModel, places: Sequence[Place]) -> None:
        """Agree with the other stages on the stage that sends each weight. Collective."""
        self._model = model
        group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[list[str]] = [[]] * group.size()
        dist.all_gather_object(stages, [place.name for place in places], group=group)
        self._sender: dict[str, int] = {}
        # the first stage with a weight sends it; of a tied embedding the last one has a copy
        for stage, names in reversed(list(enumerate(stages))):
            self._sender |= dict.fromkeys(names, stage)
        if missing := [name for name, _ in model.named_parameters() if name not in self._sender]:
            raise ModelError(f"strategy=megatron: no stage holds the weights {missing[:5]}")
        self.places = list(places)

    @property
    def sent(self) -> list[Place]:
        """Places whose weight this stage sends: all but the second copy of a tied embedding."""
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return [place for place in self.places if self._sender[place.name] == stage]

    def by_parameter(self) -> Iterator[tuple[nn.Parameter, list[Place]]]:
        """Yield each parameter with its places: several Hugging Face tensors may lie in one."""
        found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
        for place in self.places:
            found.setdefault(id(place.parameter), (place.parameter, []))[1].append(place)
        yield from found.values()

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Read the model's files one whole tensor at a time, and keep this rank's chunks."""
        for place in self.places:
            values = place.parameter.detach()
            place.write(place.of_whole(source.read(place.name)).to(values.device), values)

    def whole(
        self, values: Callable[[nn.Parameter], Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by name, one at a time, from ``values`` of each parameter. Collective.

        ``dtype``: that of the values; None: the parameters'.
        """
        mine = {place.name: place for place in self.sent}
        group = parallel_state.get_pipeline_model_parallel_group()
        device = next(place.parameter.device for place in self.places)
        for name, weight in self._model.named_parameters():
            if name in mine:
                place = mine[name]
                whole = place.gathered(place.chunk(values(place.parameter)))
            else:
                whole = torch.empty(weight.shape, device=device, dtype=dtype)
            if group.size() > 1:
                whole = whole.contiguous()
                dist.broadcast(whole, src=dist.get_global_rank(group, self._sender[name]), group=group)
            yield name, whole


def as_chunk(place: Place, chunk: Tensor) -> Tensor:
    """Return this rank's chunk as a part of the whole tensor, for ``torch.distributed.checkpoint``."""
    group = place.group
    if place.dim is None or group.size() == 1:
        return chunk
    mesh = DeviceMesh.from_group(group, chunk.device.type)
    stride = torch.empty(place.shape, device="meta").stride()
    return DTensor.from_local(
        chunk.contiguous(),
        mesh,
        [Shard(place.dim)],
        run_check=False,
        shape=torch.Size(place.shape),
        stride=stride,
    )


@contextmanager
def weights_on_demand(model: PreTrainedModel, source: WeightSource) -> Generator[None]:
    """Let a model on the meta device compute: each module's weights are read for its call alone."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    hooks = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            hooks.append(
                module.register_forward_pre_hook(partial(_fill, source=source, names=names, own=own))
            )
            hooks.append(module.register_forward_hook(partial(_empty, own=own)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fill(
    module: nn.Module, _: object, *, source: WeightSource, names: dict[int, str], own: dict[str, nn.Parameter]
) -> None:
    for name, weight in own.items():
        setattr(module, name, nn.Parameter(source.read(names[id(weight)]), requires_grad=False))


def _empty(module: nn.Module, _: object, output: object, *, own: dict[str, nn.Parameter]) -> None:
    del output
    for name, weight in own.items():
        setattr(module, name, weight)

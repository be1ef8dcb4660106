"""Training state of LoRA adapters as a few flat tensors.

A file of ``torch.distributed.checkpoint`` takes about 2.5 KB for every tensor in addition to its numbers,
which would be most of a state of many small ones. Every rank gathers all adapters; the files have one copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from strop.engines.torch.sharding import keep_part, whole
from strop.errors import CheckpointError

MODEL, OPTIMIZER = "model.adapters", "optimizer.adapters"
LAYOUT = f"{MODEL}.layout"
_STEP = f"{OPTIMIZER}.step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def flat(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return copies in CPU memory: weights, moments, the count of steps, and a digest of names and shapes.

    Collective if the parameters are sharded.
    """
    size = sum(parameter.numel() for parameter in parameters.values())
    layout = repr([(name, tuple(parameter.shape)) for name, parameter in parameters.items()])
    # 7 bytes: torch.tensor makes a signed 64-bit integer of it
    digest = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7])
    found = {MODEL: torch.empty(size), LAYOUT: torch.tensor(digest)}
    if optimizer is not None:
        found |= {f"{OPTIMIZER}.{kind}": torch.empty(size) for kind in _MOMENTS}
        found[_STEP] = torch.zeros(())
    place = 0
    for parameter in parameters.values():
        part = slice(place, place := place + parameter.numel())
        found[MODEL][part] = whole(parameter).flatten().cpu()
        if optimizer is not None:
            moments = optimizer.state[parameter]
            found[_STEP] = moments["step"].cpu().clone()  # the same of all
            for kind in _MOMENTS:
                found[f"{OPTIMIZER}.{kind}"][part] = whole(moments[kind]).flatten().cpu()
    return found


@torch.no_grad()
def unpack(
    found: Mapping[str, Tensor],
    layout: Tensor,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Copy what was read into the parameters and moments, each rank its part.

    ``layout`` is that of these parameters; ``CheckpointError`` if the files have another.
    """
    if not torch.equal(found[LAYOUT], layout):
        raise CheckpointError("its LoRA adapters are of other modules than this model's")
    place = 0
    for parameter in parameters.values():
        part = slice(place, place := place + parameter.numel())
        keep_part(parameter, found[MODEL][part].view(parameter.shape))
        if optimizer is not None:
            moments = optimizer.state[parameter]
            moments["step"].copy_(found[_STEP])
            for kind in _MOMENTS:
                keep_part(moments[kind], found[f"{OPTIMIZER}.{kind}"][part].view(parameter.shape))

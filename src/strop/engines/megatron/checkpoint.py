"""Checkpoints with the names and shapes of the Hugging Face model, in the format of the engine ``fsdp``."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor, nn

from strop.engines.megatron.optimizer import MOMENTS, Optimizer
from strop.engines.megatron.weights import Weights, as_chunk
from strop.engines.torch import state
from strop.engines.torch.sharding import part

_MODEL, _OPTIMIZER = "model.hugging_face_model.", "optimizer.hugging_face_model."


class Checkpoints:
    """Write and read weights and moments, on any layout."""

    def __init__(self, weights: Weights, optimizer: Optimizer | None) -> None:
        self._weights, self._optimizer = weights, optimizer
        self.saving = state.BackgroundSave()

    def save(self, folder: Path, *, background: bool) -> None:
        """See ``Engine.save``."""

        def start() -> Future | None:
            # Copied here: torch's stager fails on parts of tensors that are not parameters.
            collected = self._collect(copy=background)
            return state.write(collected, folder, background=background, copied=background)

        self.saving.begin(start, folder)

    def _collect(self, *, copy: bool) -> dict[str, Tensor]:
        """Return this rank's share of the state; each rank with the same chunks writes a part of them.

        With ``copy``, in CPU memory that training does not write to.
        """
        found: dict[str, Tensor] = {}
        gathered: tuple[nn.Parameter | None, dict[str, Tensor]] = (None, {})
        for number, place in enumerate(self._weights.sent):
            if self._optimizer is not None and gathered[0] is not place.parameter:
                gathered = place.parameter, self._optimizer.moments(place.parameter)
            # ranks with the same chunks take turns, so that each writes about as much as the others
            if number % place.copies.size() != place.copies.rank():
                continue
            weight = place.chunk(place.parameter.detach())
            found[_MODEL + place.name] = as_chunk(place, weight.to("cpu", copy=True) if copy else weight)
            if self._optimizer is not None:
                for kind, values in gathered[1].items():
                    found[f"{_OPTIMIZER}{place.name}.{kind}"] = as_chunk(
                        place, place.chunk(values).to("cpu", copy=copy)
                    )
                found[f"{_OPTIMIZER}{place.name}.step"] = torch.tensor(self._optimizer.steps)
        return found

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """See ``Engine.load``; this rank reads the parts that it holds, a few tensors at a time."""
        self.saving.wait()
        kinds = MOMENTS if self._optimizer is not None else ()
        wanted = {_MODEL + place.name: place.shape for place in self._weights.places}
        wanted |= {f"{_OPTIMIZER}{p.name}.{kind}": p.shape for p in self._weights.places for kind in kinds}
        state.require_fit(wanted, folder)
        for parameter, group in self._weights.by_parameter():
            chunks = {
                key: as_chunk(place, torch.empty(place.chunk_shape))
                for place in group
                for key in (_MODEL + place.name, *(f"{_OPTIMIZER}{place.name}.{kind}" for kind in kinds))
            }
            state.read(chunks, folder)
            moments = {kind: torch.zeros(parameter.shape) for kind in kinds}
            for place in group:
                weight = part(chunks[_MODEL + place.name])
                place.write(weight.to(parameter.device), parameter.detach())
                for kind, values in moments.items():
                    place.write(part(chunks[f"{_OPTIMIZER}{place.name}.{kind}"]), values)
            if self._optimizer is not None:
                self._optimizer.set_moments(parameter, moments)
        if self._optimizer is not None:
            step = torch.zeros(())
            state.read({f"{_OPTIMIZER}{self._weights.places[0].name}.step": step}, folder)
            self._optimizer.steps = float(step)
            self._optimizer.reload_parameters()
            self._optimizer.clear()  # gradients of an update that broke off

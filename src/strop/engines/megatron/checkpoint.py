"""Checkpoints with the names and shapes of the Hugging Face model, in the format of the engine ``fsdp``."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from pathlib import Path

import torch
from torch import Tensor, nn

from strop.engines.megatron.optimizer import MOMENTS, Optimizer
from strop.engines.megatron.weights import Weights, as_chunk, local
from strop.engines.torch import state

_MODEL, _OPTIMIZER = "model.hugging_face_model.", "optimizer.hugging_face_model."


class Checkpoints:
    """Write and read weights and moments, on any layout."""

    def __init__(self, weights: Weights, optimizer: Optimizer | None) -> None:
        self._weights, self._optimizer = weights, optimizer
        self._saving: tuple[Future, Path] | None = None
        self._beginning = threading.Lock()

    def save(self, folder: Path, *, background: bool) -> None:
        """See ``Engine.save``."""
        self._wait()
        with self._beginning:
            self._saving = None
            # Copied here: torch's stager fails on parts of tensors that are not parameters.
            saving = state.write(
                self._collect(copy=background), folder, background=background, copied=background
            )
            self._saving = None if saving is None else (saving, folder)

    def is_done(self) -> bool:
        """See ``Engine.save_is_done``."""
        saving = self._saving
        return saving is None or saving[0].done()

    def finish(self) -> None:
        """See ``Engine.finish_save``."""
        with self._beginning:
            saving = self._saving
        if saving is not None:
            state.finish(*saving)

    def _wait(self) -> None:
        if self._saving is not None:
            wait([self._saving[0]])

    def _collect(self, *, copy: bool) -> dict[str, Tensor]:
        """Return this rank's share of the state; each rank with the same chunks writes a part of them.

        With ``copy``, in CPU memory that training does not write to.
        """
        found: dict[str, Tensor] = {}
        gathered: tuple[nn.Parameter | None, dict[str, Tensor]] = (None, {})
        for number, place in enumerate(self._weights.sent):
            if self._optimizer is not None and gathered[0] is not place.parameter:
                gathered = place.parameter, self._optimizer.moments(place.parameter)
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
        self._wait()
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
                weight = local(chunks[_MODEL + place.name])
                place.write(weight.to(parameter.device), parameter.detach())
                for kind, values in moments.items():
                    place.write(local(chunks[f"{_OPTIMIZER}{place.name}.{kind}"]), values)
            if self._optimizer is not None:
                self._optimizer.set_moments(parameter, moments)
        if self._optimizer is not None:
            step = torch.zeros(())
            state.read({f"{_OPTIMIZER}{self._weights.places[0].name}.step": step}, folder)
            self._optimizer.steps = float(step)
            self._optimizer.reload_parameters()

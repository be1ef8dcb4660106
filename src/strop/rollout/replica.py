"""Rollout ``hf`` with a model of its own: beside a sharded actor, or in a pool of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.protocol import DataProto
from strop.rollout.base import Finished, SamplingParams
from strop.rollout.hf import HFRollout
from strop.rollout.weights import WeightLedger, checksums


class HFReplica:
    """Generates on an unsharded copy in the computing dtype, which exists from an update to ``release``."""

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Iterable[tuple[str, Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """``model`` has its parameters on the meta device; ``options`` are those of ``HFRollout``."""
        self._model, self._device, self._dtype = model, device, dtype
        self._ledger = WeightLedger({name: weight.shape for name, weight in model.named_parameters()})
        for owner, name, buffer in list(_own(model, "_buffers")):
            setattr(owner, name, buffer.to(device))
        self.update_weights(weights)
        self._rollout = HFRollout(model, **options)

    def generate(
        self, prompts: DataProto, params: SamplingParams, finished: Finished | None = None
    ) -> DataProto:
        """See ``RolloutEngine.generate``; ``ModelError`` before all weights have come."""
        self._ledger.require_complete()
        return self._rollout.generate(prompts, params, finished)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """See ``RolloutEngine.update_weights``."""
        if not self._ledger.open:
            self._begin()
        places = dict(self._model.named_parameters())
        for name, weight in weights:
            self._ledger.take(name, weight)
            places[name].copy_(weight)
            del weight  # before the next one is gathered
        if last:
            self._ledger.end()

    def checksums(self) -> dict[str, int]:
        """See ``RolloutEngine.checksums``."""
        return checksums(self._model.named_parameters(), self._dtype)

    def release(self) -> None:
        """See ``RolloutEngine.release``."""
        self._ledger.forget()
        _replace_parameters(self._model, lambda weight: weight.to("meta"))

    def _begin(self) -> None:
        self._ledger.begin()
        if next(self._model.parameters()).is_meta:
            _replace_parameters(
                self._model, lambda weight: torch.empty_like(weight, dtype=self._dtype, device=self._device)
            )


def _own(model: nn.Module, kind: str) -> Iterable[tuple[nn.Module, str, Tensor]]:
    """Every parameter or buffer with the module that owns it; tied ones once for each owner."""
    for owner in model.modules():
        for name, tensor in getattr(owner, kind).items():
            if tensor is not None:
                yield owner, name, tensor


def _replace_parameters(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put ``make(parameter)`` in the place of every parameter; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for owner, name, parameter in list(_own(model, "_parameters")):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(make(parameter.detach()), requires_grad=False)
        setattr(owner, name, made[id(parameter)])

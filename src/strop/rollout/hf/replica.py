"""``HFReplica``: rollout ``hf`` on an unsharded copy of the weights.

It is co-located with a sharded actor, or in a separate pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.deferred import defer_causal_lm
from strop.models.loader import dtype_named
from strop.rollout.base import Finished, RolloutSpec, SamplingParams
from strop.rollout.hf.engine import HFRollout, rollout_options
from strop.rollout.in_flight import InFlight
from strop.rollout.queued import Wave
from strop.rollout.weights import WeightLedger, checksums


class HFReplica(HFRollout):
    """Generate on an unsharded copy of the weights, allocated at an update and freed by ``release``."""

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Iterable[tuple[str, Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """Load ``weights`` into ``model``, whose parameters are on the meta device.

        ``options`` are those of ``HFRollout``.
        """
        self.model, self._device, self._dtype = model, device, dtype
        self._ledger = WeightLedger({name: weight.shape for name, weight in model.named_parameters()})
        self._layout = CheckpointLayout(model)
        for owner in model.modules():
            for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
                # a deferred model has the values of its buffers; its parameters come with the first update
                setattr(owner, name, buffer.to(device))
        self.update_weights(weights)
        super().__init__(model, **options)

    @classmethod
    def build(cls, spec: RolloutSpec) -> HFReplica:
        from strop.rollout.hf.kind import KIND  # needs pydantic, which the replica does not

        model, source = defer_causal_lm(**spec.model)
        weights = source.stream() if spec.weights is None else spec.weights
        dtype = dtype_named(KIND.dtype(spec.config), spec.device)
        return cls(model, weights, device=spec.device, dtype=dtype, **rollout_options(spec, model))

    def _complete(self, batches: Sequence[InFlight], version: int, finished: Finished | None) -> None:
        """See ``HFRollout``; ``ModelError`` before an update is complete."""
        self._ledger.require_complete()
        super()._complete(batches, version, finished)

    @contextlib.contextmanager
    def waves(self, params: SamplingParams, *, keeps: bool = False) -> Generator[Wave]:
        """See ``QueuedRollout.waves``; ``ModelError`` before an update is complete."""
        self._ledger.require_complete()
        with super().waves(params, keeps=keeps) as wave:
            yield wave

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        if not self._ledger.open:
            self._ledger.begin()
            if next(self.model.parameters()).is_meta:
                like = partial(torch.empty_like, dtype=self._dtype, device=self._device)
                _replace_parameters(self.model, like)
        places = dict(self.model.named_parameters())
        for name, weight in weights:
            self._ledger.take(name, weight)
            places[name].copy_(weight)
            del weight  # free it before the next one is gathered
        if last:
            self._ledger.end()

    def checksums(self) -> dict[str, int]:
        return checksums(self._layout.convert(self.model.named_parameters()), self._dtype)

    def release(self) -> None:
        self._ledger.forget()
        _replace_parameters(self.model, lambda weight: weight.to("meta"))


def _replace_parameters(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter by ``make(parameter)``; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for owner in model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(make(parameter.detach()), requires_grad=False)
            setattr(owner, name, made[id(parameter)])

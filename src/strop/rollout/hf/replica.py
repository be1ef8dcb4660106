"""``HFReplica``: rollout ``hf`` on an unsharded copy of the weights.

It is co-located with a sharded actor, or in a separate pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.deferred import defer_causal_lm
from strop.models.loader import dtype_named
from strop.protocol import DataProto
from strop.rollout.base import Finished, RolloutSpec, SamplingParams
from strop.rollout.hf.engine import HFRollout, rollout_options
from strop.rollout.weights import WeightLedger, checksums


class HFReplica:
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
        self._model, self._device, self._dtype = model, device, dtype
        self._ledger = WeightLedger({name: weight.shape for name, weight in model.named_parameters()})
        self._layout = CheckpointLayout(model)
        for owner in model.modules():
            for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
                # a deferred model has the values of its buffers; its parameters come with the first update
                setattr(owner, name, buffer.to(device))
        self.update_weights(weights)
        self._rollout = HFRollout(model, **options)
        self.advanced = self._rollout.advanced

    @classmethod
    def build(cls, spec: RolloutSpec) -> HFReplica:
        """See ``RolloutEngine.build``."""
        from strop.rollout.hf.kind import KIND  # needs pydantic, which the replica does not

        model, source = defer_causal_lm(**spec.model)
        weights = source.stream() if spec.weights is None else spec.weights
        dtype = dtype_named(KIND.dtype(spec.config), spec.device)
        return cls(model, weights, device=spec.device, dtype=dtype, **rollout_options(spec, model))

    def generate(
        self, prompts: DataProto, params: SamplingParams, finished: Finished | None = None
    ) -> DataProto:
        """See ``RolloutEngine.generate``; ``ModelError`` before an update is complete."""
        self._ledger.require_complete()
        self._rollout.advanced = self.advanced
        return self._rollout.generate(prompts, params, finished)

    def admit(self, batch: int, prompts: DataProto, params: SamplingParams) -> None:
        """See ``RolloutEngine.admit``."""
        self._rollout.admit(batch, prompts, params)

    def finish(self, batch: int, version: int, finished: Finished | None = None) -> DataProto:
        """See ``RolloutEngine.finish``; ``ModelError`` before an update is complete."""
        self._ledger.require_complete()
        self._rollout.advanced = self.advanced
        return self._rollout.finish(batch, version, finished)

    def in_flight(self) -> dict[str, Any]:
        """See ``RolloutEngine.in_flight``."""
        return self._rollout.in_flight()

    def restore(self, state: dict[str, Any]) -> None:
        """See ``RolloutEngine.restore``."""
        self._rollout.restore(state)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """See ``RolloutEngine.update_weights``."""
        if not self._ledger.open:
            self._ledger.begin()
            if next(self._model.parameters()).is_meta:
                like = partial(torch.empty_like, dtype=self._dtype, device=self._device)
                _replace_parameters(self._model, like)
        places = dict(self._model.named_parameters())
        for name, weight in weights:
            self._ledger.take(name, weight)
            places[name].copy_(weight)
            del weight  # free it before the next one is gathered
        if last:
            self._ledger.end()

    def checksums(self) -> dict[str, int]:
        """See ``RolloutEngine.checksums``."""
        return checksums(self._layout.convert(self._model.named_parameters()), self._dtype)

    def release(self) -> None:
        """See ``RolloutEngine.release``."""
        self._ledger.forget()
        _replace_parameters(self._model, lambda weight: weight.to("meta"))


def _replace_parameters(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter by ``make(parameter)``; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for owner in model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(make(parameter.detach()), requires_grad=False)
            setattr(owner, name, made[id(parameter)])

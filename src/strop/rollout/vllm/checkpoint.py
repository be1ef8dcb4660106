"""vLLM's copy of a model by the names of a checkpoint: what is sent to it, and what is read back from it.

vLLM itself is not imported.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from strop.models.checkpoint_layout import CheckpointLayout, Waiting
from strop.models.loader import persistent_buffers
from strop.rollout.weights import UNEQUAL, UNREADABLE, WeightLedger, add_up

logger = logging.getLogger(__name__)


class CheckpointWeights:
    """The weights that a copy of a model has to get, and their checksums."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Read names and shapes of ``model``, whose parameters may be on the meta device."""
        self.layout, self._name = CheckpointLayout(model), type(model).__name__
        self.ledger = WeightLedger({name: weight.shape for name, weight in model.named_parameters()})
        self._waiting: Waiting = {}
        self._buffers = dict(persistent_buffers(model))
        saved = self.layout.renamed
        self._tied = {saved(name): saved(first) for name, first in _tied_names(model).items()}
        # transformers' Conv1D stores [in, out] and vLLM [out, in]; checksums depend on positions.
        self._transposed = {
            saved(f"{path}.weight") for path, module in model.named_modules() if isinstance(module, Conv1D)
        }
        self._warned = False

    def shapes(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return everything that is sent, on the meta device; parameters have the ``dtype``."""
        found = {self.layout.renamed(name): value.to("meta") for name, value in self._buffers.items()}
        shapes = self.layout.shapes().items()
        return found | {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes}

    def sent(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Count ``weights``, by name in the model, and yield what a checkpoint has of them.

        Begins an update unless one is open. Engines send parameters only; the buffers are added.
        """
        if not self.ledger.open:
            self.ledger.begin()
            self._waiting.clear()
            weights = itertools.chain(self._buffers.items(), weights)
        yield from self.layout.convert(self._counted(weights), self._waiting)

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if name not in self._buffers:
                self.ledger.take(name, weight)
            yield name, weight
            del weight  # free it before the next one is gathered

    @property
    def names(self) -> list[str]:
        """The names that a checkpoint has, and those of tied weights."""
        return [*self.layout.shapes(), *self._tied]

    def held(self, parts: Iterable[dict[str, int]]) -> dict[str, int]:
        """Return the checksum of every weight from ``held_checksums`` of all ranks, tied ones once."""
        found = add_up(parts)
        for name, original in self._tied.items():
            # where vLLM holds a tied weight twice, both copies must be the actor's
            if original in found and found.pop(name, found[original]) != found[original]:
                found[original] = UNEQUAL
        names = self.layout.shapes().keys()
        unread = sorted(names - found.keys() | self._transposed)
        for name in unread:
            found[name] = UNREADABLE
        if unread and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d weights cannot be read back from vLLM's %s and are not verified: %s",
                len(unread), len(names), self._name, ", ".join(unread[:3]),
            )  # fmt: skip
        return found


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return further name -> first name of every weight that has several."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: kept for name, weight in every if (kept := first.setdefault(id(weight), name)) != name}

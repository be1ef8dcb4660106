"""Conversion of weights from a model's names and shapes to those of its family's checkpoints.

transformers fuses weights when it loads some families (the experts of a layer into one tensor) and renames
those of others; ``save_pretrained`` reverts that for the whole model at once. Here it is reverted while
weights stream by: exports and vLLM get what a published checkpoint of the family holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from strop.models.loader import persistent_buffers

Waiting = dict[str, dict[str, Tensor]]
"""Weights by name, of groups that are not complete."""


def _published_prefix(model: PreTrainedModel) -> Callable[[str], str]:
    """Return the change of a name by which an encoder of pictures has those of published files.

    transformers 5.19 takes ``vision_model`` out of the names of CLIP and SigLIP when it reads them, and does
    not put it back; vLLM 0.32 reads the published names alone.
    """
    encoder = getattr(model.config, "vision_config", None)
    if getattr(encoder, "model_type", None) not in ("clip_vision_model", "siglip_vision_model"):
        return lambda name: name
    return partial(re.compile(r"(^|\.)vision_tower\.(?!vision_model\.)").sub, r"\1vision_tower.vision_model.")


class CheckpointLayout:
    """Names and shapes that a family's checkpoints have for the parameters and persistent buffers of a model.

    The same for equal configurations, whichever file the weights came from: ``save_pretrained`` goes by the
    names in that file, and actor and rollout may be built in different ways.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Read the conversions of ``model``, which must not be sharded: FSDP changes the names of classes."""
        loading = get_model_conversion_mapping(model, add_legacy=False)
        # PrefixChange is not invertible without the file: it may or may not have the prefix.
        saving = [
            step.reverse_transform() for step in reversed(loading) if not isinstance(step, PrefixChange)
        ]
        converters = [step for step in saving if isinstance(step, WeightConverter)]
        renamings = [step for step in saving if isinstance(step, WeightRenaming)]
        self._model_config = model.config
        self._loading = {p: s for s in loading if isinstance(s, WeightConverter) for p in s.source_patterns}
        self._loaded_name = partial(
            rename_source_key,
            weight_renamings=[step for step in loading if isinstance(step, WeightRenaming)],
            weight_converters=[step for step in loading if isinstance(step, WeightConverter)],
        )
        self._converters = {pattern: step for step in converters for pattern in step.source_patterns}
        rename = partial(
            rename_source_key, weight_renamings=renamings, weight_converters=converters, reverse=True
        )
        named = [
            name for name, _ in (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model))
        ]
        published = _published_prefix(model)
        self._places = {
            name: (published(place), pattern)
            for name in sorted(named, key=dot_natural_key)
            for place, pattern in [rename(name)]
        }
        """Name in the model -> name of its group of converted weights, and the pattern of its conversion."""
        self._shapes = {name: weight.shape for name, weight in model.named_parameters()}
        self._groups: dict[str, set[str]] = {}
        for name in self._shapes:
            self._groups.setdefault(self._places[name][0], set()).add(name)

    def renamed(self, name: str) -> str:
        """Return a checkpoint's name for a weight that is stored as it is; of others, their own."""
        return self._places.get(name, (name,))[0]

    @property
    def parameters(self) -> Set[str]:
        """Names of the model's parameters."""
        return self._shapes.keys()

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every parameter by its name in a checkpoint, tied ones once."""
        empty = ((name, torch.empty(shape, device="meta")) for name, shape in self._shapes.items())
        return {name: weight.shape for name, weight in self.convert(empty)}

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes in ``dtype`` of every parameter by its name in a checkpoint, tied ones once."""
        return {name: dtype.itemsize * shape.numel() for name, shape in self.shapes().items()}

    @torch.no_grad()
    def convert(
        self, weights: Iterable[tuple[str, Tensor]], waiting: Waiting | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights`` (by their names in the model) as a checkpoint holds them.

        Weights that a checkpoint fuses wait for each other: in ``waiting``, if they come in several calls.
        """
        waiting = {} if waiting is None else waiting
        for name, weight in weights:
            group, pattern = self._places.get(name, (name, None))
            if pattern is None:
                yield group, weight
                continue
            waiting.setdefault(group, {})[name] = weight
            del weight  # free it before the next one is gathered
            if waiting[group].keys() == self._groups[group]:
                yield from self._converted(group, waiting.pop(group)).items()

    def sources(self, name: str) -> list[str]:
        """Return the names of a checkpoint's tensors that become the weight ``name``; [] if it is stored."""
        group, pattern = self._places[name]
        if pattern is None:
            return []
        empty = {other: torch.empty(self._shapes[other], device="meta") for other in self._groups[group]}
        return [key for key in self._converted(group, empty) if self._loaded_name(key)[0] == name]

    def fused(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the weight ``name`` from the ``sources`` of it, as transformers fuses them when it loads."""
        ordered = sorted(tensors, key=dot_natural_key)  # expert 10 after 9: they are stacked as they come
        # a copy: converters collect the tensors that they are given
        converter: Any = deepcopy(self._loading[str(self._loaded_name(ordered[0])[1])])
        for key in ordered:
            converter.add_tensor(name, key, self._loaded_name(key)[1], tensors[key])
        return converter.convert(name, config=self._model_config)[name]

    def _converted(self, group: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the weights of a group, as transformers' ``revert_weight_conversion`` does."""
        ordered = sorted(weights, key=dot_natural_key)
        converter: Any = deepcopy(self._converters[str(self._places[ordered[0]][1])])
        for name in ordered:
            converter.add_tensor(group, name, str(self._places[name][1]), weights[name])
        found = converter.convert(group, config=self._model_config)
        return {name: part[0] if isinstance(part, list) else part for name, part in found.items()}

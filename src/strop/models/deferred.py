"""Build models on the meta device, and read their weights one tensor at a time.

A sharded model is built without memory for its parameters, sharded, and only then allocated and filled, so
that no process ever holds all of it. Only parameters are on the meta device: buffers (rotary frequencies,
a user's constants) are computed in constructors, and ``torch.device("meta")`` would lose their values.

``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads neither GGUF, .bin or converted weights nor
fresh heads, nor does it map names, so it could replace a part of ``WeightSource.stream`` only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from strop.config.paths import SAFETENSORS_INDEX, weight_map
from strop.errors import ModelError, StropError, raised_as
from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.loader import (
    completed,
    fresh_head,
    load_causal_lm,
    load_failure,
    load_scorer,
    model_arguments,
    model_class,
    persistent_buffers,
)


class Weights(Protocol):
    """Source of the weights of a model that is built without them."""

    @property
    def readable(self) -> bool:
        """True if every process can read single tensors."""
        ...

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter in float32, tied ones once."""
        ...


class WeightSource:
    """Weights of a model on disk, by the parameter names of the model in memory."""

    def __init__(
        self,
        model: PreTrainedModel,
        path: str | Path,
        *,
        load: Callable[[], PreTrainedModel],
        fresh: Mapping[str, Callable[[], Tensor]],
    ) -> None:
        """Find the files of every parameter, and fill the buffers that the files hold.

        ``load`` reads the whole model by transformers; ``fresh`` makes weights that the files may lack.
        """
        self._load = load
        self._fresh = fresh
        self._layout = CheckpointLayout(model)
        self._files = _find(model, Path(path), fresh, self._layout)
        buffers = dict(persistent_buffers(model))
        if buffers and self._files is None:
            raise ModelError(
                f"model {path}: {sorted(buffers)[0]} is a buffer that has to be read with the weights; on "
                "several ranks that needs safetensors files only; convert the model with save_pretrained"
            )
        _fill(buffers, model.base_model_prefix, self._layout, Path(path))

    @property
    def readable(self) -> bool:
        """True if safetensors files hold every tensor as the model has it.

        Tensors that transformers fuses, such as those of experts, count as had. Otherwise (GGUF, .bin,
        other conversions) ``stream`` reads the whole model first.
        """
        return self._files is not None

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter in float32, tied ones once. Raises ``ModelError`` if one cannot be read."""
        if self._files is None:
            yield from ((name, weight.detach()) for name, weight in self._load().named_parameters())
            return
        for name in self._files:
            yield name, self.read(name)

    def read(self, name: str) -> Tensor:
        """Return one parameter in float32 from ``readable`` files; ``ModelError`` if it cannot be read."""
        place = (self._files or {})[name]
        if place is None:
            return self._fresh[name]()
        if isinstance(place, tuple):
            return _read(*place)
        return self._layout.fused(name, {key: _read(file, key) for key, file in place.items()})


def defer_causal_lm(path: str | Path, **options: Any) -> tuple[PreTrainedModel, WeightSource]:
    """Build the model of ``load_causal_lm`` on the meta device; return it with the source of its weights."""
    model = _without_weights(path, **options)
    return model, WeightSource(model, path, load=lambda: load_causal_lm(path, **options), fresh={})


def defer_scorer(
    path: str | Path, *, fresh_head_seed: int | None, **options: Any
) -> tuple[PreTrainedModel, WeightSource]:
    """Build the model of ``load_scorer`` on the meta device; return it with the source of its weights."""
    model = _without_weights(path, num_labels=1, **options)
    fresh = {}
    head = getattr(model, "score", None)
    if fresh_head_seed is not None and isinstance(head, nn.Linear) and head.bias is None:
        fresh["score.weight"] = lambda: fresh_head(head.in_features, fresh_head_seed)

    def load() -> PreTrainedModel:
        return load_scorer(path, fresh_head_seed=fresh_head_seed, **options)

    return model, WeightSource(model, path, load=load, fresh=fresh)


def described(folder: Path) -> PreTrainedModel:
    """Build the model of a folder, which may have no weights, on the meta device."""
    architectures = json.loads((folder / "config.json").read_bytes())["architectures"]
    scores = architectures[0].endswith("ForSequenceClassification")
    return _without_weights(folder, **({"num_labels": 1} if scores else {}))


def _without_weights(path: str | Path, **options: Any) -> PreTrainedModel:
    try:
        arguments = model_arguments(path, **options)
        auto_class = model_class(arguments["config"], scores="num_labels" in options)
        with _parameters_on_meta():
            model = auto_class.from_config(**arguments)
    except StropError:
        raise
    except Exception as error:  # the family's code may raise anything
        raise ModelError(f"cannot build the model of {path}: {load_failure(error)}") from error
    return completed(model, path, **options).eval()  # as from_pretrained does


_building = threading.local()


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    del module, name
    if not getattr(_building, "on_meta", False) or parameter.is_meta:  # a tied one stays the same object
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


# Torch's hooks are global and iterated without a lock, so this one is registered once, for all threads, and
# acts in a thread that is inside `_parameters_on_meta`: another thread may build its model at the same time.
register_module_parameter_registration_hook(_to_meta)  # ty: ignore[invalid-argument-type]


@contextmanager
def _parameters_on_meta() -> Generator[None]:
    """Build modules in this thread with parameters on the meta device and buffers with their values."""
    _building.on_meta = True
    try:
        yield
    finally:
        _building.on_meta = False


def _fill(buffers: Mapping[str, Tensor], base_prefix: str, layout: CheckpointLayout, path: Path) -> None:
    """Read the buffers that the files hold; others keep their values from construction."""
    stored = _keys(path) if buffers else {}
    for name, buffer in buffers.items():
        names = (*_aliases(name, base_prefix), layout.renamed(name))
        key = next((key for key in names if key in stored), None)
        if key is None:
            continue
        with safe_open(stored[key], framework="pt") as tensors:
            buffer.copy_(tensors.get_tensor(key))


def _aliases(name: str, base_prefix: str) -> tuple[str, str, str]:
    """Return the keys under which files may hold a tensor: with and without the base model's prefix."""
    return name, f"{base_prefix}.{name}", name.removeprefix(f"{base_prefix}.")


_Places = dict[str, tuple[Path, str] | dict[str, Path] | None]
"""File and key of every parameter; key -> file of one that is fused from several; None: make it fresh."""


def _read(file: Path, key: str) -> Tensor:
    with (
        raised_as(ModelError, f"cannot read {key} from {file}", OSError, SafetensorError),
        safe_open(file, framework="pt") as tensors,
    ):
        return tensors.get_tensor(key).float()


def _find(
    model: PreTrainedModel, path: Path, fresh: Mapping[str, Any], layout: CheckpointLayout
) -> _Places | None:
    """Return the places of all parameters; None if the files cannot be streamed."""
    stored = _keys(path)
    by_identity: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        # a file may hold a tied weight under either of its names
        by_identity.setdefault(id(weight), []).append(name)
    places: _Places = {}
    for name, weight in model.named_parameters():
        keys = [
            key
            for alias in by_identity[id(weight)]
            for key in (*_aliases(alias, model.base_model_prefix), layout.renamed(alias))
            if key in stored
        ]
        if keys and _fits(stored[keys[0]], keys[0], weight):
            places[name] = (stored[keys[0]], keys[0])
        elif not keys and name in fresh:
            places[name] = None
        elif not keys and (sources := layout.sources(name)) and stored.keys() >= set(sources):
            places[name] = {key: stored[key] for key in sources}
        else:
            return None
    return places


def _keys(path: Path) -> dict[str, Path]:
    """Return key -> file over the folder's safetensors files."""
    single = path / "model.safetensors"
    if not single.is_file():  # transformers' choice where there are both
        return {key: path / file for key, file in weight_map(path / SAFETENSORS_INDEX).items()}
    try:
        with safe_open(single, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), single)
    except (OSError, SafetensorError):
        return {}  # loading by transformers reports what is wrong


def _fits(file: Path, key: str, weight: Tensor) -> bool:
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = tensors.get_slice(key)
            # integers and float8 have scales, which transformers unpacks them with
            return stored.get_shape() == list(weight.shape) and stored.get_dtype() in ("F32", "BF16", "F16")
    except (OSError, SafetensorError):
        return False

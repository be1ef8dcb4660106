"""LoRA: low-rank adapters on linear layers of a frozen model (Hu et al., arXiv:2106.09685), by peft.

An adapted layer computes W x + s B (A x), with s = alpha / rank, A [rank, in] and B [out, rank]. A is drawn
from (seed, name of the layer) and B is 0, so that training starts from the base model's own numbers on any
number of ranks. peft's layers are put into the Hugging Face model; its class stays as it is.

Other modules can be trained whole in addition (``modules_to_save``). peft wraps such a module around a copy,
which unties an embedding from the output layer; here the module itself is trained, and a copy of its first
values takes their place where the base model is run. Folders have peft's format.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.config.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ATTENTION, is_url
from strop.errors import ConfigError, MissingExtraError, ModelError, raised_as
from strop.models.deferred import Weights
from strop.models.heads import encoder_modules
from strop.models.source import save_tensors

_ADAPTER = "default"  # peft's name for the only adapter
_HEAD = "score.weight"
_PREFIX = "base_model.model."  # of names in files of peft
_MATRICES = ("lora_A", "lora_B")
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base model's weights as they are."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters of a model: new ones, or those of a folder."""

    base: str
    """Path of the base model, for ``adapter_config.json``."""
    rank: int = 0
    """0: that of the folder."""
    alpha: float = 16.0
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] | None = None
    modules_to_save: tuple[str, ...] = ()
    """Ends of names of modules that are trained and saved whole."""
    folder: Path | None = None
    """Local folder of an adapter to start from; it decides alpha and modules."""
    seed: int = 0
    key: str = "actor_rollout_ref.model"
    """Section of the configuration, for errors."""


class Adapters:
    """The adapters of a Hugging Face model, by the names that its weights have without them."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings) -> None:
        """Put adapters into ``model`` in place and freeze all weights but those of modules trained whole.

        These are the settings' ``modules_to_save`` and a scalar head.

        A model on the meta device gets its weights from ``source``. Raises ``ConfigError`` for modules that
        the model lacks or that cannot be adapted, ``ModelError`` for a folder that does not fit,
        ``MissingExtraError`` without peft.
        """
        try:
            import peft
        except ImportError as error:
            raise MissingExtraError("peft", "peft", f"{settings.key}.lora_rank") from error
        self._settings, self._model = settings, model
        has_head = isinstance(getattr(model, "score", None), nn.Linear) and not model.can_generate()
        names = {id(weight): name for name, weight in model.named_parameters()}
        self._config: Any = (
            _read_config(peft, settings) if settings.folder else _new_config(peft, settings, model)
        )
        self._config.task_type = "SEQ_CLS" if has_head else "CAUSAL_LM"  # all-linear without the head
        whole = _modules_to_save(model, settings, self._config.modules_to_save or settings.modules_to_save)
        _inject(model, self._config, settings, list(whole))
        if has_head:
            whole.setdefault("score", model.get_submodule("score"))
        self._layers = _adapted_layers(model, settings)
        self._names = {
            name: names.get(id(weight)) for name, weight in model.named_parameters() if id(weight) in names
        }
        weights = [(outer, weight) for outer, module in whole.items() for weight in module.parameters()]
        chosen = {id(weight): names[id(weight)] for _, weight in weights}
        self._modules = {
            outer if chosen[id(weight)].startswith(f"{outer}.") else chosen[id(weight)].rpartition(".")[0]
            for outer, weight in weights
        }
        """Modules that are trained whole; instead of a tied output layer, the embedding."""
        self._whole: dict[str, list[str]] = {}
        """Their weights, with all names of each; tied ones have several."""
        for name, weight in model.named_parameters(remove_duplicate=False):
            if id(weight) in chosen:
                weight.requires_grad_(True)
                self._whole.setdefault(chosen[id(weight)], []).append(name)
        tied = any(len(names) > 1 for names in self._whole.values())
        if tied and settings.folder is not None and not self._config.ensure_weight_tying:
            raise ModelError(
                f"{settings.key}.lora_adapter_path={settings.folder}: its embedding and output layer were "
                f"trained apart (ensure_weight_tying=False), and they are one weight in {settings.base}; "
                "train the adapter with ensure_weight_tying=True, or merge it with peft (merge_and_unload)"
            )
        self._config.ensure_weight_tying = tied
        self._base: dict[str, Tensor] = {}
        """Values in the base model of the modules trained whole, sharded as those are."""
        self._start = _start_of(model, settings, self._whole)
        if not next(model.parameters()).is_meta:
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if name in self._start and name not in self._whole:
                        weight.copy_(self._start[name]())
        else:
            for layer in self._layers.values():
                for kind in _MATRICES:
                    getattr(layer, kind).to("meta")

    def is_trained(self, name: str) -> bool:
        """Return True for the name, in the adapted model, of a weight that is trained and saved."""
        return name not in self._names or name in self._whole

    def source(self, base: Weights) -> Weights:
        """Return the source of all weights of the adapted model, from that of the base model.

        Weights that are trained whole are the base model's; see ``keep_base``.
        """
        start = {name: make for name, make in self._start.items() if name not in self._whole}
        return _AdaptedSource(base, {name: adapted for adapted, name in self._names.items()}, start)

    @torch.no_grad()
    def keep_base(self, write: Callable[[Tensor, Tensor], None]) -> None:
        """Copy the base model's values of weights that are trained whole, once the model has its weights.

        ``write`` then puts the whole tensors of a folder's adapter into the weights, which may be sharded.
        """
        for name in self._whole:
            weight = self._model.get_parameter(name)
            self._base[name] = weight.detach().clone()
            if name in self._start:
                write(weight, self._start[name]())

    def merged(
        self, weights: Iterable[tuple[str, Tensor]], whole: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield W + s B A for the weights (by adapted names) of the base model, by their own names.

        In the body of ``off``, yield W. ``whole`` gathers a sharded weight; adapters in ``weights`` are
        skipped.
        """
        for adapted, weight in weights:
            name = self._names.get(adapted)
            if name is None:
                continue
            layer = self._layers.get(name.removesuffix(".weight"))
            if layer is None or layer.disable_adapters or not name.endswith(".weight"):
                yield name, whole(weight)
                continue
            delta = whole(layer.lora_B[_ADAPTER].weight) @ whole(layer.lora_A[_ADAPTER].weight)
            delta = (delta.T if layer.fan_in_fan_out else delta) * layer.scaling[_ADAPTER]
            found = whole(weight)
            del weight
            # -0.0 + 0.0 is 0.0, and with B = 0 the base should come out bit for bit
            yield name, torch.where(delta == 0, found, found + delta)

    def merged_from(self, base: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights of a model on the meta device, reading ``base`` one at a time."""
        start = {name: make() for name, make in self._start.items()}
        for layer_name, layer in self._layers.items():
            for kind in _MATRICES:
                matrix = start[f"{layer_name}.{kind}.{_ADAPTER}.weight"]
                getattr(layer, kind)[_ADAPTER].weight = nn.Parameter(matrix, requires_grad=False)
        adapted = {name: adapted for adapted, name in self._names.items()}
        stream = ((adapted[name], start.get(name, weight)) for name, weight in base.stream())
        return self.merged(stream, lambda weight: weight)

    @contextmanager
    def off(self) -> Generator[None]:
        """Run passes of the base model alone in the body."""
        # Not by peft's enable_adapters, which changes requires_grad.
        for layer in self._layers.values():
            layer._disable_adapters = True
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            for layer in self._layers.values():
                layer._disable_adapters = False

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the values of weights that are trained whole with those of the base model, in place."""
        for name, kept in self._base.items():
            weight = self._model.get_parameter(name)
            # in place: a rollout, the optimizer and FSDP2 hold these tensors
            now = weight.clone()
            weight.copy_(kept)
            kept.copy_(now)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write a folder of peft's from the whole trained weights by name."""
        self._config.base_model_name_or_path = self._settings.base
        self._config.inference_mode = True
        self._config.modules_to_save = sorted(self._modules) or None
        self._config.save_pretrained(folder)
        named = {
            _PREFIX + key.replace(f".{_ADAPTER}.", "."): weight.cpu().contiguous().clone()
            for name, weight in weights.items()
            for key in self._whole.get(name, [name])  # peft expects a tied one under all its names
        }
        save_tensors(named, folder / ADAPTER_WEIGHTS)


def _new_config(peft: Any, settings: LoraSettings, model: PreTrainedModel) -> Any:
    excluded, wanted = settings.exclude_modules, settings.target_modules
    # a regular expression is one of whole names, and says itself what it means
    if excluded is None and (wanted == "all-linear" or not isinstance(wanted, str)):
        excluded = encoder_modules(model)
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=settings.target_modules,
        exclude_modules=excluded or None,
    )


def _read_config(peft: Any, settings: LoraSettings) -> Any:
    """Return the configuration of the adapter in a folder, without dropout."""
    found = f"{settings.key}.lora_adapter_path={settings.folder}"
    with raised_as(ModelError, f"{found}: no adapter of peft's can be read"):
        config = peft.PeftConfig.from_pretrained(str(settings.folder))
    if not isinstance(config, peft.LoraConfig):
        raise ModelError(f"{found}: an adapter of type {config.peft_type}, expected LORA")
    if settings.rank not in (0, config.r):
        raise ConfigError(
            f"{settings.key}.lora_rank={settings.rank}: the adapter in {settings.folder} has rank "
            f"{config.r}; set it to {config.r}"
        )
    if config.init_lora_weights not in _STARTS or config.layer_replication:
        key = "layer_replication" if config.layer_replication else "init_lora_weights"
        raise ModelError(
            f"{found}: its {key}={getattr(config, key)!r} changes weights of the base model, expected "
            "one that leaves them as they are; merge it with peft (merge_and_unload), or save it with peft's "
            "path_initial_model_for_weight_conversion"
        )
    config.lora_dropout, config.inference_mode = 0.0, False
    config.init_lora_weights = True  # the folder's weights take their place
    return config


def _modules_to_save(
    model: PreTrainedModel, settings: LoraSettings, ends: Iterable[str]
) -> dict[str, nn.Module]:
    """Return the modules whose names have one of ``ends``, as peft matches, without those inside another."""
    found: dict[str, nn.Module] = {}
    unused = set(ends)
    for name, module in model.named_modules():
        if next(module.parameters(), None) is None:
            continue
        matching = {end for end in ends if name.endswith(end)}
        unused -= matching
        if matching and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if unused and settings.folder is None:  # peft adds names that only some families have
        known = sorted({name.split(".")[-2] for name, _ in model.named_parameters() if "." in name})
        raise ConfigError(
            f"{settings.key}.modules_to_save: {type(model).__name__} has no module with weights whose name "
            f"ends in {sorted(unused)}; names of its modules end in {known}"
        )
    return found


def _inject(model: PreTrainedModel, config: Any, settings: LoraSettings, whole: list[str]) -> None:
    """Put peft's layers into ``model``, but not into modules that are trained whole."""
    import peft

    given = config.exclude_modules
    patterns = [rf"{re.escape(name)}(\..*)?" for name in whole]
    if isinstance(given, str):
        patterns.append(given)
    elif given:
        patterns += [rf"(.*\.)?{re.escape(end)}" for end in given]
    config.exclude_modules = "|".join(f"({pattern})" for pattern in patterns) or None
    config.modules_to_save = None  # peft would wrap them
    what = (
        f"{settings.key}.target_modules={settings.target_modules} with exclude_modules="
        f"{settings.exclude_modules}: {type(model).__name__} cannot be adapted so"
    )
    with raised_as(ConfigError, what, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later checks raise errors that name the layer
        peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    config.exclude_modules = given


def _adapted_layers(model: PreTrainedModel, settings: LoraSettings) -> dict[str, Any]:
    """Return peft's layers in ``model``; ``ConfigError`` if one is not a linear layer of the decoder."""
    from peft.tuners.lora import Linear

    layers = {}
    unfit = {
        id(model.get_output_embeddings()): "the output layer",
        id(getattr(model, "score", None)): "the head",
    }
    for name, layer in model.named_modules():
        if not hasattr(layer, "base_layer"):
            continue
        base = layer.get_base_layer()
        reason = unfit.get(id(layer)) or unfit.get(id(base))
        if reason is None and (type(layer) is not Linear or layer.lora_variant or layer.lora_bias[_ADAPTER]):
            reason = f"a {type(base).__name__} under peft's {type(layer).__name__}"
        if reason is not None:
            given = "target_modules" if settings.folder is None else f"lora_adapter_path={settings.folder}"
            raise ConfigError(
                f"{settings.key}.{given}: {name} is {reason}; only linear layers inside the decoder can "
                "have adapters, without DoRA and biases, and routed experts cannot; name others, for "
                f"example target_modules={ATTENTION}, or train it whole by modules_to_save"
            )
        # all of a pass has one dtype; peft's cast would give layers of one input another each
        layer.cast_input_dtype_enabled = False
        layers[name] = layer
    return layers


def _start_of(
    model: PreTrainedModel, settings: LoraSettings, whole: dict[str, list[str]]
) -> dict[str, Callable[[], Tensor]]:
    """Return what makes the first value of each adapter weight, and of others in the folder, by name.

    ``whole`` has the weights that are trained whole, with all names of each.
    """
    shapes = {
        name: weight.shape
        for name, weight in model.named_parameters()
        if name in whole or any(f".{kind}." in name for kind in _MATRICES)
    }
    if settings.folder is None:
        return {
            name: _draw(name, shape, settings.seed) for name, shape in shapes.items() if name not in whole
        }
    file = settings.folder / ADAPTER_WEIGHTS
    found = f"{settings.key}.lora_adapter_path={settings.folder}"
    with (
        raised_as(ModelError, f"{found}: {ADAPTER_WEIGHTS} cannot be read", OSError, SafetensorError),
        safe_open(file, framework="pt") as tensors,
    ):
        stored = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    keys = {name: _PREFIX + name.replace(f".{_ADAPTER}.", ".") for name in shapes}
    if keys.get(_HEAD) not in stored:
        keys.pop(_HEAD, None)  # the base model's or a fresh one
    wrong = [name for name, key in keys.items() if stored.get(key) != list(shapes[name])]
    tied = {_PREFIX + name for names in whole.values() for name in names}
    unused = sorted(stored.keys() - {*keys.values(), *tied, _PREFIX + _HEAD})
    if wrong or unused:
        raise ModelError(
            f"{found} does not fit {settings.base}: it has no {wrong[0]} of shape {list(shapes[wrong[0]])}"
            if wrong
            else f"{found} does not fit {settings.base}: the model has no place for {unused[0]}"
        )
    if _PREFIX + _HEAD in stored and _HEAD not in keys:
        raise ModelError(f"{found}: an adapter with a scalar head, and {settings.base} is loaded without one")
    return {name: _reader(file, key) for name, key in keys.items()}


def _draw(name: str, shape: torch.Size, seed: int) -> Callable[[], Tensor]:
    """Draw A as peft does (a uniform distribution by Kaiming's rule), from the seed and the name; B is 0."""

    def make() -> Tensor:
        weight = torch.zeros(shape)
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        return weight

    return make


def _reader(file: Path, key: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(key).float()

    return read


class _AdaptedSource:
    """Weights of an adapted model: the base model's under their names in it, and those of adapters."""

    def __init__(self, base: Weights, names: dict[Any, str], start: dict[str, Callable[[], Tensor]]) -> None:
        self._base, self._names, self._start = base, names, start

    @property
    def readable(self) -> bool:
        return self._base.readable

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        start = dict(self._start)
        for name, weight in self._base.stream():
            make = start.pop(name, None)
            yield self._names[name], weight if make is None else make()
        for name, make in start.items():
            yield name, make()


def base_of(folder: Path) -> tuple[str, bool]:
    """Return the path of an adapter's base model, and whether that has a scalar head.

    Raises ``ModelError`` for a URL: an adapter from elsewhere would choose what is downloaded.
    """
    content = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    base = str(content.get("base_model_name_or_path") or "")
    if is_url(base):
        raise ModelError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path={base!r}; expected a local folder or a name "
            "on the hub. Copy the base model to this machine, and name its folder there"
        )
    return base, content.get("task_type") == "SEQ_CLS"

"""Liger's fused RMSNorm, rotary positions and gated MLP for the families that it knows, on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from strop.errors import ModelError

_ABSENT = object()


class Liger:
    """Liger's kernels in one model; other models of its family keep their own modules and functions.

    Losses are not replaced: log-probs come from strop's output layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Replace modules of ``model``.

        Raises ``ModelError`` if ``liger_kernel`` is not installed or lacks kernels for the family.
        """
        patch = _monkey_patch(model.config.model_type)
        parts = list(model.modules())
        with _recorded(names for part in parts for names in (vars(part), part._modules)) as self._changes:
            with _files_restored() as functions:
                try:
                    patch._apply_liger_kernel_to_instance(
                        model,
                        rope=True,
                        rms_norm=True,
                        swiglu=True,
                        geglu=True,
                        layer_norm=False,  # Liger would replace torch.nn.LayerNorm
                        cross_entropy=False,
                        fused_linear_cross_entropy=False,
                    )
                except NotImplementedError as error:  # of families that Liger knows in part
                    raise ModelError(
                        f"model.use_liger=True: {str(error).rstrip('.')}; set it to False"
                    ) from error
            _call_instead(parts, functions)

    @contextmanager
    def off(self) -> Generator[None]:
        """Compute with the family's own modules in the body."""
        for change in self._changes:
            change.undo()
        try:
            yield
        finally:
            for change in self._changes:
                change.names[change.name] = change.after


def _monkey_patch(kind: str) -> Any:
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(
            "model.use_liger=True: the package liger_kernel is not installed; pip install liger-kernel, or "
            "set it to False"
        )
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    if kind not in patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(patch.MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ModelError(f"model.use_liger=True: Liger has no kernels for {kind} (it has for {known})")
    return patch


@dataclass(frozen=True)
class _Change:
    names: dict[str, Any]
    name: str
    before: Any
    after: Any

    def undo(self) -> None:
        if self.before is _ABSENT:
            del self.names[self.name]
        else:
            self.names[self.name] = self.before


@contextmanager
def _recorded(spaces: Iterable[dict[str, Any]]) -> Generator[list[_Change]]:
    """Yield a list that has, after the body, the names that were set in it."""
    before = [(names, dict(names)) for names in spaces]
    changes: list[_Change] = []
    try:
        yield changes
    finally:
        for names, old in before:
            for name, value in names.items():
                if old.get(name, _ABSENT) is not value:
                    changes.append(_Change(names, name, old.get(name, _ABSENT), value))


@contextmanager
def _files_restored() -> Generator[dict[str, dict[str, Any]]]:
    """Undo what the body sets in transformers' files, where models that are built later would get it.

    Yields a dictionary with, after the body, the functions set in each file.
    """
    files = [vars(file) for name, file in sys.modules.items() if name.startswith("transformers.models.")]
    functions: dict[str, dict[str, Any]] = {}
    changes: list[_Change] = []
    try:
        with _recorded(files) as changes:
            yield functions
    finally:
        for change in changes:
            if change.before is _ABSENT:  # transformers imports lazily
                continue
            change.undo()
            if not isinstance(change.after, type):
                functions.setdefault(change.names["__name__"], {})[change.name] = change.after


def _call_instead(parts: Iterable[nn.Module], functions: dict[str, dict[str, Any]]) -> None:
    """Let the forward passes of ``parts`` call ``functions`` instead of those of their files."""
    forwards: dict[type, FunctionType] = {}  # one for all layers: torch.compile keeps graphs by code object
    for part in parts:
        kind = type(part)
        own, instead = kind.forward, functions.get(kind.__module__, {})
        if not isinstance(own, FunctionType) or instead.keys().isdisjoint(own.__code__.co_names):
            continue
        if kind not in forwards:
            # torch.compile would look names up in the file called __name__
            names = {name: value for name, value in own.__globals__.items() if name != "__name__"} | instead
            code = own.__code__.replace()  # not the one with graphs of the family's own functions
            forwards[kind] = FunctionType(code, names, own.__name__, own.__defaults__, own.__closure__)
            forwards[kind].__kwdefaults__ = own.__kwdefaults__
        part.forward = MethodType(forwards[kind], part)

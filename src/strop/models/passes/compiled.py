"""Decoder layers compiled by ``torch.compile``, for passes over batches of any length.

Attention of packed rows stays outside the graphs: its calls depend on the lengths of sequences, and a graph
would be compiled again in every step.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import MethodType

import torch
from transformers import PreTrainedModel

from strop.errors import ModelError
from strop.models.attention import run_outside_graphs
from strop.models.heads import decoder_of, part_of
from strop.models.passes.graphs import many_graphs
from strop.models.transformers_private import layer_classes


class CompiledLayers:
    """The layers of a language model; compiled in the body of ``on`` alone, so that rollouts are not.

    Those of an encoder of pictures are not among them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the layers; graphs are compiled in the first passes, and serve every later one.

        Raises ``ModelError`` if transformers does not name the classes of the model's layers.
        """
        names = layer_classes(model)
        self._layers = [
            layer
            for name, layer in decoder_of(model).named_modules()
            if type(layer).__name__ in names and part_of(name) is None
        ]
        if not self._layers:
            raise ModelError(
                f"compile=True: {type(model).__name__} does not name its layers; set it to False"
            )
        run_outside_graphs()
        # One function for all layers of a class: they share its graphs.
        kinds = {type(layer) for layer in self._layers}
        self._forward = {kind: torch.compile(kind.forward, dynamic=True) for kind in kinds}
        self._kinds = [type(layer) for layer in self._layers]  # FSDP2 changes them

    @contextmanager
    def on(self) -> Generator[None]:
        """Run the layers' compiled forward passes in the body."""
        for layer, kind in zip(self._layers, self._kinds, strict=True):
            layer.forward = MethodType(self._forward[kind], layer)
        try:
            with many_graphs():  # all models of a family compile the same functions
                yield
        finally:
            for layer in self._layers:
                del layer.forward  # the class's own again


def reason_not_compiled(device: torch.device) -> str:
    """Return why ``torch.compile`` cannot work on ``device``; empty if it can."""
    other = "may name another: a program, without arguments"
    if device.type == "cpu":  # Inductor calls this one alone
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        return "" if shutil.which(compiler) else f"there is no C++ compiler {compiler!r} (CXX {other})"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # Triton's
    if not any(map(shutil.which, compilers)):
        return f"there is no C compiler {' or '.join(map(repr, compilers))} (CC {other})"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return ""

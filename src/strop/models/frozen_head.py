"""What a model can say under a final norm and an output layer that stay as they are, as with LoRA adapters.

The norm bounds the length of hidden states. Under an output layer near its initialisation none of them gives
a token much probability, whatever the adapters do.

Shapes: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from strop.models.deferred import defer_causal_lm
from strop.models.heads import decoder_of
from strop.models.policy import LogitProjection

_LARGEST = 2**29
"""Numbers of an output layer that is looked at; larger ones are of models that were trained well."""


@torch.no_grad()
def frozen_head(
    path: Path, ids: Sequence[int], whole: Sequence[str], **options: Any
) -> tuple[float, str] | None:
    """Return the median over tokens of about the highest probability of each, and the name of the layer.

    That is its probability after the hidden state along norm weight x (its row - the mean row).

    Args:
        path: local folder of a language model; two of its weights are read.
        ids: the tokens.
        whole: ends of names of modules that are trained; None if the output layer is one.
        options: those of ``load_causal_lm``.

    Returns None also if the weights cannot be read one by one, or the model has no final norm or no matrix.
    """
    model, weights = defer_causal_lm(path, **options)
    names = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = getattr(head, "weight", None) is embedding.weight
    trained = [names[id(module)] for module in ([head, embedding] if is_tied else [head])]
    norms = [module for module in decoder_of(model).children() if "norm" in type(module).__name__.lower()]
    if any(name.endswith(end) for name in trained for end in whole) or not norms or not weights.readable:
        return None
    if type(head) is not nn.Linear or head.weight.numel() > _LARGEST:
        return None
    of_weights = {id(weight): name for name, weight in model.named_parameters()}
    read = {
        module: {name: weights.read(of_weights[id(weight)]) for name, weight in module.named_parameters()}
        for module in (norms[-1], head)
    }
    norm, project = (partial(functional_call, module, read[module]) for module in (norms[-1], head))
    rows_VH = read[head]["weight"]
    # an RMS norm of ones is its weight, for Gemma 1 + weight; a layer norm of ones is its bias
    layer_norm = isinstance(norms[-1], nn.LayerNorm)
    scale_H = read[norms[-1]]["weight"] if layer_norm else norm(torch.ones(1, rows_VH.shape[1]))[0]
    best_NH = scale_H * (rows_VH[list(ids)] - rows_VH.mean(dim=0))
    best_NH = best_NH / best_NH.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-12)
    logits_NV = LogitProjection(model.config, project)(norm(best_NH)).float()
    chances_N = logits_NV.softmax(-1).gather(1, torch.tensor(list(ids))[:, None])
    return float(chances_N.median()), trained[-1].rpartition(".")[2]

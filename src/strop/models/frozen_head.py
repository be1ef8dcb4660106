"""Highest probabilities under a final norm and an output layer that stay as they are, as with LoRA adapters.

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

_LARGEST = 2**28
"""Numbers of an output layer that is looked at; larger ones are of models that were trained well."""


@torch.no_grad()
def frozen_head(
    path: Path, ids: Sequence[int], whole: Sequence[str], **options: Any
) -> tuple[float, str] | None:
    """Return the median over the tokens of about the highest probability of each, and the layer's name.

    The norm bounds the length of hidden states; the best one for a token is along norm weight x (its row -
    the mean row). Two weights are read. None: a module that ends in one of ``whole`` is the output layer, so
    it is trained, or the weights are not in safetensors, or are not those of a final norm and a matrix.
    ``options`` are those of ``load_causal_lm``.
    """
    model, weights = defer_causal_lm(path, **options)
    names = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = getattr(head, "weight", None) is embedding.weight
    trained = [names[id(module)] for module in ([head, embedding] if is_tied else [head])]
    norms = [module for module in decoder_of(model).children() if "norm" in type(module).__name__.lower()]
    is_matrix = type(head) is nn.Linear and head.weight.numel() <= _LARGEST
    if any(name.endswith(end) for name in trained for end in whole) or not (
        norms and is_matrix and weights.readable
    ):
        return None
    of_weights = {id(weight): name for name, weight in model.named_parameters()}
    read = [
        {name: weights.read(of_weights[id(weight)]) for name, weight in module.named_parameters()}
        for module in (norms[-1], head)
    ]
    norm, project = partial(functional_call, norms[-1], read[0]), partial(functional_call, head, read[1])
    rows_VH = read[1]["weight"]
    # of any norm, whether it centers, has a bias or adds 1 to its weight: both have mean 0 and mean square 1
    signs_H = 1.0 - 2 * (torch.arange(rows_VH.shape[1]) % 2)
    plus_H, minus_H = norm(torch.stack([signs_H, -signs_H]))
    scale_H = (plus_H - minus_H) / 2 * signs_H
    best_NH = scale_H * (rows_VH[list(ids)] - rows_VH.mean(dim=0))
    best_NH = best_NH / best_NH.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-12)
    chances_NV = LogitProjection(model.config, project)(norm(best_NH)).float().softmax(-1)
    return float(chances_NV[range(len(ids)), list(ids)].median()), trained[-1].rpartition(".")[2]

"""One number for all weights: what runs that must be equal are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_hash(named_weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of names and bytes, in name order: equal exactly when every parameter is bit-identical."""
    digest = hashlib.sha256()
    for name, weight in sorted(named_weights, key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

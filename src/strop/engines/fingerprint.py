"""One number for all weights: what runs that must be equal are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_hash(named_weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names and the SHA-256 of bytes, in name order; one tensor at a time is held.

    Equal exactly when every parameter is bit-identical, in whatever order and from how many ranks they come.
    """
    digests = {
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).digest()
        for name, weight in named_weights
    }
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(name.encode() + digests[name])
    return whole.hexdigest()

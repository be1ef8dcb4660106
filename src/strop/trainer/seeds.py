"""Random streams: pure functions of (``trainer.seed``, name, iteration).

No generator state is carried from one iteration to the next, so a resumed run draws the same numbers, on any
number of processes.
"""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


def stream(seed: int, name: str, *position: int) -> np.random.SeedSequence:
    """Return the stream ``name`` at ``position`` (for example the iteration)."""
    # crc32: hash() of a string differs from process to process
    return np.random.SeedSequence((seed, zlib.crc32(name.encode()), *position))


def sample_seeds(seed: int, name: str, iteration: int, n_prompts: int, n: int) -> Tensor:
    """Return a non-negative seed for every sample of an iteration: int64 [n_prompts, n]."""
    words = stream(seed, name, iteration).generate_state(n_prompts * n, np.uint64)
    # 63 bits: int64 has a sign
    return torch.from_numpy((words >> np.uint64(1)).astype(np.int64)).view(n_prompts, n)


def permutation(seed: int, name: str, length: int, *position: int) -> Tensor:
    """Return a random permutation: int64 [length]."""
    return torch.from_numpy(np.random.default_rng(stream(seed, name, *position)).permutation(length))


def seed_global_generators(seed: int) -> None:
    """Seed Python, numpy and torch for users' code; strop does not draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)

"""The global random generators of the driver: strop draws from none of them, a user's code may."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as types that ``torch.load`` trusts."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "python": (version, list(words), gauss),
        "numpy": (str(name), keys.tolist(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what ``random_state`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

"""Tensors as numpy arrays, which cross between processes out of band and without a copy."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor


def to_array(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, on the CPU; numpy has no bfloat16, which travels as int16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes these are; it shares them, and like every tensor of a batch it is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor

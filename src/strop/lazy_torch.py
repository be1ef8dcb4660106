"""``torch``, imported when an attribute of it is first used: commands that compute nothing start sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch, Tensor = _Torch(), Any  # the second for annotations

__all__ = ["Tensor", "torch"]

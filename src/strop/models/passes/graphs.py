"""Limit of the graphs that ``torch.compile`` keeps of a function."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.compiler.config

_GRAPHS = 64
"""Graphs of each function in a process: by role, window, heads, dtype, and with or without gradients."""


def many_graphs() -> AbstractContextManager[object]:
    """Raise the limit in the body, for this thread.

    Past torch's limit of 8, which roles of a family reach together, functions run operation by operation;
    torch logs it once.
    """
    return torch.compiler.config.patch(recompile_limit=_GRAPHS)  # ty: ignore[missing-attribute]

"""Training state on disk by ``torch.distributed.checkpoint``: it loads on another number of ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from strop.errors import CheckpointError


def materialize(optimizer: torch.optim.AdamW) -> None:
    """Give AdamW its (zero) moments now.

    Otherwise a checkpoint taken before the first step has nothing to save, and torch's own remedy takes a
    step with learning rate 0, which would count.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _collect(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    collected: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        collected["optimizer"] = get_optimizer_state_dict(module, optimizer)
    return collected


def save(module: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Write the state into ``folder``; ``CheckpointError`` when the disk refuses (full, read-only)."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _single_process():
            dcp.save(_collect(module, optimizer), checkpoint_id=str(folder), no_dist=True)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        raise CheckpointError(f"cannot write the checkpoint {folder}: {_cause(error)}") from error


def load(module: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Read what ``save`` wrote, bit for bit; ``CheckpointError`` when it is incomplete or does not fit."""
    collected = _collect(module, optimizer)
    try:
        with _single_process():
            dcp.load(collected, checkpoint_id=str(folder), no_dist=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, dcp.CheckpointException) as error:
        raise CheckpointError(
            f"{folder} cannot be read as the state of this model: {_cause(error)}"
        ) from error
    set_model_state_dict(module, collected["model"])
    if optimizer is not None:
        set_optimizer_state_dict(module, optimizer, collected["optimizer"])


@contextlib.contextmanager
def _single_process() -> Generator[None]:
    """Without torch's reminder, at every call, that there is one process: we say so by ``no_dist``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: BaseException) -> str:
    """The first line of the underlying failure; torch wraps it in one entry per rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"

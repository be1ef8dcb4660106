"""Device of a process, and of an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from strop.config.backends import ENGINES
from strop.config.gpus import visible_gpus
from strop.errors import ConfigError, raised_as


def pick_device(name: str) -> torch.device:
    """Return the device of ``trainer.device``; ``auto`` is a GPU if there is one.

    Raises ``ConfigError`` for ``cuda`` without a GPU, and for ``auto`` with one that torch cannot use.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch finds no GPU; expected auto or cpu")
    if name == "auto":
        is_here = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # the latter: WSL
        has_gpu = visible_gpus() and is_here
        if has_gpu and not torch.cuda.is_available():
            raise ConfigError(
                "trainer.device=auto: this machine has a GPU, and torch finds none (an old driver, or torch "
                "without CUDA); set trainer.device=cpu to go on without it"
            )
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def require_gpu(strategy: str) -> None:
    """Raise ``ConfigError`` for an engine that computes on GPUs only, if torch finds none."""
    if ENGINES[strategy].needs_gpu:
        what = f"strategy={strategy}: it runs on GPUs only, and torch finds none"
        with raised_as(ConfigError, what, RuntimeError, AssertionError, remedy="set strategy=fsdp"):
            torch.cuda.current_device()

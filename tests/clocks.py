"""Clocks that a test moves, so that deadlines need not be short for the samples that keep them."""

from __future__ import annotations

import time
from typing import Any

import pytest

WORKERS = ("strop.rewards.worker.pool", "strop.rewards.worker.process")
ENVIRONMENTS = ("strop.environments.pool", "strop.rewards.worker.process")
PROGRAMS = ("strop.rollout.agents", "strop.agents.program", "strop.rewards.worker.process")


class Clock:
    """The module ``time`` with ``passed`` more seconds in ``monotonic``, for modules by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.passed = 0.0
        for module in modules:
            monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

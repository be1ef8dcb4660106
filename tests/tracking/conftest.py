"""Trackers of a small run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.tracking import Tracking


@pytest.fixture
def track() -> Callable[..., Tracking]:
    """track(run_dir, names, **settings) -> the trackers of a run of 10 steps."""

    def open_trackers(run_dir: Path, names: Sequence[str] = (), **settings: Any) -> Tracking:
        run = {"project_name": "project", "experiment_name": "experiment", "config": {}, "total_steps": 10}
        return Tracking(names, run_dir=run_dir, **(run | settings))

    return open_trackers


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)

"""TensorBoard: event files in ``<run folder>/tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    from strop.tracking.base import RunInfo


class TensorboardTracker:
    """One scalar a metric and step. A run that resumes after step k hides what was logged for later steps."""

    def __init__(self, run: RunInfo) -> None:
        # A new run in the same folder (start_step 0) hides everything before it, including a step 0.
        purge_step = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(log_dir=str(run.run_dir / "tensorboard"), purge_step=purge_step)
        text = json.dumps(run.config, indent=2, default=str)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of ``step`` to disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()  # a killed run keeps what it logged

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()

"""TensorBoard: event files in ``<run folder>/tensorboard``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from strop.tracking.base import RunInfo
from strop.tracking.report import ShownPair, ShownSample, ValidationReport


class TensorboardTracker:
    """Write one scalar per metric and step; a resume after step k hides what was logged for later steps."""

    def __init__(self, run: RunInfo) -> None:
        # A new run in the same folder (start_step 0) hides everything before it, including a step 0.
        purge_step = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(log_dir=str(run.run_dir / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("config", _verbatim(json.dumps(run.config, indent=2, default=str)))
        if run.hf_repo_url is not None:
            self._writer.add_text("hf_repo_url", run.hf_repo_url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of ``step`` to disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()  # so that a killed run loses nothing

    def log_validation(self, step: int, report: ValidationReport) -> None:
        """Write the shown samples as text."""
        if report.shown:
            self._writer.add_text(
                report.shown_name, "\n\n".join(map(_as_markdown, report.shown)), global_step=step
            )
            self._writer.flush()

    def log_image(self, step: int, name: str, path: Path) -> None:
        """Write the picture into the event file."""
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[:, :, :3], global_step=step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


def _verbatim(text: str) -> str:
    """Return ``text`` as a Markdown code block."""
    return textwrap.indent(text, "    ", lambda line: True)


def _as_markdown(shown: ShownSample | ShownPair) -> str:
    heading = ", ".join(f"**{name} {value:g}**" for name, value in shown.figures().items())
    return f"{heading} ({shown.data_source})\n\n{_verbatim(shown.text())}"

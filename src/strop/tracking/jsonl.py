"""``metrics.jsonl``: one JSON object per step, the record that curves, ``strop view`` and tests read.

``{"step": 1, "episode": 64, "critic/score/mean": 0.25, ...}``: keys in the order logged, floats
with all bits. The file is strict JSON, which has no NaN or infinity: both are written as ``null`` and read as
NaN. A line reaches the operating system before ``log`` returns, so killing the process drops none.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from strop.config.paths import METRICS_FILE, runs_near
from strop.errors import DataError, TrainingError, raised_as, write_failure
from strop.files import atomic_path
from strop.tracking.base import RunInfo

PREVIOUS_FILE = "metrics.previous.jsonl"

_log = logging.getLogger(__name__)


class JsonlTracker:
    """Append to ``metrics.jsonl``.

    A new run (``start_step`` 0) renames an existing file to ``metrics.previous.jsonl``. A run that resumes
    after step k keeps the lines up to k; later ones, which it will write again, and a half-written last line
    are dropped. So k steps, a kill and k more give the same file as 2k steps.
    """

    def __init__(self, run: RunInfo) -> None:
        self.path = run.run_dir / METRICS_FILE
        if run.start_step == 0:
            if self.path.exists() and self.path.stat().st_size:
                os.replace(self.path, run.run_dir / PREVIOUS_FILE)
        elif self.path.exists():
            trim_metrics(self.path, last_step=run.start_step)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open for the length of the run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; if that fails, raise TrainingError and leave the earlier lines whole."""
        if "step" in metrics:
            raise ValueError("a metric must not be named 'step', the key of the step number")
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"
        opened = os.fstat(self._file.fileno())
        with raised_as(TrainingError, f"{self.path}: cannot record step {step}: it was removed", OSError):
            is_the_same = os.path.samestat(opened, os.stat(self.path))
        if not is_the_same:
            raise TrainingError(f"{self.path}: cannot record step {step}: another file has replaced it")
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes written")
        except OSError as error:
            # half a line, with the next one after it, would make the file unreadable in the middle
            self._file.truncate(opened.st_size)
            raise TrainingError(
                f"{self.path}: cannot record step {step}: {write_failure(error, self.path)}"
            ) from error

    def close(self) -> None:
        """Close the file; TrainingError if a write fails only now, as on NFS."""
        with raised_as(TrainingError, f"{self.path}: the last steps may be missing", OSError):
            self._file.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the steps of a ``metrics.jsonl`` in order, ``null`` as NaN; lines of one step are merged.

    ``trainer.val_only`` adds the line of a step that may be an earlier one.
    A half-written last line (of a running or killed process) is ignored. Raises DataError when the file
    is missing or another line is not a JSON object of numbers with a ``step``.
    """
    steps: dict[int, dict[str, Any]] = {}
    lines = _read_lines(Path(path))
    for number, (_, record) in enumerate(lines, start=1):
        if record is None and number < len(lines):
            raise DataError(f"{path}, line {number}: expected a JSON object of numbers, one an int 'step'")
        if record is None:
            break
        known = steps.setdefault(record["step"], {})
        known |= {name: math.nan if value is None else value for name, value in record.items()}
    return [steps[step] for step in sorted(steps)]


def last_step(path: Path) -> int:
    """Return the last step in a ``metrics.jsonl``, also in a damaged one; 0 when nothing is logged."""
    lines = _read_lines(path) if path.exists() else []
    return max((record["step"] for _, record in lines if record is not None), default=0)


def trim_metrics(path: Path, *, last_step: int) -> None:
    """Keep the whole lines of steps up to ``last_step``; the file is replaced atomically."""
    lines = _read_lines(path)
    kept = []
    for number, (line, record) in enumerate(lines, start=1):
        if record is None and number < len(lines):
            _log.warning("%s, line %d is not a metrics record and is dropped", path, number)
        if record is not None and record["step"] <= last_step:
            kept.append(line + b"\n")
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"".join(kept))


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Return each line with its record, or with None if it is no record."""
    try:
        content = path.read_bytes()
    except OSError as error:
        above = [folder for folder in path.absolute().parents[1:4] if (folder / path.name).is_file()]
        raise DataError(
            f"{path}: cannot read the metrics of a run: {error.strerror}. Expected the folder of "
            + (
                f"a run, which is {above[0]}"
                if above
                else f"trainer.default_local_dir{runs_near(path.parent)}"
            )
        ) from error
    lines = []
    for line in content.removesuffix(b"\n").split(b"\n") if content else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        lines.append((line, record if _is_record(record) else None))
    return lines


def _is_record(found: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        return False
    return all(
        # json reads 1e999 as infinity, and any number of digits as an int
        value is None or (isinstance(value, int | float) and not abs(value) > sys.float_info.max)
        for value in found.values()
    )

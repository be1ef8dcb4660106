"""A validation on its own: the trainer is built to validate, and what comes of it is written to a folder."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from strop.config.schema import Config
from strop.data.fetch import Bar, progress_bar
from strop.errors import TrainingError
from strop.files import atomic_write_text
from strop.rewards.manager import RewardManager
from strop.tracking.report import ValidationReport
from strop.tracking.samples import write_table
from strop.trainer.build import build_trainer
from strop.trainer.run_folder import RunFolder
from strop.trainer.validation import report_on, validation_samples

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


def evaluate(config: Config, out: Path) -> ValidationReport:
    """Validate as ``config``, which has ``trainer.val_only``, says; the samples and figures go to ``out``.

    It gets ``samples.parquet``, ``config.yaml`` and, when all is done, ``results.json``. Raises as a run
    does, and ``TrainingError`` when a file cannot be written.
    """
    trainer = build_trainer(config)
    try:
        trainer.init_workers()
        total = len(trainer.val_loader.dataset) * config.actor_rollout_ref.rollout.val_kwargs.n
        started = time.perf_counter()
        with progress_bar("Answering", total) as bar:
            samples = validation_samples(trainer, progress=_Progress(bar, total))
        seconds = time.perf_counter() - started
    finally:
        trainer.shutdown()
        if isinstance(trainer.val_reward_fn, RewardManager):
            trainer.val_reward_fn.close()
    try:
        RunFolder(out).write_config(config)
        write_table(out / "samples.parquet", samples)  # hours of work: whatever the report comes to
        report = report_on(trainer, samples, show=config.trainer.log_val_generations)
        results = {**_described(config), "seconds": round(seconds, 1), **report.as_json()}
        atomic_write_text(out / "results.json", json.dumps(results, indent=2) + "\n")
    except OSError as error:
        raise TrainingError(f"the results cannot be written to {out}: {error}") from error
    return report


def _described(config: Config) -> dict[str, Any]:
    """What was evaluated, and how; ``config.yaml`` beside it has every key."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "model": config.actor_rollout_ref.model.path,
        "data": config.data.val_files,
        "limit": config.data.val_max_samples,
        "sampling": rollout.val_kwargs.model_dump(exclude={"n"}),
        "max_response_length": config.data.max_response_length,
        "rollout": rollout.name,
        "seed": config.trainer.seed,
    }


class _Progress:
    """Moves a bar; where there is no terminal to see it on, writes a line now and then."""

    def __init__(self, bar: Bar, total: int) -> None:
        self._bar, self._total, self._done = bar, total, 0
        self._told = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, done: int) -> None:
        with self._lock:
            self._bar.advance(max(done - self._done, 0))
            self._done = max(done, self._done)
            now = time.monotonic()
            if not self._bar.is_visible and now - self._told > _SECONDS_BETWEEN_LINES:
                self._told = now
                logger.info("%d of %d answers", self._done, self._total)

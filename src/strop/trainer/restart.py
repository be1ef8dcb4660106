"""A run that starts again by itself when it loses a worker (``trainer.max_restarts``)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from strop.config.schema import Config
from strop.config.trees import Root
from strop.errors import WorkerError
from strop.trainer.build import build_trainer
from strop.trainer.run_folder import RunFolder, run_lock

logger = logging.getLogger(__name__)


def train_with_restarts(config: Config) -> None:
    """Reinforcement learning as ``config`` says; see ``with_restarts``."""
    with_restarts(config, train_once)


def with_restarts(config: Root, train: Callable[[Root], None]) -> None:
    """``train(config)``, from the last checkpoint again after each failure of a worker.

    An error that would come again (a wrong model, a bad row) is not tried again. Nothing survives into a
    restart but the run folder: models, data loaders and reward processes are built anew. The folder is
    this process's from before the first one is built to the end; ``ConfigError`` when another has it.
    """
    folder = RunFolder(config.trainer.default_local_dir)
    with run_lock(folder.path):
        _attempts(config, train, folder)


def _attempts(config: Root, train: Callable[[Root], None], folder: RunFolder) -> None:
    for restarts_left in range(config.trainer.max_restarts, -1, -1):
        before = folder.latest_checkpoint()
        try:
            train(config)
            return
        except WorkerError as error:
            if error.is_final or not restarts_left:
                raise
            logger.error("%s", error)
        after = folder.latest_checkpoint()
        resumes = after is not None and after != before
        if resumes:  # saved by this run: a checkpoint that was there already is another's
            config = _with_resume(config)
        logger.warning(
            "starting again %s; %d restart%s left",
            f"from iteration {after[0]}" if after is not None and resumes else "as the run began",
            restarts_left - 1,
            "" if restarts_left == 2 else "s",
        )


def train_once(config: Config) -> None:
    """Build, train, and give everything back, however it ends."""
    trainer = build_trainer(config)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()


def _with_resume(config: Root) -> Root:
    changed = config.trainer.model_copy(update={"resume_mode": "auto"})
    resumed = config.model_copy(update={"trainer": changed})
    if config.written is not None:
        resumed.note_written(config.written)
    return resumed

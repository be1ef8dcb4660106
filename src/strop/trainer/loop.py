"""A run of any kind around its iterations: resume, trackers, checkpoints, the model at the end."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.checkpoint.store import Checkpoints
from strop.config.load import to_dict
from strop.errors import ConfigError, TrainingError
from strop.protocol import DataProto
from strop.tracking.curves import draw_curves
from strop.tracking.trackers import Tracking
from strop.trainer.run_folder import RunFolder, run_lock

logger = logging.getLogger(__name__)


class Run(ABC):
    """One training run: its folder, its trackers and its checkpoints.

    Subclasses say what an iteration and a validation are.
    """

    trained: tuple[str, ...]
    """The groups whose state is saved; the first one's model is what the run is for."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.settings = trainer.config.trainer
        self.folder = RunFolder(self.settings.default_local_dir)
        self.checkpoints = Checkpoints.of(trainer.config, trained=self.trained)
        self.seconds_before = 0.0

    def fit(self) -> None:
        """Run the iterations that are left, from the last checkpoint if there is one."""
        # On leaving: the save in flight is finished, uploads are waited for, the folder is free.
        with run_lock(self.folder.path), self.checkpoints:
            self.start()
            try:
                with self.tracking:
                    self.iterate()
            finally:
                self._draw()

    def start(self) -> None:
        """Resume or begin: afterwards the folder holds the configuration and the trackers are open."""
        trainer, settings = self.trainer, self.settings
        checkpoint = self.checkpoints.find(settings.resume_mode)
        goes_on = checkpoint is not None and checkpoint.resolve().parent == self.folder.path.resolve()
        if not goes_on:  # another run's files would mix with what follows
            self.folder.archive_previous_run()
            if not settings.val_only:
                self.checkpoints.archive_remote()
        if checkpoint is not None:
            self.resume(checkpoint)
        if goes_on and not settings.val_only:
            self.checkpoints.go_on_from(trainer.global_step)
        if not (goes_on and settings.val_only):  # a look at a run leaves its record as it is
            self.folder.write_config(trainer.config)
        self.tracking = Tracking(
            settings.logger,
            run_dir=self.folder.path,
            project_name=settings.project_name,
            experiment_name=settings.experiment_name,
            config=to_dict(trainer.config),
            total_steps=trainer.total_steps or trainer.global_step,
            start_step=self.folder.last_logged_step() if settings.val_only else trainer.global_step,
        )
        self.started = time.perf_counter()

    def resume(self, checkpoint: Path) -> None:
        """Take up where it was saved; ``ConfigError`` when nothing is left to do."""
        trainer = self.trainer
        self.load_state_dict(self.checkpoints.load(checkpoint, trainer.groups))
        if trainer.global_step >= trainer.total_steps and not self.settings.val_only:
            raise ConfigError(
                f"{checkpoint} is already at iteration {trainer.global_step} of {trainer.total_steps}: "
                "nothing is left to train. Raise trainer.total_epochs or trainer.total_training_steps, "
                "or start anew with trainer.resume_mode=disable"
            )

    def iterate(self) -> None:
        """Train to the end, or only validate."""
        trainer, settings = self.trainer, self.settings
        first = trainer.global_step == 0
        if settings.val_only or (settings.val_before_train and first):
            metrics = self.validate()
            self.tracking.log(trainer.global_step, {**metrics, **trainer.timer.take()})
        if settings.val_only:
            return
        for batch in trainer.train_loader:
            metrics = self.one_iteration(batch)
            # Logged before it is saved: a run that resumes from this checkpoint then has this line, and a
            # run that resumes from an earlier one drops it and writes it again.
            self.tracking.log(trainer.global_step, metrics)
            self.checkpoints.poll()
            last = trainer.global_step == trainer.total_steps
            if settings.save_freq > 0 and (last or trainer.global_step % settings.save_freq == 0):
                with trainer.timer.phase("save_checkpoint"):
                    self.checkpoints.save(trainer.global_step, trainer.groups, self.state_dict())
            if last:
                break
        if settings.save_freq <= 0:
            trainer.groups[self.trained[0]].export(self.folder.final_model)

    @abstractmethod
    def one_iteration(self, batch: DataProto) -> dict[str, float]:
        """A step of the algorithm and what hangs on it; counts ``global_step``, returns all metrics."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """The figures of the model as it is."""

    def write(self, how: Callable[..., None], path: Path, *content: Any) -> None:
        """``how(path, *content)``; ``TrainingError`` when the disk refuses it."""
        try:
            how(path, *content)
        except OSError as error:
            raise TrainingError(f"{path} cannot be written: {error.strerror or error}") from error

    def seconds(self) -> float:
        """Wall-clock seconds of training since the run first began, over all resumes."""
        return self.seconds_before + time.perf_counter() - self.started

    def state_dict(self) -> dict[str, Any]:
        """What the driver must remember; the random streams that strop itself draws from need nothing."""
        trainer = self.trainer
        return {
            "global_step": trainer.global_step,
            "loader": trainer.train_loader.state_dict(),
            "seconds": self.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where ``state_dict`` was called."""
        trainer = self.trainer
        trainer.global_step = state["global_step"]
        if not self.settings.val_only:
            trainer.train_loader.load_state_dict(state["loader"])
        self.seconds_before = state["seconds"]

    def _draw(self) -> None:
        """Draw the curves, also after an error."""
        if self.settings.val_only or self.trainer.global_step == 0:
            return
        try:
            draw_curves(self.folder.path)
        except Exception as error:  # noqa: BLE001 - a full disk, a broken font: no picture decides how a run ends
            logger.warning("warning: the curves could not be drawn (%s)", error)

"""A run of any kind around its iterations: resume, trackers, checkpoints, the model at the end."""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.checkpoint.store import TRAINED, Checkpoints
from strop.config.load import to_dict
from strop.errors import ConfigError, TrainingError
from strop.files import atomic_write_text, crash_point
from strop.protocol import DataProto
from strop.tracking.curves import draw_curves
from strop.tracking.samples import write_samples, write_table
from strop.tracking.text import validation_scores
from strop.tracking.trackers import Tracking
from strop.trainer.metrics import speed_metrics
from strop.trainer.run_folder import RunFolder, run_lock
from strop.trainer.validation import validate

if TYPE_CHECKING:
    from strop.trainer.ppo import RayPPOTrainer


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
            crash_point("log", trainer.global_step)
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


# The loop around the algorithm: its data, and what hangs on an iteration.


def fit(trainer: RayPPOTrainer) -> None:
    """Run the iterations that are left, from the last checkpoint if there is one."""
    ReinforcementRun(trainer).fit()


class ReinforcementRun(Run):
    """A run of reinforcement learning: samples are written down, validations are scored."""

    trained = TRAINED
    trainer: RayPPOTrainer

    def __init__(self, trainer: RayPPOTrainer) -> None:
        super().__init__(trainer)
        self.best_score: float | None = None

    def one_iteration(self, batch: DataProto) -> dict[str, float]:
        """A step of the algorithm and what hangs on it; returns all its metrics."""
        trainer, settings = self.trainer, self.settings
        with trainer.timer.phase("step"):
            samples, metrics = trainer.step(batch)
        trainer.global_step += 1
        step, last = trainer.global_step, trainer.global_step == trainer.total_steps
        if settings.log_rollouts:
            with trainer.timer.phase("log_rollouts"):
                self.write(write_samples, self.folder.rollouts(step), samples, trainer.tokenizer)
        if settings.test_freq > 0 and (last or step % settings.test_freq == 0):
            metrics |= self.validate()
        timing = trainer.timer.take()
        return {
            "episode": float(step * trainer.config.data.train_batch_size),
            "epoch": step / len(trainer.train_loader),
            **metrics,
            **timing,
            **speed_metrics(samples, timing, devices=trainer.actor.world_size),
            "time/from_scratch": self.seconds(),
        }

    def validate(self) -> dict[str, float]:
        """Scores by data source; the best mean so far is remembered."""
        step, settings = self.trainer.global_step, self.settings
        with self.trainer.timer.phase("testing"):
            report, samples = validate(self.trainer, show=settings.log_val_generations)
            self.write(write_table, self.folder.validation(step), samples)
            self.write(
                atomic_write_text,
                self.folder.validation_report(step),
                json.dumps(report.as_json(), indent=2) + "\n",
            )
        if settings.val_only or report.n > 1 or report.shown:
            self.tracking.log_validation(step, report)
        metrics = report.metrics()
        means = validation_scores(metrics).values()
        mean = sum(means) / max(len(means), 1)
        self.best_score = mean if self.best_score is None else max(mean, self.best_score)
        return {**metrics, "val/best_score": self.best_score}

    def state_dict(self) -> dict[str, Any]:
        """See ``Run.state_dict``."""
        kl_controller = self.trainer.kl_controller.state_dict()
        return {**super().state_dict(), "kl_controller": kl_controller, "best_score": self.best_score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Run.load_state_dict``."""
        super().load_state_dict(state)
        self.trainer.kl_controller.load_state_dict(state["kl_controller"])
        self.best_score = state["best_score"]

"""The loop around the algorithm: its data, and what hangs on an iteration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from strop.checkpoint.store import TRAINED
from strop.config.schema import Config
from strop.data.loader import PromptLoader, train_loader, validation_loader
from strop.data.rl_dataset import FirstOfEachSource, create_rl_dataset
from strop.files import atomic_write_text
from strop.protocol import DataProto
from strop.tracking.samples import write_samples, write_table
from strop.tracking.text import validation_scores
from strop.trainer.metrics import speed_metrics
from strop.trainer.run import Run
from strop.trainer.validation import validate

if TYPE_CHECKING:
    from strop.trainer.ppo import RayPPOTrainer


def build_loaders(
    config: Config, tokenizer: Any, train_dataset: Any | None, val_dataset: Any | None
) -> tuple[PromptLoader | Any, PromptLoader]:
    """The endless seeded loader of training prompts and the one-pass loader of validation prompts.

    The first is None with ``trainer.val_only``, and the training files are left alone.
    """
    data = config.data
    if config.reward_model.enable and config.reward_model.model.input_tokenizer is not None:
        # The reward model writes the conversation anew with its own template, so it needs the messages.
        data = data.model_copy(update={"return_raw_chat": True})
    pad_token_id, longest = tokenizer.pad_token_id, data.max_prompt_length
    train = None
    if not config.trainer.val_only:
        if train_dataset is None:
            train_dataset = create_rl_dataset(data.train_files, data, tokenizer)
        train = train_loader(
            train_dataset,
            batch_size=data.train_batch_size,
            seed=config.trainer.seed,
            shuffle=data.shuffle,
            pad_token_id=pad_token_id,
            max_prompt_length=longest,
        )
    if val_dataset is None:
        val_dataset = create_rl_dataset(data.val_files, data, tokenizer)
    if data.val_max_samples is not None:
        val_dataset = FirstOfEachSource(val_dataset, data.val_max_samples)
    validation = validation_loader(
        val_dataset, batch_size=data.val_batch_size, pad_token_id=pad_token_id, max_prompt_length=longest
    )
    return train, validation


def total_training_steps(config: Config, steps_per_epoch: int) -> int:
    """Exactly that many iterations run."""
    return config.trainer.total_training_steps or steps_per_epoch * config.trainer.total_epochs


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

"""The training loop of any kind of run: resume, trackers, checkpoints, export of the trained model."""

from __future__ import annotations

import logging
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from strop.checkpoint.folder import auto_class, defined_by_strop, has_weights, newest_model
from strop.checkpoint.hub import Publication, command_to_repeat, model_of, upload
from strop.checkpoint.record import RECORD, record_of, without_effect
from strop.checkpoint.store import Checkpoints, random_state, reading_state_of
from strop.config.keys import all_keys, value_at
from strop.config.roles import has_reward
from strop.config.schema import Config
from strop.data.loader import SampledBatches, lacks_for_resume
from strop.data.pictures.expand import uses_pillow
from strop.data.rl_dataset import MeasuredDataset, all_rows
from strop.errors import (
    HOLD_INTERRUPTS_S,
    CheckpointError,
    ConfigError,
    HeldInterrupts,
    RunFolderError,
    StropError,
    TrainingError,
    WorkerError,
    interrupt_after,
    is_interrupt,
    write_failure,
)
from strop.files import crash_point
from strop.protocol import DataProto
from strop.redaction import redacted
from strop.tracking.curves import draw_curves
from strop.tracking.lengths import LENGTHS_NAME, ColumnLengths, draw_lengths
from strop.tracking.machine import record_start
from strop.tracking.timeline import TIMELINE_FILE, Timeline, draw_timeline
from strop.tracking.trackers import Tracking, numbers_of
from strop.trainer.run_folder import RunFolder, run_lock

logger = logging.getLogger(__name__)

_OF_EVALUATION = (
    *("data.prompt_key", "data.answer_key", "data.tools_key", "data.data_source", "data.reward_fn_key"),
    *("data.image_key", "data.min_pixels", "data.max_pixels", "data.max_images", "data.allow_special_tokens"),
    *("data.chat_template", "data.system_prompt", "data.apply_chat_template"),
    *("data.apply_chat_template_kwargs", "reward_model", "environment", "agent"),
)
"""Keys and sections that make prompts, turns and scores of rows, which a model's folder does not have."""

_NOTHING_TO_SAVE = (WorkerError, RunFolderError, CheckpointError)
"""Errors after which a checkpoint cannot be written, or a restart resumes from the last one."""

OnStep = Callable[[int, dict[str, float]], Any]
"""Is called after each iteration with its number and its metrics; ``False`` stops the run."""


class Run(ABC):
    """A training run: its folder, trackers and checkpoints around the iterations that subclasses define."""

    trained: tuple[str, ...]
    """Names of the groups whose state is saved; the model of the first is exported at the end."""
    on_step: OnStep | None = None

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.settings = trainer.config.trainer
        self.folder = RunFolder(self.settings.default_local_dir)
        batches = None if trainer.train_loader is None else trainer.train_loader.batches
        by_time = not (isinstance(batches, SampledBatches) and lacks_for_resume(batches.sampler))
        self.checkpoints = Checkpoints.of(trainer.config, trained=self.trained, by_time=by_time)
        self.record = record_of(trainer.config)  # now: files may change while the run trains
        self.seconds_before = 0.0
        self.timeline = Timeline()
        self._whole: dict[str, Any] | None = None  # the state after the last iteration, while models have it
        self._interrupts: HeldInterrupts | None = None
        self.publication: Publication | None = trainer.publication
        self._lengths: list[ColumnLengths] = []
        self._unlogged: dict[str, float] = {}  # of a checkpoint; see mark
        self._exports_again = False  # the dtype of the final model differs from the checkpoint's

    def fit(self, on_step: OnStep | None = None) -> None:
        """Run the remaining iterations, from the last checkpoint if there is one."""
        self.on_step = on_step
        # On exit: finish the save in flight, wait for uploads, release the lock.
        with run_lock(self.folder.path):
            with self._drawn_at_the_end(), self.checkpoints:
                self.start()
                progress = self.trainer.progress.shown(self.tracking.log_progress)
                with self.tracking, progress, self._saved_if_it_ends():
                    self.iterate()
                    self._draw_lengths()
            self._log_next_steps()
            self._publish()

    def start(self) -> None:
        """Resume or begin, write the configuration and open the trackers."""
        trainer, settings = self.trainer, self.settings
        checkpoint = self.checkpoints.find(settings.resume_mode)
        here = self.folder.path.resolve()
        # a checkpoint may be a link to another disk
        goes_on = checkpoint is not None and here in (
            checkpoint.parent.resolve(),
            checkpoint.resolve().parent,
        )
        if checkpoint is not None:
            self.resume(checkpoint, goes_on=goes_on)
        elif settings.resume_mode == "auto":
            self.folder.name_others_like_it()
        if not goes_on:  # keep the files of different runs apart; a run that is refused changes none
            self.folder.archive_previous_run()
            if not settings.val_only:
                self.checkpoints.archive_remote(trainer.global_step, settings.resume_mode)
        if goes_on and not settings.val_only:
            self.checkpoints.go_on_from(trainer.global_step, settings.resume_mode)
            self.write(lambda _: self.folder.archive_later(trainer.global_step), self.folder.path)
            if (to := self.publication) is not None and (to.step or 0) > trainer.global_step:
                self.publication = replace(to, step=None, commit=None)  # of the continuation that is left
        if not (goes_on and settings.val_only):  # validating a run must not change its record
            self.folder.write_config(trainer.config)
            steps = {"step": trainer.global_step, "steps": trainer.global_step}
            if not settings.val_only:
                steps["steps"] = trainer.total_steps
            more = {"image_processor": name} if (name := trainer.image_processor) else {}
            self.write(lambda path: record_start(path, **steps, **more), self.folder.path)
            if self.publication is not None:
                self.write(self.publication.write, self.folder.path)
        self.tracking = Tracking(
            settings.logger,
            run_dir=self.folder.path,
            project_name=settings.project_name,
            experiment_name=settings.experiment_name,
            config=trainer.config.model_dump(),
            total_steps=trainer.total_steps or trainer.global_step,
            # a tracker drops lines after its start, and validating an early checkpoint must drop none
            start_step=self.folder.last_logged_step() if settings.val_only else trainer.global_step,
            hf_repo_url=None if self.publication is None else self.publication.url,
        )
        self.started = time.perf_counter()
        if not (goes_on and settings.val_only):
            self._show_lengths()

    def resume(self, checkpoint: Path, *, goes_on: bool) -> None:
        """Restore the state of ``checkpoint``, which is of this run folder if it ``goes_on``.

        Raises ``ConfigError`` if no iterations are left, unless this run has done exactly all of them with
        these values: it may have been killed after the last one, and what follows is done then.
        """
        trainer = self.trainer
        state = self.checkpoints.load(checkpoint, trainer.groups)
        with reading_state_of(checkpoint):
            self.load_state_dict(state)
        record = state.get(RECORD, {})
        if trainer.global_step < trainer.total_steps or self.settings.val_only:
            return
        state = f"{checkpoint} is already at iteration {trainer.global_step} of {trainer.total_steps}"
        remedy = (
            "To train more, raise trainer.total_epochs or trainer.total_training_steps; to start from the "
            "beginning, set trainer.resume_mode=disable"
        )
        if trainer.global_step > trainer.total_steps or not goes_on:
            raise ConfigError(f"{state}: nothing is left to train. {remedy}")
        before = record.get("config", {}).get("trainer", {}).get("export_dtype")
        self._exports_again = before != self.settings.export_dtype
        # a validation that failed is repeated, with what corrects its cause
        if not self._measures_again and (changed := without_effect(record, self.record, trainer.config)):
            listed = "; ".join(map(str, changed))
            raise ConfigError(
                f"{state}: nothing is left to train with the values that have changed since ({listed}). To "
                f"train with them, name another folder, trainer.default_local_dir. {remedy}"
            )
        logger.info(
            "%s: nothing is left to train, only to complete curves, final model, uploads. %s", state, remedy
        )

    def iterate(self) -> None:
        """Train for the remaining iterations, or only validate."""
        trainer, settings = self.trainer, self.settings
        first = trainer.global_step == 0
        if settings.val_only or (settings.val_before_train and first and trainer.val_loader is not None):
            metrics = self.validate()
            self.tracking.log(trainer.global_step, {**metrics, **trainer.timer.take()})
        if settings.val_only:
            return
        if measures_again := self._measures_again:
            metrics = {**self._unlogged, **self.measured(), **trainer.timer.take()}
            self.tracking.log(trainer.global_step, {**metrics, "time/from_scratch": self.seconds()})
        self.mark()
        is_done = trainer.global_step >= trainer.total_steps  # this run was killed after its last iteration
        for batch in () if is_done else trainer.train_loader:
            with HeldInterrupts(self._say_when_it_stops) as self._interrupts:
                trainer.progress.begin(trainer.global_step + 1, trainer.total_steps)
                metrics = self.one_iteration(batch)
                self.folder.require_held(trainer.global_step)
                # Log before saving: a resume drops lines after its checkpoint, so metrics.jsonl of an
                # interrupted run equals that of an uninterrupted one.
                crash_point("log", trainer.global_step)
                self.tracking.log(trainer.global_step, metrics)
                self.mark()
                self.checkpoints.poll()
                is_due = self.is_due(settings.save_freq)
                if is_due or self.checkpoints.is_time(last=trainer.global_step == trainer.total_steps):
                    with trainer.timer.phase("save_checkpoint"):
                        self.save(by_time=not is_due)
            if self.on_step is not None and _is_false(self.on_step(trainer.global_step, metrics)):
                if self._whole is not None:
                    self._save_to_stop(self._whole["global_step"])
                goes_on = settings.resume_mode == "auto" and self._whole is not None
                then = "the same call goes on" if goes_on else "the same call starts again"
                logger.info("stopped at step %d by on_step; %s", trainer.global_step, then)
                break
            if trainer.global_step == trainer.total_steps:
                break
        self.checkpoints.finish()
        self.folder.require_held(trainer.global_step)
        role, step = self.trained[0], trainer.global_step
        saved = self.checkpoints.folder_of(step) / role / "huggingface"
        # a model that is measured again may have got its calibration only now
        is_model = has_weights(saved) and not measures_again and not (is_done and self._exports_again)
        there = {"saved": saved} if is_model else {}
        trainer.groups[role].export(self.folder.final_model, step, **there)

    @property
    def _measures_again(self) -> bool:
        """True if an error, as of a validation, ended the run between its last update and the line of it."""
        return bool(self._unlogged) and self.folder.last_logged_step() < self.trainer.global_step

    @property
    def late_part(self) -> Callable[[Path], Any] | None:
        """Maker of the part of a checkpoint that is complete later; see ``Checkpoints.save``."""
        return None

    def save(self, *, by_time: bool, stopping: bool = False) -> None:
        """Save a checkpoint of the last whole iteration."""
        assert self._whole is not None
        self.folder.require_held(self._whole["global_step"])
        self.checkpoints.save(
            self._whole["global_step"],
            self.trainer.groups,
            self._whole,
            later=self.late_part,
            by_time=by_time,
            stopping=stopping,
        )

    def begin_update(self) -> None:
        """Let an interrupt wait from now on until the iteration is whole: models change."""
        self.hold_interrupts()
        self._whole = None

    def hold_interrupts(self) -> None:
        """Let an interrupt wait from now on until the iteration is whole."""
        assert self._interrupts is not None
        self._interrupts.begin()

    def mark(self, unlogged: Mapping[str, Any] | None = None) -> None:
        """Note the state after an update and after an iteration; the next moves loader and KL coefficient.

        ``unlogged``: metrics of the update, which a resume logs with those that are due after it.
        """
        if self.settings.save_freq > 0 or self.checkpoints.save_minutes is not None:
            numbers = numbers_of(unlogged or {})
            self._whole = {**self.state_dict(), "random": random_state(), "unlogged": numbers}

    def _say_when_it_stops(self) -> None:
        logger.warning("stopping when the iteration that is under way is saved; a second time: at once")

    @contextmanager
    def _saved_if_it_ends(self) -> Generator[None]:
        """Save the state after the last whole iteration if an interrupt or an error ends the body.

        Not after the loss of a process or of the run folder, nor of a save that failed.
        """
        try:
            yield
        except BaseException as error:
            whole, held = self._whole, self._interrupts
            at_once = held is not None and held.broke_in
            stopped = is_interrupt(error) or not isinstance(error, _NOTHING_TO_SAVE)
            if whole is None or at_once or not stopped:
                raise
            limit = interrupt_after(HOLD_INTERRUPTS_S)  # a worker may hang in a call before the save
            try:
                self._save_to_stop(whole["global_step"])
            except Exception as failure:  # noqa: BLE001 - of a user's sampler, too; the first is the cause
                # as text: a kept record would keep the frames, and the files that they have open
                logger.warning("warning: %s", str(failure))
            finally:
                limit.cancel()
            raise

    def _save_to_stop(self, step: int) -> None:
        """Save iteration ``step``, the last whole one, unless it is saved."""
        if self.checkpoints.lacks(step):
            logger.info("saving iteration %d", step)
            self.save(by_time=not self.is_due(self.settings.save_freq), stopping=True)
        else:
            self.checkpoints.copy(step)  # one saved by time is only here

    def is_due(self, every: int) -> bool:
        """Return True after each ``every`` iterations and after the last one; never for -1."""
        step = self.trainer.global_step
        return every > 0 and (step % every == 0 or step == self.trainer.total_steps)

    @abstractmethod
    def one_iteration(self, batch: DataProto) -> dict[str, float]:
        """Run one iteration, increment ``global_step`` and return all metrics."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Return the metrics of the current model."""

    def measured(self) -> dict[str, float]:
        """Return the metrics of the current model that are due after an iteration."""
        return self.validate() if self.is_due(self.settings.test_freq) else {}

    def write(self, how: Callable[..., None], path: Path, *content: Any) -> None:
        """Call ``how(path, *content)``; raise ``TrainingError`` if the file cannot be written."""
        self.folder.require_held(self.trainer.global_step)
        try:
            how(path, *content)
        except OSError as error:
            raise TrainingError(f"{path} cannot be written: {write_failure(error, path)}") from error

    def seconds(self) -> float:
        """Return wall-clock seconds of training, summed over all resumes."""
        return self.seconds_before + time.perf_counter() - self.started

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's state; random streams are functions of the iteration and need none."""
        trainer = self.trainer
        return {
            "global_step": trainer.global_step,
            "loader": trainer.train_loader.batches.state_dict(),
            "seconds": self.seconds(),
            "image_processor": trainer.image_processor,
            RECORD: self.record,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        before, now = state.get("image_processor"), trainer.image_processor
        trains = not self.settings.val_only
        if trains and before and now and uses_pillow(before) != uses_pillow(now):
            raise CheckpointError(
                f"the checkpoint was trained on pixels that {before} made, and {now}, which is used here, "
                f"makes others; {'uninstall' if uses_pillow(before) else 'install'} torchvision, or start "
                "from scratch with trainer.resume_mode=disable"
            )
        trainer.global_step = int(state["global_step"])
        if trains:
            is_named = self.settings.resume_mode != "auto"
            trainer.train_loader.batches.load_state_dict(state["loader"], may_differ=is_named)
        self.seconds_before = float(state["seconds"])
        self._unlogged = state.get("unlogged", {})

    def _show_lengths(self) -> None:
        """Show the token lengths of the data sets."""
        self._lengths = token_lengths({"train": self.trainer.train_loader, "val": self.trainer.val_loader})
        if self._lengths:
            self.tracking.log_lengths(self.trainer.global_step, self._lengths)

    def _draw_lengths(self) -> None:
        """Draw the token lengths, also for the trackers; failing to draw is a warning.

        At the end: matplotlib takes a second, and a thread that drew meanwhile slowed the first generation.
        """
        if not self._lengths:
            return
        try:
            path = draw_lengths(self._lengths, self.folder.path)
        except Exception as error:  # noqa: BLE001 - a full disk, a broken font
            logger.warning("warning: the token lengths could not be drawn (%s)", error)
        else:
            self.tracking.log_image(self.trainer.global_step, LENGTHS_NAME, path)

    def _log_next_steps(self) -> None:
        """Log the commands that show and use what the run has made: its folder may be a default."""
        if self.settings.val_only:
            return
        run, model = shlex.quote(str(self.folder.path)), self.folder.final_model
        auto = auto_class(model)
        logger.info("view:  strop view %s --web", run)
        if not auto.endswith("SequenceClassification"):
            logger.info("eval:  strop eval %s --data FILE%s", run, self._evaluation_keys())
        else:
            sees = " reward_model.model.input_tokenizer=null" if self.trainer.max_pictures else ""
            path = shlex.quote(str(model))
            logger.info("use:   reward_model.enable=True reward_model.model.path=%s%s", path, sees)
        if defined_by_strop(model):
            config = f"transformers.AutoConfig.from_pretrained({str(model)!r})"
            logger.info("load:  strop.models.heads.scorer_config(%s), which adds the class; then:", config)
        logger.info("load:  transformers.%s.from_pretrained(%r)", auto, str(model))

    def _evaluation_keys(self) -> str:
        """Return the keys of the run without which an evaluation has other prompts, or nothing to score."""
        config, options = self.trainer.config, ""
        if isinstance(config, Config):
            own, rewards = config.custom_reward_function, config.reward_model
            if own.path is not None:
                name = f":{own.name}" if "custom_reward_function.name" in (config.written or ()) else ""
                options = f" --reward {shlex.quote(own.path + name)}"
            if rewards.enable:
                options += f" --reward-model {shlex.quote(rewards.model.path)}"
        sections = tuple(f"{key}." for key in _OF_EVALUATION)
        shown = [
            key
            for key, facts in all_keys(type(config)).items()
            if f"{key}.".startswith(sections) and not facts.is_section
            if key not in ("reward_model.enable", "reward_model.model.path")
            if any(f"{one}.".startswith(f"{key}.") for one in config.meant)
        ]
        values = {key: value_at(config, key) for key in shown}
        if isinstance(config, Config) and not has_reward(config):
            values.pop("reward_model.reward_manager", None)  # an evaluation scores as ever
        if path := values.get("environment.path"):
            values["environment.path"] = path.get("", path)
        shown = redacted(values)  # trackers record what a run prints
        overrides = (shlex.quote(f"{key}={_as_override(value)}") for key, value in shown.items())
        found = options + "".join(f" {override}" for override in overrides)
        return re.sub(r"function:(\w+)-\w+", r"FILE.py:\1", found)

    def _publish(self) -> None:
        """Upload the trained model; a failure is a warning, and ``upload_failed`` of the trainer."""
        to, step = self.publication, self.trainer.global_step
        if to is None or self.settings.val_only:
            return
        if to.commit is not None and to.step == step:
            logger.info("published: %s (before this resume)", to.url)
            return
        role, source = self.trained[0], newest_model(self.folder.path)
        assert source is not None, "a run that ends has saved its model"
        logger.info("uploading the model to %s", to.url)
        try:
            with model_of(source, role=role) as (model, _):
                to = upload(model, to, run_folder=self.folder.path, step=step)
            to.write(self.folder.path)
        except (StropError, OSError) as error:
            self.trainer.upload_failed = True
            logger.warning(
                "warning: %s. It stays in %s; upload it by\n  %s",
                error,
                source,
                command_to_repeat(source, to, role),
            )
        else:
            logger.info("published: %s", to.url)

    @contextmanager
    def _drawn_at_the_end(self) -> Generator[None]:
        """Draw the curves, also after an error: after the checkpoints, whose end an interrupt may cancel."""
        try:
            yield
        finally:
            self._draw()

    def _draw(self) -> None:
        """Draw the curves; failing to draw never fails the run."""
        if self.settings.val_only or self.trainer.global_step == 0 or not self.folder.is_held():
            return
        try:
            draw_curves(self.folder.path)
            if intervals := self.timeline.intervals():
                draw_timeline(intervals, self.folder.path / TIMELINE_FILE)
        except Exception as error:  # noqa: BLE001 - a full disk, a broken font
            logger.warning("warning: the curves could not be drawn (%s)", error)


def _is_false(value: Any) -> bool:
    """Return True for ``False``, also for that of a comparison of numpy."""
    return isinstance(value, bool | np.bool_) and not value


def token_lengths(loaders: Mapping[str, Any]) -> list[ColumnLengths]:
    """Return the token lengths of the data sets of ``loaders`` (None: not read), as they were tokenized.

    Subsets count as the whole data set; a user's data set may not know its lengths.
    """
    columns = []
    for split, loader in loaders.items():
        dataset = None if loader is None else all_rows(loader.dataset)
        if isinstance(dataset, MeasuredDataset):
            for column, found in dataset.token_lengths().items():
                dropped = len(found.lengths) - len(dataset)
                counts = np.bincount(found.lengths)
                own = found.of_pictures
                ends = None if own is None else (int(own.min()), int(own.max()))
                columns.append(ColumnLengths(split, column, counts, found.limit, found.key, dropped, ends))
    return columns


def _as_override(value: Any) -> str:
    """Return a value as an override may be written: texts with signs of its grammar in quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_override, value))}]"
    if not isinstance(value, str) or re.fullmatch(r"[\w./:@ -]+", value):
        return "null" if value is None else str(value)
    return '"' + value.replace('"', r"\"") + '"'

"""``SupervisedTrainer``: what the trainers on given answers share, and their run.

One batch is one optimizer step. Each trainer drives its worker through a worker group; ``strop.trainer.loop``
runs the loop.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic

from strop.checkpoint.hub import Publication, open_publication
from strop.checkpoint.store import Checkpoints
from strop.config.backends import load_backend
from strop.config.checks.check import check
from strop.config.checks.pictures import require_pictures
from strop.config.checks.supervised import OptimizerSteps, Supervised, few_steps
from strop.config.placement import GLOBAL_POOL, pools_of
from strop.config.roles import model_paths
from strop.config.schema.supervised import SftConfig, SupervisedConfig
from strop.controller.pools import ResourcePool, Role
from strop.data.answers import AnsweredDataset
from strop.data.hub import local_tokenizer
from strop.data.loader import EpochSampler, PromptLoader, one_pass
from strop.data.rl_dataset import (
    Subset,
    image_processor_name,
    log_prompts,
    max_pictures,
    pictures_digest,
    prompt_options,
)
from strop.data.sources import Files, Rows, sources
from strop.protocol import DataProto
from strop.tracking.report import ShownPair, ValidationReport
from strop.tracking.trackers import resolve_tracker
from strop.trainer.build import (
    check_model,
    check_teacher,
    end_ids,
    fetch_tokenizer,
    require_checkpoint,
    require_whole,
    warn_of_generation_config,
    worker_group_class,
)
from strop.trainer.frozen_head import warn_of_frozen_head
from strop.trainer.loop import OnStep, Run
from strop.trainer.metrics import PhaseTimer, peak_memory
from strop.trainer.progress import Progress
from strop.trainer.run_folder import require_shared_folder
from strop.trainer.sent_pictures import SentPictures

logger = logging.getLogger(__name__)

_FINAL_ROWS = 1000
"""Training rows on which a model is measured at the end of a run without validation."""


class SupervisedTrainer(ABC, Generic[Supervised]):
    """Train one model on prompts with given answers.

    Subclasses define the worker that holds the model, the batches and the metrics.
    """

    worker: ClassVar[str]
    """Import path of the class that holds the model."""
    trains_policy: ClassVar[bool] = True
    """Its model is a language model."""
    role: ClassVar[Role]
    group_name: ClassVar[str]
    """Name of the model's folder in a checkpoint."""
    collate: ClassVar[Callable[..., DataProto]]
    """Function of ``strop.data.answers`` that makes a batch from rows."""

    def __init__(
        self,
        config: Supervised,
        tokenizer: Any,
        *,
        group_cls: type,
        pool: ResourcePool,
        rows: Sequence[Rows] = (),
    ) -> None:
        """Read the data without loading a model; ``DataError`` for files that cannot be used.

        ``rows`` in memory are read where the configuration has their names.
        """
        self.config = config
        self.tokenizer = tokenizer
        self._group_cls, self._pool = group_cls, pool
        data = config.data
        self.train_loader: Any = None  # not read with trainer.val_only
        self.total_steps = 0
        trained = validated = None
        if not config.trainer.val_only:
            trained = self._dataset(sources(data.train_files, rows))
            batches = EpochSampler(
                len(trained),
                data.train_batch_size,
                config.trainer.seed,
                data.shuffle,
                keep_rest=True,
                pictures=pictures_digest(trained),
            )
            self.train_loader = self._loader(trained, batches)
            steps = OptimizerSteps.of(config, len(trained))
            self.total_steps = steps.total
            logger.info("%s", steps)
            for finding in few_steps(steps):
                logger.warning("warning: %s", finding.text)
        if data.val_files:
            validated = self._dataset(sources(data.val_files, rows))
        self.val_loader = self._one_pass(validated) if validated is not None else None
        log_prompts(trained, validated)
        self.global_step = 0
        self.progress = Progress(config)
        self.timer = PhaseTimer(self.progress.phases)
        self.group: Any = None  # a worker group, with the worker's methods
        self.sent_pictures: SentPictures
        self.max_pictures = max(map(max_pictures, filter(None, (trained, validated))), default=0)
        self.image_processor = image_processor_name(*filter(None, (trained, validated)))
        if self.max_pictures:
            require_pictures(config)
        self.publication: Publication | None = None
        self.upload_failed = False

    @property
    @abstractmethod
    def answer_keys(self) -> dict[str, str]:
        """Name of an answer -> the column that holds it."""

    @abstractmethod
    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Return the denominators of the loss over all ranks, for ``meta_info``."""

    def count_tokens(self, batch: DataProto) -> float:
        """Return the number of tokens of prompts and answers, without padding."""
        return float(batch.batch["attention_mask"].sum())

    @abstractmethod
    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """Return the metrics of the current model on all rows of ``batches``."""

    def shown(self) -> Sequence[ShownPair]:
        """Return rows of the last evaluation for the trackers to show."""
        return ()

    def measure(self) -> dict[str, float]:
        """Return the metrics ``final/*`` of the trained model on training rows.

        Called after the last iteration, whose own metrics are those before its update, unless it has
        validated; before the model is saved.
        """
        rows = sorted(set(self.rows_of_the_run()))[:_FINAL_ROWS]
        found = self.evaluate(self._one_pass(Subset(self.train_loader.dataset, rows)))
        return {f"final/{name}": value for name, value in found.items()}

    def rows_of_the_run(self) -> Sequence[int]:
        """Return the rows of the training set that this run visits from its start to its end."""
        # a copy, whose position may move
        batches = copy.copy(self.train_loader.batches)
        if self.total_steps > len(batches):
            return range(len(self.train_loader.dataset))
        # from the beginning, wherever a resume stands
        batches.epoch = batches.position = 0
        return [row for rows in itertools.islice(batches, self.total_steps) for row in rows]

    def prepare(self, folder: Path) -> None:
        """Compute what the run needs of the model as it was loaded, before a checkpoint is."""

    def keep(self, folder: Path) -> None:
        """Write into the run folder what ``prepare`` has computed, for a resume."""

    def keep_stopped(self, folder: Path) -> None:
        """Write what ``prepare`` has computed before the run could start: it may have taken hours."""

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare or restore what ``state_dict`` returned."""

    def _dataset(self, files: Files) -> AnsweredDataset:
        data = self.config.data
        # data.tokenizer, for example an adapter's folder, may have a tokenizer alone
        folder = local_tokenizer(self.config.model.path, data.cache_dir) if data.tokenizer else None
        return AnsweredDataset(
            files,
            self.tokenizer,
            answer_keys=self.answer_keys,
            max_response_length=data.max_response_length,
            filter_overlong=data.filter_overlong,
            end_ids=end_ids(self.config.model, self.tokenizer, data.cache_dir),
            processor=folder,
            **prompt_options(data),
        )

    def _loader(self, dataset: Any, batches: Any) -> PromptLoader:
        data = self.config.data
        collate = partial(
            self.collate,
            pad_token_id=self.tokenizer.pad_token_id,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
        )
        return PromptLoader(dataset, batches, collate)

    def _one_pass(self, dataset: Any) -> PromptLoader:
        return self._loader(dataset, one_pass(len(dataset), self.config.data.val_batch_size))

    @property
    def groups(self) -> dict[str, Any]:
        """The worker group, by the name of its folder in a checkpoint."""
        return {} if self.group is None else {self.group_name: self.group}

    def init_workers(self) -> None:
        """Build the worker group and load the model, after finding where it will be published."""
        self.publication = open_publication(self.config)
        if self.trains_policy and self.train_loader is not None:
            dataset = self.train_loader.dataset
            warn_of_frozen_head("model", self.config.model, self.tokenizer, dataset, self.config.data)
        self.group = self._group_cls(
            worker_cls=load_backend(self.worker),
            init_kwargs={"config": self.config, "role": self.role},
            resource_pool=self._pool,
            name=self.role.name,
            settings=self.config.trainer,
        )
        require_shared_folder(Path(self.config.trainer.default_local_dir), self.groups)
        self.sent_pictures = SentPictures([self.group])
        if self.max_pictures:
            self.group.set_pictures(self.max_pictures, self.image_processor)
        self.group.init_model()

    def fit(self, on_step: OnStep | None = None) -> None:
        """Train up to ``total_steps`` iterations; call ``init_workers`` first."""
        SupervisedRun(self).fit(on_step)

    def shutdown(self) -> None:
        """End the workers and free what they hold; the trainer cannot be used afterwards."""
        if self.group is not None:
            self.group.shutdown()

    def call(self, method: str, batch: DataProto, **meta_info: Any) -> Any:
        """Return what a method of the group returns for a batch, whose pictures it holds for this call."""
        self.sent_pictures.send(batch)
        found = getattr(self.group, method)(DataProto(batch.batch, {}, meta_info))
        self.sent_pictures.drop(0)
        return found

    def step(self, batch: DataProto) -> dict[str, float]:
        """Run one optimizer step and return its metrics."""
        progress = {"iteration": self.global_step, "total_iterations": self.total_steps, "first_update": 0}
        with self.timer.phase("update"):
            update = self.call("update", batch, **self.denominators(batch), **progress)
        plain = ("grad_norm", "lr", "skipped_steps")
        return {name if name in plain else f"train/{name}": value for name, value in update.items()}


class SupervisedRun(Run):
    """A run of a supervised trainer."""

    def __init__(self, trainer: SupervisedTrainer) -> None:
        self.trained = (trainer.group_name,)
        super().__init__(trainer)

    def start(self) -> None:
        try:
            self.trainer.prepare(self.folder.path)  # before a checkpoint replaces the model as it was loaded
            super().start()
        except BaseException:
            if not self.settings.val_only:
                self.trainer.keep_stopped(self.folder.path)
            raise
        if not self.settings.val_only:
            self.trainer.keep(self.folder.path)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.trainer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.trainer.load_state_dict(state)

    def one_iteration(self, batch: DataProto) -> dict[str, float]:
        trainer = self.trainer
        started = time.perf_counter()
        self.begin_update()
        with trainer.timer.phase("step"):
            metrics = trainer.step(batch)
        tokens = trainer.count_tokens(batch)
        seconds = time.perf_counter() - started
        trainer.global_step += 1
        metrics = {"epoch": trainer.global_step / len(trainer.train_loader), **metrics}
        self.mark(metrics)
        return {
            **metrics,
            **self.measured(),
            **trainer.timer.take(),
            **peak_memory([trainer.group]),
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / (seconds * trainer.group.world_size),
            "time/from_scratch": self.seconds(),
        }

    def measured(self) -> dict[str, float]:
        """See ``Run.measured``; without a validation, the last iteration has metrics on training rows."""
        trainer, metrics = self.trainer, super().measured()
        if trainer.global_step == trainer.total_steps and "val/loss" not in metrics:
            with trainer.timer.phase("testing"):
                metrics |= trainer.measure()
        return metrics

    def validate(self) -> dict[str, float]:
        """Return the metrics on the validation files; empty if there are none."""
        trainer = self.trainer
        if trainer.val_loader is None:
            return {}
        with trainer.timer.phase("testing"):
            metrics = {f"val/{name}": value for name, value in trainer.evaluate(trainer.val_loader).items()}
            shown = trainer.shown()
        if shown:
            self.tracking.log_validation(trainer.global_step, ValidationReport(1, {}, shown))
        return metrics


def build(
    trainer_cls: type[SupervisedTrainer[Any]],
    config: SupervisedConfig,
    *,
    with_weights: bool = True,
    rows: Sequence[Rows] = (),
) -> Any:
    """Check everything that can be checked without a model, and return the trainer.

    ``with_weights=False`` leaves the weights of a model on the hub there. ``rows`` in memory are read where
    ``data.train_files`` and ``data.val_files`` have their names.
    """
    check(config).report(logger)
    require_checkpoint(Checkpoints.of(config, trained=(trainer_cls.group_name,)), config)
    own = [config.data.tokenizer] if config.data.tokenizer else []
    models = model_paths(config)
    tokenizer = fetch_tokenizer(
        config, config.model, models=models.values(), tokenizers=own, weights=with_weights
    )
    size = check_model("model", config.model, tokenizer, config.data.cache_dir)
    if trainer_cls.trains_policy and not config.trainer.val_only:
        warn_of_generation_config("model", config.model, config.data.cache_dir)
    if isinstance(config, SftConfig) and "teacher.model.path" in models:
        check_teacher("teacher.model", config.teacher.model, tokenizer, config, size)
    for name in config.trainer.logger:
        resolve_tracker(name)
    trainer = trainer_cls(
        config,
        tokenizer,
        group_cls=worker_group_class(config),
        pool=ResourcePool(trainer_cls.role.name, pools_of(config)[GLOBAL_POOL]),
        rows=rows,
    )
    require_whole(models.values())
    return trainer

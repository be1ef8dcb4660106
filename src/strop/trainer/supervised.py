"""Supervised trainers: fine-tuning on responses, and reward modelling on pairs of responses.

One batch is one optimizer step. Each trainer drives its worker through a worker group; ``strop.trainer.loop``
runs the loop.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.preference import bradley_terry_loss, calibration, pairwise_accuracy
from strop.checkpoint.store import Checkpoints
from strop.config.checks.check import check
from strop.config.checks.supervised import Supervised
from strop.config.placement import GLOBAL_POOL, pools_of
from strop.config.schema.supervised import RewardModellingConfig, SftConfig, SupervisedConfig
from strop.controller.pools import ResourcePool, Role
from strop.data.answers import AnsweredDataset, pair_batch, response_batch
from strop.data.loader import EpochSampler, PromptLoader, one_pass
from strop.data.rl_dataset import Subset, log_prompts, prompt_format
from strop.data.sources import Files, Rows, sources
from strop.protocol import DataProto
from strop.tracking.trackers import resolve_tracker
from strop.trainer.build import check_model, fetch_tokenizer, require_checkpoint, worker_group_class
from strop.trainer.loop import Run
from strop.trainer.metrics import PhaseTimer
from strop.trainer.run_folder import require_shared_folder
from strop.workers.supervised import RewardModellingWorker, SftWorker

logger = logging.getLogger(__name__)


class SupervisedTrainer(ABC, Generic[Supervised]):
    """Train one model on prompts with given answers.

    Subclasses define the worker that holds the model, the batches and the metrics.
    """

    worker_cls: ClassVar[type]
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
            batches = EpochSampler(len(trained), data.train_batch_size, config.trainer.seed, data.shuffle)
            self.train_loader = self._loader(trained, batches)
            self.total_steps = config.trainer.total_training_steps or (
                len(self.train_loader) * config.trainer.total_epochs
            )
        if data.val_files:
            validated = self._dataset(sources(data.val_files, rows))
        self.val_loader = self._one_pass(validated) if validated is not None else None
        log_prompts(trained, validated)
        self.global_step = 0
        self.timer = PhaseTimer()
        self.group: Any = None  # a worker group, with the worker's methods

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

    def finish(self) -> None:
        """Run after the last iteration and its validation, before the model is saved."""

    def _dataset(self, files: Files) -> AnsweredDataset:
        data = self.config.data
        return AnsweredDataset(
            files,
            self.tokenizer,
            prompt_key=data.prompt_key,
            answer_keys=self.answer_keys,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong,
            how=prompt_format(data),
            num_workers=data.num_workers,
            cache_dir=data.cache_dir,
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
        """Build the worker group and load the model."""
        self.group = self._group_cls(
            worker_cls=self.worker_cls,
            init_kwargs={"config": self.config, "role": self.role},
            resource_pool=self._pool,
            name=self.role.name,
            settings=self.config.trainer,
        )
        require_shared_folder(Path(self.config.trainer.default_local_dir), self.groups)
        self.group.init_model()

    def fit(self) -> None:
        """Train up to ``total_steps`` iterations; call ``init_workers`` first."""
        SupervisedRun(self).fit()

    def shutdown(self) -> None:
        """End the workers and free what they hold; the trainer cannot be used afterwards."""
        if self.group is not None:
            self.group.shutdown()

    def step(self, batch: DataProto) -> dict[str, float]:
        """Run one optimizer step and return its metrics."""
        progress = {"iteration": self.global_step, "total_iterations": self.total_steps}
        with self.timer.phase("update"):
            update = self.group.update(DataProto(batch.batch, {}, {**self.denominators(batch), **progress}))
        plain = ("grad_norm", "lr", "skipped_steps")
        return {name if name in plain else f"train/{name}": value for name, value in update.items()}


class SupervisedRun(Run):
    """A run of a supervised trainer."""

    def __init__(self, trainer: SupervisedTrainer) -> None:
        self.trained = (trainer.group_name,)
        super().__init__(trainer)

    def one_iteration(self, batch: DataProto) -> dict[str, float]:
        """See ``Run.one_iteration``."""
        trainer = self.trainer
        started = time.perf_counter()
        with trainer.timer.phase("step"):
            metrics = trainer.step(batch)
        tokens = trainer.count_tokens(batch)
        seconds = time.perf_counter() - started
        trainer.global_step += 1
        if self.is_due(self.settings.test_freq):
            metrics |= self.validate()
        if trainer.global_step == trainer.total_steps:
            trainer.finish()
        return {
            "epoch": trainer.global_step / len(trainer.train_loader),
            **metrics,
            **trainer.timer.take(),
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / (seconds * trainer.group.world_size),
            "time/from_scratch": self.seconds(),
        }

    def validate(self) -> dict[str, float]:
        """Return the metrics on the validation files; empty if there are none."""
        trainer = self.trainer
        if trainer.val_loader is None:
            return {}
        with trainer.timer.phase("testing"):
            return {f"val/{name}": value for name, value in trainer.evaluate(trainer.val_loader).items()}


def build(
    trainer_cls: type[SupervisedTrainer[Any]], config: SupervisedConfig, *, rows: Sequence[Rows] = ()
) -> Any:
    """Check everything that can be checked without a model, and return the trainer.

    ``rows`` in memory are read where ``data.train_files`` and ``data.val_files`` have their names.
    """
    check(config).report(logger)
    own = [config.data.tokenizer] if config.data.tokenizer else []
    tokenizer = fetch_tokenizer(
        config, config.model, models=[config.model.path], tokenizers=own, weights=True
    )
    check_model("model", config.model, tokenizer, config.data.cache_dir)
    for name in config.trainer.logger:
        resolve_tracker(name)
    checkpoints = Checkpoints.of(config, trained=(trainer_cls.group_name,))
    require_checkpoint(checkpoints, config.trainer.resume_mode)
    return trainer_cls(
        config,
        tokenizer,
        group_cls=worker_group_class(config),
        pool=ResourcePool(trainer_cls.role.name, pools_of(config)[GLOBAL_POOL]),
        rows=rows,
    )


class SftTrainer(SupervisedTrainer[SftConfig]):
    """``strop sft``: minimizes the mean negative log-likelihood of response tokens."""

    worker_cls: ClassVar[type] = SftWorker
    role: ClassVar[Role] = Role.Actor
    group_name: ClassVar[str] = "actor"
    collate: ClassVar[Callable[..., DataProto]] = staticmethod(response_batch)

    @property
    def answer_keys(self) -> dict[str, str]:
        """See ``SupervisedTrainer``."""
        return {"response": self.config.data.response_key}

    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Count response tokens: each has the same weight, whatever its row, rank or micro-batch."""
        return {"n_tokens": float(batch.batch["response_mask"].sum())}

    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """Return ``loss``, the mean over all response tokens, and ``perplexity``, its exponential."""
        log_prob, n_tokens = 0.0, 0.0
        for batch in batches:
            answers = self.group.evaluate(DataProto(batch.batch))
            log_prob += float(answers.batch["log_prob"].double().sum())
            n_tokens += float(batch.batch["response_mask"].sum())
        loss = -log_prob / n_tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


_CALIBRATION_PAIRS = 1000  # training pairs that give the mean score if there are no validation files


class RewardModelTrainer(SupervisedTrainer[RewardModellingConfig]):
    """``strop train-rm``: fits a Bradley-Terry model to pairs (Stiennon et al. 2020)."""

    worker_cls: ClassVar[type] = RewardModellingWorker
    role: ClassVar[Role] = Role.RewardModel
    group_name: ClassVar[str] = "reward_model"
    collate: ClassVar[Callable[..., DataProto]] = staticmethod(pair_batch)
    _calibrated_step: int | None = None

    @property
    def answer_keys(self) -> dict[str, str]:
        """See ``SupervisedTrainer``."""
        return {"chosen": self.config.data.chosen_key, "rejected": self.config.data.rejected_key}

    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Count pairs."""
        return {"n_pairs": float(len(batch))}

    def count_tokens(self, batch: DataProto) -> float:
        """Count each prompt once, and both answers; a pair's mask covers the longer answer only."""
        columns = batch.batch
        prompts = columns["attention_mask"][:, : -columns["response_mask"].shape[1]].sum()
        return float(prompts + columns["response_mask"].sum() + columns["rejected_mask"].sum())

    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """Return metrics of all pairs; the mean score becomes the model's offset."""
        chosen, rejected, sources = [], [], []
        for batch in batches:
            answers = self.group.evaluate(DataProto(batch.batch))
            chosen.append(answers.batch["chosen_scores"])
            rejected.append(answers.batch["rejected_scores"])
            sources.append(batch.non_tensor_batch["data_source"])
        chosen_N, rejected_N = torch.cat(chosen).double(), torch.cat(rejected).double()
        metrics = pair_metrics(chosen_N, rejected_N, np.concatenate(sources))
        self.group.calibrate(metrics["score_mean"], metrics["score_std"])
        self._calibrated_step = self.global_step
        return metrics

    def finish(self) -> None:
        """Centre the saved model's scores on the validation pairs, else on training pairs."""
        if self._calibrated_step == self.global_step:
            return
        trained = self.train_loader.dataset
        first = Subset(trained, range(min(_CALIBRATION_PAIRS, len(trained))))
        pairs = self.val_loader or self._one_pass(first)
        with self.timer.phase("testing"):
            self.evaluate(pairs)


def pair_metrics(chosen_N: Tensor, rejected_N: Tensor, sources_N: np.ndarray) -> dict[str, float]:
    """Return loss, accuracy (also by data source), margin, scores and calibration of N pairs."""
    margin_N = chosen_N - rejected_N
    accuracy_N = pairwise_accuracy(margin_N)
    scores_2N = torch.cat([chosen_N, rejected_N])
    found = calibration(margin_N)
    by_source = {
        f"accuracy/{source}": accuracy_N[torch.from_numpy(sources_N == source)].mean().item()
        for source in sorted(set(sources_N))
    }
    return {
        "loss": bradley_terry_loss(chosen_N, rejected_N).mean().item(),
        "accuracy": accuracy_N.mean().item(),
        **by_source,
        "margin": margin_N.mean().item(),
        "chosen_score": chosen_N.mean().item(),
        "rejected_score": rejected_N.mean().item(),
        "score_mean": scores_2N.mean().item(),
        "score_std": scores_2N.std(correction=0).item(),
        "ece": found.error,
        **{f"confidence/{decile}": value for decile, value in enumerate(found.confidence, start=1)},
        **{f"accuracy_at/{decile}": value for decile, value in enumerate(found.accuracy, start=1)},
    }

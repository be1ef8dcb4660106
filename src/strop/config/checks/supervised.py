"""Rules about supervised runs, and sizes that follow from their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self, TypeVar

from strop.config.batch_plan import SUPERVISED_MICRO_BATCH, sequences_of_a_row
from strop.config.checks import inputs, learning
from strop.config.checks.finding import Finding, error, warning
from strop.config.keys import longest_row, value_at
from strop.config.names import preference_losses
from strop.config.roles import model_paths
from strop.config.schema.supervised import PairConfig, PreferenceConfig, SupervisedConfig

_FEW_STEPS, _ENOUGH_STEPS = 10, 30

Supervised = TypeVar("Supervised", bound=SupervisedConfig)
Pairs = TypeVar("Pairs", bound=PairConfig)


class OptimizerSteps(NamedTuple):
    """The optimizer steps of a run, one for each batch; the last batch of an epoch may be smaller."""

    rows: int
    size: int
    """Rows in a batch."""
    epochs: int | None
    """None: ``trainer.total_training_steps`` decides."""
    total: int

    @classmethod
    def of(cls, config: SupervisedConfig, rows: int) -> Self:
        """Return the steps of ``config`` on ``rows`` training rows."""
        size, trainer = config.data.train_batch_size, config.trainer
        if trainer.total_training_steps is not None:
            return cls(rows, size, None, trainer.total_training_steps)
        return cls(rows, size, trainer.total_epochs, -(-rows // size) * trainer.total_epochs)

    def __str__(self) -> str:
        steps = f"{self.total:,} optimizer step{'s' if self.total != 1 else ''}"
        last = f", the last of an epoch {self.rows % self.size}" if self.rows % self.size else ""
        epochs = f"{self.epochs or self.total / -(-self.rows // self.size):.3g}"
        return (
            f"{steps}: {epochs} epoch{'s' if epochs != '1' else ''} of {self.rows:,} rows in batches of "
            f"{self.size}{last}"
        )


def few_steps(steps: OptimizerSteps) -> Iterator[Finding]:
    """Warn of a run that ends before a model can learn, unless its number of steps is written."""
    if steps.epochs is not None and steps.total < _FEW_STEPS:
        per_epoch = steps.total // steps.epochs
        yield warning(
            f"a model changes little in {steps.total} optimizer step{'s' if steps.total > 1 else ''}: try "
            f"trainer.total_epochs={-(-_ENOUGH_STEPS // per_epoch)}, or a smaller data.train_batch_size"
        )


def model(config: SupervisedConfig) -> Iterator[Finding]:
    """Require the model; warn if rows may be longer than its context window."""
    for key, path in model_paths(config).items():
        yield from inputs.model_folder(key, path)
    yield from inputs.context_of_model(config.model, *longest_row(config.data))


def memory(config: SupervisedConfig) -> Iterator[Finding]:
    """Require that one iteration's columns fit into this machine's memory."""
    rows = config.data.train_batch_size * sequences_of_a_row(config)
    keys = f"data.train_batch_size={config.data.train_batch_size}"
    yield from inputs.columns_in_memory(config, rows, keys)


def micro_batches(config: SupervisedConfig) -> Iterator[Finding]:
    """Require a size of micro-batches; one in tokens must hold a whole row."""
    update, data = config.update, config.data
    if not update.use_dynamic_bsz:
        if update.micro_batch_size_per_gpu is None:
            yield error("update.micro_batch_size_per_gpu: not set; set it, or update.use_dynamic_bsz=True")
        return
    one, keys = longest_row(data)
    longest = sequences_of_a_row(config) * one
    cap = value_at(config, SUPERVISED_MICRO_BATCH.max_tokens)
    if cap < longest:
        row = "both sequences of a pair" if sequences_of_a_row(config) == 2 else "one sequence"
        yield error(
            f"{SUPERVISED_MICRO_BATCH.max_tokens}={cap} does not hold {row} of {keys} tokens (at least "
            f"{longest})"
        )


def loss(config: SupervisedConfig) -> Iterator[Finding]:
    """Require a preference loss that is built in or importable."""
    if isinstance(config, PreferenceConfig):
        yield from learning.known_name("update.loss", config.update.loss, preference_losses())

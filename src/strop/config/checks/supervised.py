"""Rules about supervised runs, and sizes that follow from their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from strop.config.batch_plan import SUPERVISED_MICRO_BATCH, sequences_of_a_row
from strop.config.checks import inputs, learning, processes
from strop.config.checks.finding import Finding, error
from strop.config.keys import longest_row, value_at
from strop.config.names import preference_losses
from strop.config.placement import process_count
from strop.config.schema.supervised import PairConfig, PreferenceConfig, SupervisedConfig

Supervised = TypeVar("Supervised", bound=SupervisedConfig)
Pairs = TypeVar("Pairs", bound=PairConfig)


def model(config: SupervisedConfig) -> Iterator[Finding]:
    """Require the model; warn if rows may be longer than its context window."""
    yield from inputs.model_folder("model.path", config.model.path)
    yield from inputs.context_of_model(config.model.path, *longest_row(config.data))


def memory(config: SupervisedConfig) -> Iterator[Finding]:
    """Require that one iteration's columns fit into this machine's memory."""
    rows = config.data.train_batch_size * sequences_of_a_row(config)
    keys = f"data.train_batch_size={config.data.train_batch_size}"
    yield from inputs.columns_in_memory(config, rows, keys)


def shards(config: SupervisedConfig) -> Iterator[Finding]:
    """Require ranks that divide into groups of `fsdp_size`."""
    yield from processes.sharded_groups("model.fsdp_config", config.model.fsdp_config, process_count(config))


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

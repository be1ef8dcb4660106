"""What can be said about a supervised run before its model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from strop.config.checks import inputs, learning, processes
from strop.config.checks.finding import Finding, error, warning
from strop.config.checks.keys import unsupported
from strop.config.load import Loaded
from strop.config.placement import group_is_on_ray, processes_per_node
from strop.config.schema.supervised import RewardModellingConfig, SupervisedConfig
from strop.errors import ConfigError

Supervised = TypeVar("Supervised", bound=SupervisedConfig)


def processes_on_nodes(config: SupervisedConfig) -> list[int]:
    """The processes on each node; all of them train the one model."""
    return [processes_per_node(config)] * config.trainer.nnodes


def supervised_runs_on_ray(config: SupervisedConfig) -> bool:
    """Whether the workers run in processes of their own."""
    return group_is_on_ray(config, sum(processes_on_nodes(config)))


def sequences_of_a_row(config: SupervisedConfig) -> int:
    """A pair is two sequences that are never parted."""
    return 2 if isinstance(config, RewardModellingConfig) else 1


def require_valid(config: SupervisedConfig) -> list[str]:
    """The warnings about the configuration. Raises all its errors as one `ConfigError`."""
    errors, warnings = _errors_and_warnings(config)
    if errors:
        raise ConfigError(*errors)
    return warnings


def get_loaded(loaded: Loaded[Supervised]) -> Supervised:
    """The configuration; one that could not be loaded whole is a `ConfigError` with all its other errors."""
    if loaded.problems and loaded.config is not None:
        errors, _ = _errors_and_warnings(loaded.config)
        raise ConfigError(*loaded.problems, *loaded.reliable(errors))
    return loaded.get()


def _errors_and_warnings(config: SupervisedConfig) -> tuple[list[str], list[str]]:
    errors, warnings = unsupported(config)
    for finding in _findings(config):
        (errors if finding.level == "error" else warnings).append(finding.text)
    return errors, warnings


def _findings(config: SupervisedConfig) -> Iterator[Finding]:
    for rule in (inputs.data_files, inputs.tokenizer, inputs.resume, inputs.run_folder, learning.trackers):
        yield from rule(config)
    yield from inputs.model_folder("model.path", config.model.path)
    yield from inputs.context_of_model(config.model.path, config.data)
    yield from learning.schedule("update", config.update.optim)
    on_ray = supervised_runs_on_ray(config)
    yield from processes.run_without_effect(config.trainer, on_ray=on_ray)
    yield from processes.run_restarts(config.trainer, on_ray=on_ray)
    yield from _processes(config)
    yield from _micro_batches(config)
    yield from _validation(config)


def _processes(config: SupervisedConfig) -> Iterator[Finding]:
    count = sum(processes_on_nodes(config))
    yield from processes.group_of(config, count, asked_by="trainer.n_gpus_per_node or trainer.nnodes")
    size = config.model.fsdp_config.fsdp_size
    if 1 < size < count and count % size:
        yield error(f"model.fsdp_config.fsdp_size={size} does not divide the {count} ranks (-1: all)")


def _micro_batches(config: SupervisedConfig) -> Iterator[Finding]:
    update, data = config.update, config.data
    if not update.use_dynamic_bsz:
        if update.micro_batch_size_per_gpu is None:
            yield error("update.micro_batch_size_per_gpu: not set; set it, or update.use_dynamic_bsz=True")
        return
    longest = sequences_of_a_row(config) * (data.max_prompt_length + data.max_response_length)
    if update.max_token_len_per_gpu < longest:
        row = "both sequences of a pair" if sequences_of_a_row(config) == 2 else "one sequence"
        yield error(
            f"update.max_token_len_per_gpu={update.max_token_len_per_gpu} does not hold {row} of "
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} tokens (at least {longest})"
        )


def _validation(config: SupervisedConfig) -> Iterator[Finding]:
    trainer, written = config.trainer, config.written or frozenset()
    asked = {"test_freq": trainer.test_freq > 0, "val_before_train": trainer.val_before_train}
    keys = [f"trainer.{key}" for key, is_on in asked.items() if is_on and f"trainer.{key}" in written]
    if keys and not config.data.val_files:
        yield warning(f"no effect (data.val_files is empty): {', '.join(keys)}")

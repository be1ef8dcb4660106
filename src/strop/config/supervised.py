"""What can be said about a supervised run before its model is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TypeVar

from strop.config.placement import processes_per_node
from strop.config.rules import inputs, named
from strop.config.rules.finding import Finding, error
from strop.config.schema.supervised import RewardModellingConfig, SupervisedConfig
from strop.errors import ConfigError

Supervised = TypeVar("Supervised", bound=SupervisedConfig)


def processes_on_nodes(config: SupervisedConfig) -> list[int]:
    """The processes on each node; all of them train the one model."""
    return [processes_per_node(config)] * config.trainer.nnodes


def supervised_runs_on_ray(config: SupervisedConfig) -> bool:
    """Whether the workers run in processes of their own."""
    kind = config.trainer.worker_group
    return kind == "ray" or (kind == "auto" and sum(processes_on_nodes(config)) > 1)


def sequences_of_a_row(config: SupervisedConfig) -> int:
    """A pair is two sequences that are never parted."""
    return 2 if isinstance(config, RewardModellingConfig) else 1


def require_valid(config: SupervisedConfig) -> None:
    """All errors of the configuration as one `ConfigError`."""
    rules = (inputs.data_files, inputs.tokenizer, inputs.resume, named.trackers)
    findings = [finding for rule in rules for finding in rule(config)]
    findings += inputs.model_folder("model.path", config.model.path)
    findings += [*_processes(config), *_micro_batches(config)]
    errors = [finding.text for finding in findings if finding.level == "error"]
    if errors:
        raise ConfigError(*errors)


def _processes(config: SupervisedConfig) -> Iterator[Finding]:
    count = sum(processes_on_nodes(config))
    if config.update.strategy != "fsdp":
        yield error(f"update.strategy={config.update.strategy}: not in this version; set it to fsdp")
    if config.trainer.worker_group == "local" and count > 1:
        yield error(
            f"trainer.worker_group=local is one process, and {count} are asked for by "
            "trainer.n_gpus_per_node or trainer.nnodes; set it to auto or ray"
        )
    elif supervised_runs_on_ray(config) and importlib.util.find_spec("ray") is None:
        yield error(f"{count} processes run on Ray, which is not installed: pip install 'strop[ray]'")
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

"""Rules about the engine that generates."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.placement import rollout_dtype, tensor_parallel_size, visible_gpus
from strop.config.rules.finding import Finding, error, warning
from strop.config.schema import Config
from strop.errors import ConfigError


def tensor_parallelism(config: Config) -> Iterator[Finding]:
    """The ranks of the rollout divide into groups that run one vLLM engine each."""
    if config.actor_rollout_ref.rollout.name != "vllm":
        return
    try:
        tensor_parallel_size(config)
    except ConfigError as problem:
        yield error(str(problem))


def batches(config: Config) -> Iterator[Finding]:
    """A step of vLLM has room for a token of every sequence."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield error(
            f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"max_num_seqs={rollout.max_num_seqs}: a step takes a token of each sequence; lower the latter"
        )


def precision(config: Config) -> Iterator[Finding]:
    """A sampler of lower precision than the trainer is another policy."""
    section = config.actor_rollout_ref
    if section.rollout.name != "vllm":
        return
    sampler, trainer = rollout_dtype(config), section.model.compute_dtype
    computed = {"auto": "bfloat16" if visible_gpus() and config.trainer.device != "cpu" else "float32"}
    if computed.get(sampler, sampler) != computed.get(trainer, trainer) and section.actor.rollout_is is None:
        yield warning(
            f"actor_rollout_ref.rollout.dtype={sampler} with model.compute_dtype={trainer}: the sampler's "
            "probabilities differ from the trainer's; actor.rollout_is corrects for it, "
            "training/rollout_probs_diff_mean tells how much"
        )

"""The sizes of micro-batches: sequences or tokens per rank, from the new keys or the deprecated ones.

Ranks that share sequences (`ulysses_sequence_parallel_size`) take a micro-batch together: with the sequences
of one rank, and the tokens of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.config.keys import value_at
from strop.config.nearest import divisors, nearest_in_words
from strop.config.schema import Config
from strop.errors import ConfigError


@dataclass(frozen=True)
class MicroBatchSize:
    """What one pass takes on one rank, or ranks that share it: `rows` sequences, or at most `max_tokens`."""

    rows: int | None = None
    max_tokens: int | None = None

    def passes(self, samples: int) -> int | None:
        """Passes over `samples` sequences, the last perhaps smaller; None if it depends on their lengths."""
        return None if self.rows is None else -(-samples // self.rows)


@dataclass(frozen=True)
class MicroBatchKeys:
    """The keys that decide one micro-batch size, by full path."""

    overall: str
    """Deprecated: sequences over all ranks."""
    dynamic: str
    max_tokens: str
    sequence_parallel: str
    """Ranks that share it."""

    @property
    def per_gpu(self) -> str:
        """Sequences per rank."""
        return f"{self.overall}_per_gpu"


MICRO_BATCHES: dict[str, MicroBatchKeys] = {
    "actor": MicroBatchKeys(
        "actor_rollout_ref.actor.ppo_micro_batch_size",
        "actor_rollout_ref.actor.use_dynamic_bsz",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    ),
    "log_prob": MicroBatchKeys(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    ),
    "ref": MicroBatchKeys(
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    ),
    "critic": MicroBatchKeys(
        "critic.ppo_micro_batch_size",
        "critic.use_dynamic_bsz",
        "critic.ppo_max_token_len_per_gpu",
        "critic.ulysses_sequence_parallel_size",
    ),
    "values": MicroBatchKeys(
        "critic.forward_micro_batch_size",
        "critic.use_dynamic_bsz",
        "critic.forward_max_token_len_per_gpu",
        "critic.ulysses_sequence_parallel_size",
    ),
    "reward_model": MicroBatchKeys(
        "reward_model.micro_batch_size",
        "reward_model.use_dynamic_bsz",
        "reward_model.forward_max_token_len_per_gpu",
        "reward_model.ulysses_sequence_parallel_size",
    ),
}
"""Each pass that is cut into micro-batches: updates of actor and critic, and the forward passes."""


def sequence_parallel_size(config: Config, name: str, ranks: int) -> int:
    """How many of `ranks` ranks share a sequence in the pass `name`; 1 in one process.

    Raises:
        ConfigError: the size does not divide the number of ranks.
    """
    key = MICRO_BATCHES[name].sequence_parallel
    size = value_at(config, key) if ranks > 1 else 1
    if ranks % size:
        raise ConfigError(
            f"{key}={size} does not divide the {ranks} ranks ({nearest_in_words(size, divisors(ranks))})"
        )
    return size


def resolve_micro_batch(config: Config, name: str, ranks: int = 1) -> MicroBatchSize:
    """The micro-batch size of the pass `name` (of `MICRO_BATCHES`) on each of `ranks` ranks.

    Raises:
        ConfigError: both or neither of the two keys set, a deprecated size that does not divide over the
            ranks, a token cap that one whole sequence may exceed, or ranks that do not divide into groups.
    """
    keys, sharing = MICRO_BATCHES[name], sequence_parallel_size(config, name, ranks)
    if value_at(config, keys.dynamic):
        return MicroBatchSize(max_tokens=_token_cap(config, keys, sharing))
    per_gpu, overall = value_at(config, keys.per_gpu), value_at(config, keys.overall)
    match per_gpu, overall:
        case None, None:
            raise ConfigError(f"{keys.per_gpu}: not set; set it, or {keys.dynamic}=True")
        case _, None:
            return MicroBatchSize(rows=per_gpu)
        case None, _:
            return MicroBatchSize(rows=_per_rank(keys, overall, ranks // sharing))
    raise ConfigError(
        f"{keys.per_gpu}={per_gpu} and the deprecated {keys.overall}={overall} are both set; keep the first, "
        "with the other at null"
    )


def _per_rank(keys: MicroBatchKeys, overall: Any, ranks: int) -> int:
    if overall % ranks:
        raise ConfigError(
            f"{keys.overall}={overall} does not divide over {ranks} ranks "
            f"({nearest_in_words(overall, range(ranks, overall + ranks + 1, ranks))}); "
            f"{keys.per_gpu} counts per rank"
        )
    return overall // ranks


def _token_cap(config: Config, keys: MicroBatchKeys, sharing: int) -> int:
    cap = value_at(config, keys.max_tokens) * sharing
    longest = config.data.max_prompt_length + config.data.max_response_length
    words = f"data.max_prompt_length={config.data.max_prompt_length} + "
    words += f"data.max_response_length={config.data.max_response_length}"
    rewards = config.reward_model
    if keys is MICRO_BATCHES["reward_model"] and rewards.model.input_tokenizer and rewards.max_length:
        longest, words = rewards.max_length, f"reward_model.max_length={rewards.max_length}"  # its own tokens
    if cap < longest:
        shared = f" on {sharing} ranks" if sharing > 1 else ""
        raise ConfigError(
            f"{keys.max_tokens}={cap // sharing}{shared} does not hold one sequence of {words} tokens "
            f"(at least {-(-longest // sharing)})"
        )
    return cap

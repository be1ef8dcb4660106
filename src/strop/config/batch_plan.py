"""Sizes that follow from the batch-size keys: samples, mini-batches, micro-batches, steps, iterations.

Units: `data.train_batch_size` and `ppo_mini_batch_size` count prompts over all ranks, each with
`actor_rollout_ref.rollout.n` samples; `*_micro_batch_size_per_gpu` counts samples on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from strop.config.backends import ENGINES, EngineKind
from strop.config.keys import divisors, longest_row, nearest_in_words, value_at
from strop.config.placement import Placement
from strop.config.roles import (
    reference_is_the_actor,
    teacher_is_the_actor,
    uses_critic,
    uses_reference,
    uses_teacher,
)
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import PairConfig, SupervisedConfig
from strop.errors import Attempts, ConfigError


@dataclass(frozen=True)
class MicroBatchSize:
    """Size of one pass on one rank, or on ranks that share it: `rows`, or up to `max_tokens` tokens."""

    rows: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class MicroBatchKeys:
    """Full paths of the keys that decide one micro-batch size."""

    overall: str
    """Deprecated: sequences over all ranks. The supervised trees have no such key."""
    dynamic: str
    max_tokens: str
    sequence_parallel: str = ""
    """Ranks that share a sequence."""

    @property
    def per_gpu(self) -> str:
        """Sequences per rank."""
        return f"{self.overall}_per_gpu"


def _keys(section: str, rows: str, tokens: str, *, prefix: str = "", sharing: str = "") -> MicroBatchKeys:
    return MicroBatchKeys(
        overall=f"{section}.{rows}",
        dynamic=f"{section}.{prefix}use_dynamic_bsz",
        max_tokens=f"{section}.{tokens}",
        sequence_parallel=f"{sharing or section}.ulysses_sequence_parallel_size",
    )


_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
_LOG_PROB = ("log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu")

MICRO_BATCHES: dict[str, MicroBatchKeys] = {
    "actor": _keys(_ACTOR, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu"),
    "log_prob": _keys(_ROLLOUT, *_LOG_PROB, prefix="log_prob_", sharing=_ACTOR),
    "ref": _keys(_REF, *_LOG_PROB, prefix="log_prob_"),
    "critic": _keys("critic", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu"),
    "values": _keys("critic", "forward_micro_batch_size", "forward_max_token_len_per_gpu"),
    "reward_model": _keys("reward_model", "micro_batch_size", "forward_max_token_len_per_gpu"),
}
"""Each pass that is cut into micro-batches: updates of actor and critic, and the forward passes."""
SUPERVISED_MICRO_BATCH = MicroBatchKeys(
    "update.micro_batch_size", "update.use_dynamic_bsz", "update.max_token_len_per_gpu"
)
"""The same of a supervised run, whose sizes count rows of the data set."""
MODELS: dict[str, str] = {
    **dict.fromkeys(("actor", "log_prob", "ref"), "actor_rollout_ref.model"),
    **dict.fromkeys(("critic", "values"), "critic.model"),
    **{"reward_model": "reward_model.model", "teacher": "teacher.model", "update": "model"},
}
"""The section of the model of each pass; that of a supervised run is called update."""


def keys_of_pass(name: str) -> MicroBatchKeys:
    """Return the keys of the sizes of the pass `name`; a teacher has those of the reference."""
    return MICRO_BATCHES["ref" if name == "teacher" else name]


def sequence_parallel_size(config: Config, name: str, ranks: int) -> int:
    """Return how many of `ranks` ranks share a sequence in the pass `name`; 1 in one process.

    Raises:
        ConfigError: the size does not divide the number of ranks.
    """
    if (name == "ref" and reference_is_the_actor(config)) or (
        name == "teacher" and teacher_is_the_actor(config)
    ):
        name = "actor"
    key = keys_of_pass(name).sequence_parallel
    shares = ranks > 1 and "shared_sequences" in engine_of(config, name).offers
    size = value_at(config, key) if shares else 1
    if ranks % size:
        raise ConfigError(
            f"{key}={size} does not divide the {ranks} ranks ({nearest_in_words(size, divisors(ranks))})"
        )
    return size


def engine_of(config: RootConfig, name: str) -> EngineKind:
    """Return the kind of the engine of the model that runs the pass `name`, or of a supervised run's."""
    keys = SUPERVISED_MICRO_BATCH if name == "update" else keys_of_pass(name)
    return ENGINES[config.strategy_of(keys.dynamic)]


def ranks_with_same_rows(config: Config, name: str, ranks: int) -> int:
    """Return how many of `ranks` ranks get the same rows in the pass `name`; see `EngineKind`."""
    return engine_of(config, name).ranks_with_same_rows(config, name, ranks)


def resolve_micro_batch(config: Config, name: str, ranks: int = 1) -> MicroBatchSize:
    """Return the micro-batch size of the pass `name` (of `MICRO_BATCHES`) on each of `ranks` ranks.

    Raises:
        ConfigError: both or neither of the two keys set, a deprecated size that does not divide over the
            ranks, a token cap that one whole sequence may exceed, or ranks that do not divide into groups.
    """
    keys, sharing = keys_of_pass(name), sequence_parallel_size(config, name, ranks)
    if value_at(config, keys.dynamic):
        return MicroBatchSize(max_tokens=_token_cap(config, name, sharing))
    per_gpu, overall = value_at(config, keys.per_gpu), value_at(config, keys.overall)
    if per_gpu is not None and overall is not None:
        raise ConfigError(
            f"{keys.per_gpu}={per_gpu} and the deprecated {keys.overall}={overall} are both set; keep the "
            "first, with the other at null"
        )
    if overall is None:
        if per_gpu is None:
            raise ConfigError(f"{keys.per_gpu}: not set; set it, or {keys.dynamic}=True")
        return MicroBatchSize(rows=per_gpu)
    groups = ranks // ranks_with_same_rows(config, name, ranks)
    if overall % groups:
        raise ConfigError(
            f"{keys.overall}={overall} does not divide over {groups} ranks "
            f"({nearest_in_words(overall, _multiples_around(overall, groups))}); "
            f"{keys.per_gpu} counts per rank"
        )
    return MicroBatchSize(rows=overall // groups)


def _multiples_around(number: int, factor: int) -> list[int]:
    """Return the positive multiples of ``factor`` next to ``number``."""
    below = number - number % factor
    return [multiple for multiple in (below, below + factor) if multiple]


def longest_scored_row(config: Config) -> tuple[int, str]:
    """Return the tokens of the longest sequence for the reward model, and the keys that decide them."""
    rewards = config.reward_model
    if rewards.model.input_tokenizer is not None and rewards.max_length:
        return rewards.max_length, f"reward_model.max_length={rewards.max_length}"
    return longest_row(config.data)  # tokenized again: about as many tokens


def longest_row_of(config: Config, name: str) -> tuple[int, str]:
    """Return the tokens of the longest sequence in the pass `name`, and the keys that decide them."""
    return longest_scored_row(config) if name == "reward_model" else longest_row(config.data)


def sequences_of_a_row(config: SupervisedConfig) -> int:
    """Return the sequences in one row: a pair is two that stay together."""
    return 2 if isinstance(config, PairConfig) else 1


def _token_cap(config: Config, name: str, sharing: int) -> int:
    """Return the cap of ranks that share a sequence; `strop.config.memory.choices` sets unwritten ones."""
    keys = keys_of_pass(name)
    cap = value_at(config, keys.max_tokens) * sharing
    longest, words = longest_row_of(config, name)
    if cap < longest:
        shared = f" on {sharing} ranks" if sharing > 1 else ""
        raise ConfigError(
            f"{keys.max_tokens}={cap // sharing}{shared} does not hold one sequence of {words} tokens "
            f"(at least {-(-longest // sharing)})"
        )
    return cap


@dataclass(frozen=True)
class ForwardPlan:
    """The passes of one model over samples that are spread over its ranks."""

    samples_per_rank: int
    micro_batch: MicroBatchSize

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches on each rank; None when they are cut by tokens."""
        rows = self.micro_batch.rows
        return None if rows is None else -(-self.samples_per_rank // rows)


@dataclass(frozen=True)
class UpdatePlan(ForwardPlan):
    """The optimizer steps of one model in one iteration; its passes are those over one mini-batch."""

    epochs: int
    mini_batches: int
    """Mini-batches in one epoch."""
    samples_per_mini_batch: int
    """Samples over all ranks."""
    sharing: int
    """Ranks that share a sequence, and with it samples and micro-batches."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in one iteration."""
        return self.epochs * self.mini_batches


@dataclass(frozen=True)
class BatchPlan:
    """Every number that follows from the batch-size keys; None for those that need the number of rows."""

    ranks: int
    """Ranks of the actor."""
    prompts: int
    """Prompts per iteration."""
    n: int
    """Samples per prompt."""
    samples: int
    """Samples per iteration, over all ranks."""
    actor: UpdatePlan
    critic: UpdatePlan | None
    forwards: dict[str, ForwardPlan]
    """Passes over all samples by name: log_prob, and those of ref, values, reward_model, teacher in use."""
    train_rows: int | None
    iterations_per_epoch: int | None
    iterations: int | None
    """Iterations of the whole run."""
    actor_iterations: int | None
    """Iterations that update the actor: all after `trainer.critic_warmup`."""

    @classmethod
    def from_config(cls, config: Config, *, train_rows: int | None = None) -> Self:
        """Return the plan of `config` for `train_rows` training prompts.

        Raises:
            ConfigError: one line for each size that does not fit the others, with the nearest that do.
        """
        attempt = Attempts()
        data, n = config.data, config.actor_rollout_ref.rollout.n
        with_critic = uses_critic(config)
        samples = data.train_batch_size * n
        ranks = Placement.from_config(config).ranks_of_pass
        actor = attempt(lambda: _plan_update(config, "actor", ranks))
        critic = attempt(lambda: _plan_update(config, "critic", ranks)) if with_critic else None
        forwards = {
            name: attempt(lambda name=name: _plan_forward(config, name, samples, ranks(name)))
            for name in forward_passes(config)
        }
        # Rows that fill no batch are left out.
        per_epoch = None if train_rows is None else train_rows // data.train_batch_size
        if per_epoch == 0:
            attempt.errors.append(ConfigError(too_few_rows(config, train_rows or 0)))
        if attempt.errors or actor is None:
            raise ConfigError(*attempt.lines)
        trainer = config.trainer
        warm_up = trainer.critic_warmup if with_critic else 0
        iterations = trainer.total_training_steps
        if iterations is None and per_epoch is not None:
            iterations = per_epoch * trainer.total_epochs
        return cls(
            ranks=ranks("actor"),
            prompts=data.train_batch_size,
            n=n,
            samples=samples,
            actor=actor,
            critic=critic,
            forwards={name: plan for name, plan in forwards.items() if plan is not None},
            train_rows=train_rows,
            iterations_per_epoch=per_epoch,
            iterations=iterations,
            actor_iterations=None if iterations is None else max(iterations - warm_up, 0),
        )


def too_few_rows(config: RootConfig, rows: int) -> str:
    """Return the error for a batch that the training rows do not fill."""
    size = config.data.train_batch_size
    return f"data.train_batch_size={size} is more than the {rows} training rows (at most {rows})"


def forward_passes(config: Config) -> list[str]:
    """Return the forward passes that this run makes over its samples, by their names in `MICRO_BATCHES`."""
    optional = {
        "ref": uses_reference(config),
        "values": uses_critic(config),
        "reward_model": config.reward_model.enable,
        "teacher": uses_teacher(config),
    }
    return ["log_prob", *(name for name, present in optional.items() if present)]


def _plan_update(config: Config, name: str, ranks_of_pass: Callable[[str], int]) -> UpdatePlan:
    is_actor = name == "actor"
    section = config.actor_rollout_ref.actor if is_actor else config.critic
    key = "actor_rollout_ref.actor.ppo_mini_batch_size" if is_actor else "critic.ppo_mini_batch_size"
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini = section.ppo_mini_batch_size
    problems = []
    ranks, groups = ranks_of_pass(name), _groups(config, name, ranks_of_pass)
    actors = config.actor_rollout_ref.actor.ppo_mini_batch_size, _groups(config, "actor", ranks_of_pass)
    reported = not is_actor and (mini, groups) == actors  # the actor's line says the same
    if (prompts % mini or mini * n % groups) and not reported:
        working = [size for size in divisors(prompts) if size * n % groups == 0]
        shares = f"{ranks} ranks" if groups == ranks else f"{groups} groups of {ranks // groups} ranks"
        wrong = (
            f"does not divide data.train_batch_size={prompts}"
            if prompts % mini
            else f"x actor_rollout_ref.rollout.n={n} does not divide over {shares}"
        )
        if working:
            problems.append(f"{key}={mini} {wrong} ({nearest_in_words(mini, working)})")
        else:
            fitting = [size for size in range(1, prompts + groups + 1) if size * n % groups == 0]
            problems.append(
                f"data.train_batch_size={prompts} x actor_rollout_ref.rollout.n={n} does not divide over "
                f"{shares} ({nearest_in_words(prompts, fitting)})"
            )
    try:
        micro_batch = resolve_micro_batch(config, name, ranks)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return UpdatePlan(
        samples_per_rank=mini * n // groups,
        micro_batch=micro_batch,
        epochs=section.ppo_epochs,
        mini_batches=prompts // mini,
        samples_per_mini_batch=mini * n,
        sharing=ranks // groups,
    )


def _groups(config: Config, name: str, ranks_of_pass: Callable[[str], int]) -> int:
    """Return the number of parts that the samples of a pass are spread over."""
    return ranks_of_pass(name) // ranks_with_same_rows(config, name, ranks_of_pass(name))


def _plan_forward(config: Config, name: str, samples: int, ranks: int) -> ForwardPlan:
    micro_batch = resolve_micro_batch(config, name, ranks)
    samples_per_rank = -(-samples * ranks_with_same_rows(config, name, ranks) // ranks)
    return ForwardPlan(samples_per_rank, micro_batch)

"""What the batch-size keys come to: prompts, samples, mini-batches, micro-batches, steps, iterations.

Units: `data.train_batch_size` and `ppo_mini_batch_size` count prompts over all ranks, each with
`actor_rollout_ref.rollout.n` samples; `*_micro_batch_size_per_gpu` counts samples on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from strop.config.micro_batches import MicroBatchSize, resolve_micro_batch, sequence_parallel_size
from strop.config.nearest import divisors, nearest_in_words
from strop.config.placement import Placement
from strop.config.roles import uses_critic, uses_reference
from strop.config.schema import Config
from strop.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class UpdatePlan:
    """The optimizer steps of one model in one iteration."""

    epochs: int
    mini_batches: int
    """In one epoch: optimizer steps = epochs x mini_batches."""
    samples_per_mini_batch: int
    """Over all ranks."""
    samples_per_rank: int
    """Of one mini-batch."""
    micro_batch: MicroBatchSize
    micro_batches: int | None
    """Of one mini-batch, on each rank; None when they are cut by tokens, as many as the lengths then give."""
    sharing: int = 1
    """Ranks that share a sequence, and with it samples and micro-batches."""

    @property
    def optimizer_steps(self) -> int:
        """In one iteration."""
        return self.epochs * self.mini_batches


@dataclass(frozen=True)
class ForwardPlan:
    """The forward passes of one model over the samples of one iteration."""

    samples_per_rank: int
    micro_batch: MicroBatchSize
    micro_batches: int | None
    """On each rank; None when they are cut by tokens."""


@dataclass(frozen=True)
class BatchPlan:
    """Every number that follows from the batch-size keys; None for those that need the number of rows."""

    ranks: int
    """Of the actor."""
    prompts: int
    """An iteration."""
    n: int
    """Samples per prompt."""
    samples: int
    """An iteration, over all ranks."""
    actor: UpdatePlan
    critic: UpdatePlan | None
    forwards: dict[str, ForwardPlan]
    """By name: log_prob, and those of ref, values and reward_model that this run has."""
    train_rows: int | None
    iterations_per_epoch: int | None
    iterations: int | None
    """Of the whole run."""
    actor_iterations: int | None
    """Those that update the actor: all after `trainer.critic_warmup`."""

    @classmethod
    def from_config(cls, config: Config, *, train_rows: int | None = None) -> Self:
        """The plan of `config` for `train_rows` training prompts, on the ranks that it places each role on.

        Raises:
            ConfigError: one line for each size that does not fit the others, with the nearest that do.
        """
        problems: list[str] = []

        def attempt(build: Callable[[], T]) -> T | None:
            try:
                return build()
            except ConfigError as error:
                problems.extend(line for line in error.problems if line not in problems)
                return None

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
        per_epoch = attempt(lambda: _iterations_per_epoch(data.train_batch_size, train_rows))
        if problems or actor is None:
            raise ConfigError(*problems)
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


def forward_passes(config: Config) -> list[str]:
    """The forward passes that this run makes over its samples, by their names in `MICRO_BATCHES`."""
    optional = {
        "ref": uses_reference(config),
        "values": uses_critic(config),
        "reward_model": config.reward_model.enable,
    }
    return ["log_prob", *(name for name, present in optional.items() if present)]


def _plan_update(config: Config, name: str, ranks_of_pass: Callable[[str], int]) -> UpdatePlan:
    is_actor = name == "actor"
    section = config.actor_rollout_ref.actor if is_actor else config.critic
    key = "actor_rollout_ref.actor.ppo_mini_batch_size" if is_actor else "critic.ppo_mini_batch_size"
    prompts, n, mini = (
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        section.ppo_mini_batch_size,
    )
    problems = []
    ranks = ranks_of_pass(name)
    groups = _groups(config, name, ranks_of_pass)
    working = [size for size in divisors(prompts) if size * n % groups == 0]
    actors = config.actor_rollout_ref.actor.ppo_mini_batch_size, _groups(config, "actor", ranks_of_pass)
    reported = not is_actor and (mini, groups) == actors  # with the actor's
    if mini not in working and not reported:
        wrong = (
            f"does not divide data.train_batch_size={prompts}"
            if prompts % mini
            else f"x actor_rollout_ref.rollout.n={n} does not divide over {_in_words(groups, ranks)}"
        )
        problems.append(f"{key}={mini} {wrong} ({nearest_in_words(mini, working)})")
    try:
        micro_batch = resolve_micro_batch(config, name, ranks)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    samples_per_rank = mini * n // groups
    return UpdatePlan(
        epochs=section.ppo_epochs,
        mini_batches=prompts // mini,
        samples_per_mini_batch=mini * n,
        samples_per_rank=samples_per_rank,
        micro_batch=micro_batch,
        micro_batches=micro_batch.passes(samples_per_rank),
        sharing=ranks // groups,
    )


def _groups(config: Config, name: str, ranks_of_pass: Callable[[str], int]) -> int:
    """Parts that the samples of a pass are spread over."""
    return ranks_of_pass(name) // sequence_parallel_size(config, name, ranks_of_pass(name))


def _in_words(groups: int, ranks: int) -> str:
    return f"{ranks} ranks" if groups == ranks else f"{groups} groups of {ranks // groups} ranks"


def _plan_forward(config: Config, name: str, samples: int, ranks: int) -> ForwardPlan:
    micro_batch = resolve_micro_batch(config, name, ranks)
    samples_per_rank = -(-samples * sequence_parallel_size(config, name, ranks) // ranks)
    return ForwardPlan(samples_per_rank, micro_batch, micro_batch.passes(samples_per_rank))


def _iterations_per_epoch(train_batch_size: int, train_rows: int | None) -> int | None:
    """Full batches only: the rest of an epoch that fills no batch is left out."""
    if train_rows is None:
        return None
    if train_rows < train_batch_size:
        raise ConfigError(
            f"data.train_batch_size={train_batch_size} is more than the {train_rows} training prompts "
            f"(at most {train_rows})"
        )
    return train_rows // train_batch_size

"""What `strop check` shows: the resolved configuration, what it comes to, and everything wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from strop.config.batch_plan import BatchPlan, ForwardPlan, UpdatePlan
from strop.config.checks.check import CheckResult, check_loaded
from strop.config.forecast import Forecast, forecast
from strop.config.load import Loaded, to_yaml
from strop.config.paths import expand, is_url
from strop.config.placement import Placement, runs_on_ray
from strop.config.reward_parts import KEY, RULE, SCORERS, RewardPart, read_parts
from strop.config.roles import why_old_log_probs_are_computed_apart
from strop.config.schema import Config
from strop.data.parquet import (
    UNNAMED_SOURCE,
    PromptTable,
    check_columns,
    no_sources,
    read_scoring_columns,
    require_ground_truths,
    sources_of,
)
from strop.errors import ConfigError, DataError, MissingExtraError, RewardError, StropError
from strop.rewards.parts import require_scored_source
from strop.rewards.router import BuiltInScorer, Router, UnknownSourceError

_FORWARD_NAMES = {
    "log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "reward_model": "reward model",
}


def show_check(
    loaded: Loaded[Config],
    *,
    train_rows: Callable[[list[str]], int | None],
    more_problems: Callable[[Config], list[str]] = lambda config: [],
) -> int:
    """Check a configuration, show everything about it on the standard output, return the status (2: errors).

    `train_rows` counts the prompts in parquet files; it is called when the training files are all local and
    there. `more_problems` are those that the configuration itself does not know of. A configuration that
    could not be loaded is shown with defaults in place of what is wrong.
    """
    config = loaded.config
    if config is None:
        raise ConfigError(*loaded.problems)
    files = [expand(file) for file in config.data.train_files]
    rows, problems = None, []
    if all(os.path.exists(file) for file in files):
        try:
            rows = train_rows(files)
        except StropError as error:
            problems.append(str(error))
    problems = list(dict.fromkeys([*problems, *more_problems(config)]))
    result = check_loaded(loaded, train_rows=rows, more_problems=problems)
    Console(soft_wrap=True).print(render(result, config))
    return 2 if result.errors else 0


def render(result: CheckResult, config: Config, *, with_yaml: bool = True) -> Group:
    """Everything about `config`, for a rich console: errors and warnings come last, where the eye ends."""
    parts: list[RenderableType] = []
    if with_yaml:
        parts.append(Syntax(to_yaml(config), "yaml", background_color="default"))
    if result.plan is not None:
        parts += [plan_table(result.plan, config), placement_table(config, result.plan)]
        parts.append(memory_table(forecast(config, result.plan)))
    parts += [Text(f"warning: {line}", style="yellow") for line in result.warnings]
    parts += [Text(f"error: {line}", style="bold red") for line in result.errors]
    if not result.errors:
        parts.append(Text("No errors.", style="green"))
    return Group(*parts)


def plan_table(plan: BatchPlan, config: Config) -> Table:
    """Prompts, samples, mini-batches, micro-batches, optimizer steps and totals."""
    table = _two_columns("What the batch sizes come to")
    table.add_row("prompts an iteration", f"{plan.prompts:,}")
    table.add_row("samples an iteration", f"{plan.samples:,} = {plan.prompts:,} prompts x {plan.n}")
    _add_update(table, "actor", plan.actor)
    if plan.critic is not None:
        _add_update(table, "critic", plan.critic)
    table.add_row("old log-probs", _source_of_old_log_probs(config))
    for name, forward in plan.forwards.items():
        table.add_row(f"{_FORWARD_NAMES[name]}: micro-batches on each rank", _micro_batches(forward))
    unknown = "unknown: the training files were not read"
    table.add_row("training prompts", unknown if plan.train_rows is None else f"{plan.train_rows:,}")
    table.add_row("iterations in an epoch", _number_or(unknown, plan.iterations_per_epoch))
    table.add_row("iterations in the run", _number_or(unknown, plan.iterations))
    if plan.iterations is not None and plan.actor_iterations is not None:
        table.add_row("samples in the run", f"{plan.iterations * plan.samples:,}")
        table.add_row(
            "actor: optimizer steps in the run", f"{plan.actor_iterations * plan.actor.optimizer_steps:,}"
        )
        if plan.critic is not None:
            table.add_row(
                "critic: optimizer steps in the run", f"{plan.iterations * plan.critic.optimizer_steps:,}"
            )
    return table


def placement_table(config: Config, plan: BatchPlan) -> Table:
    """Which model runs where."""
    devices = {"auto": "the GPU if there is one, else the CPU", "cpu": "the CPU", "cuda": "the GPU"}
    placement, on_ray = Placement.from_config(config), runs_on_ray(config)
    table = _two_columns("Placement")
    generator = config.actor_rollout_ref.rollout.name
    names = {
        "ActorRollout": ("log_prob", f"actor and rollout ({generator})"),
        "Actor": ("log_prob", "actor"),
        "Rollout": ("log_prob", f"rollout ({generator})"),
        "RefPolicy": ("ref", "reference"),
        "Critic": ("values", "critic"),
        "RewardModel": ("reward_model", "reward model"),
    }
    for role, pool in placement.roles.items():
        forward, name = names[role]
        if forward in plan.forwards:
            count = placement.ranks(role)
            where = f"{count} process{'es' if count > 1 else ''}, each on {devices[config.trainer.device]}"
            nodes = ", ".join(map(str, placement.pools[pool]))
            table.add_row(name, f"{where}; pool {pool}, by node: {nodes}" if on_ray else "this process")
    return table


def memory_table(memory: Forecast) -> Table:
    """Bytes by purpose."""
    table = _two_columns("Memory of one rank (estimate, at full sequence lengths)")
    for name, size in memory.resident.items():
        table.add_row(name, _size(size))
    for name, size in memory.phases.items():
        table.add_row(f"during {name}", _size(size))
    table.add_section()
    table.add_row("peak: all weights and the largest phase", _size(memory.peak))
    if memory.peak is None:
        table.caption = "unknown: a model that is not in a local folder"
    return table


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table


def _add_update(table: Table, name: str, update: UpdatePlan) -> None:
    table.add_row(
        f"{name}: optimizer steps an iteration",
        f"{update.optimizer_steps:,} = {update.mini_batches:,} mini-batches x {update.epochs} ppo_epochs",
    )
    table.add_row(f"{name}: samples in a mini-batch", f"{update.samples_per_mini_batch:,}")
    ranks = "rank" if update.sharing == 1 else f"{update.sharing} ranks"
    table.add_row(f"{name}: micro-batches of a mini-batch, on each {ranks}", _micro_batches(update))


def _source_of_old_log_probs(config: Config) -> str:
    reason = why_old_log_probs_are_computed_apart(config)
    if reason is None:
        return "from the update: it is one on-policy step"
    return f"from a pass before the update: {reason}"


def _micro_batches(part: UpdatePlan | ForwardPlan) -> str:
    if part.micro_batches is None:
        return f"as many as it takes, of up to {part.micro_batch.max_tokens:,} tokens"
    rows = min(part.micro_batch.rows or part.samples_per_rank, part.samples_per_rank)
    return f"{part.micro_batches:,} of {rows:,} sequences"


def _number_or(otherwise: str, number: int | None) -> str:
    return otherwise if number is None else f"{number:,}"


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


# What is wrong with prompt files, from their footers and the column of data sources; without torch.


def data_problems(config: Config) -> list[str]:
    """One line for everything that is wrong with the files that the run would read."""
    data, scoring = config.data, _Scoring.of(config)
    problems: list[str] = []
    for files, validates in ((data.train_files, False), (data.val_files, True)):
        if config.trainer.val_only and not validates:
            continue
        if not files or any(is_url(file) or not Path(expand(file)).exists() for file in files):
            continue
        try:
            table = read_scoring_columns(files, prompt_key=data.prompt_key, reward_fn_key=data.reward_fn_key)
            check_columns(table, data.prompt_key, data.reward_fn_key)
            if scoring is not None:
                problems += scoring.problems(table, data.reward_fn_key, validates=validates)
        except DataError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


class _Scoring(NamedTuple):
    """What scores the rows: the reward manager of strop without what needs torch."""

    parts: Mapping[str, RewardPart]
    router: Router | None
    """None: a function of the user's own scores every source."""
    has_reward_model: bool
    may_register: bool
    """Whether a library that the run imports may know further sources."""

    @classmethod
    def of(cls, config: Config) -> _Scoring | None:
        """None where that cannot be said: the manager is the user's own, or an option is wrong."""
        rewards = config.reward_model
        if rewards.reward_manager not in ("naive", "prime"):
            return None
        try:
            parts = read_parts(rewards.parts)
            router = None
            if config.custom_reward_function.path is None:
                router = Router(rewards.reward_kwargs.get("scorer_kwargs"))
        except (StropError, AttributeError, TypeError):  # the options may be anything
            return None
        may_register = config.actor_rollout_ref.model.external_lib is not None
        return cls(parts, router, rewards.enable, may_register)

    def problems(self, table: PromptTable, reward_fn_key: str, *, validates: bool) -> Iterator[str]:
        """What a run would say of the rows of ``table``."""
        sources = sources_of(table, reward_fn_key)
        for error in self._unscored(sources, has_reward_model=self.has_reward_model):
            is_unknown = isinstance(error, UnknownSourceError)
            if is_unknown and error.data_source == UNNAMED_SOURCE:
                yield str(no_sources(table, reward_fn_key))
            elif not (is_unknown and self.may_register):
                yield str(error)
        if self.router is None:
            return
        by_model = self.has_reward_model
        if validates:  # by rules alone, where all rows have one
            by_model = by_model and any(self._unscored(sources, has_reward_model=False))
        ruled = {s for s in sources if self.router.is_built_in(s) and self.parts[RULE].weight(s) != 0}
        try:
            require_ground_truths(table, reward_fn_key, ruled, by_model=by_model)
        except DataError as error:
            yield str(error)

    def _unscored(self, sources: set[str], *, has_reward_model: bool) -> Iterator[RewardError]:
        known = [] if self.router is None else self.router.sources
        for source in sorted(sources):
            try:
                require_scored_source(
                    self.parts,
                    source,
                    has_rule=self.router is None or source in known,
                    has_reward_model=has_reward_model,
                    known=known,
                )
            except RewardError as error:
                yield error


# The options of scorers in a configuration, tried before a run; without torch, for ``strop check``.

_SCORER_KWARGS = "reward_model.reward_kwargs.scorer_kwargs"

MANAGER_OPTIONS = (
    "tokenizer",
    "num_examine",
    "compute_score",
    "reward_fn_key",
    "timeout_s",
    "error_score",
    "max_error_rate",
    "num_workers",
    "scorer_kwargs",
    "parts",
    "non_stop_penalty",
    "penalty_reward_value",
    "min_response_length",
    "printer",
)

"""What ``strop.rewards.manager.RewardManager``, which needs torch, takes."""


def option_problems(config: Config) -> list[str]:
    """What is wrong with ``reward_model.reward_kwargs`` and the options of built-in scorers.

    A reward manager of the user's own is not looked at: its arguments are known when it is made.
    """
    rewards, problems = config.reward_model, []
    if rewards.reward_manager in ("naive", "prime"):
        unknown = [name for name in rewards.reward_kwargs if name not in MANAGER_OPTIONS]
        problems += [
            f"reward_model.reward_kwargs.{name}: unknown; reward_model.reward_manager="
            f"{rewards.reward_manager} takes {', '.join(MANAGER_OPTIONS)}"
            for name in unknown
        ]
        if options := rewards.reward_kwargs.get("scorer_kwargs"):
            problems += _scorer_kwargs_problems(options, config.custom_reward_function.path)
    try:
        parts = read_parts(rewards.parts)
    except ConfigError:  # the configuration's own rules tell
        return problems
    for name, part in parts.items():
        if part.scorer in SCORERS:
            problems += _problems_of(BuiltInScorer, part.scorer, part.kwargs, where=f"{KEY}.{name}.kwargs")
    return problems


def _scorer_kwargs_problems(options: Any, custom_path: str | None) -> list[str]:
    if custom_path is not None:
        return [f"{_SCORER_KWARGS} is for the built-in scorers: custom_reward_function.path is set"]
    if not isinstance(options, Mapping) or not all(isinstance(own, Mapping) for own in options.values()):
        return [f"{_SCORER_KWARGS}: found {options!r}, expected data source -> option -> value"]
    return _problems_of(Router, options)


def _problems_of(make: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    try:
        make(*arguments, **options)
    except ConfigError as error:
        return list(error.problems)
    except MissingExtraError as error:
        return [str(error)]
    return []

"""``strop check``: everything wrong with a run's inputs, and what it would do.

Data sets and reward managers are built as a run builds them, so there is no second opinion on what a run
would refuse.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from strop.cli.options import in_options
from strop.cli.train import add_train_arguments, is_word, load_arguments
from strop.cli.without_torch import leave_out_torch, needs_torch
from strop.config.backends import ROLLOUTS
from strop.config.batch_plan import (
    MICRO_BATCHES,
    SUPERVISED_MICRO_BATCH,
    BatchPlan,
    ForwardPlan,
    MicroBatchKeys,
    UpdatePlan,
    keys_of_pass,
)
from strop.config.checks.check import CheckResult, check
from strop.config.checks.keys import changed_from_verl, sizes_in_verl
from strop.config.checks.supervised import OptimizerSteps
from strop.config.identity import value_in
from strop.config.keys import all_keys, value_at
from strop.config.memory.facts import read_model_facts
from strop.config.memory.forecast import Forecast, SampleFiles, forecast, sample_files, supervised_forecast
from strop.config.memory.shapes import PictureBytes
from strop.config.placement import Placement, runs_on_ray, settled
from strop.config.roles import Schedule, is_off_policy, reason_for_old_log_prob_pass
from strop.config.schema import Config, RootConfig
from strop.config.schema.agent import uses_agent
from strop.config.schema.supervised import SupervisedConfig
from strop.config.trees import TREES, tree_of
from strop.config.verl import versions
from strop.errors import Attempts, ConfigError, problems_of
from strop.terminal import literal, table
from strop.trainer.commands import build

if TYPE_CHECKING:
    from rich.syntax import Syntax

    from strop.data.pictures.expand import PromptPictures
    from strop.rewards.base import Example

_FORWARD_NAMES = {
    "log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "reward_model": "reward model",
    "teacher": "teacher",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_train_arguments(parser)
    parser.add_argument(
        "--command", choices=TREES, default="train", help="command whose configuration is checked (train)"
    )
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="check the configuration alone; do not build data sets and reward managers",
    )
    parser.add_argument(
        "--images", action="store_true", help="also decode all pictures, and name those that are damaged"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="also show all tables, and all keys as YAML with the authors of their values",
    )
    parser.add_argument(
        "--diff", action="store_true", help="also show the keys that differ from the defaults"
    )
    parser.add_argument(
        "--time", action="store_true", help="also load the models, and measure how long the run takes"
    )
    known = versions()
    parser.add_argument(
        "--from",
        dest="verl",
        metavar="verl[==VERSION]",
        choices=["verl", *(f"verl=={version}" for version in known)],
        help="also say which keys that are not written mean something else than in that version of verl "
        f"({', '.join(known)}; the last, unless you name one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check and show a configuration; return 2 if there are errors, else 0."""
    tree = TREES[arguments.command]
    try:
        (config, data, batch_in_words), names = load_arguments(tree, arguments)
    except ConfigError as error:
        hint = _of_another_command(arguments)
        if not hint:
            raise
        raise ConfigError(*error.problems, hint) from None
    version = (arguments.verl or "").partition("==")[2] or versions()[-1]
    sizes = sizes_in_verl(config, version) if arguments.verl else []
    if sizes:
        arguments.overrides = [*sizes, *arguments.overrides]
        (config, data, batch_in_words), names = load_arguments(tree, arguments)
    result = check(config, train_rows=data.train_rows)
    warnings, errors, scored, turns = result.warnings, result.errors, None, None
    pictured: list[Pictured] = []
    if errors:  # else all is built, which finds these and more
        errors = [*errors, *(line for error in data.errors for line in problems_of(error))]
    elif not arguments.config_only:
        if arguments.is_process and not arguments.time and not needs_torch(config):
            leave_out_torch()
        found, errors, scored, turns, pictured = check_inputs(config)
        for own in pictured if arguments.images else ():
            errors += own.pictures.damaged()
        warnings = list(dict.fromkeys([*warnings, *found]))
    console = Console(soft_wrap=True)
    alone = " in the configuration alone: data and rewards are not read" if arguments.config_only else ""
    console.print(Text(f"{_verdict(warnings, errors)}{alone}", style="bold red" if errors else "bold green"))
    for kind, lines, style in (("error", errors, "red"), ("warning", warnings, "yellow")):
        console.print(
            Group(*(literal(in_options(f"{kind}: {line}", names), style) for line in lines)), end=""
        )
    if batch_in_words:
        console.print(literal(batch_in_words))
    if arguments.verl:
        lines = [f"checked with the sizes of that version: write {' '.join(sizes)}"] if sizes else []
        lines = [*lines, *changed_from_verl(config, version)] or ["no key that is not written"]
        console.print(
            Group(Text(f"other than in verl {version}:"), *(literal(f"  {line}") for line in lines))
        )
    pictures = PictureBytes.of_all([own.pictures.memory() for own in pictured])
    for name, words in summary(config, result, data.train_rows, pictures).items():
        console.print(literal(f"{name:<8}{words}"))
    for own in pictured:
        console.print(pictures_table(own))
    if scored is not None:
        console.print(reward_table(scored))
    if turns is not None:
        console.print(turns_table(*turns))
    if arguments.time and not errors:
        if not isinstance(config, Config) or config.trainer.val_only:
            raise ConfigError("--time measures runs of reinforcement learning (strop train)")
        from strop.trainer.timing import measured

        logging.getLogger("strop").setLevel(logging.ERROR)  # the warnings are above
        console.print("measuring, with the models loaded ...")
        for line in measured(config):
            console.print(literal(line))
    if arguments.full:
        console.print(tables(result, config, pictures), all_values(config))
    return 2 if errors else 0


def _verdict(warnings: list[str], errors: list[str]) -> str:
    counts = {"error": len(errors), "warning": len(warnings)}
    words = [
        f"{n or 'no'} {name}{'' if n == 1 else 's'}" for name, n in counts.items() if n or name == "error"
    ]
    return ", ".join(words)


def _of_another_command(arguments: argparse.Namespace) -> str:
    """Return which ``--command`` has all keys of the overrides, if the one that is checked has not."""
    given = {text.partition("=")[0].lstrip("+~") for text in arguments.overrides if not is_word(text)}
    fitting = [name for name, tree in TREES.items() if given <= all_keys(tree.schema).keys()]
    if not given or not fitting or arguments.command in fitting:
        return ""
    return f"these keys are those of strop {', '.join(fitting)}: check it with --command {fitting[0]}"


class Pictured(NamedTuple):
    """The pictures of a data set."""

    split: str
    pictures: PromptPictures
    dropped: int
    """Rows that are not used."""
    prompt: str
    """The first prompt with some as the chat template renders it, with these in words."""

    @classmethod
    def of(cls, trainer: Any) -> Iterator[Pictured]:
        """Yield those of training and validation that have some."""
        from strop.data.rl_dataset import all_rows, columns_of

        for split in ("train", "val"):
            loader = getattr(trainer, f"{split}_loader")
            dataset: Any = None if loader is None else all_rows(loader.dataset)
            if (pictures := getattr(dataset, "pictures", None)) is None:
                continue
            rows, prompt = (columns_of(dataset, row) for row in range(len(dataset))), ""
            if first := next((row for row in rows if row["images"].any()), None):
                digests = [digest for digest in first["images"].tolist() if digest]
                prompt = pictures.in_words(trainer.tokenizer.decode(first["input_ids"].tolist()), digests)
            yield cls(split, pictures, len(pictures.images) - len(dataset), prompt)


def check_inputs(
    config: RootConfig,
) -> tuple[list[str], list[str], Example | None, Any, list[Pictured]]:
    """Build tokenizer, data sets and reward managers as a run does, and score one row.

    Returns warnings, errors, the scores of that row (None if nothing scores it before a model loads), its
    turns (see ``strop.trainer.build.two_turns``), and what is known of pictures.
    """
    log = MemoryHandler(capacity=sys.maxsize, flushLevel=sys.maxsize)
    log.setLevel(logging.WARNING)
    logger = logging.getLogger("strop")
    logger.addHandler(log)
    attempt = Attempts()
    try:
        trainer = attempt(lambda: build(config, with_weights=False))
    finally:
        logger.removeHandler(log)
    scored, doubt, turns = None, "", None
    pictured = [] if trainer is None else [*Pictured.of(trainer)]
    if trainer is not None and isinstance(config, Config):
        from strop.trainer.build import try_reward, two_turns

        scored, doubt = attempt(lambda: try_reward(trainer)) or (None, "")
        turns = attempt(lambda: two_turns(trainer))
        trainer.reward_fn.close()
        trainer.val_reward_fn.close()
    warnings = [record.getMessage().removeprefix("warning: ") for record in log.buffer]
    warnings += [doubt] if doubt else []
    errors = attempt.lines
    if isinstance(config, Config):
        for level, text in ROLLOUTS[config.actor_rollout_ref.rollout.name].outside(config):
            (errors if level == "error" else warnings).append(text)
        if (judge := config.reward_model.judge).url is not None and not errors:
            from strop.rewards.judge import reason_of_silence  # takes the time of an HTTP client's import

            warnings += filter(None, [reason_of_silence(judge)])
    return warnings, errors, scored, turns, pictured


def summary(
    config: RootConfig, result: CheckResult, train_rows: int | None, pictures: PictureBytes | None = None
) -> dict[str, str]:
    """Return what the run will do, a line for each subject."""
    data, lines, memory = config.data, {}, None
    model, plan = "actor_rollout_ref.model.path" if isinstance(config, Config) else "model.path", result.plan
    model = value_at(config, model)
    facts = read_model_facts(model)
    size = facts.parameters if facts is not None else None
    lines["model"] = model if size is None else f"{model}, {size / 1e6:,.3g} million parameters"
    rows = "" if train_rows is None else f": {train_rows:,} rows"
    validation = f"validation: {_files(data.val_files)}" if data.val_files else "no validation"
    lines["data"] = f"{_files(data.train_files)}{rows}; {validation}"
    if isinstance(config, Config) and plan is not None:
        lines["model"] += f"; {config.algorithm.adv_estimator} ({config.actor_rollout_ref.rollout.name})"
        if plan.iterations is not None:
            lines["steps"] = f"{plan.iterations:,}; {plan.iterations_per_epoch or 0:,} an epoch"
        samples = f"{plan.samples:,} samples = {plan.prompts:,} prompts x {plan.n}"
        lines["batch"] = f"{samples}, {plan.actor.optimizer_steps:,} optimizer steps"
        memory = forecast(config, plan, pictures=pictures)
    elif isinstance(config, SupervisedConfig):
        if train_rows and not config.trainer.val_only:
            lines["steps"] = str(OptimizerSteps.of(config, train_rows))
        memory = supervised_forecast(config, pictures)
    if memory is not None:
        branches = isinstance(config, Config) and uses_agent(config)
        kind = "estimate without branches of sessions" if branches else "estimate"
        lines["memory"] = f"{_size(memory.peak)} in one process at most ({kind})"
    return {**lines, "run": f"{config.trainer.default_local_dir} (tables and all keys: --full)"}


def _files(files: Sequence[str] | str) -> str:
    names = [files] if isinstance(files, str) else files
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else ", ".join(names)


def reward_table(row: Example) -> Group:
    """Return the scores of a row, with its prompt and the function."""
    names = [(one.what, f"{one.response!r:.34}") for one in row.tried]
    first, second = (max(map(len, column)) for column in zip(*names, strict=True))
    lines = [f"reward  {row.function}", f"        the first row: {' '.join(row.prompt.split()):.57}"]
    for (what, response), one in zip(names, row.tried, strict=True):
        lines.append(f"        {what:<{first}}  {response:<{second}}  {one.in_words():.60}")
    return Group(*map(literal, lines))


def pictures_table(found: Pictured) -> Group:
    """Return what is known of a data set's pictures, and its first prompt with some."""
    prompt = found.prompt.replace("\n", "\\n")
    prompt = prompt if len(prompt) <= 400 else f"{prompt[:300]} ... {prompt[-100:]}"
    dropped = f"; {found.dropped:,} rows dropped" if found.dropped else ""
    lines = f"pictures of {found.split}: {found.pictures}{dropped}", f"        the first prompt: {prompt}"
    return Group(*map(literal, lines))


def turns_table(prompt: str, turns: Sequence[tuple[bool, str]], history: str) -> Group:
    """Return two turns of a row, a line for each of their lines, with the response mask."""
    lines = [literal("turns   after the first prompt: 1 is sampled and trained, 0 is inserted")]
    for mark, text in [(" ", prompt[-200:]), *((str(int(sampled)), text) for sampled, text in turns)]:
        for line in text.splitlines(keepends=True):
            shown = line.replace("\n", "\\n")
            lines.append(literal(f"     {mark}  {shown}", "dim" if mark == "0" else ""))
    return Group(*lines, literal(f"        {history}"))


def tables(result: CheckResult, config: RootConfig, pictures: PictureBytes | None = None) -> Group:
    """Return tables of sizes, placement, memory and disk space, for a rich console."""
    parts: list[RenderableType] = []
    if isinstance(config, Config) and result.plan is not None:
        parts += [plan_table(result.plan, config), placement_table(config, result.plan)]
        if config.trainer.async_steps and not config.trainer.val_only:
            parts.append(schedule_table(config))
        parts.append(memory_table(forecast(config, result.plan, pictures=pictures)))
        if config.trainer.log_rollouts and not config.trainer.val_only:
            parts.append(disk_table(sample_files(config, result.plan)))
    if isinstance(config, SupervisedConfig) and not config.trainer.val_only:
        parts += [supervised_table(config), memory_table(supervised_forecast(config, pictures))]
    return Group(*parts)


def all_values(config: RootConfig) -> Syntax:
    """Return all keys as YAML, each with the author of its value as a comment."""
    from rich.syntax import Syntax  # pygments

    tree, lines = tree_of(type(config)), []
    given, values = (one.model_dump(mode="json") for one in (config, settled(config)))
    for path, key in all_keys(type(config)).items():
        name = path.rpartition(".")[2]
        line = f"{name}:"
        if not key.is_section:
            entry = {name: value_in(values, path)}
            text = yaml.safe_dump(entry, default_flow_style=True, allow_unicode=True, width=math.inf)
            is_given = value_in(given, path) == value_in(values, path)
            line = f"{text.strip()[1:-1]}  # {tree.author(config, path) if is_given else 'this machine'}"
        lines.append("  " * path.count(".") + line)
    return Syntax("\n".join(lines), "yaml", background_color="default")


def plan_table(plan: BatchPlan, config: Config) -> Table:
    """Return a table of prompts, samples, mini-batches, micro-batches, optimizer steps and totals."""
    rows = {
        "prompts per iteration": f"{plan.prompts:,}",
        "samples per iteration": f"{plan.samples:,} = {plan.prompts:,} prompts x {plan.n}",
        **_update_rows("actor", plan.actor, config),
        **(_update_rows("critic", plan.critic, config) if plan.critic is not None else {}),
        "old log-probs": f"from {_old_log_probs(config)}",
    }
    for name, forward in plan.forwards.items():
        words = _micro_batches(forward, config, keys_of_pass(name))
        rows[f"{_FORWARD_NAMES[name]}: micro-batches on each rank"] = words
    totals: dict[str, int | None] = {
        "training prompts": plan.train_rows,
        "iterations per epoch": plan.iterations_per_epoch,
        "iterations in the run": plan.iterations,
    }
    if plan.iterations is not None and plan.actor_iterations is not None:
        totals["samples in the run"] = plan.iterations * plan.samples
        totals["actor: optimizer steps in the run"] = plan.actor_iterations * plan.actor.optimizer_steps
        if plan.critic is not None:
            totals["critic: optimizer steps in the run"] = plan.iterations * plan.critic.optimizer_steps
    unknown = "unknown: the training files were not read"
    rows |= {name: unknown if number is None else f"{number:,}" for name, number in totals.items()}
    return _rows("Batch sizes", rows)


def supervised_table(config: SupervisedConfig) -> Table:
    """Return a table of the rows and micro-batches of an iteration."""
    keys = SUPERVISED_MICRO_BATCH
    if value_at(config, keys.dynamic):
        words = _tokens(value_at(config, keys.max_tokens), config, keys)
    else:
        words = f"{value_at(config, keys.per_gpu)} rows each"
    rows = {"rows per iteration, one optimizer step": f"{config.data.train_batch_size:,}"}
    return _rows("Batch sizes", {**rows, "micro-batches on each rank": words})


def _old_log_probs(config: Config) -> str:
    if config.actor_rollout_ref.actor.use_rollout_log_probs:
        return "the sampler: use_rollout_log_probs=True"
    if reason := reason_for_old_log_prob_pass(config):
        return f"a pass before the update: {reason}"
    if is_off_policy(config):
        weighed = " (rollout_is weighs the loss)" if config.actor_rollout_ref.actor.rollout_is else ""
        return f"the update: it is one step, so every ratio is 1{weighed}"
    return "the update: it is one on-policy step"


def placement_table(config: Config, plan: BatchPlan) -> Table:
    """Return a table of the models and the processes that they run in."""
    devices = {"auto": "the GPU if there is one, else the CPU", "cpu": "the CPU", "cuda": "the GPU"}
    placement, on_ray = Placement.from_config(config), runs_on_ray(config)
    local = "this process" if len(placement.pools) == 1 else "this process, thread of the pool {}"
    rows = {}
    generator = config.actor_rollout_ref.rollout.name
    names = {
        "ActorRollout": ("log_prob", f"actor and rollout ({generator})"),
        "ActorRolloutRef": ("log_prob", f"actor, rollout ({generator}) and reference"),
        "Actor": ("log_prob", "actor"),
        "Rollout": ("log_prob", f"rollout ({generator})"),
        "RefPolicy": ("ref", "reference"),
        "Critic": ("values", "critic"),
        "RewardModel": ("reward_model", "reward model"),
        "Teacher": ("teacher", "teacher"),
    }
    for role, pool in placement.roles.items():
        forward, name = names[role]
        if forward in plan.forwards:
            count = placement.ranks(role)
            where = f"{count} process{'es' if count > 1 else ''}, each on {devices[config.trainer.device]}"
            nodes = ", ".join(map(str, placement.pools[pool]))
            rows[name] = f"{where}; pool {pool}, by node: {nodes}" if on_ray else local.format(pool)
    return _rows("Placement", rows)


def schedule_table(config: Config) -> Table:
    """Return a table of the schedule of generation ahead of training."""
    schedule, steps = Schedule.of(config), config.trainer.async_steps
    facts = read_model_facts(config.actor_rollout_ref.model.path)
    size = None if facts is None or facts.parameters is None else facts.parameters * 4
    rows = {
        "whole batches generated ahead": f"{schedule.ahead}",
        "further batches begun beside them": f"{schedule.beside}",
        "batch b is completed with the policy after update": f"b - {schedule.ahead + 1} (0: the start)",
        # Groups may be carried over.
        "updates between a token and its use, at most": f"{steps + config.algorithm.filter_groups.enable}",
        "versions of the weights in transfer, at most": f"{schedule.ahead + 1}",
        "their memory, in float32 on the CPU": _size(None if size is None else size * (schedule.ahead + 1)),
    }
    return _rows(f"Generation ahead of training: trainer.async_steps={steps}", rows)


def memory_table(memory: Forecast) -> Table:
    sizes = {**memory.resident, **{f"during {name}": size for name, size in memory.phases.items()}}
    sizes["peak: all weights and the largest phase"] = memory.peak
    rows = {name: _size(size) for name, size in sizes.items()}
    unknown = None if memory.peak is not None else "unknown: a model that is not in a local folder"
    return _rows("Memory of one rank (estimate, at full sequence lengths)", rows, caption=unknown)


def disk_table(samples: SampleFiles) -> Table:
    unknown = "unknown: all are kept, of an unknown number of iterations"
    rows = {
        "a file: the samples of one iteration": _size(samples.file),
        "files kept": unknown if samples.files is None else f"{samples.files:,}",
        "at most": _size(None if samples.files is None else samples.files * samples.file),
    }
    return _rows("Samples on disk: rollouts/ (estimate, at full sequence lengths)", rows)


def _rows(title: str, rows: Mapping[str, str], *, caption: str | None = None) -> Table:
    return table(title, ("", ""), rows.items(), show_header=False, caption=caption)


def _update_rows(name: str, update: UpdatePlan, config: Config) -> dict[str, str]:
    steps = f"{update.optimizer_steps:,}"
    ranks = "rank" if update.sharing == 1 else f"{update.sharing} ranks"
    micro_batches = _micro_batches(update, config, MICRO_BATCHES[name])
    return {
        f"{name}: optimizer steps per iteration": f"{steps} = {update.mini_batches:,} mini-batches x "
        f"{update.epochs} ppo_epochs",
        f"{name}: samples in a mini-batch": f"{update.samples_per_mini_batch:,}",
        f"{name}: micro-batches of a mini-batch, on each {ranks}": micro_batches,
    }


def _micro_batches(part: ForwardPlan, config: RootConfig, keys: MicroBatchKeys) -> str:
    if part.micro_batches is None:
        return _tokens(part.micro_batch.max_tokens, config, keys)
    rows = min(part.micro_batch.rows or part.samples_per_rank, part.samples_per_rank)
    return f"{part.micro_batches:,} of {rows:,} sequences"


def _tokens(cap: int | None, config: RootConfig, keys: MicroBatchKeys) -> str:
    tree = tree_of(type(config))
    is_written = config.written is None or tree.written_for(keys.max_tokens, config.written)
    return f"up to {cap:,} tokens each" + ("" if is_written else ", chosen from the memory")


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

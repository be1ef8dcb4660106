"""Preflight check of a configuration across its keys: all errors and warnings in one pass, without torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from strop.config.batch_plan import MICRO_BATCHES, BatchPlan, too_few_rows
from strop.config.checks import agents, inputs, learning, lora, memory, processes, publishing, supervised
from strop.config.checks.finding import Finding, error, warning
from strop.config.checks.keys import check_keys
from strop.config.derived import NEW_LIB, OLD_LIBS
from strop.config.keys import value_at
from strop.config.placement import Placement
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import SupervisedConfig
from strop.errors import Attempts, ConfigError


@dataclass(frozen=True)
class CheckResult:
    """Errors stop the run, warnings do not."""

    errors: list[str]
    warnings: list[str]
    plan: BatchPlan | None
    """None with wrong batch sizes, for a run that only validates, and for a supervised run."""

    def raise_errors(self) -> None:
        """Raise all errors as one `ConfigError`, if there are any."""
        if self.errors:
            raise ConfigError(*self.errors)

    def report(self, logger: logging.Logger) -> None:
        """Log the warnings, then raise the errors."""
        for line in self.warnings:
            logger.warning("warning: %s", line)
        self.raise_errors()


def check(config: RootConfig, *, train_rows: int | None = None) -> CheckResult:
    """Check `config`, whose values are each of the right type, across its keys.

    `train_rows` is the number of prompts in the training files, if known: the plan then has the number of
    iterations.
    """
    rules = [*COMMON_RULES, *(RULES if isinstance(config, Config) else SUPERVISED_RULES)]
    attempt = Attempts()
    if isinstance(config, Config) and attempt(lambda: Placement.from_config(config)) is not None:
        rules += PLACEMENT_RULES
    findings = [finding for rule in rules for finding in rule(config)]
    errors = [text for level, text in findings if level == "error"]
    warnings = [text for level, text in findings if level == "warning"]
    if not isinstance(config, Config) or config.trainer.val_only:
        if train_rows is not None and not config.trainer.val_only:
            if train_rows < config.data.train_batch_size:
                errors.append(too_few_rows(config, train_rows))
            elif isinstance(config, SupervisedConfig):
                steps = supervised.OptimizerSteps.of(config, train_rows)
                warnings += [text for _, text in supervised.few_steps(steps)]
        return CheckResult(errors + attempt.lines, warnings, None)
    try:
        plan = BatchPlan.from_config(config, train_rows=train_rows)
    except ConfigError as problem:
        return CheckResult(errors + problem.problems, warnings, None)
    compared = [*memory.run(config, plan), *memory.share(config, plan)] if not attempt.errors else []
    errors += [text for level, text in compared if level == "error"]
    warnings += [text for level, text in compared if level == "warning"]
    if plan.actor_iterations == 0:
        errors.append(
            f"trainer.critic_warmup={config.trainer.critic_warmup} covers all {plan.iterations} iterations: "
            "the actor would never be trained"
        )
    return CheckResult(errors, warnings, plan)


def deprecated(config: Config) -> Iterator[Finding]:
    """Warn of deprecated keys; refuse one that disagrees with its successor."""
    model = config.actor_rollout_ref.model
    if model.external_libs is not None:
        yield warning(f"{OLD_LIBS} is deprecated: use {NEW_LIB}")
        if model.external_libs != model.external_lib:
            yield error(
                f"{NEW_LIB}={model.external_lib} and the deprecated {OLD_LIBS}={model.external_libs} differ"
            )
    for keys in MICRO_BATCHES.values():
        size = value_at(config, keys.overall)
        if size is not None:
            yield warning(
                f"{keys.overall}={size} is deprecated: use {keys.per_gpu}, which counts sequences per rank"
            )


def notes(config: RootConfig) -> Iterator[Finding]:
    """Name what was read otherwise than it was written."""
    yield from map(warning, config.notes)


Rule = Callable[[Any], Iterator[Finding]]
"""Rule across keys, which yields findings; rules of one key are markers on its field."""

COMMON_RULES: tuple[Rule, ...] = (
    notes,
    check_keys,
    lora.adapters,
    learning.trackers,
    learning.learning_rate,
    learning.balance_loss,
    processes.worker_group,
    processes.restarts,
    processes.back_ends,
    inputs.data_files,
    inputs.chat_template,
    inputs.tokenizers,
    inputs.quantized_models,
    inputs.libraries,
    inputs.resume,
    inputs.run_folder,
    publishing.hub,
)

RULES: tuple[Rule, ...] = (
    learning.pluggable_names,
    learning.reward_parts,
    learning.groups,
    learning.without_reward,
    learning.teachers,
    learning.scaled_kl,
    learning.filtered_groups,
    learning.sampling,
    learning.old_samples,
    learning.sequence_clip_range,
    learning.validation_sampling,
    learning.kl_horizon,
    processes.strategies,
    inputs.models,
    inputs.reward_file,
    inputs.memory,
    inputs.context_windows,
    agents.sessions,
    deprecated,
)

PLACEMENT_RULES: tuple[Rule, ...] = (
    processes.placement,
    processes.generation_ahead,
    processes.back_end_rules,
)

SUPERVISED_RULES: tuple[Rule, ...] = (
    supervised.model,
    supervised.memory,
    memory.supervised,
    processes.back_end_rules,
    supervised.micro_batches,
    supervised.loss,
)

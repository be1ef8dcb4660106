"""Everything that can be said about a configuration before a model is loaded, in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strop.config.batch_plan import BatchPlan
from strop.config.checks import inputs, learning, processes
from strop.config.checks.finding import Rule
from strop.config.checks.keys import unsupported
from strop.config.load import Loaded
from strop.config.schema import Config
from strop.config.trees import NEW_LIB, OLD_LIBS, deprecation_lines
from strop.errors import ConfigError


@dataclass(frozen=True)
class CheckResult:
    """What `check` found; without errors there is a plan, unless the run only validates."""

    errors: list[str]
    warnings: list[str]
    plan: BatchPlan | None

    def raise_errors(self) -> None:
        """All errors as one `ConfigError`, if there are any."""
        if self.errors:
            raise ConfigError(*self.errors)


def check(config: Config, *, train_rows: int | None = None) -> CheckResult:
    """Check `config` across its keys.

    Args:
        config: what `load_config` gave: each value by itself is of the right type.
        train_rows: prompts in the training files, if known: then the plan has the number of iterations.

    Returns:
        Errors that stop the run, warnings that do not (keys without effect, deprecated keys, doubtful
        settings), and the plan, which is None when the batch sizes do not fit one another.
    """
    errors, warnings = unsupported(config)
    for rule in ALL_RULES:
        for finding in rule(config):
            (errors if finding.level == "error" else warnings).append(finding.text)
    model = config.actor_rollout_ref.model
    if model.external_libs is not None and model.external_libs != model.external_lib:
        errors.append(
            f"{NEW_LIB}={model.external_lib} and the deprecated {OLD_LIBS}={model.external_libs} differ"
        )
    warnings += deprecation_lines(config)
    if config.trainer.val_only:
        return CheckResult(errors, warnings, None)
    try:
        plan = BatchPlan.from_config(config, train_rows=train_rows)
    except ConfigError as error:
        return CheckResult(errors + error.problems, warnings, None)
    if plan.actor_iterations == 0:
        errors.append(
            f"trainer.critic_warmup={config.trainer.critic_warmup} covers all {plan.iterations} iterations: "
            f"the actor "
            "would never be trained"
        )
    return CheckResult(errors, warnings, plan)


def check_loaded(
    loaded: Loaded[Config], *, train_rows: int | None = None, more_problems: Iterable[str] = ()
) -> CheckResult:
    """As `check`, with what could not be loaded before it, and `more_problems` after it.

    Findings about a default that stands in place of something wrong are left out.
    """
    if loaded.config is None:
        return CheckResult(loaded.problems, [], None)
    result = check(loaded.config, train_rows=train_rows)
    errors = loaded.problems + loaded.reliable([*result.errors, *more_problems])
    return CheckResult(errors, loaded.reliable(result.warnings), result.plan)


# The rules between keys, each a generator of findings about one matter; `check` runs them all.

ALL_RULES: tuple[Rule, ...] = (
    learning.pluggable_names,
    learning.trackers,
    learning.reward_parts,
    learning.groups,
    learning.kl,
    learning.sampling,
    learning.validation_sampling,
    learning.schedules,
    learning.critic_warmup,
    learning.kl_horizon,
    learning.dual_clip,
    processes.tensor_parallelism,
    processes.batches,
    processes.precision,
    processes.worker_group,
    processes.placement,
    processes.without_effect,
    processes.hybrid_sharding,
    processes.shared_sequences,
    processes.restarts,
    inputs.data_files,
    inputs.models,
    inputs.tokenizer,
    inputs.context_window,
    inputs.custom_reward,
    inputs.resume,
    inputs.run_folder,
    inputs.input_tokenizer,
    inputs.shared_vocabulary,
    inputs.reward_model_context_window,
    inputs.longest_sequence,
)

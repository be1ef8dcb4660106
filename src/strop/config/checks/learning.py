"""Rules about the objective: groups, KL, sampling, and the names of estimators, losses and trackers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

from strop.config.backends import ROLLOUTS
from strop.config.checks.finding import Finding, error, warning
from strop.config.derived import USUAL_ALPHA, usual_rate
from strop.config.memory.facts import read_config_file, read_model_facts
from strop.config.names import (
    OPTIONAL_PACKAGES,
    REWARD_MANAGERS,
    TRACKERS,
    estimators,
    inputs_of,
    is_import_path,
    is_installed,
    missing_module,
    module_of,
    policy_losses,
)
from strop.config.reward_parts import SCORERS, read_parts
from strop.config.roles import has_kl_in_reward, has_reward, is_off_policy, uses_critic, uses_teacher
from strop.config.schema import Config, RootConfig
from strop.config.schema.agent import uses_agent
from strop.config.schema.supervised import SupervisedConfig
from strop.config.schema.teacher import teachers_of
from strop.errors import ConfigError, did_you_mean
from strop.listening import fault_of_token, server_faults
from strop.passed import is_function

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_HIGHEST_OF_ADAPTERS = 5
"""The highest rate of LoRA adapters, relative to the usual one."""
_LARGEST_BALANCE = 0.05
"""Published models have 0.0001 to 0.02, but for gpt-oss with 0.9."""
_WIDEST_SEQUENCE_CLIP = 0.05
"""The ratio of a whole sequence stays nearer to 1 than this; PPO's ranges are from 0.1 on."""


def groups(config: Config) -> Iterator[Finding]:
    """Require more than one answer for estimators that compare the answers to one prompt.

    What an estimator of the user's makes of ``uid`` is not known.
    """
    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if n == 1 and "uid" in inputs_of(name) and has_reward(config) and not config.trainer.val_only:
        alone = (
            f"{_ROLLOUT}.n=1 with algorithm.adv_estimator={name}: the only answer to a prompt has no other "
            "to be compared with"
        )
        if name in estimators():
            yield error(f"{alone}, so every advantage is 0 (expected n >= 2)")
        else:
            yield warning(f"{alone} (expected n >= 2 for an estimator that reads uid)")


def scaled_kl(config: Config) -> Iterator[Finding]:
    """Warn of a KL in the reward that the deviation of a group scales as it scales the scores."""
    algorithm = config.algorithm
    divides = "norm_by_std" in inputs_of(algorithm.adv_estimator)
    if divides and algorithm.norm_adv_by_std_in_grpo and has_kl_in_reward(config) and has_reward(config):
        yield warning(
            f"algorithm.kl_ctrl.kl_coef={algorithm.kl_ctrl.kl_coef:g} with algorithm.adv_estimator="
            f"{algorithm.adv_estimator}: the penalty in the reward is divided by the deviation of its "
            "group's scores, so the closer they are, the more it weighs; put it into the loss with "
            f"{_ACTOR}.use_kl_loss=True, or set algorithm.kl_ctrl.kl_coef=0"
        )


def without_reward(config: Config) -> Iterator[Finding]:
    """Require a teacher, and nothing that compares scores, in a run without a reward."""
    if has_reward(config) or config.trainer.val_only:
        return
    given, algorithm = "reward_model.reward_manager=none", config.algorithm
    if not uses_teacher(config):
        yield error(f"{given}: there is nothing to learn from; set teacher.model.path, or another manager")
    if algorithm.filter_groups.enable:
        yield error(
            f"algorithm.filter_groups.enable=True with {given}: without scores every prompt would be "
            "dropped; set it to False"
        )
    if has_kl_in_reward(config):
        yield error(
            f"algorithm.kl_ctrl.kl_coef={algorithm.kl_ctrl.kl_coef:g} with {given}: there is no reward to "
            f"subtract the penalty from; set it to 0, or {_ACTOR}.use_kl_loss=True"
        )
    whitens = algorithm.adv_estimator == "reinforce_plus_plus"
    if whitens or (algorithm.whiten_advantages and "whiten" in inputs_of(algorithm.adv_estimator)):
        yield error(
            f"algorithm.adv_estimator={algorithm.adv_estimator} with {given}: it whitens advantages, and "
            "those of a teacher would lose their size; set it to grpo"
        )
    elif uses_critic(config):
        yield error(
            f"algorithm.adv_estimator={algorithm.adv_estimator} with {given}: a critic would learn nothing; "
            "set it to grpo"
        )
    if config.reward_model.enable:
        yield error(f"reward_model.enable=True with {given}: its scores are not read; set one of the two")


def teachers(config: Config) -> Iterator[Finding]:
    """Require usable teachers; those on servers know the log-probs of given tokens at temperature 1 alone."""
    try:
        found = teachers_of(config.teacher)
    except ConfigError as problem:
        yield error(str(problem))
        return
    if not any(one.servers for one in found) or config.trainer.val_only:
        return
    temperature = config.actor_rollout_ref.rollout.temperature
    if config.teacher.kl != "sampled":
        yield error(
            f"teacher.kl={config.teacher.kl} with servers: they answer the log-prob of the sampled "
            "token alone; set it to sampled"
        )
    if temperature != 1:
        yield error(
            f"{_ROLLOUT}.temperature={temperature:g} with servers as teachers: their log-probs are of "
            "temperature 1; set it to 1"
        )
    if uses_agent(config):
        yield error(
            "teacher.servers with agent: they judge a row as one sequence, and sessions have branches; set "
            "teacher.model.path"
        )
    http = cast(Any, config.actor_rollout_ref.rollout).http
    token = ("teacher.token_env", config.teacher.token_env)
    for one in found:
        key = "teacher.servers" if one.source is None else f"teacher.by_source.{one.source}.servers"
        faults = server_faults(
            one.servers, *token, is_open=http.open_network, open_key=f"{_ROLLOUT}.http.open_network"
        )
        for fault in faults:
            yield error(f"{key}: {fault}")
    if fault := fault_of_token(*token):
        yield error(fault)


class TrainedModel(NamedTuple):
    """Sections of a model that a run trains, and of its update, with their keys."""

    key: str
    model: Any
    update_key: str
    update: Any


def trained_models(config: RootConfig) -> Iterator[TrainedModel]:
    """Yield the models that this run trains."""
    if isinstance(config, Config):
        policy, critic = config.actor_rollout_ref, config.critic
        yield TrainedModel("actor_rollout_ref.model", policy.model, _ACTOR, policy.actor)
        if uses_critic(config):
            yield TrainedModel("critic.model", critic.model, "critic", critic)
    elif isinstance(config, SupervisedConfig):
        yield TrainedModel("model", config.model, "update", config.update)


def balance_loss(config: RootConfig) -> Iterator[Finding]:
    """Warn of a coefficient of the routers' auxiliary loss next to which the task counts little."""
    for key, model, _, _ in trained_models(config):
        file = read_config_file(model.path) if model.path else {}
        name = "router_aux_loss_coef"
        coefficient = model.override_config.get(name, (file.get("text_config") or file).get(name))
        if isinstance(coefficient, int | float) and coefficient > _LARGEST_BALANCE:
            yield warning(
                f"{key}.path={model.path}: its router_aux_loss_coef={coefficient:g} adds that multiple of "
                "the experts' balance, about 1 for each expert of a token, to the loss, which may count more "
                f"than the task; set {key}.override_config.router_aux_loss_coef=0.001, or 0"
            )


def learning_rate(config: RootConfig) -> Iterator[Finding]:
    """Warn of a rate at which a model of this size changes next to nothing, or LoRA adapters collapse."""
    for key, model, update_key, update in trained_models(config):
        rate, facts = update.optim.lr, read_model_facts(model.path)
        size = facts.parameters if facts is not None else None
        usual, highest = usual_rate(size, model), math.inf
        of_model = f"a model of {(size or 0) / 1e6:.3g} million parameters"
        if model.has_adapters:
            highest = _HIGHEST_OF_ADAPTERS * usual
            of_model = "LoRA adapters" if size is None else f"LoRA adapters of {of_model}"
            if model.lora_adapter_path is None and model.lora_alpha != USUAL_ALPHA:
                of_model += f" with {key}.lora_alpha={model.lora_alpha:g}"
        elif key == "critic.model":
            continue  # the sizes and rates above were found for policies
        if config.trainer.val_only or rate == 0 or usual / 8 <= rate <= highest:
            continue
        optim, warm_up = update.optim, ""
        if optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio == 0:  # a first step moves all weights
            warm_up = f" with {update_key}.optim.lr_warmup_steps=20"
        found = "low for {}, which hardly changes" if rate < usual / 8 else "high for {}, which may collapse"
        yield warning(
            f"{update_key}.optim.lr={rate:g} is {found.format(of_model)} at that rate; "
            f"try {update_key}.optim.lr={usual:.0e}{warm_up}"
        )


def filtered_groups(config: Config) -> Iterator[Finding]:
    """Require several answers to a prompt where groups without a difference are dropped."""
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        yield error(
            f"algorithm.filter_groups.enable=True with {_ROLLOUT}.n=1: one answer differs from no other, so "
            "every prompt would be dropped (expected n >= 2)"
        )


def kl_horizon(config: Config) -> Iterator[Finding]:
    """Require a horizon with which one iteration cannot take the adaptive coefficient to 0."""
    control = config.algorithm.kl_ctrl
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    steers = control.type == "adaptive" and not config.actor_rollout_ref.actor.use_kl_loss
    if steers and samples >= 5 * control.horizon:
        yield error(
            f"algorithm.kl_ctrl.horizon={control.horizon} is too short for {samples} samples per iteration: "
            f"the coefficient could fall to 0 (expected more than {samples // 5})"
        )


def sampling(config: Config) -> Iterator[Finding]:
    """Require a sampler that explores; warn if it is another distribution than the policy."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature == 0 and not config.trainer.val_only:
        yield error(
            f"{_ROLLOUT}.temperature=0: training needs a temperature above 0, by which all log-probs are "
            f"divided; greedy validation is {_ROLLOUT}.val_kwargs.do_sample=False"
        )
    if not rollout.do_sample:
        yield warning(
            f"{_ROLLOUT}.do_sample=False: training takes the likeliest tokens, so the policy explores "
            f"nothing and all {_ROLLOUT}.n answers to a prompt are the same"
        )
        with_sampler = [
            f"{_ACTOR}.{name}"
            for name in ("use_rollout_log_probs", "rollout_is")
            if getattr(config.actor_rollout_ref.actor, name) and not config.trainer.val_only
        ]
        if with_sampler and rollout.temperature != 1:
            yield error(
                f"{_ROLLOUT}.do_sample=False with {_ROLLOUT}.temperature={rollout.temperature:g} and "
                f"{' and '.join(with_sampler)}: log-probs of greedy answers are of temperature 1, so a "
                "policy that has not changed has other ratios than 1; set the temperature to 1"
            )
    narrowed = [
        f"{_ROLLOUT}.{key}" for key, on in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)) if on
    ]
    changing = ROLLOUTS[rollout.name].policy_changing_keys(config)
    narrowed += [f"{_ROLLOUT}.{key}" for key in changing]
    if not narrowed or not rollout.do_sample:
        return
    found = f"{' and '.join(narrowed)}: the sampler is another distribution than the policy that is trained"
    actor, trains = config.actor_rollout_ref.actor, not config.trainer.val_only
    remedy = f"sample from the whole distribution, or set {_ACTOR}.rollout_is=token"
    if trains and actor.use_rollout_log_probs:
        yield error(
            f"{found}, so with {_ACTOR}.use_rollout_log_probs=True a policy that has not changed has other "
            f"ratios than 1; {remedy} and that key to False"
        )
    elif trains and config.trainer.async_steps and actor.rollout_is is None:
        yield error(
            f"{found}, and with trainer.async_steps={config.trainer.async_steps} it is an older one besides; "
            f"{remedy}"
        )
    else:
        yield warning(f"{found}; the sampler's own log-probs are recorded (training/rollout_probs_diff_mean)")


def old_samples(config: Config) -> Iterator[Finding]:
    """Warn if samples of an older policy are learned from as if they were of the one before the update."""
    actor, filters = config.actor_rollout_ref.actor, config.algorithm.filter_groups.enable
    corrected = actor.rollout_is is not None or actor.use_rollout_log_probs
    if not is_off_policy(config) or corrected or config.trainer.val_only:
        return
    steps, age = config.trainer.async_steps, config.trainer.async_steps + filters
    given = f"trainer.async_steps={steps}" + (" with algorithm.filter_groups.enable=True" if filters else "")
    yield warning(
        f"{given}: samples are of a policy that is up to {age} iteration{'s' if age > 1 else ''} old, and "
        f"nothing corrects for it; set {_ACTOR}.rollout_is=token, which weighs them, or "
        f"{_ACTOR}.use_rollout_log_probs=True, which takes the ratio against the sampler"
    )


def sequence_clip_range(config: Config) -> Iterator[Finding]:
    """Warn if ratios of whole sequences have a clip range that none reaches, or another aggregation."""
    actor = config.actor_rollout_ref.actor
    bounds = {f"clip_ratio_{end}": getattr(actor, f"clip_ratio_{end}") for end in ("low", "high")}
    bounds = {key: actor.clip_ratio if bound is None else bound for key, bound in bounds.items()}
    wide = [f"{key}={bound}" for key, bound in bounds.items() if bound > _WIDEST_SEQUENCE_CLIP]
    if actor.policy_loss == "gspo" and wide:
        yield warning(
            f"{_ACTOR}.policy_loss=gspo with {' and '.join(wide)}: the ratio of a whole sequence hardly "
            "leaves 1, so nothing is clipped; set clip_ratio_low=3e-4, clip_ratio_high=4e-4 and "
            "loss_agg_mode=seq-mean-token-mean, as in its paper"
        )
    elif actor.policy_loss == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        yield warning(
            f"{_ACTOR}.policy_loss=gspo with loss_agg_mode={actor.loss_agg_mode}: its paper has "
            "seq-mean-token-mean, and verl computes that whatever the key says"
        )


def validation_sampling(config: Config) -> Iterator[Finding]:
    """Warn if several answers to a validation prompt are all the same."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield warning(
            f"{_ROLLOUT}.val_kwargs.n={val.n} greedy answers are all the same; set "
            f"val_kwargs.do_sample=True and val_kwargs.temperature above 0"
        )


_NOT_IN_A_WANDB_PROJECT = re.compile(r"[/\\#?%:]")


def pluggable_names(config: Config) -> Iterator[Finding]:
    """Require an estimator, a policy loss and a reward manager that are built in or importable."""
    yield from known_name("algorithm.adv_estimator", config.algorithm.adv_estimator, estimators())
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    yield from known_name("actor_rollout_ref.actor.policy_loss", policy_loss, policy_losses())
    yield from known_name("reward_model.reward_manager", config.reward_model.reward_manager, REWARD_MANAGERS)


def trackers(config: RootConfig) -> Iterator[Finding]:
    """Require known trackers with their packages, and names of the run that suit them."""
    trainer = config.trainer
    for name in trainer.logger:
        yield from known_name("trainer.logger", name, TRACKERS)
        if name in OPTIONAL_PACKAGES and not is_installed(name):
            yield error(
                f"trainer.logger={name}: the package {name} is not installed: "
                f"pip install 'strop[{name}]', or leave it out, as in trainer.logger=[console]"
            )
    if "wandb" in trainer.logger and _NOT_IN_A_WANDB_PROJECT.search(trainer.project_name):
        yield error(f"trainer.project_name={trainer.project_name}: wandb allows none of / \\ # ? % : in it")


def reward_parts(config: Config) -> Iterator[Finding]:
    """Require weights and known scorers for the parts of a score."""
    rewards = config.reward_model
    try:
        parts = read_parts(rewards.parts)
    except ConfigError as problem:
        for line in problem.problems:
            yield error(line)
        return
    for name, part in parts.items():
        if part.scorer is not None:
            yield from known_name(f"reward_model.parts.{name}.scorer", part.scorer, SCORERS)
    yield from _judge(rewards.judge)
    if "reward_model" in rewards.parts and not rewards.enable:
        yield warning("reward_model.parts.reward_model has no effect: reward_model.enable=False")


def _judge(judge: Any) -> Iterator[Finding]:
    """Require an address and a scale of the judge."""
    key = "reward_model.judge"
    if judge.url is None:
        return
    token = (f"{key}.token_env", judge.token_env)
    for fault in server_faults([judge.url], *token):
        yield error(f"{key}.url: {fault}")
    if fault := fault_of_token(*token):
        yield error(fault)
    if not judge.scale[0] < judge.scale[1]:
        yield error(f"{key}.scale={judge.scale}: expected the lowest number and then the highest")


def known_name(key: str, name: str, known: Collection[str]) -> Iterator[Finding]:
    """Require one of the ``known`` names, an import path, or a function of the program."""
    if name in known or is_function(name):
        return
    if not is_import_path(name):
        own = "your own by its import path, package.module:name"
        yield error(f"{key}={name}: unknown{did_you_mean(name, known)} (known: {', '.join(known)}; {own})")
        return
    module = module_of(name)
    if module != "__main__" and (missing := missing_module(module)):
        yield error(f"{key}={name}: there is no module {missing}; is its folder on PYTHONPATH?")

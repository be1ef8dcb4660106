"""Rules about what is learnt: groups, KL, sampling, schedules."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.names import ESTIMATOR_NEEDS, needs_critic
from strop.config.placement import KEEPS_THE_POLICY, extra_sampling
from strop.config.rules.finding import Finding, error, warning
from strop.config.schema import Config
from strop.config.schema.shared import OptimConfig

_ROLLOUT = "actor_rollout_ref.rollout"


def groups(config: Config) -> Iterator[Finding]:
    """Estimators that compare the answers to one prompt need more than one answer."""
    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if n > 1 or "uid" not in ESTIMATOR_NEEDS.get(name, ()):
        return
    if name == "rloo":
        yield error(
            f"{_ROLLOUT}.n={n} with algorithm.adv_estimator=rloo: the only answer to a prompt has no other "
            f"to be "
            "compared with, so every advantage is 0 (expected n >= 2)"
        )
    else:
        yield warning(
            f"{_ROLLOUT}.n={n} with algorithm.adv_estimator={name}: a group of one has no mean to compare "
            f"with; the "
            "score itself is the advantage (usual: n >= 4)"
        )


def kl(config: Config) -> Iterator[Finding]:
    """The adaptive controller has something to steer."""
    control, use_kl_loss = config.algorithm.kl_ctrl, config.actor_rollout_ref.actor.use_kl_loss
    if control.type == "adaptive" and use_kl_loss:
        yield warning(
            "algorithm.kl_ctrl.type=adaptive has no effect with actor_rollout_ref.actor.use_kl_loss=True: "
            "the KL is in "
            "the loss, with the fixed weight kl_loss_coef"
        )
    elif control.type == "adaptive" and control.kl_coef == 0:
        yield warning(
            "algorithm.kl_ctrl.type=adaptive has no effect with algorithm.kl_ctrl.kl_coef=0: it scales the "
            "weight"
        )


def kl_horizon(config: Config) -> Iterator[Finding]:
    """One iteration must not be able to take the adaptive coefficient to 0."""
    control, samples = (
        config.algorithm.kl_ctrl,
        config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
    )
    steers = control.type == "adaptive" and not config.actor_rollout_ref.actor.use_kl_loss
    if steers and samples >= 5 * control.horizon:
        yield error(
            f"algorithm.kl_ctrl.horizon={control.horizon} is too short for {samples} samples an iteration: "
            f"the coefficient could fall to 0 (expected more than {samples // 5})"
        )


def dual_clip(config: Config) -> Iterator[Finding]:
    """CISPO has no second clip."""
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss == "cispo" and actor.clip_ratio_c is not None:
        yield error(
            f"actor_rollout_ref.actor.clip_ratio_c={actor.clip_ratio_c} with policy_loss=cispo, which has no "
            "dual clip (expected null)"
        )


def sampling(config: Config) -> Iterator[Finding]:
    """The sampler explores, and is the policy that is trained."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature == 0 and not config.trainer.val_only:
        yield error(
            f"{_ROLLOUT}.temperature=0: training needs a temperature above 0, which all log-probs are "
            f"divided by; greedy "
            f"validation is {_ROLLOUT}.val_kwargs.do_sample=False"
        )
    if not rollout.do_sample:
        yield warning(
            f"{_ROLLOUT}.do_sample=False: training takes the likeliest tokens, so the policy explores "
            f"nothing and all "
            f"{_ROLLOUT}.n answers to a prompt are the same"
        )
    narrowed = [
        f"{_ROLLOUT}.{key}" for key, on in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)) if on
    ]
    if rollout.name == "vllm":
        narrowed += [f"{_ROLLOUT}.{key}" for key in extra_sampling(config) if key not in KEEPS_THE_POLICY]
    if narrowed and rollout.do_sample:
        yield warning(
            f"{' and '.join(narrowed)}: the sampler is another distribution than the policy that is "
            f"trained; the "
            "sampler's own log-probs are recorded (training/rollout_probs_diff_mean)"
        )


def validation_sampling(config: Config) -> Iterator[Finding]:
    """Several answers to a validation prompt differ."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield warning(
            f"{_ROLLOUT}.val_kwargs.n={val.n} greedy answers are all the same; set "
            f"val_kwargs.do_sample=True and "
            "val_kwargs.temperature above 0"
        )
    elif val.do_sample and val.temperature == 0:
        yield warning(f"{_ROLLOUT}.val_kwargs.do_sample=True with temperature=0 is greedy")


def schedules(config: Config) -> Iterator[Finding]:
    """A floor of the learning rate has a decay to end."""
    sections = [("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim)]
    if needs_critic(config.algorithm.adv_estimator):
        sections.append(("critic", config.critic.optim))
    for section, optim in sections:
        yield from schedule(section, optim)


def schedule(section: str, optim: OptimConfig) -> Iterator[Finding]:
    """The learning rate of the update that `section` names."""
    if optim.min_lr_ratio is not None and optim.warmup_style == "constant":
        yield warning(
            f"{section}.optim.min_lr_ratio={optim.min_lr_ratio} has no effect with warmup_style=constant "
            "(cosine and linear decay to it)"
        )


def critic_warmup(config: Config) -> Iterator[Finding]:
    """The critic's head start needs a critic."""
    steps, name = config.trainer.critic_warmup, config.algorithm.adv_estimator
    if steps and not needs_critic(name):
        yield warning(
            f"trainer.critic_warmup={steps} has no effect: algorithm.adv_estimator={name} has no critic"
        )

"""PPO and its relatives: ``collect`` samples with the current policy, ``learn`` from them.

``PPO`` sees models only through worker groups, so the same code drives models in this process and on a
cluster. It reads no state of the loop: the iteration is an argument, so a loop may collect the next batch
while it learns from this one, if the rollout has a separate pool and weights are sent between updates. Its
only state is the KL controller, which ``learn`` updates, and the list of pictures that the groups hold.
``strop.trainer.ray_trainer`` runs the loop.

Shapes: B samples (prompts x rollout.n), T response tokens; seeds [P, N] of P prompts, N samples of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from strop.algorithms.advantages import estimate_columns, get_estimator
from strop.algorithms.aggregation import zero_masked
from strop.algorithms.kl import apply_kl_penalty, kl_penalty, make_kl_controller, mean_sequence_kl
from strop.algorithms.policy_loss import extra_inputs, get_policy_loss
from strop.algorithms.registry import required_parameters
from strop.columns import TEACHER_COLUMNS
from strop.config.roles import (
    has_kl_in_reward,
    has_reward,
    is_off_policy,
    reason_for_old_log_prob_pass,
    reason_updates_change_log_probs,
    teaches_by_advantages,
    uses_full_kl,
    uses_reference,
)
from strop.config.schema import Config
from strop.controller.group import Future
from strop.errors import TrainingError
from strop.files import crash_point
from strop.protocol import DataProto
from strop.rewards.base import Reward
from strop.rewards.reward_output import ScoreCheck
from strop.trainer.metrics import (
    PhaseTimer,
    batch_metrics,
    critic_metrics,
    objective_metrics,
    policy_metrics,
    sampler_metrics,
)
from strop.trainer.progress import Progress
from strop.trainer.scores import PendingScores, Samples, require_finite
from strop.trainer.seeds import sample_seeds
from strop.trainer.sent_pictures import SentPictures
from strop.trainer.updates import PendingUpdates, mini_batches
from strop.trainer.weight_sync import WeightSync

if TYPE_CHECKING:
    from torch import Tensor

_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
_ACTOR_OPTIONAL = ("old_log_probs", "ref_log_prob", "ref_hidden", *TEACHER_COLUMNS)
_EVALUATED = ("old_log_probs", "ref_log_prob", "values")


class Groups(NamedTuple):
    """Worker groups of a run; ``rollout``, ``ref`` and ``teacher`` may be the actor's group."""

    actor: Any
    rollout: Any
    ref: Any = None
    critic: Any = None
    reward_model: Any = None
    teacher: Any = None


class _Sampling(NamedTuple):
    """A call of the rollout in flight, and the scores of its samples."""

    call: Future
    scores: PendingScores
    received: Callable[[DataProto], None]

    def finish(self, timer: PhaseTimer, phase: str) -> DataProto:
        """Wait for the samples, and hand them to the scorers."""
        with timer.phase(phase):
            batch = self.call.get()
        self.received(batch)
        with timer.phase("reward"):
            self.scores.complete(batch)
        return batch


def require_samples(batch: DataProto) -> None:
    """Raise ``TrainingError``, with the first cause, if no session of a batch has a sampled token."""
    if "n_branches" in batch and not batch.batch["response_mask"].any():
        causes = [json.loads(text).get("error", "") for text in batch.non_tensor_batch["conversation"]]
        first = next(filter(None, causes), "no program asked for an answer")
        raise TrainingError(f"no session of the batch has a sampled token: {first}")


class Generation(NamedTuple):
    """A batch of samples that is being generated."""

    loading: list[Future]
    """Calls that load the weights."""
    sampled: _Sampling
    greedy: _Sampling | None
    """The greedy responses, for ReMax."""
    timer: PhaseTimer

    def is_done(self) -> bool:
        """Return True if ``PPO.finish`` will not wait."""
        return self.sampled.call.is_done() and (self.greedy is None or self.greedy.call.is_done())

    def cancel(self) -> None:
        """Cancel scoring; the scores will not be read."""
        for sampling in (self.sampled, self.greedy):
            if sampling is not None:
                sampling.scores.cancel()


def loss_inputs(config: Config) -> list[str]:
    """Return the further columns that the objective takes; ``ConfigError`` if this run lacks one."""
    has_critic = "values" in required_parameters(get_estimator(config.algorithm.adv_estimator))
    actor = config.actor_rollout_ref.actor
    computed = {
        "values": has_critic,
        "ref_log_prob": uses_reference(config),
        "rollout_is_weights": actor.rollout_is is not None,
    }
    absent = [name for name, found in computed.items() if not found]
    of_sampler = ["rollout_log_probs"] if actor.rollout_is or actor.use_rollout_log_probs else []
    policy_loss = get_policy_loss(actor.policy_loss, actor.policy_loss_kwargs, absent=absent)
    return [*of_sampler, *extra_inputs(policy_loss)]


def _with_inputs(batch: DataProto, *names: str) -> DataProto:
    """Return the columns of the models' passes and those of these names."""
    optional = (name for name in ("follows", "images", "images_at") if name in batch.batch)
    return batch.select(*_MODEL_INPUTS, *optional, *names)


def _require_finite_columns(batch: DataProto) -> None:
    """Raise ``TrainingError`` for a log-prob or value of a sampled token that is NaN or infinite.

    A token of probability 0 under two policies has no ratio: its loss would be NaN, and every step skipped.
    """
    for name in _EVALUATED:
        if name in batch.batch:
            require_finite(name, zero_masked(batch.batch[name], batch.batch["response_mask"]), batch)


class PPO:
    """The algorithm over worker groups. Iterations count from 1.

    Args:
        groups: those that the configuration needs: ``ref`` for a KL term, ``critic`` for values.
        weights: brings the rollout to the current policy before it generates.
        total_iterations: length of the run, for schedules.
    """

    def __init__(
        self, config: Config, groups: Groups, reward_fn: Reward, weights: WeightSync, *, total_iterations: int
    ) -> None:
        self.config, self.groups, self.reward_fn, self.weights = config, groups, reward_fn, weights
        self.total_iterations = total_iterations
        self.critic_warmup = 0 if groups.critic is None else config.trainer.critic_warmup
        """Iterations before the actor's first update."""
        self.before_update: Callable[[], None] = lambda: None
        """Called when a model is about to change."""
        self._sent_pictures = SentPictures(groups)
        self.progress = Progress(config)
        limits = config.reward_model
        self._score_check = ScoreCheck(error_score=limits.error_score, max_error_rate=limits.max_error_rate)
        self.estimator = get_estimator(config.algorithm.adv_estimator)
        self._estimator_needs = required_parameters(self.estimator)
        self._loss_inputs = [] if config.trainer.val_only else loss_inputs(config)
        control = config.algorithm.kl_ctrl
        self.kl_controller = make_kl_controller(
            control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon
        )
        self.teaches_by_advantages, self.has_reward = teaches_by_advantages(config), has_reward(config)
        self._teachers = [*config.teacher.by_source]
        self.use_reference = uses_reference(config)
        self.kl_in_reward = has_kl_in_reward(config)
        self.sampler_is_old = config.actor_rollout_ref.actor.use_rollout_log_probs
        # A full KL in the loss alone needs no pass before the update.
        self.full_kl = uses_full_kl(config) and not self.sampler_is_old
        ahead = config.trainer.async_steps > 0
        # ahead, the driver waits for a part of the generation only; the rollout reports the time of all
        self._phases = ("wait_samples", "wait_samples") if ahead else ("gen", "gen_greedy")
        self.is_one_step = (
            reason_for_old_log_prob_pass(config) is None and reason_updates_change_log_probs(config) is None
        )

    def collect(self, prompts: DataProto, iteration: int) -> Samples:
        """Generate ``rollout.n`` responses to each prompt; their scores are computed in the background."""
        generation = self.start(prompts, iteration)
        try:
            return self.finish(generation)
        except BaseException:
            generation.cancel()
            raise

    def start(self, prompts: DataProto, batch: int) -> Generation:
        """Start to generate batch number ``batch`` with the current policy, and to score finished samples.

        Waits for nothing where the rollout has a separate pool and ``weights`` are sent ahead.
        """
        prompts, seeds_PN = self.named(prompts, batch), self.seeds(batch, len(prompts))
        self._sent_pictures.send(prompts, batch)
        loading = self.weights.to_rollout(timer := PhaseTimer(self.progress.phases))
        # a numbered batch has rollout_versions; without a number all samples are of one version
        number = batch if is_off_policy(self.config) else None
        request = self._request(prompts, seeds_PN, "train", number)
        sampled = self._start(request, batch, timer, self._phases[0])
        greedy = None
        if "baseline_scores" in self._estimator_needs:  # ReMax: the score of the greedy response
            with sampled.scores.cancelled_on_error():
                # one response each, of which the seed is not used
                request = self._request(prompts, seeds_PN[:, :1], "greedy", number)
                greedy = self._start(request, batch, timer, self._phases[1])
        return Generation(loading, sampled, greedy, timer)

    def finish(self, generation: Generation, *, timer: PhaseTimer | None = None) -> Samples:
        """Wait for what ``start`` began; ``timer`` gets the time, None: the batch's own.

        After an interrupt it may be called again: a checkpoint may need the samples.
        """
        loading, sampled, greedy, own = generation
        timer = own if timer is None else timer
        with timer.phase(self._phases[0]):
            for call in loading:
                call.get()
        batch = sampled.finish(timer, self._phases[0])
        require_samples(batch)
        if greedy is not None:
            times = greedy.finish(timer, self._phases[1]).meta_info.get("generation")
            batch.meta_info["generation_greedy"] = times
        return Samples(batch, sampled.scores, own, None if greedy is None else greedy.scores)

    def admit(self, prompts: DataProto, batch: int) -> Future:
        """Send the prompts of a batch to the rollout, which generates it with batches started earlier."""
        self._sent_pictures.send(prompts, batch)
        request = self._request(self.named(prompts, batch), self.seeds(batch, len(prompts)), "train", batch)
        return self.groups.rollout.admit_prompts.start(request)

    def seeds(self, batch: int, n_prompts: int) -> Tensor:
        """Return the seeds [n_prompts, n] of the samples of batch number ``batch``."""
        n = self.config.actor_rollout_ref.rollout.n
        return sample_seeds(self.config.trainer.seed, "rollout", batch, n_prompts, n)

    @staticmethod
    def named(prompts: DataProto, batch: int) -> DataProto:
        """Add the column ``uid``, the name of each prompt of batch number ``batch``."""
        # unique in the run; a resume finds the prompt of a saved sample by it (Pipeline._load)
        uids = [f"{batch}-{row}" for row in range(len(prompts))]
        return prompts.union(DataProto.from_dict(non_tensors={"uid": uids}))

    def learn(self, samples: Samples, iteration: int) -> tuple[DataProto, dict[str, float]]:
        """Compute advantages and update critic and actor; returns the finished batch and its metrics."""
        uids = samples.batch.non_tensor_batch["uid"]
        newest = max(
            int(uid.partition("-")[0]) for uid in uids
        )  # of the batches, which are complete in order
        # again: samples of a checkpoint were asked for in another process
        self._sent_pictures.send(samples.batch, newest)
        timer, trains_actor = samples.timer, self.trains_actor(iteration)
        # The forward pass of the only step is of the policy before it: log-probs and entropies are recorded.
        recorded = self.is_one_step and trains_actor
        # now: estimate_advantages updates the controller after this batch's penalty
        beta = self.kl_controller.value if self.kl_in_reward else 0.0

        if self._teachers:
            samples.batch = self._with_teachers(samples.batch)
        needs_pass = not (recorded or self.sampler_is_old)
        evaluation = self._start_evaluation(samples.batch, timer, with_old_log_probs=needs_pass)
        with timer.phase("reward"):  # the scorers' last samples, while models evaluate the batch
            batch = samples.scored()
        batch = self._finish_evaluation(batch, evaluation, timer)
        with timer.phase("adv"):
            batch = self.estimate_advantages(batch, beta)
        # both are started before either is awaited: in separate pools they run at the same time
        critic = self.start_critic_update(batch, timer, iteration) if self.groups.critic is not None else None
        crash_point("update", iteration)
        actor = self.start_actor_update(batch, timer, iteration, recorded) if trains_actor else None
        # on the driver, while the workers update; recorded entropies come with the update
        metrics = {} if recorded else self.batch_metrics(batch, beta)
        if critic is not None:
            with timer.phase("update_critic"):
                metrics |= critic_metrics(critic.get()[0])
        if actor is not None:
            with timer.phase("update_actor"):
                update, columns = actor.get()
            batch = batch.union(columns)
            metrics |= policy_metrics(update)
        else:
            metrics["lr"] = 0.0  # the critic warms up: nothing moves the policy
        if recorded:
            _require_finite_columns(batch)  # the step has skipped a gradient that is not finite
            metrics |= self.batch_metrics(batch, beta)
        self._sent_pictures.drop(newest)
        return batch, metrics

    def _with_teachers(self, batch: DataProto) -> DataProto:
        """Add the column ``teacher``: the number of each row's teacher in ``teacher.by_source``."""
        sources = batch.non_tensor_batch[self.config.data.reward_fn_key]
        numbers = torch.tensor([self._teachers.index(source) for source in sources])
        mask_BT = batch.batch["response_mask"]
        return batch.union(DataProto({"teacher": numbers[:, None].expand(mask_BT.shape).contiguous()}))

    def trains_actor(self, iteration: int) -> bool:
        """Return True once the critic's warm-up is over."""
        return iteration > self.critic_warmup

    def _start(self, request: DataProto, batch: int, timer: PhaseTimer, phase: str) -> _Sampling:
        n, reward_model = request.batch["seeds"].shape[1], self.groups.reward_model
        scores = PendingScores(request, n, self.reward_fn, reward_model, self._score_check)
        advanced = self.progress.generating(n * len(request))
        callbacks = {"finished": scores.finished, "advanced": advanced}
        with scores.cancelled_on_error(), timer.phase(phase):
            call = self.groups.rollout.generate_sequences.start(request, **callbacks)
        return _Sampling(call, scores, partial(self._sent_pictures.send, number=batch))

    def generate(
        self,
        prompts: DataProto,
        seeds_PN: Tensor,
        timer: PhaseTimer,
        *,
        mode: str,
        **callbacks: Any,
    ) -> DataProto:
        """Generate with the current policy. ``mode``: ``train``, ``greedy`` or ``validate``."""
        for call in self.weights.to_rollout(timer):
            call.get()
        self._sent_pictures.send(prompts)
        batch = self.groups.rollout.generate_sequences(self._request(prompts, seeds_PN, mode), **callbacks)
        self._sent_pictures.send(batch)  # a reward model reads those of turns
        return batch

    def _request(
        self, prompts: DataProto, seeds_PN: Tensor, mode: str, batch: int | None = None
    ) -> DataProto:
        meta_info = {**prompts.meta_info, "mode": mode, "weights_version": self.weights.version}
        if batch is not None:
            meta_info["batch"] = batch
        return DataProto({**prompts.batch, "seeds": seeds_PN}, prompts.non_tensor_batch, meta_info)

    def _start_evaluation(
        self, batch: DataProto, timer: PhaseTimer, *, with_old_log_probs: bool
    ) -> dict[str, Future]:
        """Start the forward passes over the samples, by phase; groups in different pools run concurrently."""
        inputs = _with_inputs(batch)
        given = dict.fromkeys(("ref", "old_log_prob", "values"), inputs)
        if self.groups.teacher is not None:
            given["teacher"] = _with_inputs(batch, *(("teacher",) if "teacher" in batch else ()))
        methods = {}
        if self.use_reference:
            methods["ref"] = self.groups.ref.compute_ref_log_prob
        if with_old_log_probs and not self.full_kl:
            methods["old_log_prob"] = self.groups.actor.compute_log_prob
        if self.groups.teacher is not None:
            methods["teacher"] = self.groups.teacher.compute_teacher
        if self.groups.critic is not None:
            methods["values"] = self.groups.critic.compute_values
        calls = {}
        for phase, method in methods.items():
            with timer.phase(phase):
                calls[phase] = method.start(given[phase])
        return calls

    def _finish_evaluation(self, batch: DataProto, calls: dict[str, Future], timer: PhaseTimer) -> DataProto:
        """Add log-probs, entropies and values to the batch."""
        for phase, call in calls.items():
            with timer.phase(phase):
                batch = batch.union(call.get())
        if self.full_kl:  # the actor compares its distributions with those of the reference's hidden states
            with timer.phase("old_log_prob"):
                inputs = _with_inputs(batch, "ref_hidden")
                batch = batch.union(self.groups.actor.compute_log_prob(inputs))
        _require_finite_columns(batch)
        return batch

    def estimate_advantages(self, batch: DataProto, beta: float) -> DataProto:
        """Compute rewards with the KL penalty, advantages and returns, on the driver.

        r_t = score_t - ``beta`` kl_t; no KL without ``has_kl_in_reward``. Raises ``TrainingError`` for
        advantages that are not finite.
        """
        columns, mask_BT = dict(batch.batch), batch.batch["response_mask"]
        columns["token_level_rewards"] = columns["token_level_scores"]
        if self.kl_in_reward:
            columns["kl"] = self._kl(columns)
            columns["token_level_rewards"] = apply_kl_penalty(
                columns["token_level_scores"], columns["kl"], mask_BT, beta
            )
            self.kl_controller.update(mean_sequence_kl(columns["kl"], mask_BT).item(), len(mask_BT))
        columns["advantages"], columns["returns"] = self._estimate(columns, batch)
        if self.teaches_by_advantages:
            old_BT = columns["rollout_log_probs" if self.sampler_is_old else "old_log_probs"]
            columns["teacher_kl"] = kl_penalty(old_BT, columns["teacher_log_prob"], "k1", mask_BT)
            # after normalization, which would change its weight from batch to batch
            columns["advantages"] = columns["advantages"] - self.config.teacher.coef * columns["teacher_kl"]
        require_finite("advantages", columns["advantages"], batch)
        return DataProto(columns, batch.non_tensor_batch, batch.meta_info)

    def _estimate(self, columns: dict[str, Tensor], batch: DataProto) -> tuple[Tensor, Tensor]:
        """Return advantages and returns [B, T]; without a reward 0."""
        algorithm = self.config.algorithm
        if not self.has_reward:
            zeros_BT = torch.zeros_like(columns["response_mask"], dtype=torch.float32)
            return zeros_BT, columns["token_level_rewards"]
        return estimate_columns(
            self.estimator,
            columns,
            batch.non_tensor_batch["uid"],
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            whiten=algorithm.whiten_advantages,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        )

    def _kl(self, columns: dict[str, Tensor]) -> Tensor:
        """Return the KL [B, T] to the reference by the estimator ``algorithm.kl_penalty``."""
        kind = self.config.algorithm.kl_penalty
        if kind == "full":
            return columns["full_kl"]
        old_BT = columns["rollout_log_probs" if self.sampler_is_old else "old_log_probs"]
        return kl_penalty(old_BT, columns["ref_log_prob"], kind, columns["response_mask"])

    def start_critic_update(self, batch: DataProto, timer: PhaseTimer, iteration: int) -> PendingUpdates:
        section = self.config.critic
        self.before_update()
        with timer.phase("update_critic"):
            parts = self._mini_batches(_with_inputs(batch, "values", "returns"), section, "critic", iteration)
            update = self.groups.critic.update_critic
            return PendingUpdates(update, parts, loss_agg_mode=section.loss_agg_mode)

    def start_actor_update(
        self, batch: DataProto, timer: PhaseTimer, iteration: int, recorded: bool
    ) -> PendingUpdates:
        section, actor = self.config.actor_rollout_ref.actor, self.groups.actor
        self.before_update()
        optional = [name for name in dict.fromkeys((*_ACTOR_OPTIONAL, *self._loss_inputs)) if name in batch]
        with timer.phase("update_actor"):
            # Ratios of the samples that are written down: new log-probs against the old ones.
            record = not recorded and self.writes_samples(iteration)
            inputs = _with_inputs(batch, "advantages", *optional)
            parts = self._mini_batches(inputs, section, "actor", iteration, record=record)
            update = actor.update_actor_on_policy if recorded else actor.update_actor
            return PendingUpdates(update, parts, loss_agg_mode=section.loss_agg_mode)

    def writes_samples(self, iteration: int) -> bool:
        """Return True if the samples of the iteration are written to a file."""
        settings = self.config.trainer
        due = iteration % settings.log_rollouts_freq == 0 or iteration == self.total_iterations
        return settings.log_rollouts and due

    def _mini_batches(
        self, batch: DataProto, section: Any, name: str, iteration: int, *, record: bool = False
    ) -> Iterator[DataProto]:
        return mini_batches(
            batch,
            # the key counts prompts, for the critic too: without n it would take n times as many steps
            size=section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n,
            epochs=section.ppo_epochs,
            shuffle_seed=(self.config.trainer.seed, name) if section.shuffle else None,
            iteration=iteration,
            total_iterations=self.total_iterations,
            first_update=self.critic_warmup if name == "actor" else 0,
            record=record,
        )

    def batch_metrics(self, batch: DataProto, beta: float) -> dict[str, float]:
        """Return metrics of the samples before the update; ``beta`` is the KL coefficient that they had."""
        if self.use_reference and "kl" not in batch.batch:  # the KL is in the loss: here it is only reported
            batch = batch.union(DataProto({"kl": self._kl(batch.batch)}))
        return {
            **batch_metrics(batch, max_prompt_length=self.config.data.max_prompt_length),
            **objective_metrics(batch, kl_coef=beta),
            **sampler_metrics(batch),
            **batch.meta_info["reward_metrics"],
            **batch.meta_info.get("greedy_reward_metrics", {}),
            **batch.meta_info.get("rollout_metrics", {}),
        }

"""PPO and its relatives, as one reads them: ``step`` is one iteration of the algorithm.

The trainer is the single controller. It sees workers only through worker groups, so the same text drives
models in this process and models on a cluster; ``ray_worker_group_cls`` decides which. Everything that is
not the algorithm (validation, checkpoints, logging) hangs on the loop in ``strop.trainer.loop``.

Shapes: B samples (prompts x rollout.n), T response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.algorithms.advantages import estimate, get_estimator, needs
from strop.algorithms.correction import rollout_is_weights
from strop.algorithms.kl import apply_kl_penalty, kl_penalty, make_kl_controller, mean_sequence_kl
from strop.config.checks.check import check
from strop.config.load import as_config
from strop.config.roles import uses_reference, why_old_log_probs_are_computed_apart
from strop.config.schema import Config
from strop.controller.group import Future
from strop.controller.pools import ResourcePoolManager, Role
from strop.files import crash_point
from strop.protocol import DataProto
from strop.rollout.base import Finished
from strop.trainer import loop
from strop.trainer.metrics import (
    PhaseTimer,
    batch_metrics,
    objective_metrics,
    policy_metrics,
    sampler_metrics,
)
from strop.trainer.ray_trainer import build_loaders, total_training_steps
from strop.trainer.run_folder import require_shared_folder
from strop.trainer.scores import PendingScores, Samples, require_finite
from strop.trainer.seeds import sample_seeds
from strop.trainer.updates import PendingUpdates, mini_batches
from strop.trainer.validation import needs_reward_model
from strop.trainer.weight_sync import WeightSync

logger = logging.getLogger(__name__)

_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
_ACTOR_COLUMNS = (*_MODEL_INPUTS, "advantages")
_ACTOR_OPTIONAL = ("old_log_probs", "ref_log_prob", "ref_hidden", "rollout_is_weights")
_CRITIC_COLUMNS = (*_MODEL_INPUTS, "values", "returns")


class RayPPOTrainer:
    """Drives actor, rollout, reference, critic and reward model through one PPO iteration after another.

    ``role_worker_mapping`` gives the worker class of each role, ``resource_pool_manager`` where it lives and
    ``ray_worker_group_cls`` the kind of group (``LocalWorkerGroup`` runs everything in this process).
    ``reward_fn`` maps a batch to a ``RewardOutput`` (or to token-level scores [B, T]); ``val_reward_fn``
    does so in validation.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type,
        reward_fn: Callable[[DataProto], Any],
        val_reward_fn: Callable[[DataProto], Any] | None = None,
        train_dataset: Any | None = None,
        val_dataset: Any | None = None,
    ) -> None:
        self.config = as_config(config)
        self.tokenizer = tokenizer
        self.role_worker_mapping = dict(role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        self.worker_group_cls = ray_worker_group_cls
        self.reward_fn: Callable[[DataProto], Any] = reward_fn
        self.val_reward_fn: Callable[[DataProto], Any] = val_reward_fn or reward_fn
        self.train_loader, self.val_loader = build_loaders(self.config, tokenizer, train_dataset, val_dataset)
        trains = not self.config.trainer.val_only
        result = check(self.config, train_rows=len(self.train_loader.dataset) if trains else None)
        for line in result.warnings:
            logger.warning("warning: %s", line)
        result.raise_errors()
        self.total_steps = total_training_steps(self.config, len(self.train_loader)) if trains else 0
        self.global_step = 0  # iterations done; the one in progress is global_step + 1
        self.timer = PhaseTimer()
        self.actor: Any = None  # worker groups: their methods are those of the workers
        self.rollout: Any = None  # the actor's own, unless the two are placed apart
        self.ref: Any = None
        self.critic: Any = None
        self.reward_model: Any = None

        algorithm = self.config.algorithm
        self.estimator = get_estimator(algorithm.adv_estimator)
        self._estimator_needs = needs(self.estimator)
        control = algorithm.kl_ctrl
        self.kl_controller = make_kl_controller(
            control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon
        )
        actor = self.config.actor_rollout_ref.actor
        self.kl_in_reward = not actor.use_kl_loss and control.kl_coef > 0
        self.use_reference = uses_reference(self.config)
        self.full_kl = self.use_reference and (
            algorithm.kl_penalty == "full" or (actor.use_kl_loss and actor.kl_loss_type == "full")
        )
        self.is_one_step = why_old_log_probs_are_computed_apart(self.config) is None
        self.use_critic = trains and "values" in self._estimator_needs
        self.use_reward_model = self.config.reward_model.enable

    # ------------------------------------------------------------------------------------------- building

    def init_workers(self) -> None:
        """Build the worker groups of the roles that this run needs, and load their models."""
        mapping = self.resource_pool_manager.mapping
        if Role.ActorRolloutRef in mapping:
            self.actor = self.rollout = self.ref = self._group(Role.ActorRolloutRef)
        elif Role.ActorRollout in mapping:
            self.actor = self.rollout = self._group(Role.ActorRollout)
        else:
            self.actor, self.rollout = self._group(Role.Actor), self._group(Role.Rollout)
        if self.use_reference and self.ref is None:
            self.ref = self._group(Role.RefPolicy)
        if self.use_critic:
            self.critic = self._group(Role.Critic)
        if self.use_reward_model and (not self.config.trainer.val_only or needs_reward_model(self)):
            self.reward_model = self._group(Role.RewardModel)
        require_shared_folder(Path(self.config.trainer.default_local_dir), self.groups)
        for call in [group.init_model.start() for group in self.groups.values()]:
            call.get()
        every = self.config.actor_rollout_ref.rollout.verify_weights_every
        self.weights = WeightSync(self.actor, self.rollout, self.timer, verify_every=every)

    def _group(self, role: Role) -> Any:
        return self.worker_group_cls(
            worker_cls=self.role_worker_mapping[role],
            init_kwargs={"config": self.config, "role": role},
            resource_pool=self.resource_pool_manager.pool_of(role),
            name=role.name,
            settings=self.config.trainer,
        )

    @property
    def groups(self) -> dict[str, Any]:
        """The worker groups that exist, by the name of their folder in a checkpoint."""
        named = {
            "actor": self.actor,
            "rollout": None if self.rollout is self.actor else self.rollout,
            "ref": None if self.ref is self.actor else self.ref,
            "critic": self.critic,
            "reward_model": self.reward_model,
        }
        return {name: group for name, group in named.items() if group is not None}

    def shutdown(self) -> None:
        """End the workers and what they hold; the trainer is of no more use."""
        for group in self.groups.values():
            group.shutdown()

    def fit(self) -> None:
        """Train: ``init_workers`` comes first. Ends after ``total_steps`` iterations."""
        loop.fit(self)

    # ------------------------------------------------------------------------------------------ one iteration

    def step(self, prompts: DataProto) -> tuple[DataProto, dict[str, float]]:
        """One iteration of PPO on a batch of prompts: the finished samples, and the metrics."""
        samples = self.collect(prompts)
        with samples.cancelled_on_error():
            return self.learn(samples)

    def collect(self, prompts: DataProto) -> Samples:
        """Generate responses with the present policy; their scores are on the way."""
        batch, scores = self.generate(prompts)
        with scores.cancelled_on_error():
            greedy = self.generate_greedy(prompts) if "baseline_scores" in self._estimator_needs else None
        return Samples(batch, scores, greedy)

    def learn(self, samples: Samples) -> tuple[DataProto, dict[str, float]]:
        """Advantages, then the updates of critic and actor."""
        self.weights.release()
        evaluation = self.start_evaluation(samples.batch)
        batch = self.finish_scoring(samples)  # while models in other processes look at the samples
        batch = self.finish_evaluation(batch, evaluation)
        batch = self.estimate_advantages(batch)
        critic = self.update_critic(batch) if self.use_critic else None
        crash_point("update", self.global_step + 1)
        actor = self.update_actor(batch) if self.trains_actor else None
        metrics = {} if self.update_gives_old_log_probs else self.batch_metrics(batch)
        if critic is not None:
            with self.timer.phase("update_critic"):
                metrics |= {f"critic/{name}": value for name, value in critic.get().metrics.items()}
        if actor is not None:
            with self.timer.phase("update_actor"):
                update = actor.get()
            batch = batch.union(update.columns)
            metrics |= policy_metrics(update.metrics)
        if self.update_gives_old_log_probs:
            metrics |= self.batch_metrics(batch)
        return batch, metrics

    @property
    def trains_actor(self) -> bool:
        """Whether the iteration in progress updates the actor, after the critic's warm-up."""
        return not self.use_critic or self.global_step >= self.config.trainer.critic_warmup

    @property
    def update_gives_old_log_probs(self) -> bool:
        """Whether they come from the update's own forward pass, as one on-policy step has them."""
        return self.is_one_step and self.trains_actor

    # ---------------------------------------------------------------------------------------- parts of
    # collect

    def generate(self, prompts: DataProto) -> tuple[DataProto, PendingScores]:
        """``rollout.n`` responses to each prompt, with the sampler's log-probs, and their scores."""
        prompts, seeds = self._drawn(prompts)
        return self._generate_and_score(prompts, seeds, mode="train", phase="gen")

    def generate_greedy(self, prompts: DataProto) -> PendingScores:
        """The scores of the likeliest response to each prompt: ReMax's baseline."""
        prompts, seeds = self._drawn(prompts)
        return self._generate_and_score(prompts, seeds[:, :1], mode="greedy", phase="gen_greedy")[1]

    def _drawn(self, prompts: DataProto) -> tuple[DataProto, Tensor]:
        """The prompts with their ``uid``, and the seed [prompts, n] of each sample of this iteration."""
        n, iteration = self.config.actor_rollout_ref.rollout.n, self.global_step + 1
        uids = [f"{iteration}-{row}" for row in range(len(prompts))]
        seeds = sample_seeds(self.config.trainer.seed, "rollout", iteration, len(prompts), n)
        return prompts.union(DataProto.from_dict(non_tensors={"uid": uids})), seeds

    def _generate_and_score(
        self, prompts: DataProto, seeds: Tensor, *, mode: str, phase: str
    ) -> tuple[DataProto, PendingScores]:
        scores = PendingScores(prompts, seeds.shape[1], self.reward_fn, self.reward_model)
        with scores.cancelled_on_error():
            with self.timer.phase(phase):
                batch = self.generate_with(prompts, seeds, mode=mode, finished=scores.finished)
            with self.timer.phase("reward"):
                scores.complete(batch)
        return batch, scores

    def generate_with(
        self, prompts: DataProto, seeds: Tensor, *, mode: str, finished: Finished | None = None
    ) -> DataProto:
        """Responses of the rollout; ``mode``: ``train``, ``greedy`` or ``validate`` (``val_kwargs``)."""
        request = DataProto(
            {**prompts.batch, "seeds": seeds},
            prompts.non_tensor_batch,
            {**prompts.meta_info, "mode": mode, "weights_version": self.weights.version},
        )
        self.weights.to_rollout()
        return self.rollout.generate_sequences(request, finished=finished)

    # ------------------------------------------------------------------------------------------ parts of
    # learn

    def finish_scoring(self, samples: Samples) -> DataProto:
        """Wait for ``token_level_scores`` [B, T], ``reward/<part>`` [B] and, for ReMax, the baseline [B]."""
        with self.timer.phase("reward"):
            return samples.scored()

    def start_evaluation(self, batch: DataProto) -> dict[str, Future]:
        """Ask the models what they say of the samples before the update; by the phase's name.

        Models in different pools work at the same time. An update that is one on-policy step computes the
        actor's part itself.
        """
        inputs = batch.select(*_MODEL_INPUTS)
        calls = {}
        if self.use_reference:
            calls["ref"] = self._start("ref", self.ref.compute_ref_log_prob, inputs)
        if not self.full_kl and not self.update_gives_old_log_probs:
            calls["old_log_prob"] = self._start("old_log_prob", self.actor.compute_log_prob, inputs)
        if self.use_critic:
            calls["values"] = self._start("values", self.critic.compute_values, inputs)
        return calls

    def finish_evaluation(self, batch: DataProto, calls: dict[str, Future]) -> DataProto:
        """The batch with log-probs, entropies and values."""
        for name, call in calls.items():
            with self.timer.phase(name):
                batch = batch.union(call.get())
        if self.full_kl:  # the actor compares its distributions with those of the reference's hidden states
            with self.timer.phase("old_log_prob"):
                batch = batch.union(self.actor.compute_log_prob(batch.select(*_MODEL_INPUTS, "ref_hidden")))
        return batch

    def _start(self, phase: str, method: Any, inputs: DataProto) -> Future:
        with self.timer.phase(phase):
            return method.start(inputs)

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Rewards with the KL penalty, advantages and returns: pure functions of the batch, on the driver."""
        with self.timer.phase("adv"):
            columns, algorithm = dict(batch.batch), self.config.algorithm
            columns["token_level_rewards"] = self._rewards(columns)
            columns["advantages"], columns["returns"] = estimate(
                self.estimator,
                rewards=columns["token_level_rewards"],
                response_mask=columns["response_mask"],
                values=columns.get("values"),
                uid=batch.non_tensor_batch["uid"],
                baseline_scores=columns.get("baseline_scores"),
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                whiten=algorithm.whiten_advantages,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            )
            actor = self.config.actor_rollout_ref.actor
            if actor.rollout_is is not None:
                columns["rollout_is_weights"] = rollout_is_weights(
                    columns["old_log_probs"],
                    columns["rollout_log_probs"],
                    columns["response_mask"],
                    level=actor.rollout_is,
                    threshold=actor.rollout_is_threshold,
                )
        require_finite("advantages", columns["advantages"])
        return DataProto(columns, batch.non_tensor_batch, batch.meta_info)

    def _rewards(self, columns: dict[str, Tensor]) -> Tensor:
        """r_t = score_t - beta kl_t; also steers beta by the KL."""
        self._beta_used = self.kl_controller.value if self.kl_in_reward else 0.0
        if not self.kl_in_reward:
            return columns["token_level_scores"]
        mask_BT = columns["response_mask"]
        columns["kl"] = self._kl(columns)
        rewards_BT = apply_kl_penalty(columns["token_level_scores"], columns["kl"], mask_BT, self._beta_used)
        self.kl_controller.update(mean_sequence_kl(columns["kl"], mask_BT).item(), len(mask_BT))
        return rewards_BT

    def _kl(self, columns: dict[str, Tensor]) -> Tensor:
        """The KL [B, T] to the reference, as ``algorithm.kl_penalty`` estimates it."""
        kind = self.config.algorithm.kl_penalty
        if kind == "full":
            return columns["full_kl"]
        mask_BT = columns["response_mask"]
        return kl_penalty(columns["old_log_probs"], columns["ref_log_prob"], kind, mask_BT)

    def update_critic(self, batch: DataProto) -> PendingUpdates:
        """Start the critic's optimizer steps of this iteration."""
        section, columns = self.config.critic, batch.select(*_CRITIC_COLUMNS)
        with self.timer.phase("update_critic"):
            parts = self._mini_batches(columns, section, "critic")
            return PendingUpdates(self.critic.update_critic, parts, loss_agg_mode=section.loss_agg_mode)

    def update_actor(self, batch: DataProto) -> PendingUpdates:
        """Start the actor's optimizer steps of this iteration."""
        section = self.config.actor_rollout_ref.actor
        optional = [name for name in _ACTOR_OPTIONAL if name in batch]
        columns = batch.select(*_ACTOR_COLUMNS, *optional)
        self.weights.policy_changes()
        with self.timer.phase("update_actor"):
            parts = self._mini_batches(columns, section, "actor")
            update = self.actor.update_actor
            if self.update_gives_old_log_probs:
                update = self.actor.update_actor_on_policy
            return PendingUpdates(update, parts, loss_agg_mode=section.loss_agg_mode)

    def _mini_batches(self, batch: DataProto, section: Any, name: str) -> Iterator[DataProto]:
        return mini_batches(
            batch,
            size=section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n,
            epochs=section.ppo_epochs,
            shuffle_seed=(self.config.trainer.seed, name) if section.shuffle else None,
            iteration=self.global_step,
            total_iterations=self.total_steps,
        )

    def batch_metrics(self, batch: DataProto) -> dict[str, float]:
        """Everything that is known about the samples before the update."""
        if self.use_reference and "kl" not in batch:  # the KL is in the loss: here it is only reported
            batch = batch.union(DataProto({"kl": self._kl(batch.batch)}))
        return {
            **batch_metrics(batch, max_prompt_length=self.config.data.max_prompt_length),
            **objective_metrics(batch, kl_coef=self._beta_used),
            **sampler_metrics(batch),
            **batch.meta_info["reward_metrics"],
            **batch.meta_info.get("greedy_reward_metrics", {}),
        }

"""``RayPPOTrainer``: builds worker groups, and runs the loop around ``PPO``."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from strop.agents.program import Program
from strop.algorithms.advantages import get_estimator
from strop.algorithms.registry import required_parameters
from strop.checkpoint.hub import Publication, open_publication
from strop.checkpoint.record import RECORD, changed_samples
from strop.checkpoint.store import IN_FLIGHT, TRAINED, reading_state_of
from strop.config.backends import load_backend
from strop.config.checks.check import check
from strop.config.checks.pictures import require_pictures
from strop.config.identity import Change
from strop.config.load import as_config
from strop.config.memory.choices import with_values
from strop.config.placement import Placement
from strop.config.roles import (
    has_reward,
    has_teacher_role,
    loads_policy,
    reference_is_the_actor,
    roles_of,
    teacher_is_the_actor,
    uses_reference,
)
from strop.config.schema import Config
from strop.config.schema.agent import uses_agent
from strop.config.schema.environment import uses_environment
from strop.controller.pools import ResourcePoolManager, Role, name_of
from strop.data.rl_dataset import (
    RLHFDataset,
    all_rows,
    data_sources_of,
    image_processor_name,
    max_pictures,
)
from strop.data.sources import Rows
from strop.environments.loading import Environments
from strop.errors import ConfigError, RewardError
from strop.files import atomic_write_text
from strop.protocol import DataProto
from strop.rewards.base import as_reward
from strop.rollout.http.kind import variables_of
from strop.terminal import printable
from strop.tracking.samples import HiddenTokensWarning, samples_table, write_table
from strop.tracking.thumbnails import Thumbnails
from strop.trainer.frozen_head import warn_of_frozen_head
from strop.trainer.loop import OnStep, Run
from strop.trainer.metrics import (
    PhaseTimer,
    peak_memory,
    picture_metrics,
    speed_metrics,
    staleness_metrics,
)
from strop.trainer.pipeline import ROLLOUT_PROCESSES, LatePart, Pipeline, lost_of
from strop.trainer.ppo import PPO, Groups, loss_inputs
from strop.trainer.progress import Progress
from strop.trainer.run_folder import require_shared_folder
from strop.trainer.validation import BestValidation, Validator
from strop.trainer.watches import equal_scores, watches_of
from strop.trainer.weight_sync import WeightSync
from strop.verl import VerlNames

logger = logging.getLogger(__name__)


_GROUPS = ("actor", "rollout", "ref", "critic", "reward_model")
TEACHER = "Teacher"
"""Role of the teacher."""


def _in_words(role: Any) -> str:
    return f"Role.{role.name}" if isinstance(role, Role) else role


def _with_pools(config: Config, manager: ResourcePoolManager) -> Config:
    """Return the configuration with a program's own pools, if a role has more or fewer processes in them.

    Checks, batch plan and forecast are then of the processes that are started.
    """
    placed = {name_of(role): pool for role, pool in manager.mapping.items()}
    placed.setdefault("ActorRollout", placed.get("ActorRolloutRef", ""))
    placed = {role: placed[role] for role in roles_of(config) if placed.get(role)}
    pools = {name: list(manager.pools[name].processes_per_node) for name in placed.values()}
    try:
        ranks = Placement.from_config(config).ranks
    except ConfigError:  # reported by ``check``
        return config
    if all(ranks(role) == sum(pools[name]) for role, name in placed.items()):
        return config
    return with_values(config, {"trainer.resource_pools": pools, "trainer.placement": placed})


class RayPPOTrainer(VerlNames):
    """Drive actor, rollout, reference, critic and reward model through one PPO iteration after another.

    Takes the arguments of verl's trainer of this name. Call ``init_workers()``, then ``fit()``.

    Args:
        role_worker_mapping: the worker class of each role, its import path (``module:class``), or
            ``ray.remote`` of it (resources are those of the role's pool). Keys other than ``Role`` (strings,
            or members of another enum) are roles of one's own: their groups are built with the others, get
            the calls that the subclass makes, and are ``groups[name]``. See ``strop docs own_algorithm``.
        resource_pool_manager: where each role lives. A role that the run needs and that one of the two lacks
            is a ``ConfigError``.
        ray_worker_group_cls: the kind of group; ``LocalWorkerGroup`` runs everything in this process.
        reward_fn: maps a batch to a ``RewardOutput``, or to token-level scores [B, T].
        val_reward_fn: the same in validation; ``reward_fn`` if None.
        train_dataset: in place of the one that ``config.data`` describes; ``val_dataset`` likewise.
        collate_fn: makes a ``DataProto``, or a mapping of its columns, from a list of rows, in training and
            validation; None: ``strop.data.loader.collate``.
        train_sampler: yields the row numbers of one epoch per iteration over it, and has a length; None: a
            new seeded order every epoch. Its ``state_dict`` is a part of checkpoints, so one without
            ``state_dict`` and ``load_state_dict`` is a ``ConfigError`` where ``trainer.save_freq`` > 0.
        rows: rows in memory, read where ``data.train_files`` or ``data.val_files`` has their names.
        environments: what answers the turns of samples; None: samples have one turn.
        program: the agent program whose sessions samples are; None: samples are no sessions.
    """

    trained: tuple[str, ...] = TRAINED
    """Names of the groups whose state is in checkpoints; a subclass may add those of its roles."""

    ppo: PPO
    weights: WeightSync
    validator: Validator
    pipeline: Pipeline | None = None
    """Generates ahead of training, or further batches where groups are filtered; else None."""

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        tokenizer: Any,
        role_worker_mapping: Mapping[Any, type | str],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type,
        reward_fn: Callable[[DataProto], Any],
        val_reward_fn: Callable[[DataProto], Any] | None = None,
        train_dataset: Any | None = None,
        val_dataset: Any | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        train_sampler: Any | None = None,
        rows: Sequence[Rows] = (),
        environments: Environments | None = None,
        program: Program | None = None,
    ) -> None:
        self.config = _with_pools(as_config(config), resource_pool_manager)
        self.tokenizer = tokenizer
        self.role_worker_mapping = dict(role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        self.worker_group_cls = ray_worker_group_cls
        self.reward_fn = as_reward(reward_fn)
        self.val_reward_fn = as_reward(val_reward_fn or reward_fn)
        self.rows, self.environments, self.program = rows, environments, program
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        named = {  # data sets that a program passes: as rows in memory are named, which no check looks for
            f"data.{key}": [f"rows:{key}"]
            for key, loader in (("train_files", self.train_loader), ("val_files", self.val_loader))
            if loader is not None and not getattr(self.config.data, key)
        }
        self.config = with_values(self.config, named)
        trains = not self.config.trainer.val_only
        check(self.config, train_rows=len(self.train_loader.dataset) if trains else None).report(logger)
        loaders = [loader for loader in (self.train_loader, self.val_loader) if loader is not None]
        most = max((max_pictures(loader.dataset) for loader in loaders), default=0)
        if uses_environment(self.config) or uses_agent(self.config):
            most = max(most, self.config.data.max_images or 0)
        if most:
            require_pictures(self.config)
        self._max_pictures = most
        self.image_processor = image_processor_name(*(loader.dataset for loader in loaders))
        datasets = [all_rows(loader.dataset) for loader in loaders]
        found = [dataset.pictures for dataset in datasets if isinstance(dataset, RLHFDataset)]
        self.pictures = next(filter(None, found), None)
        self.pictures_in_words = None if self.pictures is None else self.pictures.in_words
        self.total_steps = 0
        if trains:
            loss_inputs(self.config)  # raises if this run cannot compute them
            settings = self.config.trainer
            self.total_steps = settings.total_training_steps or len(self.train_loader) * settings.total_epochs
        self.publication: Publication | None = None
        self.upload_failed = False
        self.global_step = 0  # iterations done; the one in progress is global_step + 1
        self.progress = Progress(self.config)
        self.timer = PhaseTimer(self.progress.phases)
        self._warn_of_hidden_tokens = HiddenTokensWarning(tokenizer)
        self._watches, self._showed_equal = watches_of(self.config), False
        self._required_roles()  # raises for one that the mappings lack
        self.actor: Any = None  # worker groups: their methods are those of the workers
        self.rollout: Any = None  # the actor's group unless the two roles are apart
        self.ref: Any = None
        self.critic: Any = None
        self.reward_model: Any = None
        self.teacher: Any = None
        self.own_groups: dict[str, Any] = {}
        """Worker groups of roles of one's own, by the role's name."""

    def init_workers(self) -> None:
        """Build the worker groups of the roles that this run needs, and load their models.

        First find where the model will be published (``trainer.push_to_hub``).
        """
        config = self.config
        self.publication = open_publication(config)
        if not config.trainer.val_only:
            policy = config.actor_rollout_ref.model
            warn_of_frozen_head(
                "actor_rollout_ref.model", policy, self.tokenizer, self.train_loader.dataset, config.data
            )
        groups = {role: self._group(role) for role in self._required_roles()}
        self.actor = next(iter(groups.values()))
        self.rollout = groups.get(Role.Rollout, self.actor)
        self.ref = groups.get(Role.RefPolicy, groups.get(Role.ActorRolloutRef))
        if reference_is_the_actor(config):
            self.ref = self.actor
        self.critic, self.reward_model = groups.get(Role.Critic), groups.get(Role.RewardModel)
        self.teacher = self.actor if teacher_is_the_actor(config) else groups.get(TEACHER)
        self.own_groups = {name_of(role): self._group(role) for role in self._own_roles()}
        require_shared_folder(Path(config.trainer.default_local_dir), self.groups)
        if self.environments is not None:
            self.rollout.set_environments(self.environments)
        if self.program is not None:
            self.rollout.set_program(self.program)
        if variables := variables_of(config):
            for group in (self.rollout, self.teacher):
                if hasattr(group, "set_variables"):  # a worker of one's own may lack it
                    group.set_variables(variables)
        for name, group in self.groups.items():
            if self._max_pictures and name not in self.own_groups:
                group.set_pictures(self._max_pictures, self.image_processor)
        # all started before the first is awaited: pools load their models at the same time
        for call in [group.init_model.start() for group in self.groups.values()]:
            call.get()
        every = config.actor_rollout_ref.rollout.verify_weights_every
        ahead = config.trainer.async_steps
        placed = self.resource_pool_manager.mapping
        beside = [placed[role] for role in (*groups, *self._own_roles()) if role is not Role.Rollout]
        self.weights = WeightSync(
            self.actor,
            self.rollout,
            verify_every=every,
            ahead=ahead > 0,
            shares_pool=placed.get(Role.Rollout) in beside,
        )
        groups = Groups(self.actor, self.rollout, self.ref, self.critic, self.reward_model, self.teacher)
        self.ppo = PPO(config, groups, self.reward_fn, self.weights, total_iterations=self.total_steps)
        self.ppo.progress = self.progress
        if (ahead or config.algorithm.filter_groups.enable) and not config.trainer.val_only:
            self.renew_pipeline()
        if self.val_loader is not None:
            self.validator = Validator(
                config,
                self.tokenizer,
                self.val_loader,
                self.val_reward_fn,
                reward_model=self.reward_model if self.validates_by_model else None,
                generate=self.ppo.generate,
                progress=self.progress,
                pictures_in_words=self.pictures_in_words,
                warn_of_hidden_tokens=self._warn_of_hidden_tokens,
            )

    @property
    def devices(self) -> int:
        """Number of processes of this run, over all pools."""
        pool = self.resource_pool_manager.pool_of(next(iter(self._required_roles())))
        return sum(other.world_size for other in pool.all_of_run)

    @property
    def validates_by_model(self) -> bool:
        """True if validation has rows that the reward model alone scores; in others rules go first."""
        if not self.config.reward_model.enable or self.val_loader is None:
            return False
        try:
            sources = data_sources_of(self.val_loader.dataset, self.config.data.reward_fn_key)
            self.val_reward_fn.require_scored(sources)
        except RewardError:
            return True
        rows = all_rows(self.val_loader.dataset)
        return isinstance(rows, RLHFDataset) and rows.has_rows_for_model()

    def _own_roles(self) -> list[Any]:
        """Return the roles of ``role_worker_mapping`` that are not of ``Role``."""
        return [role for role in self.role_worker_mapping if not isinstance(role, Role) and role != TEACHER]

    def _required_roles(self) -> list[Any]:
        """Return the roles of this run, the one that trains the policy first.

        Raises ``ConfigError`` for each that has no worker class or no resource pool, with the reason for it.
        """
        config, placed = self.config, self.resource_pool_manager.mapping
        policy = [role for role in (Role.ActorRolloutRef, Role.ActorRollout) if role in placed][:1]
        if not policy and {Role.Actor, Role.Rollout} & placed.keys():
            policy = [Role.Actor, Role.Rollout] if loads_policy(config) else [Role.Rollout]
        needed: dict[Any, str] = dict.fromkeys(policy or [Role.ActorRollout], "the policy")
        estimator = config.algorithm.adv_estimator
        has_reference = Role.ActorRolloutRef in needed or reference_is_the_actor(config)
        if uses_reference(config) and not has_reference:
            needed[Role.RefPolicy] = "the KL to the reference model"
        if not config.trainer.val_only and "values" in required_parameters(get_estimator(estimator)):
            needed[Role.Critic] = f"algorithm.adv_estimator={estimator}"
        if config.reward_model.enable and (not config.trainer.val_only or self.validates_by_model):
            needed[Role.RewardModel] = "reward_model.enable=True"
        if has_teacher_role(config):
            needed[TEACHER] = "teacher.model.path"
        tables = {"role_worker_mapping": self.role_worker_mapping, "resource_pool_manager.mapping": placed}
        problems = [
            f"{table} lacks {_in_words(role)}, which this run needs ({reason}); it has "
            f"{', '.join(sorted(map(name_of, given))) or 'no role'}"
            for role, reason in needed.items()
            for table, given in tables.items()
            if role not in given
        ]
        for role in self._own_roles():
            if role not in placed:
                problems.append(
                    f"resource_pool_manager.mapping lacks the role {name_of(role)!r} of role_worker_mapping"
                )
            if name_of(role) in _GROUPS:
                problems.append(
                    f"role_worker_mapping: a role may not be named {name_of(role)!r}, as a group of strop"
                )
        if problems:
            raise ConfigError(*problems)
        return list(needed)

    def _group(self, role: Any) -> Any:
        worker = self.role_worker_mapping[role]
        return self.worker_group_cls(
            worker_cls=load_backend(worker) if isinstance(worker, str) else worker,
            init_kwargs={"config": self.config, "role": role},
            resource_pool=self.resource_pool_manager.pool_of(role),
            name=name_of(role),
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
            "teacher": None if self.teacher is self.actor else self.teacher,
            **self.own_groups,
        }
        return {name: group for name, group in named.items() if group is not None}

    def step(self, prompts: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Run one iteration on a batch of prompts; returns the finished samples and the metrics.

        With ``trainer.async_steps`` the samples of these prompts were begun in an earlier iteration.
        """
        iteration = self.global_step + 1
        if self.pipeline is None:
            samples = self.ppo.collect(prompts, iteration)
            unused = samples.cancelled_on_error()
        else:
            samples = self.pipeline.take(iteration)
            unused = contextlib.nullcontext()  # a checkpoint may need them: see ``ReinforcementRun.fit``
        with unused:
            self.weights.release()  # a copy of the weights makes room for the update
            batch, metrics = self.ppo.learn(samples, iteration)
        metrics |= staleness_metrics(batch, version=self.weights.version, warmup=self.ppo.critic_warmup)
        if "rollout_versions" not in batch:  # all tokens are of the policy that learns from them
            is_sampled = (batch.batch["response_mask"] > 0).int()
            versions = is_sampled * (self.weights.version + 1) - 1
            batch = batch.union(DataProto({"rollout_versions": versions}))
        if self.ppo.trains_actor(iteration):
            # the same in the critic's warm-up: only a copy that ``release`` has freed is then sent again
            self.weights.version = iteration
        self.timer.add(samples.timer)
        self._warn_of_hidden_tokens(batch)
        if (
            has_reward(self.config)
            and not self._showed_equal
            and len(batch) > 1
            and metrics["critic/score/min"] == metrics["critic/score/max"]
        ):
            self._showed_equal = True
            sample = samples_table(batch[:1], self.tokenizer, self.pictures_in_words).to_pylist()[0]
            logger.warning("warning: %s", printable(equal_scores(metrics, sample)))
        for watch in self._watches:
            if warning := watch(metrics):
                logger.warning("warning: %s", warning)
        if not has_reward(self.config):  # zeros, which console and curves would show as a reward
            metrics = {name: value for name, value in metrics.items() if not name.startswith("critic/score/")}
        return batch, metrics

    def renew_pipeline(self) -> None:
        """Forget the batches between rollout and learner: an earlier ``fit`` was stopped with them.

        Groups that it carried over stay. Raises ``ConfigError`` if the rollout has samples of these batches,
        which it would complete.
        """
        if self.pipeline is not None and self.pipeline.beside and self.pipeline.is_ahead:
            raise ConfigError(
                f"trainer.async_steps={self.config.trainer.async_steps}: fit of this trainer was called "
                "before, and its rollout holds samples; call shutdown, and make a new trainer of the same "
                "configuration, which goes on from the last checkpoint if there is one"
            )
        kept = () if self.pipeline is None else self.pipeline.kept
        self.pipeline = Pipeline(self.ppo, self.train_loader, total_iterations=self.total_steps, kept=kept)

    def fit(self, on_step: OnStep | None = None) -> None:
        """Train up to ``total_steps`` iterations, from the last checkpoint if there is one."""
        ReinforcementRun(self).fit(on_step)

    def shutdown(self) -> None:
        """End the workers and the scoring processes; the trainer cannot be used afterwards."""
        try:
            for group in self.groups.values():
                group.shutdown()
        finally:
            self.reward_fn.close()
            self.val_reward_fn.close()


class ReinforcementRun(Run):
    """A run of reinforcement learning: samples are written down, validations are scored."""

    trainer: RayPPOTrainer

    def __init__(self, trainer: RayPPOTrainer) -> None:
        self.trained = trainer.trained
        super().__init__(trainer)
        self._thumbnails = Thumbnails(self.folder.path)
        self.best = BestValidation()
        self.has_validated = False
        self._changed_samples: list[Change] = []

    def fit(self, on_step: OnStep | None = None) -> None:
        try:
            super().fit(on_step)
        finally:
            self._thumbnails.close()
            if self.trainer.pipeline is not None:  # only now: a checkpoint may have waited for the scores
                self.trainer.pipeline.cancel()

    def start(self) -> None:
        self.trainer.ppo.before_update = self.begin_update
        if self.trainer.pipeline is not None:
            self.trainer.renew_pipeline()
        super().start()

    def resume(self, checkpoint: Path, *, goes_on: bool) -> None:
        super().resume(checkpoint, goes_on=goes_on)
        trainer, changed = self.trainer, [change.key for change in self._changed_samples]
        words = [*map(str, self._changed_samples)]
        batches: Any = getattr(trainer.train_loader, "batches", None)  # none where it validates only
        if batches is not None and batches.has_another_order:  # also by rows that no key names
            changed, words = [*changed, "data"], words or ["other rows"]
        n_saved, n_now = len([*(checkpoint / IN_FLIGHT).glob("rank_*.pt")]), trainer.rollout.world_size
        if n_saved not in (0, n_now):
            changed = [*changed, ROLLOUT_PROCESSES]
            words = [*words, f"{n_saved} rollout processes, now {n_now}"]
        lost = lost_of(checkpoint / IN_FLIGHT, changed)
        if lost and not self.settings.val_only:
            logger.warning(
                "warning: %s: %s was saved with other settings (%s)",
                " and ".join(lost),
                checkpoint,
                "; ".join(words),
            )
        if trainer.pipeline is not None:
            with reading_state_of(checkpoint, IN_FLIGHT):
                trainer.pipeline.restore(checkpoint, changed=changed)

    def iterate(self) -> None:
        """See ``Run.iterate``; warn if an earlier model was better in validation."""
        super().iterate()
        if not self.settings.val_only and (found := self.best.if_later_ones_are_worse(self.folder.path)):
            logger.warning("warning: %s", found)

    def mark(self, unlogged: Mapping[str, Any] | None = None) -> None:
        super().mark(unlogged)
        if self.trainer.pipeline is not None:
            self.trainer.pipeline.mark()

    def save(self, *, by_time: bool, stopping: bool = False) -> None:
        rollout = self.trainer.rollout
        with contextlib.ExitStack() as after:
            # ahead, the checkpoint has the samples in flight; a worker of one's own may lack the method
            if stopping and not self.settings.async_steps and hasattr(rollout, "stop_generation"):
                # a process on Ray executes one call after another: the save would wait for the generation
                rollout.stop_generation()
                after.callback(rollout.allow_generation.start)  # the trainer may go on
            super().save(by_time=by_time, stopping=stopping)

    @property
    def late_part(self) -> Callable[[Path], LatePart | None] | None:
        """Samples in flight are a part of the checkpoint."""
        return None if self.trainer.pipeline is None else self.trainer.pipeline.save

    def one_iteration(self, batch: DataProto) -> dict[str, float]:
        """Run one iteration of PPO, log samples and validate; return all metrics."""
        trainer, settings = self.trainer, self.settings
        if type(trainer).step is not RayPPOTrainer.step:  # what changes when is not known
            self.begin_update()
        elif trainer.pipeline is not None and trainer.pipeline.beside:
            # the rollout's part of the last iteration's checkpoint is overwritten; models are whole yet
            self.hold_interrupts()
            trainer.pipeline.leave_out()
        with trainer.timer.phase("step"):
            samples, metrics = trainer.step(batch)
        trainer.global_step += 1
        step = trainer.global_step
        metrics = {
            "episode": float(step * trainer.config.data.train_batch_size),
            "epoch": trainer.train_loader.yielded / len(trainer.train_loader),
            **metrics,
        }
        self.mark(metrics)  # models stay as they are: an error of the validation costs no update
        if step == 1 and trainer.pipeline is not None and not trainer.pipeline.is_used:
            filters = trainer.config.algorithm.filter_groups.enable
            logger.warning(
                "warning: no effect: trainer.async_steps=%s, algorithm.filter_groups.enable=%s; %s.step "
                "takes no samples of trainer.pipeline",
                *(settings.async_steps, filters, type(trainer).__name__),
            )
        if trainer.ppo.writes_samples(step):
            with trainer.timer.phase("log_rollouts"):
                table = samples_table(samples, trainer.tokenizer, trainer.pictures_in_words)
                self._write_samples(self.folder.rollouts(step), table)
                if settings.rollouts_to_keep is not None:
                    self.folder.prune_rollouts(step, to_keep=settings.rollouts_to_keep)
        metrics |= self.measured()
        metrics |= peak_memory(trainer.groups.values())
        metrics |= picture_metrics(samples, trainer.groups.values(), trainer.pictures)
        self.timeline.add_phases("learner", trainer.timer.intervals, step)
        timing = trainer.timer.take()
        if trainer.pipeline is not None and settings.async_steps:
            self.timeline.add(*trainer.pipeline.rollout.intervals)
            metrics |= {
                "async/ready_batches": float(trainer.pipeline.ready_batches),
                "async/learner_idle": timing.get("timing_s/wait_samples", 0.0) / timing["timing_s/step"],
                **trainer.pipeline.rollout.take(),
            }
        return {
            **metrics,
            **timing,
            **speed_metrics(samples, timing, devices=trainer.devices),
            "time/from_scratch": self.seconds(),
        }

    def _write_samples(self, path: Path, samples: pa.Table) -> None:
        self.write(write_table, path, samples)
        self._thumbnails.add(samples)

    def validate(self) -> dict[str, float]:
        """Validate, write samples and report; return scores by data source and the best mean.

        Without ``data.val_files`` there is nothing to do, and no metric.
        """
        if self.trainer.val_loader is None:
            return {}
        if type(self.trainer)._validate is not VerlNames._validate:  # a subclass's, as in verl
            with self.trainer.timer.phase("testing"):
                return self.trainer._validate()
        step, settings = self.trainer.global_step, self.settings
        with self.trainer.timer.phase("testing"):
            if self.trainer.pipeline is not None:
                self.trainer.pipeline.wait()
            # samples are logged by the first and the last validation: the others would repeat their prompts
            is_last = step == self.trainer.total_steps
            samples = self.trainer.validator.samples(
                self.trainer.timer, examine=is_last or not self.has_validated
            )
            is_first, self.has_validated = not self.has_validated, True
            report = self.trainer.validator.report(samples, show=settings.log_val_generations)
            self._write_samples(self.folder.validation(step), samples)
            text = json.dumps(report.as_json(), indent=2) + "\n"
            self.write(atomic_write_text, self.folder.validation(step).with_suffix(".json"), text)
        if settings.val_only or report.n > 1 or report.shown:
            self.tracking.log_validation(step, report)
        for row, names in enumerate(report.pictures if is_first else (), start=1):
            for place, path in enumerate(self._thumbnails.of(names), start=1):
                self.tracking.log_image(step, f"{report.shown_name}/pictures/{row}_{place}", path)
        return {**report.metrics(), "val/best_score": self.best.add(step, report)}

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "kl_controller": self.trainer.ppo.kl_controller.state_dict(),
            "best_score": self.best.score,
            "best_step": self.best.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        trainer = self.trainer
        # the critic's warm-up has not changed the policy
        trainer.weights.version = trainer.global_step if trainer.ppo.trains_actor(trainer.global_step) else 0
        self.trainer.ppo.kl_controller.load_state_dict(state["kl_controller"])
        self.best = BestValidation(state["best_score"], state.get("best_step"))
        self._changed_samples = changed_samples(state.get(RECORD, {}), self.record, trainer.config)

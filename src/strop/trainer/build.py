"""The wiring of a run: which worker plays which role, where it lives, what rewards it.

This is the place to copy from when a run needs another worker, reward or placement: everything that it puts
together is public. What can be checked before a model loads is checked here.
"""

from __future__ import annotations

import importlib.util

from strop.checkpoint.folder import verify
from strop.checkpoint.store import Checkpoints
from strop.config.placement import Placement, runs_on_ray
from strop.config.roles import model_paths, roles_of, tokenizer_paths
from strop.config.schema import Config
from strop.controller.group import LocalWorkerGroup
from strop.controller.pools import ResourcePoolManager, Role
from strop.data.hub import local_tokenizer, require_from_hub
from strop.data.loader import RowDataset
from strop.data.parquet import UNNAMED_SOURCE
from strop.data.rl_dataset import RLHFDataset, all_rows
from strop.errors import MissingExtraError
from strop.models.loader import import_external_lib, load_tokenizer
from strop.rewards.manager import RewardManager, load_reward_manager
from strop.rewards.router import UnknownSourceError
from strop.trainer.ppo import RayPPOTrainer
from strop.trainer.reward_model_tokens import check_reward_model_tokens
from strop.trainer.seeds import seed_global_generators
from strop.trainer.validation import needs_reward_model
from strop.workers.critic import CriticWorker
from strop.workers.policy import ActorRolloutRefWorker
from strop.workers.reward_model import RewardModelWorker


def build_trainer(config: Config) -> RayPPOTrainer:
    """A trainer whose ``init_workers()`` and ``fit()`` are left to call; no model is loaded yet."""
    seed_global_generators(config.trainer.seed)
    model = config.actor_rollout_ref.model
    import_external_lib(model.external_lib)
    require_from_hub(
        models=model_paths(config).values(),
        tokenizers=tokenizer_paths(config).values(),
        cache_dir=config.data.cache_dir,
        weights=not runs_on_ray(config),
    )
    tokenizer = load_tokenizer(
        local_tokenizer(config.data.tokenizer or model.path, config.data.cache_dir),
        trust_remote_code=model.trust_remote_code,
    )
    check_reward_model_tokens(config, tokenizer)
    _require_checkpoint(config)

    role_worker_mapping = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Actor: ActorRolloutRefWorker,
        Role.Rollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
        Role.RewardModel: RewardModelWorker,
    }
    placement = Placement.from_config(config)
    resource_pool_manager = ResourcePoolManager(
        resource_pool_spec=placement.pools,
        mapping={Role[role]: placement.roles[role] for role in roles_of(config)},
    )
    rewards = config.reward_model
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=resource_pool_manager,
        ray_worker_group_cls=worker_group_class(config),
        reward_fn=load_reward_manager(config, tokenizer, rewards.num_examine, **rewards.reward_kwargs),
        val_reward_fn=load_reward_manager(
            config, tokenizer, rewards.val_num_examine, **rewards.reward_kwargs
        ),
    )
    _require_scorers(trainer)
    return trainer


def worker_group_class(config: Config) -> type:
    """``LocalWorkerGroup`` or ``RayWorkerGroup``, as ``trainer.worker_group`` and the placement say."""
    return group_class(on_ray=runs_on_ray(config))


def group_class(*, on_ray: bool) -> type:
    """The kind of worker group; ``MissingExtraError`` when Ray is asked for and not installed."""
    if not on_ray:
        return LocalWorkerGroup
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("ray", "ray", "a run with several processes")
    from strop.controller.ray.group import RayWorkerGroup

    return RayWorkerGroup


def _require_checkpoint(config: Config) -> None:
    """The checkpoint that the run would resume from is whole, or ``CheckpointError``."""
    checkpoint = Checkpoints.of(config).find(config.trainer.resume_mode)
    if checkpoint is not None:
        verify(checkpoint)


def _require_scorers(trainer: RayPPOTrainer) -> None:
    """Every row of the prompts can be scored, or an error that names it; the scoring processes start.

    Raises:
        RewardError: a ``data_source`` without a scorer.
        DataError: a row without the column or the value that its scorer needs.
    """
    used = [(trainer.val_reward_fn, trainer.val_loader.dataset, needs_reward_model(trainer))]
    if not trainer.config.trainer.val_only:
        used.insert(0, (trainer.reward_fn, trainer.train_loader.dataset, trainer.use_reward_model))
    of_the_run = set().union(*(dataset.data_sources() for _, dataset, _ in used))
    for reward_fn, dataset, by_model in used:
        if isinstance(reward_fn, RewardManager):
            _require_scored_rows(
                reward_fn,
                all_rows(dataset),
                has_reward_model=trainer.use_reward_model,
                by_model=by_model,
                of_the_run=of_the_run,
            )
            reward_fn.start()


def _require_scored_rows(
    reward_fn: RewardManager,
    dataset: RowDataset,
    *,
    has_reward_model: bool,
    by_model: bool,
    of_the_run: set[str],
) -> None:
    sources = dataset.data_sources()
    try:
        reward_fn.validate_sources(sources, has_reward_model=has_reward_model, elsewhere=of_the_run)
    except UnknownSourceError as error:
        if error.data_source == UNNAMED_SOURCE and isinstance(dataset, RLHFDataset):
            raise dataset.no_sources() from None
        raise
    if isinstance(dataset, RLHFDataset):
        by_rule = {source for source in sources if reward_fn.is_built_in(source)}
        dataset.require_ground_truths(by_rule, by_model=by_model)

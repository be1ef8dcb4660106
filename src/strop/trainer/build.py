"""Build a trainer from a configuration: worker classes, placement, rewards and start-up checks.

Copy ``build_trainer`` for a run with another worker, reward or placement: its parts are public.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from strop.checkpoint.folder import verify
from strop.checkpoint.store import Checkpoints
from strop.config.placement import Placement, runs_on_ray
from strop.config.roles import model_paths, roles_of, tokenizer_paths, uses_critic
from strop.config.schema import Config, RootConfig
from strop.config.schema.base import ModelConfig
from strop.controller.group import LocalWorkerGroup
from strop.controller.pools import ResourcePoolManager, Role
from strop.data.hub import local_tokenizer, require_from_hub
from strop.data.loader import RowDataset
from strop.data.parquet import UNNAMED_SOURCE
from strop.data.prompts import encode_prompts, encode_responses
from strop.data.rl_dataset import RLHFDataset, all_rows
from strop.data.tokenize import tokenizer_fingerprint
from strop.errors import Attempts, ModelError
from strop.models.loader import import_external_lib, load_model_config, load_tokenizer
from strop.rewards.base import Reward
from strop.rewards.manager import load_reward_manager
from strop.rewards.router import UnknownSourceError
from strop.tracking.trackers import resolve_tracker
from strop.trainer.ray_trainer import RayPPOTrainer
from strop.trainer.seeds import seed_global_generators
from strop.workers.critic import CriticWorker
from strop.workers.policy import ActorRolloutRefWorker
from strop.workers.reward_model import RewardModelWorker

logger = logging.getLogger("strop")

_REMEDY = (
    "Set reward_model.model.input_tokenizer to the policy's tokenizer, so that samples are decoded and "
    "tokenized again for the reward model"
)


def require_same_vocabulary(
    policy: str | Path, reward_model: str | Path, tokenizer: Any, *, trusted: tuple[bool, bool]
) -> None:
    """Raise ``ModelError`` if two models' vocabularies differ in size or in the meaning of a token id.

    ``tokenizer`` is the policy's; ``trusted``: permission for each model to run its code. Tokens that one of
    them lacks and added tokens may differ. Of a reward model without a tokenizer, only the size is compared.
    """
    sizes = [
        load_model_config(path, override_config={}, trust_remote_code=trust).get_text_config().vocab_size
        for path, trust in zip((policy, reward_model), trusted, strict=True)
    ]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"the vocabularies differ: the policy {policy} has {sizes[0]} tokens, the reward model "
            f"{reward_model} has {sizes[1]} tokens. {_REMEDY}"
        )
    try:
        other = load_tokenizer(reward_model, trust_remote_code=trusted[1])
    except ModelError:
        return
    ours, theirs = _ordinary_tokens(tokenizer), _ordinary_tokens(other)
    differing = sorted(token_id for token_id in ours.keys() & theirs if ours[token_id] != theirs[token_id])
    if differing:
        first = differing[0]
        raise ModelError(
            f"the vocabularies have {sizes[0]} tokens each, but {len(differing)} ids mean other tokens: the "
            f"first, {first}, is {ours[first]!r} to the policy and {theirs[first]!r} to the reward model. "
            f"{_REMEDY}"
        )


def _ordinary_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.get_added_vocab()
    return {token_id: token for token, token_id in tokenizer.get_vocab().items() if token not in added}


def check_reward_model_tokens(config: Config, tokenizer: Any) -> None:
    """Raise ``ModelError`` if the reward model would score token ids that mean other tokens to it.

    Warn if samples are tokenized again although both models share a tokenizer whose chat template changes
    them.
    """
    rewards = config.reward_model
    if not rewards.enable:
        return
    import_external_lib(rewards.model.external_lib)
    models = config.actor_rollout_ref.model, rewards.model
    policy, reward_model = (local_tokenizer(model.path, config.data.cache_dir) for model in models)
    if rewards.model.input_tokenizer is None:
        trusted = models[0].trust_remote_code, models[1].trust_remote_code
        require_same_vocabulary(policy, reward_model, tokenizer, trusted=trusted)
        return
    own = load_tokenizer(reward_model, trust_remote_code=rewards.model.trust_remote_code)
    is_shared = tokenizer_fingerprint(own) == tokenizer_fingerprint(tokenizer)
    if is_shared and own.chat_template is not None and _template_differs(own):
        logger.warning(
            "reward_model.model.input_tokenizer=%s: policy and reward model have one tokenizer, and its chat "
            "template ends a conversation otherwise than a policy does. A reward model of `strop train-rm` "
            "has learned from what a policy generates: set the key to null for it",
            rewards.model.input_tokenizer,
        )


def check_model_configurations(config: Config) -> None:
    """Raise ``ModelError`` if the configuration of policy or critic cannot be read, or overridden."""
    sections = [config.actor_rollout_ref.model, *([config.critic.model] if uses_critic(config) else [])]
    for section in sections:
        import_external_lib(section.external_lib)
        load_model_config(
            local_tokenizer(section.path, config.data.cache_dir),
            override_config=section.override_config,
            trust_remote_code=section.trust_remote_code,
        )


def _template_differs(tokenizer: Any) -> bool:
    """Return True if the chat template writes a response otherwise than a policy generates it."""
    prompt, response = [{"role": "user", "content": "1"}], {"role": "assistant", "content": "2"}
    generated = [*encode_prompts([prompt], tokenizer)[0], *encode_responses(["2"], tokenizer)[0]]
    return tokenizer.apply_chat_template([*prompt, response], return_dict=False) != generated


def fetch_tokenizer(
    config: RootConfig, model: ModelConfig, *, models: Iterable[str], tokenizers: Iterable[str], weights: bool
) -> Any:
    """Prepare this process for a run, download what is on the hub, and return the tokenizer of ``model``.

    ``weights=False`` leaves the weights of ``models`` on the hub; processes on Ray fetch their own.
    """
    seed_global_generators(config.trainer.seed)
    import_external_lib(model.external_lib)
    cache_dir, weights = config.data.cache_dir, weights and not runs_on_ray(config)
    require_from_hub(models=models, tokenizers=tokenizers, cache_dir=cache_dir, weights=weights)
    folder = local_tokenizer(config.data.tokenizer or model.path, cache_dir)
    return load_tokenizer(folder, trust_remote_code=model.trust_remote_code)


def build_trainer(config: Config, *, with_weights: bool = True) -> RayPPOTrainer:
    """Return a trainer whose ``init_workers()`` and ``fit()`` are left to call; no model is loaded yet.

    Everything that can be checked before is checked here. ``with_weights=False`` leaves the weights of models
    on the hub there, for a caller who does not train.

    Raises:
        StropError: wrong inputs; several of them are ``SeveralErrors``.
    """
    tokenizer = fetch_tokenizer(
        config,
        config.actor_rollout_ref.model,
        models=model_paths(config).values(),
        tokenizers=tokenizer_paths(config).values(),
        weights=with_weights,
    )
    attempt = Attempts()
    attempt(lambda: check_reward_model_tokens(config, tokenizer))
    attempt(lambda: check_model_configurations(config))
    for name in config.trainer.logger:
        attempt(lambda name=name: resolve_tracker(name))
    attempt(lambda: require_checkpoint(Checkpoints.of(config), config.trainer.resume_mode))

    role_worker_mapping = {
        **dict.fromkeys((Role.ActorRollout, Role.Actor, Role.Rollout, Role.RefPolicy), ActorRolloutRefWorker),
        Role.Critic: CriticWorker,
        Role.RewardModel: RewardModelWorker,
    }
    placement = Placement.from_config(config)
    resource_pool_manager = ResourcePoolManager(
        resource_pool_spec=placement.pools,
        mapping={Role[role]: placement.roles[role] for role in roles_of(config)},
    )
    rewards = config.reward_model
    reward_fn, val_reward_fn = (
        attempt(lambda n=n: load_reward_manager(config, tokenizer, n, **rewards.reward_kwargs))
        for n in (rewards.num_examine, rewards.val_num_examine)
    )
    trainer = attempt(
        lambda: RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=role_worker_mapping,
            resource_pool_manager=resource_pool_manager,
            ray_worker_group_cls=worker_group_class(config),
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
        )
    )
    attempt.raise_errors()
    _require_scorers(trainer)
    return trainer


def worker_group_class(config: RootConfig) -> type:
    """Return the kind of worker group that ``trainer.worker_group`` and the placement require."""
    if not runs_on_ray(config):
        return LocalWorkerGroup
    from strop.controller.ray.group import RayWorkerGroup

    return RayWorkerGroup


def require_checkpoint(checkpoints: Checkpoints, resume_mode: str) -> None:
    """Raise ``CheckpointError`` if the checkpoint to resume from is damaged."""
    checkpoint = checkpoints.find(resume_mode)
    if checkpoint is not None:
        verify(checkpoint)


def _require_scorers(trainer: RayPPOTrainer) -> None:
    """Check that every row can be scored, and start the scoring processes.

    Raises:
        RewardError: a ``data_source`` without a scorer.
        DataError: a row without the column or the value that its scorer needs.
    """
    has_reward_model = trainer.config.reward_model.enable
    used = [(trainer.val_reward_fn, trainer.val_loader.dataset, trainer.validates_by_model)]
    if not trainer.config.trainer.val_only:
        used.insert(0, (trainer.reward_fn, trainer.train_loader.dataset, has_reward_model))
    of_the_run = set().union(*(dataset.data_sources() for _, dataset, _ in used))

    def require_scored(reward_fn: Reward, dataset: RowDataset, by_model: bool) -> None:
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

    attempt = Attempts()
    for reward_fn, dataset, by_model in used:
        attempt(partial(require_scored, reward_fn, all_rows(dataset), by_model))
        attempt(reward_fn.start)
    attempt.raise_errors()

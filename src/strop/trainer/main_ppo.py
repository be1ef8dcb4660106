"""``strop train``: from a configuration to a trained model.

``build_trainer`` is the place to copy from when a run needs another worker, reward or placement: everything
that it puts together is public.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from strop.command import run_command
from strop.config.check import check
from strop.config.load import load_config
from strop.config.schema import Config
from strop.errors import ModelError

logger = logging.getLogger("strop")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config-path``, ``--config-name`` and Hydra overrides."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides of ppo_trainer.yaml"
    )
    parser.add_argument("--config-name", "-cn", help="a YAML file of yours, laid over ppo_trainer.yaml")
    parser.add_argument("--config-path", "-cp", help="the folder of that file, or the file itself")


def config_from(arguments: argparse.Namespace) -> Config:
    """The configuration that a command line asks for."""
    return load_config(
        arguments.overrides, config_name=arguments.config_name, config_path=arguments.config_path
    )


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m strop.trainer.main_ppo key=value ...``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="strop train", description="Train a language model with PPO.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_config_arguments(parser)
    arguments = parser.parse_intermixed_args(argv)
    return run_command(lambda: run(config_from(arguments)), debug=arguments.debug)


def run(config: Config) -> int:
    """Train as ``config`` says; returns 0."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    trainer = build_trainer(config)
    trainer.init_workers()
    trainer.fit()
    return 0


def build_trainer(config: Config) -> Any:
    """Check everything that can be checked before a model loads, then wire up the trainer."""
    require_valid(config)
    from strop.controller.local import LocalWorkerGroup
    from strop.controller.resource_pool import ResourcePoolManager
    from strop.controller.roles import Role
    from strop.data.files import local_path
    from strop.models.loader import import_external_lib, load_tokenizer
    from strop.rewards.manager import load_reward_manager
    from strop.trainer.ppo import RayPPOTrainer
    from strop.trainer.seeds import seed_global_generators
    from strop.workers.actor_rollout_ref import ActorRolloutRefWorker
    from strop.workers.critic import CriticWorker
    from strop.workers.reward_model import RewardModelWorker

    seed_global_generators(config.trainer.seed)
    model = config.actor_rollout_ref.model
    import_external_lib(model.external_lib)
    tokenizer = load_tokenizer(
        local_path(config.data.tokenizer or model.path, config.data.cache_dir),
        trust_remote_code=model.trust_remote_code,
    )
    require_shared_vocabulary(config)
    require_checkpoint(config)

    role_worker_mapping = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
        Role.RewardModel: RewardModelWorker,
    }
    pool = "global_pool"
    resource_pool_manager = ResourcePoolManager(
        resource_pool_spec={pool: [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
        mapping=dict.fromkeys(role_worker_mapping, pool),
    )
    rewards = config.reward_model
    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=resource_pool_manager,
        ray_worker_group_cls=LocalWorkerGroup,
        reward_fn=load_reward_manager(config, tokenizer, rewards.num_examine, **rewards.reward_kwargs),
        val_reward_fn=load_reward_manager(
            config, tokenizer, rewards.val_num_examine, **rewards.reward_kwargs
        ),
    )


def require_valid(config: Config) -> None:
    """All cross-key errors as one ``ConfigError``; warnings go to the log."""
    result = check(config)
    for warning in result.warnings:
        logger.warning("warning: %s", warning)
    result.raise_errors()


def require_shared_vocabulary(config: Config) -> None:
    """``ModelError`` when a reward model without ``input_tokenizer`` has another vocabulary."""
    from strop.data.files import local_path
    from strop.models.loader import load_model_config

    rewards = config.reward_model
    if not rewards.enable or rewards.model.input_tokenizer is not None:
        return
    sizes = {}
    for name, path in (("policy", config.actor_rollout_ref.model.path), ("reward model", rewards.model.path)):
        folder = local_path(path, config.data.cache_dir)
        sizes[name] = load_model_config(folder, override_config={}).get_text_config().vocab_size
    if sizes["policy"] != sizes["reward model"]:
        raise ModelError(
            f"the vocabularies differ: policy {sizes['policy']}, reward model {sizes['reward model']}. Set "
            "reward_model.model.input_tokenizer to the policy's tokenizer, so that samples are decoded and "
            "written anew for the reward model"
        )


def require_checkpoint(config: Config) -> None:
    """The checkpoint that the run would resume from is whole, or ``CheckpointError``."""
    from strop.trainer.checkpoint import Checkpoints, verify
    from strop.trainer.run_folder import RunFolder

    folder = RunFolder(config.trainer.default_local_dir)
    checkpoint = Checkpoints(folder.path).find(config.trainer.resume_mode)
    if checkpoint is not None:
        verify(checkpoint)


if __name__ == "__main__":
    sys.exit(main())

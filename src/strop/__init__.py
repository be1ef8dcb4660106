"""strop: reinforcement-learning post-training for language models.

Public names are imported from their modules on first use, so ``import strop`` and ``strop --help`` are fast.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "DataProto": "strop.protocol",
    "RLHFDataset": "strop.data.rl_dataset",
    "create_rl_dataset": "strop.data.rl_dataset",
    "RewardManager": "strop.rewards.manager",
    "load_reward_manager": "strop.rewards.loading",
    "Role": "strop.controller.pools",
    "ResourcePoolManager": "strop.controller.pools",
    "LocalWorkerGroup": "strop.controller.group",
    "RayWorkerGroup": "strop.controller.ray.group",
    "NVMegatronRayWorkerGroup": "strop.controller.ray.group",
    "Worker": "strop.workers.base",
    "ActorRolloutRefWorker": "strop.workers.policy",
    "CriticWorker": "strop.workers.critic",
    "RewardModelWorker": "strop.workers.reward_model",
    "RayPPOTrainer": "strop.trainer.ray_trainer",
    "load_config": "strop.config.load",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        if name.endswith("RayWorkerGroup") and importlib.util.find_spec("ray") is None:
            from strop.errors import MissingExtraError

            raise MissingExtraError("ray", "ray", name)
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'strop' has no attribute {name!r}")

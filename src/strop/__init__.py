"""strop: reinforcement-learning post-training for language models.

    strop.train(model, data, reward, algorithm="grpo")   reinforcement learning
    strop.sft(model, data)                               supervised fine-tuning
    strop.train_rm(model, data)                          a reward model, from preferences
    strop.dpo(model, data)                               a policy, from preferences
    strop.evaluate(model, data, reward)                  answers to prompts, scored
    strop.Run(folder)                                    metrics, samples, curves and model of a run
    strop.tools.python                                   a tool for the policy: Python in a sandbox

``help(strop.train)`` has the arguments. The building blocks of own programs are in ``strop.BUILDING_BLOCKS``.
Names are imported from their modules on first use, so ``import strop`` and ``strop --help`` are fast.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from strop.version import __version__

if TYPE_CHECKING:
    from strop import tools as tools
    from strop.api import distill as distill
    from strop.api import dpo as dpo
    from strop.api import evaluate as evaluate
    from strop.api import sft as sft
    from strop.api import train as train
    from strop.api import train_rm as train_rm
    from strop.results import Evaluation as Evaluation
    from strop.results import Run as Run

_FUNCTIONS = {
    "train": "strop.api",
    "distill": "strop.api",
    "sft": "strop.api",
    "train_rm": "strop.api",
    "dpo": "strop.api",
    "evaluate": "strop.api",
    "Run": "strop.results",
    "Evaluation": "strop.results",
}
BUILDING_BLOCKS = {
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

"""Name -> the module that has it."""

__all__ = [*_FUNCTIONS, "BUILDING_BLOCKS", "__version__", *BUILDING_BLOCKS]


def __dir__() -> list[str]:  # building blocks would hide the functions, and import all packages in help()
    return [
        *_FUNCTIONS,
        "BUILDING_BLOCKS",
        "__all__",
        "__doc__",
        "__file__",
        "__name__",
        "__path__",
        "__version__",
    ]


def __getattr__(name: str) -> Any:
    modules = {**_FUNCTIONS, **BUILDING_BLOCKS}
    if name in modules:
        if name.endswith("RayWorkerGroup") and importlib.util.find_spec("ray") is None:
            from strop.errors import MissingExtraError

            raise MissingExtraError("ray", "ray", name)
        return getattr(importlib.import_module(modules[name]), name)
    if name == "tools":
        return importlib.import_module("strop.tools")
    raise AttributeError(f"module 'strop' has no attribute {name!r}")

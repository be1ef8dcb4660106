"""The configuration as a file that repeats the run: what depends on who wrote a key is written out."""

from __future__ import annotations

from typing import Any

from strop.config.load import to_dict
from strop.config.placement import processes_per_node
from strop.config.schema import Config
from strop.config.trees import Root
from strop.config.vllm import rollout_dtype, tensor_parallel_size


def settled(config: Root) -> Root:
    """``config`` with the values that unwritten keys come to in this run: in a file every key is written."""
    tree = to_dict(config)
    if not tree["trainer"].get("resource_pools"):
        tree["trainer"]["n_gpus_per_node"] = processes_per_node(config)
    if isinstance(config, Config):
        _settle_rollout(config, tree["actor_rollout_ref"]["rollout"])
    return type(config).model_validate(tree)


def _settle_rollout(config: Config, rollout: dict[str, Any]) -> None:
    if rollout["name"] == "vllm":
        rollout["dtype"] = rollout_dtype(config)
        rollout["tensor_model_parallel_size"] = tensor_parallel_size(config)

"""What keys of the rollout come to where nobody wrote them: the defaults are those of a GPU."""

from __future__ import annotations

from typing import Any

from strop.config.placement import Placement, visible_gpus
from strop.config.schema import Config
from strop.config.schema.rollout import VLLMSamplingConfig
from strop.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
NEUTRAL: dict[str, Any] = {
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": [],
    "stop": [],
}
"""The values of vLLM's sampling keys with which they do nothing; null for the others."""
KEEPS_THE_POLICY = frozenset({"stop", "repetition_detection"})
"""Those that end a response and leave its distribution as it is."""


def rollout_dtype(config: Config) -> str:
    """Of vLLM's weights: the actor's computing dtype, unless another one is written."""
    dtype = config.actor_rollout_ref.rollout.dtype
    if dtype == "auto" or not _is_written(config, "dtype"):
        return config.actor_rollout_ref.model.compute_dtype
    return dtype


def tensor_parallel_size(config: Config) -> int:
    """Ranks that run one vLLM engine together; a default that does not suit the ranks counts as 1.

    Raises ``ConfigError`` when the written size does not divide them.
    """
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    placement = Placement.from_config(config)
    ranks = placement.ranks("Rollout" if "Rollout" in placement.roles else "ActorRollout")
    if not _is_written(config, "tensor_model_parallel_size"):
        return size if ranks % size == 0 and config.trainer.device != "cpu" and visible_gpus() else 1
    if ranks % size:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={size} does not divide the {ranks} ranks of the rollout"
        )
    return size


def extra_sampling(config: Config) -> dict[str, object]:
    """The fields of vLLM's ``SamplingParams`` that the run sets beyond those of every generator."""
    rollout = config.actor_rollout_ref.rollout
    values = {name: getattr(rollout, name) for name in VLLMSamplingConfig.model_fields}
    return {name: value for name, value in values.items() if value != NEUTRAL.get(name)}


def _is_written(config: Config, key: str) -> bool:
    return config.written is None or f"{_ROLLOUT}.{key}" in config.written

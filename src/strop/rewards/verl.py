"""The names that reward managers written for verl import from it.

``sed -E 's/from verl[a-z_.]* import/from strop.rewards.verl import/'`` is the change that such a file needs.
"""

from __future__ import annotations

from asyncio import get_event_loop
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from strop.protocol import DataProto
from strop.rewards.reward_output import at_last_token, model_scores
from strop.rewards.router import default_compute_score

__all__ = [
    "AbstractRewardManager",
    "DataProto",
    "RawRewardFn",
    "_default_compute_score",
    "default_compute_score",
    "get_event_loop",
    "register",
]

RawRewardFn = Callable[..., Any]
_default_compute_score = default_compute_score  # its name in verl 0.3
_Class = TypeVar("_Class", bound=type)


class AbstractRewardManager:
    """Base class of verl's reward managers."""

    def _extract_reward_from_rm_scores(
        self, data: DataProto, return_dict: bool = False
    ) -> Tensor | dict[str, Any] | None:
        """Return the reward model's scores at the last response tokens [B, T]; None without a model."""
        if "rm_scores" not in data.batch:
            return None
        mask_BT = data.batch["response_mask"]
        scores_BT = at_last_token(model_scores(data.batch["rm_scores"], mask_BT), mask_BT)
        return {"reward_tensor": scores_BT, "reward_extra_info": {}} if return_dict else scores_BT


def register(name: str) -> Callable[[_Class], _Class]:
    """Return the class unchanged: ``reward_model.reward_manager`` is its import path, not ``name``."""
    return lambda manager: manager

"""Workers without models, to benchmark the driver: every column has its real shape and dtype.

Shapes: B samples (one per prompt), P prompt tokens, T response tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from strop.config.schema import Config
from strop.controller.group import Dispatch, register
from strop.controller.pools import Role
from strop.protocol import DataProto
from strop.rollout.base import Finished


class LightWorker:
    """Worker without model and tokenizer, so that its process needs little more memory than torch."""

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        self.response_width = config.data.max_response_length

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Do nothing."""


class LightPolicy(LightWorker):
    """Stand-in for actor, rollout and reference policy."""

    @register(Dispatch.DATA_PARALLEL)
    def generate_sequences(
        self, prompts: DataProto, finished: Finished | None = None, advanced: Any = None
    ) -> DataProto:
        """Return the columns of the ``hf`` rollout; each seed sets a response length of T/2 to T tokens."""
        width, columns = self.response_width, prompts.batch
        shortest = width // 2
        lengths_B = shortest + columns["seeds"][:, 0] % (width - shortest + 1)
        mask_BT = torch.arange(width) < lengths_B[:, None]
        responses_BT = torch.arange(width).expand(len(prompts), width) * mask_BT
        attention_mask = torch.cat([columns["attention_mask"], mask_BT.long()], dim=1)
        generated = {
            "prompts": columns["input_ids"],
            "responses": responses_BT,
            "input_ids": torch.cat([columns["input_ids"], responses_BT], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask_BT.float(),
            "rollout_log_probs": -mask_BT.float(),
            "truncated": lengths_B == width,
        }
        return DataProto(generated, prompts.non_tensor_batch, prompts.meta_info)

    @register(Dispatch.ONE_TO_ALL)
    def sync_rollout(self, version: int) -> None:
        """Do nothing: there are no weights."""

    @register(Dispatch.ONE_TO_ALL)
    def verify_rollout(self, version: int, expected: dict[str, int] | None = None) -> None:
        """Do nothing: there are no weights to compare."""

    @register(Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """Do nothing: there is no memory to release."""

    @register(Dispatch.DATA_PARALLEL)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys`` [B, T]."""
        mask_BT = batch.batch["response_mask"]
        return DataProto({"old_log_probs": -mask_BT, "entropys": 2 * mask_BT})

    @register(Dispatch.DATA_PARALLEL)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``ref_log_prob`` [B, T]."""
        return DataProto({"ref_log_prob": -1.1 * batch.batch["response_mask"]})

    @register(Dispatch.DATA_PARALLEL)
    def update_actor(self, mini_batch: DataProto) -> dict[str, float]:
        """Read every column, as an optimizer step does."""
        return _read(mini_batch)


class LightCritic(LightWorker):
    """Stand-in for the critic."""

    @register(Dispatch.DATA_PARALLEL)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return ``values`` [B, T]."""
        return DataProto({"values": 0.5 * batch.batch["response_mask"]})

    @register(Dispatch.DATA_PARALLEL)
    def update_critic(self, mini_batch: DataProto) -> dict[str, float]:
        """Read every column, as an optimizer step does."""
        return _read(mini_batch)


def _read(mini_batch: DataProto) -> dict[str, float]:
    total = sum(float(column.sum()) for column in mini_batch.batch.values())
    return {"loss": total / mini_batch.meta_info["n_tokens"], "grad_norm": 1.0, "lr": 0.0}

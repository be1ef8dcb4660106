"""Workers that do next to nothing, for measuring what drives them: every column has its real shape and dtype.

Shapes: B samples (one for each prompt), P prompt tokens, T response tokens.
"""

from __future__ import annotations

import torch

from strop.config.schema import Config
from strop.controller.group import Dispatch, register
from strop.controller.pools import Role
from strop.protocol import DataProto
from strop.rollout.base import Finished


class LightWorker:
    """No model, no tokenizer: a process with one stays as small as torch lets it."""

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        self.response_width = config.data.max_response_length

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """There is none."""


class LightPolicy(LightWorker):
    """In place of actor, rollout and reference."""

    @register(Dispatch.DATA_PARALLEL)
    def generate_sequences(self, prompts: DataProto, finished: Finished | None = None) -> DataProto:
        """The columns of the ``hf`` rollout; responses of half to all of T tokens, their seed decides."""
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
        """There are no weights."""

    @register(Dispatch.ONE_TO_ALL)
    def verify_rollout(self, version: int, expected: dict[str, int] | None = None) -> None:
        """There are none that could be wrong."""

    @register(Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """There is nothing to release."""

    @register(Dispatch.DATA_PARALLEL)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` [B, T]."""
        mask_BT = batch.batch["response_mask"]
        return DataProto({"old_log_probs": -mask_BT, "entropys": 2 * mask_BT})

    @register(Dispatch.DATA_PARALLEL)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """``ref_log_prob`` [B, T]."""
        return DataProto({"ref_log_prob": -1.1 * batch.batch["response_mask"]})

    @register(Dispatch.DATA_PARALLEL)
    def update_actor(self, mini_batch: DataProto) -> dict[str, float]:
        """Reads every column, as a step would."""
        return _read(mini_batch)


class LightCritic(LightWorker):
    """In place of the critic."""

    @register(Dispatch.DATA_PARALLEL)
    def compute_values(self, batch: DataProto) -> DataProto:
        """``values`` [B, T]."""
        return DataProto({"values": 0.5 * batch.batch["response_mask"]})

    @register(Dispatch.DATA_PARALLEL)
    def update_critic(self, mini_batch: DataProto) -> dict[str, float]:
        """Reads every column, as a step would."""
        return _read(mini_batch)


def _read(mini_batch: DataProto) -> dict[str, float]:
    total = sum(float(column.sum()) for column in mini_batch.batch.values())
    return {"loss": total / mini_batch.meta_info["n_tokens"], "grad_norm": 1.0, "lr": 0.0}

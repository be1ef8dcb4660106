"""The reward model's worker: one score for each prompt with its response."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from strop.controller.dispatch import Dispatch, register
from strop.errors import ModelError
from strop.models.deferred import defer_scorer
from strop.models.loader import load_scorer
from strop.models.scorer import SequenceScorer
from strop.protocol import DataProto
from strop.workers.role import RoleWorker


class RewardModelWorker(RoleWorker):
    """Scores with an ``AutoModelForSequenceClassification``.

    With ``reward_model.model.input_tokenizer`` set, samples are decoded with it and written anew with the
    reward model's own tokenizer and chat template; without it the policy's token ids are scored as they
    are.
    """

    shared_passes: ClassVar = {"compute_rm_score": "reward_model"}

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model, and the tokenizers when it has its own."""
        section, policy = self.config.reward_model, self.config.actor_rollout_ref.model
        options: dict[str, Any] = {
            "path": self.find_model(section.model.path, section.model.external_lib),
            "fresh_head_seed": None,
            "trust_remote_code": section.model.trust_remote_code,
        }
        scorer, weights = defer_scorer(**options) if self.sharded else (load_scorer(**options), None)
        self.tokenizer = self.load_tokenizer(section.model.path)
        self.input_tokenizer: Any = None
        if section.model.input_tokenizer is not None:
            self.input_tokenizer = self.load_tokenizer(section.model.input_tokenizer)
            if self.tokenizer.chat_template is None:
                raise ModelError(
                    f"reward model {section.model.path}: its tokenizer has no chat template to write samples "
                    "with; set reward_model.model.input_tokenizer=null if it shares the policy's tokenizer"
                )
        self.engine = self.build_engine(
            SequenceScorer(scorer, packed=policy.use_remove_padding),
            name="reward_model",
            compute_dtype=policy.compute_dtype,
            fsdp=section.model.fsdp_config,
            weights=weights,
        )

    @register(Dispatch.DATA_PARALLEL)
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """``rm_scores`` [B]."""
        return DataProto(self.engine.infer(self._inputs(batch), self.micro_batching("reward_model")))

    def _inputs(self, batch: DataProto) -> DataProto:
        if self.input_tokenizer is None:
            return batch.select("input_ids", "attention_mask", "position_ids")
        rows = [
            self._write_anew(prompt, response_T[mask_T.bool()])
            for prompt, response_T, mask_T in zip(
                batch.non_tensor_batch["raw_prompt"],
                batch.batch["responses"],
                batch.batch["response_mask"],
                strict=True,
            )
        ]
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, width - len(row) :] = torch.tensor(row)
            mask[index, width - len(row) :] = 1
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return DataProto({"input_ids": ids, "attention_mask": mask, "position_ids": positions})

    def _write_anew(self, prompt: Any, response: Tensor) -> list[int]:
        """Token ids of the conversation by the reward model's own template; if too long, its end is kept."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = self.input_tokenizer.decode(response, skip_special_tokens=True)
        ids = self.tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": text}], return_dict=False
        )
        limit = self.config.reward_model.max_length
        return ids if limit is None else ids[-limit:]

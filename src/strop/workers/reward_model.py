"""The reward model's worker: one score for each prompt with its response."""

from __future__ import annotations

from typing import Any, ClassVar

from strop.controller.group import Dispatch, register
from strop.data.rewriting import Rewriter
from strop.models.deferred import defer_scorer
from strop.models.loader import load_scorer, load_tokenizer
from strop.models.scorer import SequenceScorer
from strop.protocol import DataProto
from strop.workers.base import RoleWorker


class RewardModelWorker(RoleWorker):
    """Scores with an ``AutoModelForSequenceClassification``.

    With ``reward_model.model.input_tokenizer`` set, samples are decoded with it and written anew with the
    reward model's own tokenizer and chat template (``data/rewriting.py``); without it the policy's token ids
    are scored as they are.
    """

    shared_passes: ClassVar = {"compute_rm_score": "reward_model"}

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model, and both tokenizers when it has its own."""
        section, policy = self.config.reward_model, self.config.actor_rollout_ref.model
        options: dict[str, Any] = {
            "path": self.find_model(section.model.path, section.model.external_lib),
            "fresh_head_seed": None,
            "trust_remote_code": section.model.trust_remote_code,
        }
        scorer, weights = defer_scorer(**options) if self.sharded else (load_scorer(**options), None)
        self.rewriter: Rewriter | None = None
        if section.model.input_tokenizer is not None:
            self.rewriter = Rewriter(
                reader=self.load_tokenizer(section.model.input_tokenizer),
                writer=load_tokenizer(options["path"], trust_remote_code=section.model.trust_remote_code),
                max_length=section.max_length,
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
        if self.rewriter is not None:
            return self.rewriter(batch)
        columns = ("input_ids", "attention_mask", "position_ids", "response_mask")
        return batch.select(*columns)  # the mask tells packed passes what samples of a prompt share

"""``RewardModelWorker``: one score for each prompt with its response."""

from __future__ import annotations

from typing import Any, ClassVar

from strop.controller.group import Dispatch, register
from strop.data.rewriting import Rewriter
from strop.engines.micro_batches import require_no_tree
from strop.models.folder import load_tokenizer
from strop.protocol import DataProto
from strop.workers.base import RoleWorker
from strop.workers.memory import phase
from strop.workers.vocabulary import require_same_vocabulary


class RewardModelWorker(RoleWorker):
    """Score with an ``AutoModelForSequenceClassification``.

    With ``reward_model.model.input_tokenizer`` samples are decoded with that tokenizer and re-tokenized with
    the reward model's tokenizer and chat template (``data/rewriting.py``). Without it the policy's token ids
    are scored.
    """

    shared_passes: ClassVar = {"compute_rm_score": "reward_model"}

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model, and both tokenizers if samples are re-tokenized."""
        require_same_vocabulary(self.config)
        section, policy = self.config.reward_model, self.config.actor_rollout_ref.model
        options: dict[str, Any] = {
            "path": self.find_model(section.model.path, section.model.external_lib),
            "trust_remote_code": section.model.trust_remote_code,
        }
        self.rewriter: Rewriter | None = None
        if section.model.input_tokenizer is not None:
            self.max_pictures = 0  # its samples have words in their places
            self.rewriter = Rewriter(
                reader=self.load_tokenizer(section.model.input_tokenizer),
                writer=load_tokenizer(options["path"], trust_remote_code=section.model.trust_remote_code),
                max_length=section.max_length,
            )
        self.engine = self.build_engine(
            "score",
            options,
            name="reward_model",
            compute_dtype=policy.compute_dtype,
            packed=policy.use_remove_padding,
            trained=None,
        )

    @register(Dispatch.DATA_PARALLEL)
    @phase("reward_model")
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Return ``rm_scores`` [B]."""
        inputs, micro = self._inputs(batch), self.micro_batching("reward_model")
        # in its own tokens a sample may be longer than the cap, which the policy's limits bound
        return DataProto(self.engine.infer(inputs, micro.holding_rows_of(inputs)))

    def _inputs(self, batch: DataProto) -> DataProto:
        require_no_tree(batch, "reward_model.enable=True", "set it to False, and score with a function")
        if self.rewriter is not None:
            return self.rewriter(batch)
        columns = ("input_ids", "attention_mask", "position_ids", "response_mask")
        # packed passes need response_mask to share prompts between samples
        return batch.select(*columns, *(name for name in ("images", "images_at") if name in batch.batch))

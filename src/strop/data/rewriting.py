"""Samples in the words of another tokenizer: decoded, and written anew with its chat template.

Shapes: B samples, T response columns of the policy, L tokens of the longest conversation written anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop.data.prompts import as_messages
from strop.errors import DataError, ModelError
from strop.protocol import DataProto

_RESPONSE_ENDS = "\ue000"
"""Marks the place in a template's text; of the private use area, so no tokenizer has a word with it."""


@dataclass(frozen=True)
class Rewriter:
    """From the policy's ``reader`` to the ``writer``, a tokenizer with a chat template.

    A response that was cut off by its length limit stays open: what the template writes after a response,
    its end token above all, is left out, as the policy has not said that it had ended.
    """

    reader: Any
    writer: Any
    max_length: int | None = None
    """The longest conversation in tokens of ``writer``; of a longer one the end is kept. None: any length."""

    def __post_init__(self) -> None:
        if self.writer.chat_template is None:
            raise ModelError(
                f"the tokenizer in {self.writer.name_or_path} has no chat template to write samples with; "
                "give it one, or, if it is the policy's tokenizer as well, set reward_model.model."
                "input_tokenizer=null"
            )

    def __call__(self, batch: DataProto) -> DataProto:
        """``input_ids``, ``attention_mask`` and ``position_ids`` [B, L], padded on the left.

        Needs ``responses`` and ``response_mask`` [B, T], ``truncated`` [B], and ``raw_prompt``: the messages,
        which ``data.return_raw_chat`` keeps.
        """
        if "raw_prompt" not in batch.non_tensor_batch:
            raise DataError(
                "samples have no raw_prompt, the chat messages that are written anew for the reward model; "
                "a data set of your own has to bring this column (data.return_raw_chat)"
            )
        columns = batch.batch
        texts = [
            self._text(prompt, response_T[mask_T.bool()], bool(truncated))
            for prompt, response_T, mask_T, truncated in zip(
                batch.non_tensor_batch["raw_prompt"],
                columns["responses"],
                columns["response_mask"],
                columns["truncated"],
                strict=True,
            )
        ]
        rows = self.writer(texts, add_special_tokens=False)["input_ids"]
        return self._pad(rows if self.max_length is None else [row[-self.max_length :] for row in rows])

    def _text(self, prompt: Any, token_ids: Any, truncated: bool) -> str:
        response = self.reader.decode(token_ids, skip_special_tokens=True)
        messages = [*as_messages(prompt), {"role": "assistant", "content": response}]
        if truncated:
            messages[-1]["content"] += _RESPONSE_ENDS
        text = self.writer.apply_chat_template(messages, tokenize=False)
        if not truncated:
            return text
        # A template that drops parts of a response (its reasoning) may drop the mark, and then has no end.
        return text.rpartition(_RESPONSE_ENDS)[0] or text

    def _pad(self, rows: Sequence[Sequence[int]]) -> DataProto:
        width = max(len(row) for row in rows)
        ids_BL = torch.full((len(rows), width), self.writer.pad_token_id)
        mask_BL = torch.zeros_like(ids_BL)
        for index, row in enumerate(rows):
            ids_BL[index, width - len(row) :] = torch.tensor(row)
            mask_BL[index, width - len(row) :] = 1
        positions_BL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
        return DataProto({"input_ids": ids_BL, "attention_mask": mask_BL, "position_ids": positions_BL})

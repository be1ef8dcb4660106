"""Re-tokenize samples for a reward model whose tokenizer is not the policy's.

Samples are decoded and rendered again with the other tokenizer's chat template. Shapes: B samples, T response
columns of the policy, L tokens of the longest re-tokenized conversation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from strop.columns import sampled_runs
from strop.data.control_tokens import PromptError, control_tokens
from strop.data.loader import collate
from strop.data.pictures.parts import in_words
from strop.data.prompts import as_messages, as_taken
from strop.errors import DataError, ModelError, raised_as
from strop.protocol import DataProto

_RESPONSE_ENDS = "\ue000"
"""Marks the end of a cut response in rendered text; a private-use character, unknown to tokenizers."""


@dataclass(frozen=True)
class Rewriter:
    """Re-tokenize from the policy's ``reader`` to ``writer``, a tokenizer with a chat template.

    A response that was cut at its length limit stays open: whatever the template appends to a response, above
    all its end token, is left out, because the policy did not generate it.
    """

    reader: Any
    writer: Any
    max_length: int | None = None
    """Keep the last ``max_length`` tokens of a longer conversation; None: no limit."""

    def __post_init__(self) -> None:
        if self.writer.chat_template is None:
            raise ModelError(
                f"the tokenizer in {self.writer.name_or_path} has no chat template to render samples with; "
                "add one, or, if the policy uses the same tokenizer, set "
                "reward_model.model.input_tokenizer=null"
            )

    def __call__(self, batch: DataProto) -> DataProto:
        """Return ``input_ids``, ``attention_mask`` and ``position_ids`` [B, L], padded on the left.

        Reads ``responses`` and ``response_mask`` [B, T], ``truncated`` [B], and ``raw_prompt``, the messages
        kept by ``data.return_raw_chat``, with their ``raw_tools``; of samples with turns also ``ended_by``
        and ``conversation``. Pictures are words, ``[picture]``.
        """
        if "raw_prompt" not in batch.non_tensor_batch:
            raise DataError(
                "samples have no raw_prompt, the chat messages that are re-tokenized for the reward model; a "
                "custom data set must provide this column (data.return_raw_chat)"
            )
        columns, given = batch.batch, batch.non_tensor_batch["raw_prompt"]
        counts = (columns["images"] != 0).sum(dim=1).tolist() if "images" in columns else [0] * len(batch)
        played: list[dict[str, Any]] = [{} for _ in given]
        if "ended_by" in columns:
            played = [*map(json.loads, batch.non_tensor_batch["conversation"])]
        prompts = [one.get("prompt") or as_messages(own) for one, own in zip(played, given, strict=True)]
        texts = [
            self._text(self._chat(in_words(prompt, count), one.get("turns"), *tokens), tools, bool(truncated))
            for prompt, count, one, tools, truncated, *tokens in zip(
                prompts,
                counts,
                played,
                batch.non_tensor_batch.get("raw_tools", [None] * len(batch)),
                columns["truncated"],
                columns["responses"],
                columns["response_mask"],
                strict=True,
            )
        ]
        try:
            rows = control_tokens(self.writer).encode(texts, add_special_tokens=False)
        except PromptError as error:
            raise ModelError(f"sample {error.offset}, for another tokenizer: {error.reason}") from error
        if self.max_length is not None:
            # the end: a reward model scores at the last token
            rows = [row[-self.max_length :] for row in rows]
        longest = max(len(row) for row in rows)
        tensors = [{"input_ids": torch.tensor(row)} for row in rows]
        return collate(tensors, pad_token_id=self.writer.pad_token_id, max_prompt_length=longest)

    def _chat(self, messages: list[Any], turns: Any, ids_T: Any, mask_T: Any) -> list[Any]:
        """Return the messages of the prompt, and each turn with the answers to it as the user's."""
        runs = sampled_runs(ids_T, mask_T)
        said = [self.reader.decode(ids, skip_special_tokens=True) for ids in runs] or [""]
        if messages[-1]["role"] == "assistant":  # the response continues it
            said[0] = messages.pop()["content"] + said[0]
        # a lost sample has turns, and no sampled tokens
        for text, turn in zip(said, turns or [{}], strict=False):
            messages.append({"role": "assistant", "content": text})
            if answers := turn.get("answers"):  # not as of a tool: most templates of reward models have none
                content = "\n".join(answer["content"] for answer in in_words(answers, 0))
                messages.append({"role": "user", "content": content})
        return messages

    def _text(self, messages: list[Any], tools: Any, truncated: bool) -> str:
        messages, tools = map(control_tokens(self.writer).escape, (messages, tools))
        if truncated:
            messages[-1]["content"] += _RESPONSE_ENDS
        chat = as_taken(messages, self.writer)
        refused = f"the chat template in {self.writer.name_or_path} refuses the messages of a sample"
        # templates raise anything
        with raised_as(ModelError, refused, remedy="use a reward model whose template takes such prompts"):
            text = self.writer.apply_chat_template(chat, tools=tools, tokenize=False)
        if not truncated:
            return text
        # A template that drops parts of a response (its reasoning) may drop the mark, and nothing follows it.
        return text.rpartition(_RESPONSE_ENDS)[0] or text

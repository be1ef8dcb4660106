"""What every rollout takes and gives: the check of a request's columns, and the columns of its answer.

Columns of the answer, for B prompts and n samples each (a prompt's samples are adjacent rows): the prompts'
other columns, repeated, and
    prompts [B*n, P], responses [B*n, T], input_ids, attention_mask, position_ids [B*n, P+T]: int64
    response_mask [B*n, T]: float32, 1 for sampled tokens up to and including the stop token
    rollout_log_probs [B*n, T]: float32, of the distribution sampled from; 0 in padding
    truncated [B*n]: bool, ended by the length limit and not by a stop token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import DataError, TrainingError
from strop.protocol import DataProto
from strop.rollout.base import SamplingParams

PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Samples:
    """Tokens and float32 log-probs [R, T] (of no meaning from ``lengths`` on); lengths and truncated [R]."""

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    truncated: Tensor


def seeds_of(prompts: DataProto, params: SamplingParams) -> list[int]:
    """The seeds of all samples, in order; none if greedy.

    ``DataError``: a column is missing or has another shape, or a prompt is empty or not left-padded.
    """
    needed = PROMPT_COLUMNS if params.greedy else (*PROMPT_COLUMNS, "seeds")
    missing = [name for name in needed if name not in prompts.batch]
    if missing:
        raise DataError(f"generate: the prompts have no column {', '.join(missing)}")
    mask_BP = prompts.batch["attention_mask"].bool()
    misplaced_B = ~mask_BP[:, -1] | (mask_BP[:, 1:] < mask_BP[:, :-1]).any(1)
    if misplaced_B.any():
        row = int(misplaced_B.nonzero()[0])
        raise DataError(f"generate: prompt {row} is empty or not left-padded (see its attention_mask)")
    if params.greedy:
        return []
    seeds = prompts.batch["seeds"]
    if seeds.shape != (len(prompts), params.n):
        raise DataError(
            f"generate: seeds have shape {list(seeds.shape)}, expected [{len(prompts)}, {params.n}]: "
            "one for each sample of each prompt"
        )
    return seeds.flatten().tolist()


def answer(prompts: DataProto, params: SamplingParams, samples: Samples, *, pad_token_id: int) -> DataProto:
    """``params.n`` rows for every prompt; ``TrainingError`` for log-probs that are not finite."""
    device = prompts.batch["input_ids"].device
    lengths, truncated = samples.lengths.to(device), samples.truncated.to(device)
    sampled = torch.arange(params.max_tokens, device=device) < lengths[:, None]
    log_probs = samples.log_probs.to(device).masked_fill(~sampled, 0.0)
    if not log_probs.isfinite().all():
        raise TrainingError("generate: the model's logits are not finite; have its weights diverged?")
    responses = samples.tokens.to(device).masked_fill(~sampled, pad_token_id)
    rest = DataProto(
        {name: column for name, column in prompts.batch.items() if name not in (*PROMPT_COLUMNS, "seeds")},
        prompts.non_tensor_batch,
        prompts.meta_info,
    )
    prompt_ids, prompt_mask = (
        prompts.batch[name].repeat_interleave(params.n, dim=0) for name in ("input_ids", "attention_mask")
    )
    attention_mask = torch.cat([prompt_mask, sampled.to(prompt_mask.dtype)], dim=1)
    generated = {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": sampled.float(),
        "rollout_log_probs": log_probs,
        "truncated": truncated,
    }
    return rest.repeat(params.n).union(DataProto.from_dict(generated))

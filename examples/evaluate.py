"""Accuracy of a model's answers: sampled at temperature 1, and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from strop.data.loader import collate
from strop.models.folder import end_token_ids
from strop.protocol import DataProto
from strop.rollout.base import SamplingParams
from strop.rollout.hf.engine import HFRollout


class Accuracy(NamedTuple):
    """Fractions of correct answers."""

    sampled: float
    greedy: float

    def __str__(self) -> str:
        return f"accuracy {self.sampled:.3f} sampled, {self.greedy:.3f} greedy"


def answers(
    model: Any, tokenizer: Any, problems: Sequence[dict], *, n: int, do_sample: bool, max_tokens: int
) -> list[list[str]]:
    """Sample and decode ``n`` answers to each problem (a row of the data set)."""
    rows = [
        {
            "input_ids": torch.tensor(
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            )
        }
        for row in problems
    ]
    width = max(len(row["input_ids"]) for row in rows)
    prompts = collate(rows, pad_token_id=tokenizer.pad_token_id, max_prompt_length=width)
    seeds = torch.arange(len(rows) * n).view(len(rows), n)
    ends = end_token_ids(model.generation_config, tokenizer)
    rollout = HFRollout(model, pad_token_id=tokenizer.pad_token_id, eos_token_ids=ends)
    request = DataProto({**prompts.batch, "seeds": seeds})
    samples = rollout.generate(request, SamplingParams(n=n, do_sample=do_sample, max_tokens=max_tokens))
    texts = [
        tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
        for ids, mask in zip(samples.batch["responses"], samples.batch["response_mask"], strict=True)
    ]
    return [texts[start : start + n] for start in range(0, len(texts), n)]


def evaluate(
    model: Any, tokenizer: Any, problems: Sequence[dict], *, n: int = 8, max_tokens: int = 4
) -> Accuracy:
    """Measure exact-match accuracy; the sampled figure averages ``n`` answers per problem."""

    def share(n: int, do_sample: bool) -> float:
        found = answers(model, tokenizer, problems, n=n, do_sample=do_sample, max_tokens=max_tokens)
        right = [
            answer.strip() == row["reward_model"]["ground_truth"]
            for row, group in zip(problems, found, strict=True)
            for answer in group
        ]
        return sum(right) / len(right)

    return Accuracy(sampled=share(n, True), greedy=share(1, False))


def sample_answers(model: Any, tokenizer: Any, problems: Sequence[dict]) -> list[tuple[str, str, str]]:
    """Return (problem, one sampled answer, ground truth) for each problem."""
    found = answers(model, tokenizer, problems, n=1, do_sample=True, max_tokens=4)
    return [
        (row["prompt"][-1]["content"], group[0], row["reward_model"]["ground_truth"])
        for row, group in zip(problems, found, strict=True)
    ]

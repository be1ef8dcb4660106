"""The seam between a policy and whatever generates with it: sampling parameters, protocol, registry."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from strop.errors import ConfigError, DataError, TrainingError
from strop.protocol import DataProto

if TYPE_CHECKING:
    from torch import Tensor

    from strop.config.schema.policy import RolloutConfig
    from strop.protocol import DataProto


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one call samples. Raises ``ConfigError`` with every field that is out of range."""

    max_tokens: int
    """Longest response, in tokens, the stop token included."""
    n: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """The logits are divided by it; 0 means greedy."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 or 0: off."""
    top_p: float = 1.0
    """Then among the fewest likeliest tokens that hold this much probability; 1: off."""
    do_sample: bool = True
    """False means greedy, whatever the other fields say."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the end-of-sequence tokens."""
    ignore_eos: bool = False
    """Do not stop at the end-of-sequence tokens; ``stop_token_ids`` still stop."""

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "n": (self.n >= 1, "1 or more"),
            "temperature": (self.temperature >= 0 and math.isfinite(self.temperature), "0 or more"),
            "top_k": (self.top_k >= -1, "-1 or 0 (off), or 1 and more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "stop_token_ids": (all(token >= 0 for token in self.stop_token_ids), "0 or more, each"),
        }
        problems = [
            f"SamplingParams.{name}={vars(self)[name]} is out of range, expected {expected}"
            for name, (valid, expected) in rules.items()
            if not valid
        ]
        if problems:
            raise ConfigError(*problems)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a random one."""
        return not self.do_sample or self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p makes the sampled distribution another one than the model's."""
        return self.top_k > 0 or self.top_p < 1

    @classmethod
    def from_config(cls, rollout: RolloutConfig, validate: bool = False) -> SamplingParams:
        """From the section ``actor_rollout_ref.rollout``; ``validate`` takes its ``val_kwargs``."""
        source = rollout.val_kwargs if validate else rollout
        return cls(
            max_tokens=rollout.response_length,
            n=source.n,
            temperature=source.temperature,
            top_k=source.top_k,
            top_p=source.top_p,
            do_sample=source.do_sample,
            stop_token_ids=tuple(rollout.stop_token_ids),
            ignore_eos=rollout.ignore_eos,
        )


Finished = Callable[[int, int, list[int]], None]

"""Told of a sample before the others are finished: row of its prompt, its number among the prompt's samples,
and its token ids with the stop token."""


class RolloutEngine(Protocol):
    """Generates responses. A new back-end is one new class with these methods and a line in ``ROLLOUTS``."""

    def generate(
        self, prompts: DataProto, params: SamplingParams, finished: Finished | None = None
    ) -> DataProto:
        """``params.n`` rows for every prompt, adjacent; columns as in ``strop.rollout.base``.

        ``finished`` is told of as many samples as are known early; of none twice.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """Take over weights by Hugging Face name; nothing to do where they are shared with the trainer.

        An update may come in several calls, all but the last with ``last=False``. ``ModelError`` names a
        parameter that is unknown, has another shape, comes twice or, after the last call, never came.
        """
        ...

    def checksums(self) -> dict[str, int] | None:
        """``strop.rollout.weights.checksum`` of what the engine computes with, by Hugging Face name, in its
        own dtype; None where the weights are the trainer's.
        """
        ...

    def release(self) -> None:
        """Give back the memory of an own copy of the weights, until the next update."""
        ...


ROLLOUTS: dict[str, str] = {"hf": "strop.rollout.hf.engine:HFRollout"}

"""Name in ``actor_rollout_ref.rollout.name`` -> "module:class", imported when it is asked for."""

REPLICAS: dict[str, str] = {
    "hf": "strop.rollout.hf.engine:HFReplica",
    "vllm": "strop.rollout.vllm.engine:VLLMRollout",
}

"""The same for a rollout that cannot share the actor's weights and takes them over."""


def build_rollout(name: str, *arguments: Any, own_weights: bool = False, **options: Any) -> RolloutEngine:
    """Import the back-end called ``name`` and construct it; ``ConfigError`` names the known ones."""
    known = REPLICAS if own_weights else ROLLOUTS
    if name not in known:
        raise ConfigError(f"actor_rollout_ref.rollout.name={name!r} is unknown (known: {', '.join(known)})")
    module_name, _, class_name = known[name].partition(":")
    return getattr(importlib.import_module(module_name), class_name)(*arguments, **options)


# What every rollout takes and gives: the check of a request's columns, and the columns of its answer.

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

"""Floating-point operations that an iteration needs, and the machine's peak: a floor without any program.

Counted is what no system can leave out, from the sizes alone: each prompt once in every pass for all of its
samples, logits of response tokens only, half of the attention matrix. Prompts count with their mean length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from side_by_side.inputs import LONGEST, SHORTEST
from side_by_side.setting import Setting

from rollout_hf import MODELS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak(dtype: torch.dtype, size: int = 2048, rounds: int = 5) -> float:
    """Return the floating-point operations per second of the fastest of several matrix products."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: left @ right) for _ in range(rounds))


def pass_operations(model: str, prompt: float, responses: Sequence[int], n: int, *, head: bool) -> float:
    """Count a forward pass over ``n`` samples each of prompts of ``prompt`` tokens."""
    sizes = MODELS[model]
    hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    heads, groups = sizes["heads"]
    weights = hidden * (2 * hidden + 2 * groups * hidden // heads) + 3 * hidden * sizes["intermediate_size"]
    prompts, of_response = len(responses) / n, sum(responses)
    pairs = prompts * prompt**2 / 2 + sum(prompt * length + length**2 / 2 for length in responses)
    body = layers * (2 * weights * (prompts * prompt + of_response) + 4 * hidden * pairs)
    return body + 2 * hidden * sizes["vocab_size"] * of_response * head


def iteration_operations(setting: Setting, responses: Sequence[int]) -> float:
    """Count an iteration: generation, the update, and PPO's critic and reference.

    An update is three forward passes. Old log-probs come from it, as an iteration has one optimizer step.
    """
    prompt = (SHORTEST + LONGEST) / 2
    policy, values = (
        pass_operations(setting.model, prompt, responses, setting.n, head=head) for head in (True, False)
    )
    if setting.algorithm == "grpo":
        return 4 * policy
    return (5 if setting.kl_coef else 4) * policy + 4 * values

"""Hooks that end strop's responses at the lengths planned by a ``Setting``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from side_by_side.setting import Setting
from strop.rollout.base import SamplingParams
from strop.rollout.hf import decoding
from strop.rollout.hf import engine as hf

END = 2.0  # marks the step at which a row ends: uniform numbers are below 1


def planned_ends(setting: Setting) -> contextlib.AbstractContextManager[None]:
    """Return a context in which strop's rollout ends responses as ``setting`` plans."""
    if setting.lengths == "limit":
        return contextlib.nullcontext()
    return _vllm_ends(setting) if setting.rollout == "vllm" else _hf_ends(setting)


@contextlib.contextmanager
def _hf_ends(setting: Setting) -> Generator[None]:
    """Patch the hf rollout.

    End marks replace uniform numbers, so they stay with their rows when finished rows are dropped.
    """
    draw = hf.draw_uniforms
    iteration = -1

    def draw_with_ends(seeds: Iterable[int], tokens: int) -> Tensor:
        nonlocal iteration
        uniforms_RT = draw(seeds, tokens)
        iteration += 1
        lengths = setting.planned_lengths(iteration)
        if lengths is not None and len(uniforms_RT) == len(lengths):
            uniforms_RT[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = END
        else:  # the self-check of the rollout at start-up
            iteration -= 1
        return uniforms_RT

    with forced_ends(setting, draw_with_ends):
        yield


@contextlib.contextmanager
def forced_ends(
    setting: Setting, draw: Callable[[Iterable[int], int], Tensor], step_s: float = 0.0
) -> Generator[None]:
    """Draw the hf rollout's uniform numbers by ``draw``, whose ``END`` ends a row.

    The end token is sampled nowhere else. A decoding step takes ``step_s`` seconds longer.
    """
    sample = decoding.next_tokens

    def sample_with_ends(
        logits_RV: Tensor, uniforms_R: Tensor | None, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        if uniforms_R is None:
            return sample(logits_RV, uniforms_R, params)
        if step_s:
            time.sleep(step_s)
        logits_RV[:, end_token] = -torch.inf
        tokens_R, log_probs_R = sample(logits_RV, uniforms_R, params)
        return torch.where(uniforms_R == END, end_token, tokens_R), log_probs_R

    end_token = json.loads((setting.model_folder / "config.json").read_text())["eos_token_id"]
    with (
        mock.patch.object(hf, "draw_uniforms", draw),
        mock.patch.object(decoding, "next_tokens", sample_with_ends),
    ):
        yield


@contextlib.contextmanager
def _vllm_ends(setting: Setting) -> Generator[None]:
    """Patch the vLLM rollout: every sample is a separate request with its own limit and no stop token."""
    from strop.rollout.in_flight import InFlight
    from strop.rollout.vllm.engine import VLLMRollout

    sampling, requests = VLLMRollout._sampling, iter(range(1 << 40))

    def sampling_with_end(self: Any, batch: InFlight, row: int, *request: Any) -> Any:
        iteration, sample = divmod(next(requests), setting.samples)
        lengths = setting.planned_lengths(iteration)
        assert lengths is not None
        own = copy.copy(batch)
        own.params = dataclasses.replace(
            batch.params, max_tokens=lengths[sample], stop_token_ids=(), ignore_eos=True
        )
        return sampling(self, own, row, *request)

    VLLMRollout._sampling = sampling_with_end
    try:
        yield
    finally:
        VLLMRollout._sampling = sampling

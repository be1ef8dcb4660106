"""Batches of samples that are generated over several calls.

Between two calls a sample is its prompt, its seed and its tokens so far: no request outlives a call. The next
call continues it as a new request, whose prompt is the prompt and those tokens, and whose seed is a function
of the sample's seed and their number. So a checkpoint holds tokens, and no state of an engine or a generator.

Shapes: R samples of T token columns, N tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.errors import CheckpointError, TrainingError
from strop.protocol import DataProto
from strop.rollout.base import Samples, SamplingParams

_ENDS = ("stop", "length", "repetition")


@dataclass
class Sample:
    """A sample of the engine, and what is generated of it."""

    prompt: list[int]
    seed: int | None
    """None: greedy."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    ended: bool = False
    truncated: bool = False

    @property
    def next_seed(self) -> int | None:
        """Seed of the request that goes on from here; the sample's own for the first."""
        if self.seed is None or not self.tokens:
            return self.seed
        words = np.random.SeedSequence((self.seed, len(self.tokens))).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))

    def extend(self, output: Any, version: int) -> None:
        """Append what a request for the sample generated, a ``vllm.CompletionOutput``."""
        length, reason = len(output.token_ids), output.finish_reason
        if reason is not None and (reason not in _ENDS or length == 0):
            raise TrainingError(f"vLLM ended a sample after {length} tokens for the reason {reason!r}")
        self.tokens.extend(output.token_ids)
        self.log_probs.extend(output.logprobs.logprobs)
        self.versions.extend([version] * length)
        self.ended, self.truncated = reason is not None, reason == "length"


@dataclass
class Batch:
    """The samples of one call of ``generate`` or ``admit``."""

    prompts: DataProto
    """Those of this rank."""
    params: SamplingParams
    samples: list[Sample]
    """Those of all ranks of the engine."""
    own: range
    """Rows of ``samples`` that are this rank's."""

    @property
    def columns(self) -> Samples:
        """The samples of this rank, when they have ended."""
        samples, max_tokens = [self.samples[row] for row in self.own], self.params.max_tokens
        return Samples(
            padded([sample.tokens for sample in samples], max_tokens, 0, torch.long),
            padded([sample.log_probs for sample in samples], max_tokens, 0.0, torch.float32),
            torch.tensor([len(sample.tokens) for sample in samples]),
            torch.tensor([sample.truncated for sample in samples]),
        )

    @property
    def versions(self) -> Tensor:
        """Version that sampled each token of this rank's samples: int32 [R, T], -1 beyond a response."""
        rows = [self.samples[row].versions for row in self.own]
        return padded(rows, self.params.max_tokens, -1, torch.int32)

    def state(self) -> dict[str, Tensor]:
        """Return what is generated: lengths, ended and truncated [R], tokens, log_probs and versions [N]."""
        samples = self.samples
        return {
            "lengths": torch.tensor([len(sample.tokens) for sample in samples]),
            "ended": torch.tensor([sample.ended for sample in samples]),
            "truncated": torch.tensor([sample.truncated for sample in samples]),
            "tokens": torch.tensor([i for sample in samples for i in sample.tokens], dtype=torch.long),
            "log_probs": torch.tensor([x for sample in samples for x in sample.log_probs]),
            "versions": torch.tensor([v for sample in samples for v in sample.versions], dtype=torch.int32),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Set what ``state`` returned; ``CheckpointError`` if it is of another number of samples."""
        lengths = state["lengths"].tolist()
        if len(lengths) != len(self.samples):
            raise CheckpointError(
                f"the samples in flight were saved as {len(lengths)} of an engine, and here are "
                f"{len(self.samples)}: resume with as many rollout processes, prompts and samples as before"
            )
        parts = [state[name].split(lengths) for name in ("tokens", "log_probs", "versions")]
        ends = zip(state["ended"].tolist(), state["truncated"].tolist(), strict=True)
        for sample, (ended, truncated), *generated in zip(self.samples, ends, *parts, strict=True):
            sample.tokens, sample.log_probs, sample.versions = (part.tolist() for part in generated)
            sample.ended, sample.truncated = ended, truncated


def padded(rows: Sequence[Sequence[float]], width: int, value: float, dtype: torch.dtype) -> Tensor:
    """Return the rows as one tensor [R, width], with ``value`` beyond each row's end."""
    table = torch.full((len(rows), width), value, dtype=dtype)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = torch.tensor(row, dtype=dtype)
    return table

"""Samples of admitted batches: what is generated of each, for the engine and for a checkpoint.

``InFlight`` holds one batch, ``Queue`` the batches that an engine has admitted. Between two calls a sample is
its prompt, its seed and its tokens so far. So a checkpoint holds tokens, and no state of an engine or a
generator.

Shapes: B prompts, R = B x n samples, at most T tokens (``SamplingParams.max_tokens``), K samples that
grow by S new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.errors import CheckpointError, TrainingError
from strop.protocol import DataProto
from strop.rollout.base import Finished, Samples, SamplingParams, answer, seeds_of

_COLUMNS = ("tokens", "log_probs", "versions")


class InFlight:
    """The samples of one batch, in CPU memory.

    tokens [R, T], log_probs [R, T] float32 and versions [R, T] int32 (-1: no token yet) up to lengths [R];
    stopped [R]: the last token is a stop token.
    """

    def __init__(
        self, prompts: DataProto, params: SamplingParams, of_ranks: Sequence[DataProto] = (), rank: int = 0
    ) -> None:
        """Begin with no tokens; ``DataError`` for prompts that ``seeds_of`` refuses.

        Where ranks generate each other's samples, ``of_ranks`` has the prompts of all, and ``prompts`` those
        of ``rank``.
        """
        self.prompts, self.params = prompts, params
        self.seeds: list[int] = []
        """Empty if greedy."""
        self.prompt_ids: list[Tensor] = []
        """Tokens of each prompt, without padding."""
        for part in of_ranks or (prompts,):
            self.seeds += seeds_of(part, params)
            columns = (part.batch["input_ids"].cpu(), part.batch["attention_mask"].sum(1).tolist())
            self.prompt_ids += [ids[len(ids) - length :] for ids, length in zip(*columns, strict=True)]
        first = params.n * sum(map(len, of_ranks[:rank]))
        self.own = slice(first, first + params.n * len(prompts))
        """Rows of this rank's samples."""
        rows = params.n * len(self.prompt_ids)
        self.tokens = torch.zeros(rows, params.max_tokens, dtype=torch.long)
        self.log_probs = torch.zeros(rows, params.max_tokens)
        self.versions = torch.full((rows, params.max_tokens), -1, dtype=torch.int32)
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.stopped = torch.zeros(rows, dtype=torch.bool)

    @property
    def complete(self) -> Tensor:
        """Samples [R] that end with a stop token or have ``max_tokens`` tokens."""
        return self.stopped | (self.lengths == self.params.max_tokens)

    def ids(self, row: int) -> list[int]:
        """Return the tokens of a sample so far."""
        return self.tokens[row, : int(self.lengths[row])].tolist()

    def report(self, finished: Finished | None, row: int, new: Sequence[int] = ()) -> None:
        """Call ``finished`` for a sample that its ``new`` tokens complete, if it is this rank's."""
        if finished is not None and self.own.start <= row < self.own.stop:
            finished(*divmod(row - self.own.start, self.params.n), [*self.ids(row), *new])

    def add(self, rows: Tensor, new: Samples, version: int) -> None:
        """Append ``new`` (tokens [K, S], ...), sampled by weights ``version``, to the samples ``rows`` [K].

        ``new.truncated``: no stop token yet.
        """
        is_new_KS = torch.arange(new.tokens.shape[1]) < new.lengths[:, None]
        first_K1 = (rows * self.params.max_tokens + self.lengths[rows])[:, None]
        places = (first_K1 + torch.arange(new.tokens.shape[1]))[is_new_KS]
        self.tokens.view(-1)[places] = new.tokens[is_new_KS]
        self.log_probs.view(-1)[places] = new.log_probs[is_new_KS]
        self.versions.view(-1)[places] = version
        self.lengths[rows] += new.lengths
        self.stopped[rows] = ~new.truncated

    def result(self, **options: Any) -> DataProto:
        """Return the columns of ``answer``, of this rank's samples; ``options`` are its keyword arguments."""
        columns = (self.tokens, self.log_probs, self.lengths, ~self.stopped)
        samples = Samples(*(column[self.own] for column in columns))
        return answer(self.prompts, self.params, samples, **options)

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the samples, without unused columns."""
        longest = int(self.lengths.max())
        columns = {name: getattr(self, name)[:, :longest].clone() for name in _COLUMNS}
        return {**columns, "lengths": self.lengths.clone(), "stopped": self.stopped.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a ``state``; ``CheckpointError`` if it is not of as many samples, or is longer."""
        rows, longest = state["tokens"].shape
        if rows != len(self.lengths) or longest > self.params.max_tokens:
            raise CheckpointError(
                f"the samples in flight are {rows} of up to {longest} tokens, expected {len(self.lengths)} "
                f"of at most {self.params.max_tokens}: resume with the rollout processes, batch size, "
                "rollout.n and response length of the run that saved them"
            )
        for name in _COLUMNS:
            getattr(self, name)[:, :longest] = state[name]
        self.lengths.copy_(state["lengths"])
        self.stopped.copy_(state["stopped"])


class Queue:
    """Admitted batches by number, oldest first."""

    def __init__(self) -> None:
        self._batches: dict[int, InFlight] = {}

    def admit(self, number: int, batch: InFlight) -> None:
        """See ``RolloutEngine.admit``."""
        queued = [*self._batches]
        if queued and number <= queued[-1]:
            raise TrainingError(
                f"batch {number} was admitted after batch {queued[-1]} of {queued}; admit them in order, once"
            )
        self._batches[number] = batch

    def from_oldest(self, number: int) -> list[InFlight]:
        """Return all batches; ``TrainingError`` if ``number`` is not the oldest."""
        if next(iter(self._batches), None) != number:
            raise TrainingError(
                f"batch {number} cannot be finished: the batches admitted are {[*self._batches]}"
            )
        return [*self._batches.values()]

    def finished(self, number: int, **options: Any) -> DataProto:
        """Forget a batch; return its columns (``InFlight.result``) with ``rollout_versions``."""
        batch = self._batches.pop(number)
        result = batch.result(**options)
        versions = batch.versions[batch.own].to(result.batch["responses"].device)
        return result.union(DataProto({"rollout_versions": versions}))

    def state(self) -> dict[str, Any]:
        """See ``RolloutEngine.in_flight``."""
        return {"batches": {number: batch.state() for number, batch in self._batches.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See ``RolloutEngine.restore``."""
        saved = state["batches"]
        # in order, too: batches are completed oldest first
        if [*saved] != [*self._batches]:
            raise CheckpointError(
                f"samples in flight are of batches {[*saved]}, but batches {[*self._batches]} are admitted"
            )
        for number, batch in self._batches.items():
            batch.restore(saved[number])

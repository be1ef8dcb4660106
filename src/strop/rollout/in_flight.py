"""Samples of admitted batches: what is generated of each, for the engine and for a checkpoint.

``InFlight`` holds one batch, ``Queue`` the batches that an engine has admitted. Between two calls a sample is
its prompt, its seed, its tokens so far and the record of its turns. So a checkpoint holds tokens and texts,
and no state of an engine, a generator or an environment.

With turns, a stop token ends a turn and not the sample: an environment's answer is inserted, whose tokens
have the version -1, or the sample ends. The random numbers of the first turn are those of a sample without
turns; of a later one they follow from the sample's seed and the tokens before the turn.

Shapes: B prompts, R = B x n samples, at most T tokens (``SamplingParams.max_tokens``), K samples that
grow by S new tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from strop.columns import ENDED_BY
from strop.data.pictures.parts import digests_of
from strop.errors import CheckpointError, TrainingError, portable
from strop.pictures import Picture, alive, held
from strop.protocol import DataProto, padded_on_the_left
from strop.rewards.arguments import PlayedTurn
from strop.rollout.base import Finished, Samples, SamplingParams, answer, seeds_of

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = ("tokens", "log_probs", "versions")
_ROWS = ("lengths", "stopped", "begun", "ended")


@dataclass
class RecordedTurn(PlayedTurn):
    """A turn that an environment has answered; ``answers`` are those that were inserted."""

    malformed: str = ""
    """The reason why its calls were not run; "" if they were."""
    is_lost: bool = False
    """Its method cost its process: it is never played again."""


@dataclass
class Record:
    """The answered turns of a sample, as plain values."""

    turns: list[RecordedTurn] = field(default_factory=list)
    error: str = ""
    """The reason why the sample is lost; "" if it is not."""
    errors: int = 0
    malformed: int = 0
    timeouts: int = 0
    other_stop: int = 0
    """Turns that ended with another stop token than the template's."""
    is_begun: bool = False
    """Its environment has been reset, and what that returned was compared with the prompt."""
    is_resumed: bool = False
    """It comes from a checkpoint, and no environment has played its turns again."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Record:
        """Read what ``dataclasses.asdict`` wrote."""
        record = cls(**saved)
        record.turns, record.is_resumed = [RecordedTurn(**turn) for turn in saved["turns"]], True
        return record


Gather = Callable[[Any], Sequence[Any]]
"""Return the values of all ranks that generate each other's samples, in their order."""


class InFlight:
    """The samples of one batch, in CPU memory.

    tokens [R, T], log_probs [R, T] float32 and versions [R, T] int32 (-1: no token yet, or not sampled) up to
    lengths [R]; stopped [R]: the last token is a stop token. With turns, begun [R] is the number of tokens
    before the last turn, and ended [R] int8 the reason of the end (``columns.ENDED_BY``), 0 before it.
    """

    def __init__(
        self,
        prompts: DataProto,
        params: SamplingParams,
        of_ranks: Sequence[DataProto] = (),
        rank: int = 0,
        *,
        turn_length: int | None = None,
        limits: Sequence[int] | None = None,
        shows_pictures: bool = False,
    ) -> None:
        """Begin with no tokens; ``DataError`` for prompts that ``seeds_of`` refuses.

        Where ranks generate each other's samples, ``of_ranks`` has the prompts of all, and ``prompts`` those
        of ``rank``. ``turn_length``: most tokens of a turn; None: samples have no turns. ``limits``: most
        tokens of each sample, instead of ``max_tokens``. ``shows_pictures``: turns may bring pictures.
        """
        self.prompts, self.params, self.turn_length = prompts, params, turn_length
        self.seeds: list[int] = []
        """Empty if greedy."""
        self.prompt_ids: list[Tensor] = []
        """Tokens of each prompt, without padding."""
        self.images: list[Tensor] = []
        """Digests of each prompt's pictures; empty for prompts of text."""
        for part in of_ranks or (prompts,):
            self.seeds += seeds_of(part, params)
            columns = (part.batch["input_ids"].cpu(), part.batch["attention_mask"].sum(1).tolist())
            self.prompt_ids += [ids[len(ids) - length :] for ids, length in zip(*columns, strict=True)]
            self.images += [*part.batch["images"].cpu()] if "images" in part.batch else []
        first = params.n * sum(map(len, of_ranks[:rank]))
        self.own = slice(first, first + params.n * len(prompts))
        """Rows of this rank's samples."""
        rows = params.n * len(self.prompt_ids)
        self.tokens = torch.zeros(rows, params.max_tokens, dtype=torch.long)
        self.log_probs = torch.zeros(rows, params.max_tokens)
        self.versions = torch.full((rows, params.max_tokens), -1, dtype=torch.int32)
        self.images_at = torch.zeros(rows, params.max_tokens, dtype=torch.long) if shows_pictures else None
        """See ``strop.pictures``; None: turns are text."""
        self.images_before: list[list[int]] = []
        """``images_at`` of the last tokens of each prompt, where it is a context of turns; else empty."""
        self.files: dict[int, Picture] = {}
        """The pictures of turns."""
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.limits = torch.tensor(limits if limits is not None else [params.max_tokens] * rows)
        self.stopped = torch.zeros(rows, dtype=torch.bool)
        self.begun = torch.zeros(rows, dtype=torch.long)
        self.ended = torch.zeros(rows, dtype=torch.int8)
        self.turn_seeds = list(self.seeds)
        """Of the last turn of each sample; empty if greedy."""
        self.records = [Record() for _ in range(rows)]
        self.names: Sequence[Hashable] | None = None
        """By which an engine knows samples of another object again, of which these are copies."""

    def replace_prompts(self, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Set the token ids of this rank's prompts, which fit into the column, before any is generated."""
        width = self.prompts.batch["input_ids"].shape[1]
        columns = padded_on_the_left(prompts, pad_token_id, width)
        device = self.prompts.batch["input_ids"].device
        new = {name: column.to(device) for name, column in columns.items()}
        self.prompts = DataProto(
            {**self.prompts.batch, **new}, self.prompts.non_tensor_batch, self.prompts.meta_info
        )
        first = self.own.start // self.params.n
        self.prompt_ids[first : first + len(prompts)] = [torch.tensor(ids) for ids in prompts]

    def pictures_of(self, row: int) -> list[int]:
        """Return the digests of the pictures of a sample's prompt."""
        return digests_of(self.images[row // self.params.n].tolist()) if self.images else []

    def images_at_of(self, row: int) -> list[int]:
        """Return the column ``images_at`` of a sample's last tokens: those among which some were sampled."""
        before = self.images_before[row // self.params.n] if self.images_before else []
        length = int(self.lengths[row])
        own = [0] * length if self.images_at is None else self.images_at[row, :length].tolist()
        return [*before, *own]

    @property
    def complete(self) -> Tensor:
        """Samples [R] that are complete: with a stop token, or ``max_tokens`` tokens; with turns, ended."""
        if self.turn_length is not None:
            return self.ended > 0
        return self.stopped | (self.lengths >= self.limits)

    @property
    def decoding(self) -> Tensor:
        """Samples [R] whose next token the policy samples."""
        return ~self.complete & ~self.stopped

    @property
    def waiting(self) -> Tensor:
        """Samples [R] whose turn has ended, for which an environment is to answer."""
        return ~self.complete & self.stopped

    def files_of(self, images_at: Sequence[int]) -> dict[int, Picture]:
        """Return the pictures of turns that a column names."""
        return {digest: self.files[digest] for digest in digests_of(images_at)}

    def room(self, row: int) -> int:
        """Return how many tokens the turn of a sample may still get."""
        left = int(self.limits[row] - self.lengths[row])
        if self.turn_length is None:
            return left
        return min(left, self.turn_length - int(self.lengths[row] - self.begun[row]))

    def insert(
        self,
        row: int,
        ids: Sequence[int],
        images_at: Sequence[int] = (),
        files: Mapping[int, Picture] = MappingProxyType({}),
    ) -> None:
        """Append tokens that the policy did not sample, and begin a turn; end the sample without room.

        ``images_at`` and ``files``: the pictures among them.
        """
        first = int(self.lengths[row])
        if first + len(ids) >= self.params.max_tokens:
            self.end(row, "length")
            return
        self.tokens[row, first : first + len(ids)] = torch.tensor(ids)
        if images_at and self.images_at is not None:
            self.images_at[row, first : first + len(ids)] = torch.tensor(images_at)
            self.files |= files
        self.lengths[row] = self.begun[row] = first + len(ids)
        self.stopped[row] = False
        self._seed_turn(row)

    def end(self, row: int, reason: str) -> None:
        """End a sample, for one of the reasons ``ENDED_BY``."""
        self.ended[row] = ENDED_BY.index(reason)

    def _seed_turn(self, row: int) -> None:
        """Set the seed of a sample's last turn, a function of its own seed and of the tokens before."""
        if not self.seeds or not self.begun[row]:
            return
        begun = int(self.begun[row])
        context = [*self.prompt_ids[row // self.params.n].tolist(), *self.ids(row)[:begun]]
        context += self.pictures_of(row)
        if self.images_at is not None:
            context += digests_of(self.images_at[row, :begun].tolist())
        text = ",".join(map(str, (self.seeds[row], *context)))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        self.turn_seeds[row] = int.from_bytes(digest, "big") >> 1  # vLLM's seeds are signed

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
        if new.over is not None:
            self.limits[rows[new.over]] = self.lengths[rows[new.over]]
        if self.turn_length is not None:
            for row in rows[new.truncated].tolist():
                if not self.room(row):
                    self.end(row, "length")

    def cut(self, row: int, length: int) -> None:
        """Drop the tokens of a sample from ``length`` on, where the policy then goes on."""
        if length < int(self.lengths[row]):
            self.lengths[row], self.stopped[row] = length, False
            self.tokens[row, length:], self.log_probs[row, length:], self.versions[row, length:] = 0, 0, -1

    def result(self, **options: Any) -> DataProto:
        """Return the columns of ``answer``, of this rank's samples; ``options`` are its keyword arguments."""
        if self.turn_length is None:
            truncated, sampled = ~self.stopped, None
        else:
            truncated, sampled = self.ended == ENDED_BY.index("length"), self.versions[self.own] >= 0
            lost = self.ended[self.own] == ENDED_BY.index("error")
            sampled &= ~lost[:, None]
        columns = (self.tokens, self.log_probs, self.lengths, truncated)
        samples = Samples(*(column[self.own] for column in columns), sampled)
        found = answer(self.prompts, self.params, samples, **options)
        if self.images_at is not None:
            device = found.batch["responses"].device
            images_at = self.images_at[self.own]
            files = [*map(self.files_of, images_at.tolist())]
            found = found.union(with_files(images_at.to(device), files))
        return found if sampled is None else found.union(self._of_turns(sampled))

    def _of_turns(self, sampled: Tensor) -> DataProto:
        begins = sampled.int().diff(dim=1, prepend=torch.zeros(len(sampled), 1, dtype=torch.int32)) > 0
        columns = {"ended_by": self.ended[self.own], "n_turns": begins.sum(1).short()}
        return DataProto({name: column.clone() for name, column in columns.items()})

    def state(self) -> dict[str, Any]:
        """Return a copy of this rank's samples, without unused columns, as tensors and plain values."""
        own, prompts = self.own, self._prompts_of(self.own)
        longest = int(self.lengths[own].max())
        columns = {name: getattr(self, name)[own, :longest].clone() for name in _COLUMNS}
        columns |= {name: getattr(self, name)[own].clone() for name in _ROWS}
        if self.images_at is not None:
            columns |= {"images_at": self.images_at[own, :longest].clone(), "files": packed_files(self.files)}
        if self.turn_length is None:
            return columns
        ids = [ids.tolist() for ids in self.prompt_ids[prompts]]
        return {**columns, "prompts": ids, "records": list(map(dataclasses.asdict, self.records[own]))}

    def restore(self, state: Mapping[str, Any], own: slice | None = None) -> None:
        """Continue from a ``state`` of this rank, or of the one that has the rows ``own``.

        Raises ``CheckpointError`` if it is not of as many samples, is longer, or an environment's ``reset``
        returned other texts for the prompts.
        """
        rows, longest = state["tokens"].shape
        if own is None:  # version 0.1.0 saved the samples of all ranks
            own = slice(0, rows) if rows == len(self.lengths) else self.own
        expected = own.stop - own.start
        if rows != expected or longest > self.params.max_tokens:
            raise CheckpointError(
                f"the samples in flight are {rows} of up to {longest} tokens, expected {expected} "
                f"of at most {self.params.max_tokens}: resume with the rollout processes, batch size, "
                "rollout.n and response length of the run that saved them"
            )
        for name in _COLUMNS:
            getattr(self, name)[own, :longest] = state[name]
        for name in _ROWS:
            if name in state:  # checkpoints from before there were turns lack two
                getattr(self, name)[own] = state[name]
        if self.images_at is not None and "images_at" in state:
            self.images_at[own, :longest] = state["images_at"]
            self.files |= unpacked_files(state["files"])
        if self.turn_length is not None:
            self.records[own] = [Record.of(saved) for saved in state["records"]]
            prompts = self._prompts_of(own)
            pairs = zip(self.prompt_ids[prompts], state["prompts"], strict=True)
            for number, (ids, saved) in enumerate(pairs, start=prompts.start):
                if ids.tolist() != saved:
                    raise CheckpointError(
                        f"prompt {number} of a batch in flight is another one than before: the text that an "
                        "environment's reset returns must follow from row and seed alone"
                    )
        for row in range(own.start, own.stop):
            self._seed_turn(row)

    def restore_others(self, gather: Gather) -> None:
        """Continue from the samples of the other ranks, too, which have restored theirs. Collective."""
        first = 0
        for part in gather(self.state()):
            last = first + len(part["lengths"])
            self.restore(part, slice(first, last))
            first = last

    def _prompts_of(self, rows: slice) -> slice:
        return slice(rows.start // self.params.n, rows.stop // self.params.n)


def with_files(images_at: Tensor, files: Sequence[Mapping[int, Picture]]) -> DataProto:
    """Return the columns of pictures that came in turns: ``images_at``, and the files of each row."""
    return DataProto({"images_at": images_at}, {"image_files": np.array(files, object)})


def packed_files(files: Mapping[int, Picture]) -> dict[int, Any]:
    """Return pictures as plain values for ``torch.save``."""
    contents = {digest: (bytearray(held(digest)), files[digest].where) for digest in files}
    return {digest: (torch.frombuffer(file, dtype=torch.uint8), w) for digest, (file, w) in contents.items()}


def unpacked_files(packed: Mapping[int, Any]) -> dict[int, Picture]:
    """Return the pictures of ``packed_files``."""
    return {digest: alive(file.numpy().tobytes(), where) for digest, (file, where) in packed.items()}


Place = tuple[InFlight, int]
"""A batch, and the number of a sample in it."""


def together(step: Callable[[], Any], gather: Gather) -> list[Any]:
    """Return the results of ``step`` on all ranks; raise on all what it raises on one. Collective.

    The other ranks would wait for that one in the next collective.
    """
    result = error = None
    try:
        result = step()
    except Exception as raised:  # noqa: BLE001 - raised below
        error = portable(raised)
    every = gather((result, error))
    if (error := error or next(filter(None, (other for _, other in every)), None)) is not None:
        raise error
    return [found for found, _ in every]


def exchange(waiting: Sequence[Place], answer: Callable[[Sequence[Place]], None], gather: Gather) -> None:
    """Answer this rank's samples among those ``waiting``; insert what others did into theirs. Collective."""
    own = {
        number: (batch, row)
        for number, (batch, row) in enumerate(waiting)
        if batch.own.start <= row < batch.own.stop
    }

    def answered() -> dict[int, tuple[int, list[int], list[int], dict[int, Picture]]]:
        answer([*own.values()])
        return {
            number: (int(batch.ended[row]), batch.ids(row), at := batch.images_at_of(row), batch.files_of(at))
            for number, (batch, row) in own.items()
        }

    for found in together(answered, gather):
        for number in found.keys() - own.keys():
            (batch, row), (ended, ids, images_at, files) = waiting[number], found[number]
            batch.ended[row] = ended
            if not ended:
                done = int(batch.lengths[row])
                batch.insert(row, ids[done:], images_at[done:], files)


class _Batch(Protocol):
    def state(self) -> Any: ...

    def restore(self, state: Any, /) -> None: ...


Batch = TypeVar("Batch", bound=_Batch)


class Queue(Generic[Batch]):
    """Admitted batches by number, oldest first."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}

    def admit(self, number: int, batch: Batch) -> None:
        """See ``RolloutEngine.admit``."""
        queued = [*self._batches]
        if queued and number <= queued[-1]:
            raise TrainingError(
                f"batch {number} was admitted after batch {queued[-1]} of {queued}; admit them in order, once"
            )
        self._batches[number] = batch

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches.values())

    def from_oldest(self, number: int) -> list[Batch]:
        """Return all batches; ``TrainingError`` if ``number`` is not the oldest."""
        if next(iter(self._batches), None) != number:
            raise TrainingError(
                f"batch {number} cannot be finished: the batches admitted are {[*self._batches]}"
            )
        return [*self._batches.values()]

    def forget(self, number: int) -> None:
        """Drop a batch that is finished."""
        del self._batches[number]

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


def continued_seed(seed: int, done: int) -> int:
    """Return the seed of a request that continues after ``done`` tokens; the sample's own for the first."""
    if done == 0:
        return seed
    words = np.random.SeedSequence((seed, done)).generate_state(1, np.uint64)
    # 63 bits: vLLM's seeds are signed 64-bit integers
    return int(words[0] >> np.uint64(1))

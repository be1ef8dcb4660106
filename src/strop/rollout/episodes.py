"""The turns of samples: ask environments, insert their answers, and record what was said.

``Episodes`` belongs to an engine. Between two calls of the engine a sample is its tokens and the record of
its turns: where no process has its environment, as after a resume, that is made again from the row and its
seed, and plays the recorded turns again. Where samples depend on what runs with them, answers are inserted in
the order of rows once all are there (``answer``), else as they arrive (``ask``): no sample depends on which
environment is fast.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strop.columns import ENDED_BY
from strop.data.bridge import Bridge, Call, UnwritableText, call_id
from strop.data.pictures.parts import Shown, joined
from strop.environments.loading import Environments
from strop.environments.pool import EnvironmentPool, Request, row_of
from strop.errors import CheckpointError, ModelError
from strop.pictures import Picture
from strop.protocol import DataProto
from strop.redaction import redacted_text
from strop.rewards.arguments import PlayedTurn
from strop.rollout.base import LOOK_S, GenerationStopped
from strop.rollout.in_flight import Gather, InFlight, Place, Record, RecordedTurn, exchange
from strop.rollout.turn_format import TurnFormat
from strop.terminal import printable

if TYPE_CHECKING:
    from strop.config.schema.environment import EnvironmentConfig
    from strop.rollout.base import Advanced, RolloutSpec

logger = logging.getLogger(__name__)

Answer = dict[str, Any]
"""Result of ``EnvironmentPool.submit``."""


@dataclass
class _Episode:
    """The environment's side of a sample."""

    name: str
    row: dict[str, Any]
    seed: int
    tools: list[dict[str, Any]]
    bridge: Bridge
    text: str | None = None
    """What ``reset`` added to its prompt; None if that is not known."""

    def calls(self, record: Record, number: int) -> list[Call]:
        """Return the calls of a turn, with their ids."""
        calls = record.turns[number].calls
        return [Call(**call, id=call_id(self.seed, number, place)) for place, call in enumerate(calls)]


class Episodes:
    """Environments of one rank of a rollout."""

    def __init__(
        self, environments: Environments, settings: EnvironmentConfig, form: TurnFormat, pool: EnvironmentPool
    ) -> None:
        """Start nothing: ``pool`` runs ``environments``, with ``settings``, the section ``environment``."""
        self._environments, self._settings = environments, settings
        self._form, self._pool = form, pool
        self.options: dict[str, Any] = {
            "turn_length": settings.turn_length or 2**31 - 1,
            "shows_pictures": form.reads_pictures,
        }
        """Arguments of ``InFlight``."""
        self._episodes: weakref.WeakKeyDictionary[InFlight, dict[int, _Episode]] = weakref.WeakKeyDictionary()
        self.stopping = threading.Event()
        """See ``RolloutEngine``."""
        self._n_named = 0
        self._warned: set[str] = set()

    @classmethod
    def of(cls, spec: RolloutSpec, stop_ids: Sequence[int]) -> Episodes | None:
        """Return the episodes of a rollout; None without an environment."""
        if spec.environments is None:
            return None
        assert spec.environment_pool is not None
        form = TurnFormat(
            spec.config, spec.environments, spec.tokenizer, stop_ids, pictures=spec.picture_texts
        )
        return cls(spec.environments, spec.config.environment, form, spec.environment_pool)

    def begin(self, batch: InFlight) -> InFlight:
        """Give the prompts of a batch the texts that ``reset`` returned; return the batch.

        A prompt has the text of its first sample whose ``reset`` does not fail, and is cut as others are.
        Raises ``DataError`` if a prompt becomes too long, or its samples have seeds of their own.
        """
        if not self._environments.named:
            return batch
        own, n = batch.own, batch.params.n
        texts: dict[int, str] = {}
        for number in range(n):
            firsts = [row for row in range(own.start, own.stop, n) if row not in texts]
            asked = [(first, self._submit(batch, first + number, {})) for first in firsts]
            for first, future in asked:
                answer = self._awaited(future)
                if self._is_playing(batch, first + number, answer):
                    texts[first] = answer["text"]
        for row in range(own.start, own.stop):
            self._episode(batch, row).text = texts.get(row - (row - own.start) % n, "")
        told = {first: text for first, text in texts.items() if text}
        if told:
            prompts = {
                first: batch.prompt_ids[first // n].tolist() for first in range(own.start, own.stop, n)
            }
            for first, text in told.items():
                one = self._episode(batch, first)
                prompts[first] = self._form.prompt(one.row, one.tools, text, batch.pictures_of(first))
            width = batch.prompts.batch["input_ids"].shape[1]
            batch.replace_prompts(self._form.fitted([*prompts.values()], width), self._form.pad_token_id)
        return batch

    def complete(
        self,
        batches: Sequence[InFlight],
        decode: Callable[[], None],
        gather: Gather = lambda value: [value],
        advanced: Advanced | None = None,
    ) -> None:
        """Let environments answer and ``decode`` turns, until the first of ``batches`` is complete.

        ``decode`` ends when each turn of the first batch has ended. Ranks that ``gather`` generate each
        other's samples, and each answers its own. ``advanced`` is called with the samples that are complete.
        """
        oldest, done = batches[0], 0
        while True:
            waiting = [(one, row) for one in batches for row in one.waiting.nonzero()[:, 0].tolist()]
            exchange(waiting, self.answer, gather)
            if advanced is not None:
                before, done = done, int(oldest.complete[oldest.own].sum())
                advanced(done - before, 0)
            if bool(oldest.complete.all()):
                return
            decode()

    def answer(self, places: Sequence[Place]) -> None:
        """Answer the turns of samples that wait, all at the same time; insert in the order of ``places``."""
        asked = [(place, self._ask(*place)) for place in places]
        for (batch, row), future in asked:
            self._go_on(batch, row, None if future is None else self._awaited(future))

    def ask(self, batch: InFlight, row: int, arrived: SimpleQueue[tuple[int, Callable[[], None]]]) -> None:
        """Send a turn to its environment.

        Once its answer is there ``arrived`` gets the row, and a function that inserts the answer.
        """
        future = self._ask(batch, row)

        def insert() -> None:
            self._go_on(batch, row, None if future is None else future.result())

        if future is None:
            arrived.put((row, insert))
        else:
            future.add_done_callback(lambda _: arrived.put((row, insert)))

    def columns(self, batch: InFlight) -> DataProto:
        """Close the episodes of this rank's samples; return what is known of them, as columns.

        conversation [R] (object): JSON of turns, each {text, calls, answers}, of the prompt's messages where
        ``reset`` has added a text to it, and of the rewards of the turns or the whole, or the error of a lost
        sample; environment_scores [R, T] float32, where environments give rewards.
        """
        rows = range(batch.own.start, batch.own.stop)
        asked = [(row, *self._close(batch, row)) for row in rows]
        texts, scores = [], []
        for row, turns, future in asked:
            answer = self._awaited(future)
            is_lost = batch.records[row].error or not self._is_playing(batch, row, answer)
            scores.append(_scores(batch, row, None if is_lost else answer["rewards"]))
            found: dict[str, Any] = {"turns": turns}
            if text := (episode := self._episode(batch, row)).text:
                found["prompt"] = self._form.prompt_messages(episode.row, text, batch.pictures_of(row))
            if is_lost:
                found["error"] = f"{self._environments.name_of(episode.row)}: {batch.records[row].error}"
            elif answer["rewards"] is not None:
                found["rewards"] = answer["rewards"]
            texts.append(json.dumps(found, ensure_ascii=False))
        columns: dict[str, Any] = {}
        if self._environments.gives_rewards:
            columns["environment_scores"] = torch.stack(scores)
        records = batch.records[batch.own]
        for name in ("malformed", "errors", "timeouts", "other_stop"):
            columns[f"n_{name}"] = torch.tensor([getattr(one, name) for one in records], dtype=torch.int16)
        own = batch.own
        is_cut = (batch.ended[own] == ENDED_BY.index("length")) & ~batch.stopped[own]
        columns["turn_cut"] = is_cut & (batch.lengths[own] < batch.params.max_tokens)
        calls = [sum(len(turn.calls) for turn in one.turns) for one in records]
        columns["n_calls"] = torch.tensor(calls, dtype=torch.int16)
        self._episodes.pop(batch, None)
        return DataProto(columns, {"conversation": np.array(texts, object)})

    def _awaited(self, future: Future[Answer]) -> Answer:
        """Wait for an answer, which may take long; raise ``GenerationStopped`` once ``stopping`` is set."""
        while not wait([future], LOOK_S).done:
            if self.stopping.is_set():
                raise GenerationStopped
        return future.result()

    def _episode(self, batch: InFlight, row: int) -> _Episode:
        """Return the episode of a sample, made from its row where it is not known."""
        known = self._episodes.setdefault(batch, {})
        if row not in known:
            prompt, number = divmod(row - batch.own.start, batch.params.n)
            given = {name: values[prompt] for name, values in batch.prompts.non_tensor_batch.items()}
            columns = row_of(given, batch.pictures_of(row) if self._environments.takes_pictures else None)
            self._n_named += 1
            tools = self._environments.tools_of(columns)
            seed = self._seed(batch, prompt, number)
            known[row] = _Episode(str(self._n_named), columns, seed, tools, self._form.bridge(tools))
        return known[row]

    def _seed(self, batch: InFlight, prompt: int, number: int) -> int:
        """Return the seed of an environment: of its prompt's first sample, or of its own."""
        seeds = batch.prompts.batch.get("seeds")
        if seeds is None:
            return 0
        seed = int(seeds[prompt, number if self._settings.seed == "sample" else 0])
        digest = hashlib.blake2b(f"environment {seed}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1

    def _ask(self, batch: InFlight, row: int) -> Future[Answer] | None:
        """Send a turn to its environment; return None if it is malformed."""
        episode, record = self._episode(batch, row), batch.records[row]
        begun, ids = int(batch.begun[row]), batch.ids(row)
        before = ids[:begun] or batch.prompt_ids[row // batch.params.n].tolist()
        turn = self._form.read(ids[begun:], before, episode.tools, episode.bridge)
        calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        now = RecordedTurn(turn.text, calls, malformed=turn.malformed)
        future = None
        if not turn.malformed:
            future = self._submit(batch, row, {"turn": _content(len(record.turns), now)})
        record.turns.append(now)
        return future

    def _submit(self, batch: InFlight, row: int, content: Mapping[str, Any]) -> Future[Answer]:
        """Send a request; an environment that no process has plays the recorded turns first."""
        episode, record = self._episode(batch, row), batch.records[row]
        past = [_content(*pair) for pair in _replayed(record)]
        return self._pool.submit(Request(episode.name, episode.row, episode.seed, past, content))

    def _go_on(self, batch: InFlight, row: int, answer: Answer | None) -> None:
        """End a sample, or insert the answer to its last turn; None: the turn is malformed."""
        episode, record = self._episode(batch, row), batch.records[row]
        number, turn = len(record.turns) - 1, record.turns[-1]
        calls, ends = episode.calls(record, number), self._settings.error == "end"
        if answer is None:
            record.malformed += 1
            ends = self._settings.malformed == "end"
            calls = [Call(episode.tools[0]["function"]["name"], {}, call_id(episode.seed, number, 0))]
            answer = _told(f"error: {turn.malformed}", calls)
        elif "lost" in answer:
            turn.is_lost = True
            answer |= _told(f"error: {answer['lost'].splitlines()[0]}", calls)
        if not self._is_playing(batch, row, answer):
            return
        if not turn.malformed:
            record.errors += len(answer["errors"])
            if answer["errors"]:
                told = answer.get("traceback", answer["errors"][0])
                self._warn("a method failed, and the policy read the error", told)
        if answer["errors"] and ends:
            record.error = answer["errors"][0]
            batch.end(row, "error")
        elif answer["end"]:
            batch.end(row, answer["end"])
        elif len(record.turns) >= self._settings.max_turns:
            batch.end(row, "turns")
        else:
            came: dict[int, Picture] = {}
            record.other_stop += batch.ids(row)[-1] != episode.bridge.end_id
            try:
                messages = self._form.messages(episode.bridge, calls, answer, came)
                shown = episode.bridge.shown(messages, calls)
            except UnwritableText as error:
                self._lose(batch, row, str(error))
                return
            except ModelError as error:
                named = self._environments.name_of(episode.row)
                raise ModelError(f"{named}: turn {number} of sample {row}: {error}") from error
            if not self._form.ends(batch.ids(row)):  # a text of rollout.stop ended the turn
                shown = joined(Shown([episode.bridge.end_id]), shown)
            batch.insert(row, *shown, came)
            if not batch.complete[row]:  # else the answer did not fit
                turn.answers = messages

    def _is_playing(self, batch: InFlight, row: int, answer: Answer) -> bool:
        """Return False, and end a sample as lost, if its environment failed or plays turns otherwise.

        Raises ``CheckpointError`` for a turn that is played otherwise after a resume.
        """
        record = batch.records[row]
        record.timeouts += bool(answer.get("is_late"))
        found = answer.get("failed") or self._difference(batch, row, answer)
        if not found:
            return True
        self._lose(batch, row, found, answer.get("traceback", found))
        return False

    def _lose(self, batch: InFlight, row: int, found: str, told: str = "") -> None:
        """End a sample as lost, with a reason; the log has ``told`` of the first one."""
        record = batch.records[row]
        self._warn("a sample was lost", told or found)
        record.error, record.errors = found, record.errors + 1
        batch.end(row, "error")

    def _warn(self, what: str, found: str) -> None:
        """Log the first failure of a kind; metrics count the others."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("environment: %s, for the first time: %s", what, printable(found))

    def _difference(self, batch: InFlight, row: int, answer: Answer) -> str:
        """Compare the answers of turns that were played again with those that were inserted."""
        episode, record = self._episode(batch, row), batch.records[row]
        if "past" not in answer:
            return ""
        is_checked = self._settings.replay == "check" or not record.is_begun
        record.is_begun = True
        if is_checked and episode.text is not None and answer["text"] not in (None, episode.text):
            return (
                f"reset returned {answer['text']!r:.80} for one sample; its prompt has {episode.text!r:.80}; "
                "it must draw random numbers from its argument seed, as random.Random(seed)"
            )
        for (number, turn), again in zip(_replayed(record)[answer["first"] :], answer["past"], strict=False):
            if not turn.answers or self._settings.replay == "recorded":
                continue
            messages = self._form.messages(episode.bridge, episode.calls(record, number), again)
            if messages != turn.answers:
                texts = [str([one["content"] for one in found]) for found in (messages, turn.answers)]
                named = ", ".join(call["name"] for call in turn.calls) or "the environment"
                given = [*self._settings.path.values(), *self._settings.tools]
                shared = [one for one in given if one.startswith("mcp-shared:")]
                found = (
                    f"sample {row} (uid {episode.row.get('uid')}), turn {number}: {named} answers "
                    f"{texts[0]:.200}, and before {texts[1]:.200}; it must answer from row, seed and turns "
                    "alone, or set environment.replay=recorded"
                    + (
                        f"; if the server of {redacted_text(shared[0])} has a state, write mcp: for "
                        "mcp-shared:"
                        if shared
                        else ""
                    )
                )
                if record.is_resumed:
                    raise CheckpointError(found)
                return found
        record.is_resumed = False
        return ""

    def _close(self, batch: InFlight, row: int) -> tuple[list[dict[str, Any]], Future[Answer]]:
        """End an episode, and ask for its rewards if it is not lost; return its turns, too."""
        record, values = batch.records[row], None
        played = [PlayedTurn(turn.text, turn.calls, turn.answers) for turn in record.turns]
        if bool(batch.ended[row] == ENDED_BY.index("length")) and not bool(batch.stopped[row]):
            cut = batch.ids(row)[int(batch.begun[row]) :]  # which nothing answers
            played.append(PlayedTurn(self._form.text(cut)))
        turns = [asdict(turn) for turn in played]
        if not record.error:
            values = {"ended_by": ENDED_BY[int(batch.ended[row])], "n_turns": len(turns)}
            episode = self._episode(batch, row)
            values["messages"] = self._form.prompt_messages(episode.row, episode.text or "")
        return turns, self._submit(batch, row, {"end": {"turns": turns, "values": values}})


def _told(text: str, calls: Sequence[Call]) -> Answer:
    """Return an error as the answer to a turn."""
    messages = [{"role": "user", "content": text}]
    return {"texts": [text] * len(calls), "messages": messages, "errors": [text], "end": ""}


def _content(number: int, turn: RecordedTurn) -> dict[str, Any]:
    """Return a turn as its environment gets it."""
    return {"number": number, "text": turn.text, "calls": turn.calls}


def _replayed(record: Record) -> list[tuple[int, RecordedTurn]]:
    """Return the turns, with their numbers, that a new process of the environment plays again."""
    return [
        (number, turn) for number, turn in enumerate(record.turns) if not (turn.malformed or turn.is_lost)
    ]


def _scores(batch: InFlight, row: int, rewards: Sequence[float] | None) -> torch.Tensor:
    """Return the rewards of a sample [T]: a turn's on its last token, a single one on the last turn's.

    NaN without rewards, as other parts of a score are where they do not apply.
    """
    if not rewards:
        return torch.full((batch.params.max_tokens,), math.nan)
    scores = torch.zeros(batch.params.max_tokens)
    sampled = (batch.versions[row] >= 0).int()
    lasts = (sampled.diff(append=sampled.new_zeros(1)) < 0).nonzero()[:, 0]
    scores[lasts[-1:] if len(rewards) == 1 else lasts] = torch.tensor(rewards)
    return scores

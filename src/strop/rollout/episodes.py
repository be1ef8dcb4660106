"""The turns of samples: ask environments, insert their answers, and keep what was said.

``Episodes`` belongs to an engine. Between two calls of the engine a sample is its tokens: an episode that is
not known here (after a resume) or whose process was lost is made again, from the row and its seed, and its
turns are played again. Answers are inserted in the order of rows once all are there, so that a sample does
not depend on which environment is fast.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from strop.columns import ENDED_BY
from strop.data.bridge import Bridge, Call
from strop.data.prompts import PromptFormat, encode_prompts
from strop.data.tool_calls import Parser, Turn, find_parser
from strop.environments.loading import Environments, load_object
from strop.environments.pool import EnvironmentPool, Request
from strop.errors import CheckpointError, DataError
from strop.protocol import DataProto
from strop.rewards.arguments import PlayedTurn
from strop.rollout.in_flight import InFlight, Part

if TYPE_CHECKING:
    from strop.config.schema import Config
    from strop.config.schema.environment import EnvironmentConfig
    from strop.rollout.base import RolloutSpec

logger = logging.getLogger(__name__)

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
Place = tuple[InFlight, int]
"""A batch, and the number of a sample in it."""


@dataclass
class _Played:
    """A turn with what answered it."""

    turn: Turn
    answer: dict[str, Any] | None = None
    """The result of the environment; None if it was not asked."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Those that were inserted."""
    ids: list[int] = field(default_factory=list)
    """The tokens that were inserted."""

    def content(self) -> dict[str, Any]:
        """Return the turn as the environment gets it; ``skip``: its process was lost."""
        calls = [call._asdict() for call in self.turn.calls]
        lost = self.answer is not None and "lost" in self.answer
        return {"text": self.turn.text, "calls": calls, **({"skip": True} if lost else {})}


@dataclass
class _Episode:
    """The environment's side of a sample: its row, its seed, and its turns so far."""

    name: str
    row: dict[str, Any]
    seed: int
    tools: list[dict[str, Any]]
    prompt_end: str
    played: list[_Played] = field(default_factory=list)
    is_resumed: bool = False
    """Its first turns are of a checkpoint."""
    rewards: list[float] | None = None
    is_closed: bool = False
    error: str = ""
    errors: int = 0
    malformed: int = 0
    other_stop: int = 0
    """Turns that ended with another stop token than the template's."""


class TurnFormat(NamedTuple):
    """The format of answers and calls in the chat template."""

    bridges: dict[str, Bridge]
    """By the JSON of the tools that the prompt shows."""
    parser: Parser | None
    """None without tools."""
    how: PromptFormat

    @classmethod
    def of(
        cls, config: Config, environments: Environments, tokenizer: Any, stop_ids: Sequence[int]
    ) -> TurnFormat:
        """Try the chat template; ``stop_ids`` end a turn, besides those of the configuration.

        Raises ``ModelError`` for a template that shows no answers, or from which no parser follows.
        """
        data, settings = config.data, config.environment
        how = PromptFormat(**{key.name: getattr(data, key.name) for key in dataclasses.fields(PromptFormat)})
        stop_ids = [*stop_ids, *config.actor_rollout_ref.rollout.stop_token_ids]
        bridges = {
            json.dumps(tools): Bridge(tokenizer, stop_ids, how, tools=tools, answer_role=settings.answer_role)
            for tools in environments.schemas.values()
        }
        if not any(environments.schemas.values()):
            return cls(bridges, None, how)
        added = tokenizer.added_tokens_decoder
        stops = [str(added[stop]) if stop in added else tokenizer.decode([stop]) for stop in stop_ids]
        options = dict(how.apply_chat_template_kwargs)
        load = partial(load_object, key="environment.parser")
        parser = find_parser(settings.parser, tokenizer, options, stops, load)
        return cls(bridges, parser, how)

    def log(self) -> None:
        """Log what the template does to earlier turns, if it rewrites them."""
        for history in {bridge.history for bridge in self.bridges.values()} - {""}:
            logger.info(
                "environment: the chat template shows %s otherwise than it was sampled; the policy goes on "
                "from what it sampled",
                history,
            )


class Episodes:
    """Environments of one rank of a rollout."""

    def __init__(
        self,
        environments: Environments,
        settings: EnvironmentConfig,
        tokenizer: Any,
        stop_ids: Sequence[int],
        form: TurnFormat,
        prompt_key: str = "prompt",
    ) -> None:
        """Start no process yet; ``settings`` is the section ``environment``."""
        self._environments, self._settings, self._tokenizer = environments, settings, tokenizer
        self._stop_ids, self._bridges, self._parser = set(stop_ids), form.bridges, form.parser
        self._how, self._prompt_key = form.how, prompt_key
        self.turn_length: int = settings.turn_length or 2**31 - 1
        self._pool = EnvironmentPool(
            environments.blueprint,
            environments.search_path,
            processes=settings.processes,
            concurrency=settings.concurrency,
            timeout_s=settings.timeout,
            memory_limit_mb=settings.memory_limit_mb,
        )
        self._episodes: weakref.WeakKeyDictionary[InFlight, dict[int, _Episode]] = weakref.WeakKeyDictionary()
        self._n_named = 0
        self._has_failed = False

    @classmethod
    def of(cls, spec: RolloutSpec, stop_ids: Sequence[int]) -> Episodes | None:
        """Return the episodes of a rollout; None without an environment."""
        if spec.environments is None:
            return None
        form = TurnFormat.of(spec.config, spec.environments, spec.tokenizer, stop_ids)
        stops = [*stop_ids, *spec.config.actor_rollout_ref.rollout.stop_token_ids]
        key = spec.config.data.prompt_key
        return cls(spec.environments, spec.config.environment, spec.tokenizer, stops, form, key)

    def begin(self, batch: InFlight) -> InFlight:
        """Give the prompts of a batch the texts that ``reset`` returned; return the batch.

        Raises ``DataError`` if a prompt becomes too long, or its samples have seeds of their own.
        """
        if not self._environments.has_reset:
            return batch
        rows = range(batch.own.start, batch.own.stop, batch.params.n)
        episodes = [self._episode(batch, row) for row in rows]
        asked = [self._submit(one, [], {"begin": True}) for one in episodes]
        texts = [future.result().get("text", "") for future in asked]
        if any(texts):
            prompts = [self._with_text(*pair) for pair in zip(episodes, texts, strict=True)]
            batch.replace_prompts(prompts, self._tokenizer.pad_token_id)
        return batch

    def _with_text(self, episode: _Episode, text: str) -> list[int]:
        """Return the ids of a prompt with a text at the end of its last message of the user."""
        if text and self._settings.seed == "sample":
            raise DataError(
                "reset returned a text for the prompt, which the samples of a prompt share, and "
                "environment.seed=sample gives each its own: set environment.seed=prompt"
            )
        messages = self._how.messages(episode.row[self._prompt_key])
        last = messages[-1]
        if text and last["role"] == "user":
            messages = [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}".strip()}]
        elif text:
            messages = [*messages, {"role": "user", "content": text}]
        tools = json.dumps(episode.tools) if episode.tools else None
        return encode_prompts([messages], self._tokenizer, self._how, [tools])[0]

    def complete(self, batches: Sequence[InFlight], decode: Callable[[], None]) -> None:
        """Let environments answer and ``decode`` turns, until the first of ``batches`` is complete.

        ``decode`` ends when each turn of the first batch has ended.
        """
        oldest = batches[0]
        while True:
            self.answer([(batch, row) for batch in batches for row in batch.waiting.nonzero()[:, 0].tolist()])
            if bool(oldest.complete.all()):
                return
            decode()

    def answer(self, places: Sequence[Place]) -> None:
        """Answer the turns of samples that wait, all at the same time; insert in the order of ``places``."""
        asked = [(place, self._ask(*place)) for place in places]
        for (batch, row), future in asked:
            self._go_on(batch, row, None if future is None else future.result())

    def columns(self, batch: InFlight) -> DataProto:
        """Close the episodes of this rank's samples; return what is known of them, as columns.

        conversation [R] (object): JSON of turns, each {text, calls, answers}; environment_scores [R, T]
        float32, where environments give rewards.
        """
        rows = range(batch.own.start, batch.own.stop)
        episodes = [self._episode(batch, row) for row in rows]
        futures = [self._close(batch, row, one) for row, one in zip(rows, episodes, strict=True)]
        for row, one, future in zip(rows, episodes, futures, strict=True):
            if future is not None:
                self._end(batch, row, one, future.result())
        columns: dict[str, Any] = {}
        if self._environments.gives_rewards:
            columns["environment_scores"] = torch.stack(
                [_scores(batch, row, one) for row, one in zip(rows, episodes, strict=True)]
            )
        for name in ("malformed", "errors", "other_stop"):
            columns[f"n_{name}"] = torch.tensor([getattr(one, name) for one in episodes], dtype=torch.int16)
        calls = [sum(len(played.turn.calls) for played in one.played) for one in episodes]
        columns["n_calls"] = torch.tensor(calls, dtype=torch.int16)
        texts = [json.dumps(_as_json(one), ensure_ascii=False) for one in episodes]
        self._episodes.pop(batch, None)
        return DataProto(columns, {"conversation": np.array(texts, object)})

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _episode(self, batch: InFlight, row: int) -> _Episode:
        """Return the episode of a sample, made from its row and its tokens where it is not known."""
        known = self._episodes.setdefault(batch, {})
        if row not in known:
            own = row - batch.own.start
            prompt = own // batch.params.n
            columns = {name: values[prompt] for name, values in batch.prompts.non_tensor_batch.items()}
            self._n_named += 1
            end = self._tokenizer.decode(
                batch.prompt_ids[row // batch.params.n][-8:], skip_special_tokens=False
            )
            known[row] = _Episode(
                str(self._n_named),
                columns,
                self._seed(batch, prompt, own % batch.params.n),
                self._environments.tools_of(columns),
                end,
            )
        return known[row]

    def _recover(self, batch: InFlight, row: int, episode: _Episode) -> None:
        """Read the turns of a sample from its tokens, where a checkpoint has them; the last one may wait."""
        if episode.played:
            return
        parts = batch.parts(row)
        if parts and parts[-1].is_turn and (not bool(batch.complete[row]) or _is_cut(batch, row)):
            parts = parts[:-1]
        for part in parts:
            if part.is_turn:
                episode.played.append(_Played(self._read(episode, part)))
                episode.is_resumed = True
            else:
                episode.played[-1].ids = part.ids

    def _seed(self, batch: InFlight, prompt: int, number: int) -> int:
        """Return the seed of an environment: of its prompt's first sample, or of its own."""
        seeds = batch.prompts.batch.get("seeds")
        if seeds is None:
            return 0
        seed = int(seeds[prompt, number if self._settings.seed == "sample" else 0])
        digest = hashlib.blake2b(f"environment {seed}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1

    def _read(self, episode: _Episode, part: Part) -> Turn:
        """Return the turn of sampled ids; its calls have ids of their own."""
        ids = part.ids[:-1] if part.ids and part.ids[-1] in self._stop_ids else part.ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        number = len(episode.played)
        if self._parser is None or not episode.tools:
            return Turn(text, content=text)
        before = episode.prompt_end
        if number:
            before = self._tokenizer.decode(episode.played[-1].ids[-8:], skip_special_tokens=False)
        turn = self._parser(text, before, episode.tools)
        if len(turn.calls) > 1 and self._bridge(episode).one_call:
            return turn._replace(calls=(), malformed="expected one call in a turn")
        calls = [
            call._replace(id=_call_id(episode.seed, number, place)) for place, call in enumerate(turn.calls)
        ]
        return turn._replace(calls=tuple(calls))

    def _bridge(self, episode: _Episode) -> Bridge:
        return self._bridges[json.dumps(episode.tools)]

    def _ask(self, batch: InFlight, row: int) -> Any:
        """Send a turn to its environment; return None if it is malformed."""
        episode = self._episode(batch, row)
        self._recover(batch, row, episode)
        played = _Played(self._read(episode, batch.parts(row)[-1]))
        past = self._past(episode)
        episode.played.append(played)
        if played.turn.malformed:
            return None
        return self._submit(episode, past, {"turn": played.content()})

    def _past(self, episode: _Episode) -> list[dict[str, Any]]:
        return [played.content() for played in episode.played if not played.turn.malformed]

    def _submit(
        self, episode: _Episode, past: Sequence[Mapping[str, Any]], content: Mapping[str, Any]
    ) -> Any:
        return self._pool.submit(Request(episode.name, episode.row, episode.seed, past, content))

    def _go_on(self, batch: InFlight, row: int, answer: dict[str, Any] | None) -> None:
        """End a sample, or insert the answer to its last turn."""
        episode = self._episode(batch, row)
        played, bridge = episode.played[-1], self._bridge(episode)
        calls: Sequence[Call] = played.turn.calls
        tells = True
        done = False
        messages: list[dict[str, Any]] | None
        if answer is None:
            episode.malformed += 1
            tells = self._settings.malformed == "tell"
            calls = [Call(_first_name(episode), {}, _call_id(episode.seed, len(episode.played), 0))]
            messages = bridge.answers(calls, [f"error: {played.turn.malformed}"])
        else:
            played.answer = answer
            self._check_replay(batch, row, episode, answer)
            if "failed" in answer:  # not of a method that was called: reset, or a blueprint
                episode.error = answer["failed"]
                episode.errors += 1
                self._log_failure(answer.get("traceback", episode.error))
            elif "lost" in answer:
                text = f"error: {answer['lost'].splitlines()[0]}"
                answer |= {"errors": [text], "done": False}
                answer["texts" if calls else "messages"] = (
                    [text] * len(calls) if calls else [{"role": "user", "content": text}]
                )
            if episode.error:
                batch.end(row, "error")
                return
            episode.errors += len(answer["errors"])
            tells = not answer["errors"] or self._settings.error == "tell"
            done = answer["done"]
            messages = self._messages(bridge, calls, answer)
        if not tells:
            episode.error = played.turn.malformed if answer is None else answer["errors"][0]
            batch.end(row, "error")
        elif done:
            batch.end(row, "environment")
        elif messages is None:
            batch.end(row, "environment" if self._environments.responds else "stop")
        elif len(episode.played) >= self._settings.max_turns:
            batch.end(row, "turns")
        else:
            played.messages, played.ids = messages, bridge.ids(messages, calls)
            episode.other_stop += batch.ids(row)[-1] != bridge.stop_id
            batch.insert(row, played.ids)
            if bool(batch.complete[row]):  # the answer did not fit
                played.messages, played.ids = [], []

    def _messages(
        self, bridge: Bridge, calls: Sequence[Call], answer: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Return an environment's answer as messages of at most ``answer_length`` tokens; None: no answer."""
        limit = self._settings.answer_length
        if calls:
            return bridge.answers(calls, [bridge.cut(text, limit) for text in answer["texts"]])
        if answer["messages"] is None:
            return None
        return [{**one, "content": bridge.cut(one["content"], limit)} for one in answer["messages"]]

    def _log_failure(self, error: str) -> None:
        """Log the first traceback; metrics count the others."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("an environment failed, for the first time: %s", error)

    def _check_replay(self, batch: InFlight, row: int, episode: _Episode, answer: Mapping[str, Any]) -> None:
        """Compare the answers of turns that were played again with those that were inserted."""
        asked = [played for played in episode.played if not played.turn.malformed]
        first = answer.get("first", 0)
        for played, again in zip(asked[first:], answer["past"], strict=False):
            if not again:  # its process had been lost
                continue
            bridge, calls = self._bridge(episode), played.turn.calls
            messages = self._messages(bridge, calls, again) or []
            if played.ids and (not messages or bridge.ids(messages, calls) != played.ids):
                if self._settings.replay == "recorded":
                    continue
                number = episode.played.index(played)
                texts = str(again.get("texts") or messages)
                found = (
                    f"sample {row} (uid {episode.row.get('uid')}), turn {number}: the environment answers "
                    f"otherwise than before: {texts:.200}; it must answer from row, seed and turns "
                    "alone, or set environment.replay=recorded"
                )
                if episode.is_resumed:
                    raise CheckpointError(found)
                episode.error = found
                episode.errors += 1
                return
            if not played.messages and played.ids:  # of a checkpoint, which has their tokens only
                played.messages, played.answer = messages, dict(again)

    def _close(self, batch: InFlight, row: int, episode: _Episode) -> Any:
        """Ask for the rewards of an ended episode; return None if there is nothing to ask for."""
        if episode.is_closed:
            return None
        episode.is_closed = True
        self._recover(batch, row, episode)
        if bool(batch.ended[row] == ENDED_BY.index("error")) and not episode.error:
            episode.error = "it was lost before the run was resumed"
        if episode.error:
            return None
        past = self._past(episode)
        if _is_cut(batch, row):
            ids = batch.parts(row)[-1].ids
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            episode.played.append(_Played(Turn(text, content=text)))
        reason = ENDED_BY[int(batch.ended[row])]
        turns = [dataclasses.asdict(turn) for turn in _played_turns(episode)]
        values = {"ended_by": reason, "n_turns": len(turns)}
        return self._submit(episode, past, {"turns": turns, "values": values})

    def _end(self, batch: InFlight, row: int, episode: _Episode, answer: Mapping[str, Any]) -> None:
        """Take the rewards of an episode, or end it as lost."""
        self._check_replay(batch, row, episode, answer)
        if found := answer.get("failed") or answer.get("lost"):
            episode.error, episode.errors = found, episode.errors + 1
            self._log_failure(answer.get("traceback", found))
        if episode.error:
            batch.end(row, "error")
            return
        episode.rewards = answer["rewards"]


def _is_cut(batch: InFlight, row: int) -> bool:
    """Return True if a limit of tokens cut the last turn of a sample, so that nothing answers it."""
    return bool(batch.complete[row]) and not bool(batch.stopped[row]) and bool(batch.lengths[row])


def _played_turns(episode: _Episode) -> list[PlayedTurn]:
    return [
        PlayedTurn(
            played.turn.text,
            [{"name": call.name, "arguments": call.arguments} for call in played.turn.calls],
            list(played.messages),
        )
        for played in episode.played
    ]


def _as_json(episode: _Episode) -> dict[str, Any]:
    turns = [dataclasses.asdict(turn) for turn in _played_turns(episode)]
    return {"turns": turns, **({"error": episode.error} if episode.error else {})}


def _scores(batch: InFlight, row: int, episode: _Episode) -> torch.Tensor:
    """Return the rewards of a sample [T]: a turn's on its last token, a single one on the last turn's."""
    scores = torch.zeros(batch.params.max_tokens)
    if not episode.rewards:
        return scores
    lasts: list[int] = []
    place = 0
    for part in batch.parts(row):
        place += len(part.ids)
        if part.is_turn:
            lasts.append(place - 1)
    if len(episode.rewards) == 1:
        lasts = lasts[-1:]
    for last, reward in zip(lasts, episode.rewards, strict=True):
        scores[last] = reward
    return scores


def _first_name(episode: _Episode) -> str:
    return episode.tools[0]["function"]["name"]


def _call_id(seed: int, turn: int, number: int) -> str:
    """Return the id of a call: nine characters, which Mistral's template demands."""
    digest = hashlib.blake2b(f"{seed} {turn} {number}".encode(), digest_size=9).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)

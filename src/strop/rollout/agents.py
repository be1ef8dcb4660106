"""``AgentRollout``: samples that are sessions of agent programs.

An engine generates answers; this module starts the programs and collects their requests, and
``session_rows`` makes rows of their sessions. Requests are answered in waves. With ``agent.lockstep`` a wave
begins when every running program waits for an answer, so that what is computed together, and in which order,
depends on no clock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from strop import pictures
from strop.agents.chat import ChatFormat, ChatRequest, Refusal, canonical, digest_of, read_request
from strop.agents.program import Outcome, Started
from strop.agents.server import Reply, Server
from strop.agents.session import Node, Session
from strop.data.pictures.parts import digests_of, named, with_pictures
from strop.data.prompts import as_messages
from strop.environments.pool import row_of
from strop.errors import CheckpointError
from strop.listening import Address
from strop.protocol import DataProto, padded_on_the_left
from strop.rollout.base import LOOK_S, Advanced, Finished, RolloutSpec, SamplingParams, seeds_of, tokens_only
from strop.rollout.in_flight import InFlight, Queue
from strop.rollout.queued import Wave
from strop.rollout.session_rows import columns_of, images_of
from strop.terminal import printable

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_STARTS = 3
"""Starts of a program whose process ends, at least: the last ones are without others in it."""
_RETRY_S = 10.0
"""Seconds in which the official clients send a request again, at most 8 s after they gave up."""
_GATHER_S = 0.002
"""Seconds in which further requests are gathered: each look is at all sessions."""


@dataclass(eq=False)
class _Play:
    """A session, its program, and the requests of both."""

    key: str
    session: Session
    values: dict[str, Any]
    state: str = "waiting"
    """waiting, running, or ended."""
    futures: dict[Node, asyncio.Future[Node]] = field(default_factory=dict)
    bodies: dict[str, list[Node]] = field(default_factory=dict)
    """By the digest of a request's body, and its idempotency key."""
    outcome: Outcome = field(default_factory=dict)
    started: Started | None = None
    starts: int = 0
    is_alone: bool = False
    """No other program shares its process."""
    has_begun: bool = False
    """Its process runs it."""
    own_s: float = 0.0
    since: float = 0.0
    """Time since which its program computes; 0: the program waits."""

    def look(self, now: float) -> float:
        """Return the seconds that its program has taken by itself."""
        is_own = self.has_begun and self.state == "running" and not self.is_waiting(now)
        if self.since:
            self.own_s += now - self.since
        self.since = now if is_own else 0.0
        return self.own_s

    def is_waiting(self, now: float) -> bool:
        """Return True if its program waits for an answer."""
        return any(node.is_awaited(now) for node in self.session.open)

    def refuse(self, nodes: Iterable[Node], refusal: Refusal) -> None:
        """Refuse requests that have no answer yet."""
        for node in [*nodes]:
            for sent in self.bodies.values():
                sent[:] = [one for one in sent if one is not node]
            if (future := self.futures.pop(node, None)) is not None:
                future.get_loop().call_soon_threadsafe(_refuse, future, refusal)


@dataclass(eq=False)
class _Batch:
    """Sessions of one batch, in the order of rows."""

    prompts: DataProto
    params: SamplingParams
    plays: list[_Play]
    wait_s: float = 0.0
    """Seconds in which the engine waited for programs."""
    begun: float = field(default_factory=time.monotonic)

    def state(self) -> list[Any]:
        """Return the answers of each session."""
        return [play.session.state() for play in self.plays]

    def restore(self, state: Sequence[Any], /) -> None:
        """Take what ``state`` returned."""
        if len(state) != len(self.plays):
            raise CheckpointError(
                f"a batch in flight has {len(self.plays)} sessions, and {len(state)} were saved"
            )
        for play, saved in zip(self.plays, state, strict=True):
            play.session.restore(saved)


class AgentRollout:
    """Let programs sample from an engine; see ``RolloutEngine``."""

    def __init__(self, engine: Any, spec: RolloutSpec) -> None:
        """Serve the endpoint of this rank; ``engine``, a ``QueuedRollout`` without episodes, generates."""
        assert spec.program_pool is not None
        config: Any = spec.config
        self._engine, self._settings, self._pool = engine, config.agent, spec.program_pool
        self._form = ChatFormat(
            config, spec.tokenizer, engine.eos_token_ids, config.agent.parser, spec.picture_texts
        )
        rollout = config.actor_rollout_ref.rollout
        # those of training also while a validation samples otherwise: programs need not know of it
        self._sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}
        self._prompt_key = config.data.prompt_key
        self.advanced: Advanced = lambda done, tokens: None
        self.stopping = threading.Event()
        self._queue = Queue[_Batch]()
        self._plays: weakref.WeakValueDictionary[str, _Play] = weakref.WeakValueDictionary()
        self._changed = threading.Condition()
        self._warned: set[str] = set()
        port = config.agent.port and config.agent.port + spec.rank
        self._address = Address(config.agent.host, port)
        self._server = Server(_Handler(self), self._address, key_in_path=True)
        weakref.finalize(self, self._server.close, wait=False)

    def close(self) -> None:
        self._server.close()
        self._engine.close()

    def generate(
        self, prompts: DataProto, params: SamplingParams, finished: Finished | None = None
    ) -> DataProto:
        """See ``RolloutEngine.generate``; ``finished`` is not called."""
        batch = self._begun(prompts, params)
        self._complete([batch], 0)
        return self._result(batch)

    def admit(self, batch: int, prompts: DataProto, params: SamplingParams) -> None:
        """See ``RolloutEngine.admit``; no program starts before ``finish``."""
        self._queue.admit(batch, self._begun(prompts, params))

    def finish(self, batch: int, version: int, finished: Finished | None = None) -> DataProto:
        """See ``RolloutEngine.finish``; ``finished`` is not called."""
        batches = self._queue.from_oldest(batch)
        self._complete(batches, version)
        result = self._result(batches[0], with_versions=True)
        self._queue.forget(batch)
        return result

    def in_flight(self) -> dict[str, Any]:
        """See ``RolloutEngine.in_flight``: answers by session; programs are started again."""
        with self._changed:
            return self._queue.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._queue.restore(state)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        self._engine.update_weights(weights, last=last)

    def checksums(self) -> dict[str, int] | None:
        return self._engine.checksums()

    def release(self) -> None:
        self._engine.release()

    def _begun(self, prompts: DataProto, params: SamplingParams) -> _Batch:
        """Return a batch whose programs have not been started."""
        seeds: list[int | None] = [*seeds_of(prompts, params)] or [None] * (len(prompts) * params.n)
        width, plays = prompts.batch["input_ids"].shape[1], []
        images = images_of(prompts)
        for number, seed in enumerate(seeds):
            given = {name: values[number // params.n] for name, values in prompts.non_tensor_batch.items()}
            row, key = row_of(given), secrets.token_hex(16)
            messages = self._form.how.messages(row[self._prompt_key])
            if "images" in prompts.batch:
                own = digests_of(images[number // params.n].tolist())
                messages = with_pictures(messages, [*map(named, own)])
                urls = [{"type": "image_url", "image_url": {"url": pictures.url(one)}} for one in own]
                row[self._prompt_key] = with_pictures(as_messages(row[self._prompt_key]), urls)
            session = Session(
                self._form,
                tuple(map(canonical, messages)),
                seed=seed,
                room=params.max_tokens,
                widest=width,
                max_calls=self._settings.max_calls,
                sampling=self._sampling,
                most_pictures=images.shape[1],
            )
            url = f"{self._address.url}/s/{key}/v1"
            play = _Play(key, session, {**row, "row": row, "base_url": url, "api_key": key})
            plays.append(play)
            self._plays[key] = play
        return _Batch(prompts, params, plays)

    def _complete(self, batches: Sequence[_Batch], version: int) -> None:
        """Answer requests in waves until the sessions of the first batch have ended."""
        oldest, plays = batches[0], [play for batch in batches for play in batch.plays]
        reported = sum(play.state == "ended" for play in oldest.plays)
        self.advanced(reported, 0)
        self._engine.advanced = tokens_only(self.advanced)
        self._engine.stopping = self.stopping
        with self._engine.waves(oldest.params) as wave:
            while True:
                begun = time.monotonic()
                while not self._is_ready(oldest, plays):
                    self._engine.require_going_on()
                    time.sleep(_GATHER_S)
                oldest.wait_s += time.monotonic() - begun
                ended = sum(play.state == "ended" for play in oldest.plays)
                self.advanced(ended - reported, 0)
                reported = ended
                if ended == len(oldest.plays):
                    return
                self._wave(batches, version, wave)

    def _is_ready(self, oldest: _Batch, plays: Sequence[_Play]) -> bool:
        """Wait until a wave can begin or all of ``oldest`` have ended; return False to look again."""
        with self._changed:
            return self._look(oldest, plays) or (self._changed.wait(LOOK_S) and False)

    def _look(self, oldest: _Batch, plays: Sequence[_Play]) -> bool:
        """Start programs and end late ones; return True if a wave can begin, or all of ``oldest`` ended."""
        now = time.monotonic()
        for play in plays:
            if "raised" in play.outcome:
                raise play.outcome["raised"]
            if play.look(now) > self._settings.timeout and play.state == "running":
                reason = f"the program took more than agent.timeout={self._settings.timeout:g} s by itself"
                if play.started is None or play.started.stop(reason):
                    play.session.is_late = True
                    self._end(play, "error", reason)
        running = [play for play in plays if play.state == "running"]
        placed = [(play, play.started.process) for play in running if play.started]
        busy = {process for play, process in placed if play.has_begun and not play.is_waiting(now)}
        for play, process in placed:
            if not play.has_begun and process not in busy and process.is_stuck:
                process.kill("a coroutine that waits without await blocks its event loop")
        # programs whose process has ended start again apart, a half each time: who ends it is soon alone
        together = {
            (play.starts, place % 2 ** (play.starts - 1))
            for place, play in enumerate(plays)
            if play.state == "running"
        }
        for place, play in enumerate(plays):
            share = play.starts + 1, place % 2**play.starts
            if play.state != "waiting" or not together <= {share}:
                continue
            if len(running) >= (self._pool.concurrency or len(plays)):
                break
            play.is_alone = 2**play.starts >= len(plays)
            self._start(play)
            running.append(play)
            together.add(share)
        if all(play.state == "ended" for play in oldest.plays):
            return True
        waiting = [play for play in running if play.is_waiting(now)]
        if self._settings.lockstep:
            return bool(waiting) and len(waiting) == len(running)
        return bool(waiting)

    def _start(self, play: _Play) -> None:
        play.starts += 1
        play.state, play.own_s, play.since, play.has_begun = "running", 0.0, 0.0, False

        def ended(outcome: Outcome, start: int = play.starts) -> None:
            with self._changed:
                if play.state == "running" and play.starts == start:
                    if "begun" in outcome:
                        play.has_begun, play.since = True, time.monotonic()
                    else:
                        self._take(play, outcome)
                self._changed.notify_all()

        play.started = self._pool.start(f"{play.key}-{play.starts}", play.values, ended)

    def _take(self, play: _Play, outcome: Outcome) -> None:
        session = play.session
        if "raised" in outcome:
            play.outcome = outcome
        elif "lost" in outcome and not (play.is_alone and play.starts >= _STARTS):
            self._warn("a program was lost, and is started again", outcome["lost"])
            session.recorded = session.state()["answers"]
            play.refuse(play.futures, Refusal(400, "the program is started again"))
            session.restart()
            play.bodies.clear()
            play.state = "waiting"
        elif ("error" in outcome and session.refused_by) or "response" in outcome or "score" in outcome:
            play.outcome = outcome if "error" not in outcome else {"response": None}
            if session.is_resumed and self._settings.replay == "check" and session.unused():
                raised = f"session {play.values['row'].get('uid')}: the program asks otherwise than before"
                play.outcome = {"raised": CheckpointError(f"{raised} (agent.replay=check)")}
            self._end(play, session.refused_by or ("length" if session.is_cut else "stop"))
        else:
            self._warn("a session was lost", outcome.get("traceback") or outcome.get("lost", ""))
            self._end(play, "error", outcome.get("error") or outcome["lost"].splitlines()[0])

    def _end(self, play: _Play, reason: str, error: str = "") -> None:
        play.session.end(reason, error)
        play.state, play.since = "ended", 0.0
        play.refuse(play.futures, Refusal(403, "the session has ended"))
        play.bodies.clear()

    def _warn(self, what: str, found: str) -> None:
        """Log the first failure of a kind; metrics count the others."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("agent: %s, for the first time: %s", what, printable(found))

    def submit(
        self, key: str, request: ChatRequest, mark: str, is_retry: bool
    ) -> tuple[_Play, Node, asyncio.Future[Node] | None]:
        """Return the node of a request, and what sets its answer; one that is sent again is not another one.

        Raises ``Refusal`` for an unknown session, and as ``Session.submit`` does. In the server's thread.
        """
        with self._changed:
            play = self._plays.get(key)
            if play is None:
                raise Refusal(404, "there is no session of this key")
            sent_before = play.bodies.setdefault(mark, [])
            # an equal request after one whose client is gone is its retry, marked or not
            left = next((one for one in sent_before if not one.is_claimed), None)
            if left is None and is_retry and sent_before:
                left = sent_before[-1]
            if left is not None and not play.session.ended_by:
                node = left
                node.n_claims += 1
            elif play.state == "waiting":
                raise Refusal(403, "the program is started again")
            else:
                node = play.session.submit(request)
                sent_before.append(node)
            play.look(time.monotonic())
            if node.answer is None and node not in play.futures:
                play.futures[node] = self._server.loop.create_future()
            self._changed.notify_all()
            return play, node, play.futures.get(node)

    def leave(self, play: _Play, node: Node, *, may_retry: bool) -> None:
        """Note that the client of a request is gone."""
        with self._changed:
            node.n_claims -= 1
            node.retry_until = time.monotonic() + _RETRY_S if may_retry else 0.0
            play.look(time.monotonic())
            self._changed.notify_all()

    def _wave(self, batches: Sequence[_Batch], version: int, generate: Wave) -> None:
        """Sample the open nodes; those of the first batch to their ends."""
        with self._changed:
            waves = [wave for wave in map(_Wave.of, batches) if wave.nodes]
        if not waves:
            return
        contexts: dict[Any, Tensor] = {}
        shows = self._form.pictures is not None
        flights = [wave.in_flight(contexts, shows_pictures=shows) for wave in waves]
        generate(flights, version)
        with self._changed:
            for wave, flight in zip(waves, flights, strict=True):
                for play, node in wave.take(flight):
                    play.look(time.monotonic())
                    if (future := play.futures.pop(node, None)) is not None:
                        self._server.loop.call_soon_threadsafe(_settle, future, node)

    def _result(self, batch: _Batch, *, with_versions: bool = False) -> DataProto:
        """Return the columns of the rows of a batch."""
        sessions = [play.session for play in batch.plays]
        outcomes = [play.outcome for play in batch.plays]
        found = columns_of(
            *(batch.prompts, batch.params, sessions, outcomes, self._form),
            with_versions=with_versions,
            waiting=batch.wait_s / max(time.monotonic() - batch.begun, 1e-9),
            **self._engine.special_ids,
        )
        return found.union(self._engine.columns_of(batch))


class _Handler:
    """The ``Handler`` of the endpoint: its side of a rollout."""

    def __init__(self, rollout: AgentRollout) -> None:
        self._rollout = weakref.ref(rollout)

    def models(self) -> Sequence[str]:
        return ["policy"]

    async def answer(self, key: str, body: dict[str, Any], retry: int | None, mark: str | None) -> Reply:
        rollout, request = self._rollout(), read_request(body)
        if rollout is None:
            raise Refusal(403, "the run has ended")
        name = digest_of(body) + (mark or "")
        play, node, future = rollout.submit(key, request, name, bool(retry) or mark is not None)
        if future is not None:
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                rollout.leave(play, node, may_retry=retry is not None)
                raise
        assert node.answer is not None
        return Reply(node.key, node.answer, node.message(), len(node.context), len(node.ids), node.is_cut)


@dataclass
class _Wave:
    """Nodes of a batch that are sampled together, in an order without arrival."""

    batch: _Batch
    nodes: list[tuple[_Play, Node]]
    limits: list[int]

    @classmethod
    def of(cls, batch: _Batch) -> _Wave:
        """Collect the open nodes of a batch for which clients wait."""
        nodes, limits, now = [], [], time.monotonic()
        for play in batch.plays:
            if not play.session.open:
                continue
            ordered = play.session.begin([node for node in play.session.open if node.is_awaited(now)])
            if late := play.session.without_room():
                play.refuse(late, play.session.no_room())
                ordered = [node for node in ordered if node not in late]
            nodes += [(play, node) for node in ordered]
            limits += play.session.limits(ordered)
        return cls(batch, nodes, limits)

    def in_flight(self, contexts: dict[Any, Tensor], *, shows_pictures: bool) -> InFlight:
        """Return the nodes as samples; equal contexts are one tensor."""
        nodes, params = [node for _, node in self.nodes], replace(self.batch.params, n=1)
        found = flight_of(nodes, params, self.limits, shows_pictures=shows_pictures)
        found.prompt_ids = [
            contexts.setdefault((tuple(one.ids), one.images_at), torch.tensor(one.ids))
            for one in (node.whole for node in nodes)
        ]
        for row, node in enumerate(nodes):
            found.log_probs[row, : len(node.ids)] = torch.tensor(node.log_probs)
            found.versions[row, : len(node.ids)] = torch.tensor(node.versions, dtype=torch.int32)
        return found

    def take(self, found: InFlight) -> list[tuple[_Play, Node]]:
        """Give the nodes their tokens; return those that are answered now."""
        answered = []
        for row, (play, node) in enumerate(self.nodes):
            if node not in play.session.open:  # its session has ended meanwhile
                continue
            length = int(found.lengths[row])
            play.session.n_sampled += length - len(node.ids)
            node.ids, node.is_stopped = found.ids(row), bool(found.stopped[row])
            node.log_probs = found.log_probs[row, :length].tolist()
            node.versions = found.versions[row, :length].tolist()
            if bool(found.complete[row]):
                play.session.answer(node)
                answered.append((play, node))
        return answered


def flight_of(
    nodes: Sequence[Node], params: SamplingParams, limits: Sequence[int], *, shows_pictures: bool
) -> InFlight:
    """Return open nodes as samples that go on after the ids that they have; contexts are the prompts."""
    shown = [node.whole for node in nodes]
    columns = padded_on_the_left([one.ids for one in shown])
    if not params.greedy:
        columns["seeds"] = torch.tensor([[node.seed] for node in nodes])
    found = InFlight(DataProto(columns), params, limits=limits)
    for row, (node, whole) in enumerate(zip(nodes, shown, strict=True)):
        found.lengths[row] = done = len(node.ids)
        found.tokens[row, :done] = torch.tensor(node.ids)
        if shows_pictures:  # the first request of a session is a pure prompt
            root, images_at = node.path[0], whole.images_at or [0] * len(whole.ids)
            found.images.append(torch.tensor(digests_of(root.images_at), dtype=torch.long))
            found.images_before.append([*images_at[len(root.inserted) :]])
    return found


def _settle(future: asyncio.Future[Node], node: Node) -> None:
    if not future.done():
        future.set_result(node)


def _refuse(future: asyncio.Future[Node], refusal: Refusal) -> None:
    if not future.done():
        future.set_exception(refusal)
        future.exception()  # its client may be gone

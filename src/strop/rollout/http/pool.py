"""The servers of a run: which ones answer, with which weights, and which one a request goes to."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import resource
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from strop.errors import ConfigError, LostServersError, ModelError, TrainingError
from strop.listening import LOOPBACK
from strop.rollout.base import LOOK_S
from strop.rollout.http.kind import proxy_of, read_urls
from strop.rollout.http.sealed import SealedWeights
from strop.rollout.http.start import OwnServer
from strop.rollout.http.wire import (
    FIRST_VERSION,
    SCORED,
    Connection,
    Lost,
    Refused,
    Request,
    VLLMWire,
    differences,
)
from strop.rollout.transfer.broadcast import send_file

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S, _PROBE_S, _FACTS_S, _AGAIN_S = 0.2, 10.0, 60.0, 0.5
_FILES, _OTHER_FILES = resource.RLIMIT_NOFILE, 64
_DEADLY = 3
"""Deaths of its servers after which a sample is held to be the cause, if they have two addresses, or the run
has one; before that one it goes alone. If the others do not answer, twice as many."""
_ERRORS = 3
"""Errors that every server answers before any answer, after which the run does not wait for better ones."""
_OF_ONE = {"max_model_len", "max_num_seqs", "reads_text", "generation_config", "started"}
"""Facts in which servers of the same weights may differ; a run requires its own ``generation_config``."""
_COUNTED = (
    "rollout/lost_requests", "rollout/lost_tokens", "rollout/cut_tokens", "weights/bytes",
    "weights/pause_s", "weights/joins",
)  # fmt: skip


@dataclass(eq=False)
class Server:
    """A server, from when it joins until it is lost."""

    url: str
    wire: VLLMWire
    places: int = 1
    ranks: int = 1
    running: int = 0
    served: int = 0
    counted: int = 0
    """Of ``served``, those of metrics that were taken."""
    answered_at: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    """As it joined."""


class Pool:
    """Servers; all methods but the constructor run in the loop of the requests."""

    def __init__(
        self,
        settings: Any,
        expected: Mapping[str, Any],
        vocabulary: int,
        token: str | None,
        own: Sequence[OwnServer] = (),
        verify: Callable[[SealedWeights, list[dict[str, int]]], None] | None = None,
        *,
        weights: Sequence[str] = (),
        broadcasts: bool = False,
        keeps_weights: bool = False,
        name: str = "rollout.http",
    ) -> None:
        """Take the section ``rollout.http``, and the facts that every server must have; errors say ``name``.

        ``verify`` raises ``ModelError`` unless a joiner's checksums are those of the weights; None: they are
        not read. ``weights`` are their names in a checkpoint. With ``broadcasts`` servers are sent the sealed
        file, else they read it. With ``keeps_weights`` no weights are sent, and all servers must have those
        of the first.
        """
        self._settings, self._expected, self.vocabulary = settings, dict(expected), vocabulary
        self._token, self.own, self._verify, self._broadcasts = token, own, verify, broadcasts
        self._keeps_weights, self._name, self._weights = keeps_weights, name, weights
        self.live: list[Server] = []
        """Servers that answer, and have the present weights if there are any."""
        self.out: dict[str, Exception] = {}
        """The reasons why others do not, by URL."""
        self.sealed: SealedWeights | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._is_open = False
        self._left_at = time.monotonic()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._suspects = asyncio.Lock()
        self._slowest = 0.0
        self._errors = Counter[tuple[str, bool]]()
        self.counts = defaultdict[str, float](float)

    async def open(self) -> None:
        """Wait for the servers that the run starts, and for ``min_servers`` of those that are given.

        Raises ``ConfigError`` for one with other settings, ``LostServersError`` if too few answer in time.
        """
        self._read_urls()
        self._left_at = time.monotonic()
        needed = len(self.own) or self._settings.min_servers
        while True:
            for keeper in self._keepers.values():
                if keeper.done():
                    keeper.result()
            if len(self.live) >= needed and len(self.live) + len(self.out) >= len(self._keepers):
                break
            self._require_patience(needed)
            await asyncio.sleep(_LOOK_S)
        self._is_open = True
        named = [*self._keepers]
        self.live.sort(key=lambda server: named.index(server.url))  # of equal loads the first one is taken
        if self._keeps_weights:
            logger.info(
                "%s: no weights are loaded or sent; those of the servers are used, version %s%s",
                self._name,
                version := self._expected["weight_version"],
                " (of their start)" if version == FIRST_VERSION else "",
            )

    def _read_urls(self) -> None:
        """Keep the servers that are named now, and no others."""
        named = dict.fromkeys(read_urls(self._settings)) | {server.url: server for server in self.own}
        for url in [url for url in named if url not in self._keepers]:
            self._keepers[url] = asyncio.create_task(self._keep(url, named[url]))
        for url in self._keepers.keys() - named.keys():
            self._keepers.pop(url).cancel()
            for server in [one for one in self.live if one.url == url]:
                self._lose(server, Lost("it is not named any more"))
            self.out.pop(url, None)

    async def _keep(self, url: str, own: OwnServer | None) -> None:
        """Take a server in whenever it answers, and start one of the run again once it is lost.

        Raises ``TrainingError`` for one that does not start, and at the start of the run ``ConfigError`` for
        one with other settings.
        """
        wire = VLLMWire(Connection(url, self._token, proxy_of(self._settings)), self.vocabulary)
        restarts = 0  # in a row, without an answer between
        while True:
            server, joined = Server(url, wire), False
            try:
                await self._join(server)
                joined = True
            except Exception as error:  # it is tried again, and named if too few answer
                if isinstance(error, Refused | ConfigError) and not self._is_open:
                    raise ConfigError(f"{url}: {error}") from error
                self._count_error(url, error)
                # one of the run that is starting gives nothing but errors
                if (self._is_open or own is None) and str(error) != str(self.out.get(url)):
                    logger.warning("%s does not join: %s", url, error)
                self.out[url] = error
            while server in self.live:
                await asyncio.sleep(_LOOK_S)
                if own is not None and own.has_ended:
                    self._lose(server, Lost("its process has ended"))
            if own is None:
                await asyncio.sleep(_PROBE_S if self.live else _AGAIN_S)
            elif joined or own.has_ended:
                log = own.last_lines()
                restarts = 1 if server.served else restarts + 1
                if restarts > self._settings.max_restarts or not (joined or restarts > 1):
                    self.out[url] = TrainingError(f"{url} ended; starts in a row: {restarts}\n{log}")
                    raise self.out[url]
                logger.warning("%s is started again; its log ended with\n%s", url, log)
                await asyncio.sleep(2.0**restarts - 2)
                await asyncio.to_thread(own.stop)  # it may hang
                own.start()
            else:  # it is starting, or refuses the weights
                await asyncio.sleep(_PROBE_S if server.answered_at else _LOOK_S)

    async def _join(self, server: Server) -> None:
        """Compare the facts of a server, bring it the weights, and take it in."""
        patience_s = self._settings.patience_s
        facts = await server.wire.facts(min(patience_s, _FACTS_S))
        server.answered_at, server.facts = time.monotonic(), {**facts}
        self._expected.setdefault("kernels", facts["kernels"])  # equal results need equal ones
        if self._keeps_weights:
            facts |= await self._facts_of_weights(server)
            for name in facts.keys() - _OF_ONE:
                self._expected.setdefault(name, facts[name])
        if found := differences(facts, self._expected):
            raise ConfigError(
                f"it is another engine: {'; '.join(found)}; start it as in strop docs http_rollout"
            )
        if self._broadcasts and facts["engines"] > 1:
            raise ConfigError(
                f"it has {facts['engines']} engines (--data-parallel-size), whose ranks have equal numbers: "
                "set actor_rollout_ref.rollout.weight_transfer to auto or disk, or start a server for each"
            )
        server.places, server.ranks, held = (
            facts["engines"] * int(facts["max_num_seqs"]),
            facts["ranks"],
            None,
        )
        while (sealed := self.sealed) is not held:  # a transfer may begin meanwhile
            assert sealed is not None
            await self._bring(server, sealed)
            if self._verify is not None:
                parts = await server.wire.checksums(self._weights, patience_s)
                await asyncio.to_thread(self._verify, sealed, parts)
            held = sealed
        lower = "actor_rollout_ref.rollout.max_num_seqs" if self.own else "the servers' --max-num-seqs"
        _allow_files(server.places + sum(one.places for one in self.live) + _OTHER_FILES, lower)
        self.live.append(server)
        self.out.pop(server.url, None)
        if held is not None:
            self.counts["weights/joins"] += 1
            logger.info("%s joins; %d servers answer", server.url, len(self.live))
        self._wake(server.places)

    async def _facts_of_weights(self, server: Server) -> dict[str, str]:
        patience_s = self._settings.patience_s
        if await server.wire.is_paused(patience_s):  # its weights may be others than it says
            raise Lost(
                "it is paused: a run is sending weights to it, or was ended meanwhile; then start the server "
                "again"
            )
        version = await server.wire.version(patience_s)
        try:  # of a single server, too: it may be started again with others
            parts = await server.wire.checksums((), patience_s)
        except Lost as error:
            if not error.is_error:
                raise
            if len(self._keepers) > 1:
                logger.warning("%s: its weights are not compared with the others': %s", server.url, error)
            return {"weight_version": version}
        digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=6).hexdigest()
        return {"weight_version": version, "weights": digest}

    async def transfer(self, sealed: SealedWeights) -> None:
        """Bring new weights to all live servers; those that fail leave, by name."""
        try:
            self._read_urls()
        except ConfigError as error:  # the file is being written
            logger.warning("%s; the servers stay as they are", error)
        await self.lose_others()
        before, self.sealed = self.sealed, sealed
        copies = sum(server.ranks for server in self.live) if self._broadcasts else 1
        self.counts["weights/bytes"] += copies * sealed.size
        pauses = await asyncio.gather(*(self._load(server, sealed) for server in self.live))
        if before is not None:
            before.close()
        self.counts["weights/pause_s"] += max(pauses, default=0.0)
        await self._enough()

    async def lose_others(self) -> None:
        """Lose servers that were started again since they joined, also with other settings or weights.

        They join again as any other does. Where no request was in flight, no answer tells.
        """

        async def look(server: Server) -> None:
            try:
                facts = await server.wire.facts_of_engine(min(self._settings.patience_s, _FACTS_S))
            except (Lost, Refused) as error:
                self._lose(server, error)
            else:
                if facts != server.facts:
                    self._lose(server, Lost("it was started again"))

        await asyncio.gather(*map(look, self.live))

    async def _load(self, server: Server, sealed: SealedWeights) -> float:
        try:
            return await self._bring(server, sealed)
        except (Lost, Refused, OSError) as error:
            self._count_error(server.url, error)
            self._lose(server, Lost(f"the transfer of {sealed.version} failed: {error}"))
            return 0.0

    async def _bring(self, server: Server, sealed: SealedWeights) -> float:
        def offer() -> dict[str, Any]:
            if not self._broadcasts:
                return {"path": sealed.path}
            host = urlsplit(server.url).hostname or LOOPBACK
            return {"sender": send_file(sealed.path, host, server.ranks, patience_s)}

        patience_s = self._settings.patience_s
        return await server.wire.transfer(offer, sealed.version, patience_s)

    def _lose(self, server: Server, reason: Exception, since: float | None = None) -> None:
        if server not in self.live:
            return
        self.live.remove(server)
        self.out[server.url] = reason
        self._left_at = time.monotonic() if since is None else since
        logger.warning("%s leaves: %s; %d others answer", server.url, reason, len(self.live))
        self._wake(len(self._waiting))

    def _wake(self, number: int) -> None:
        """Let requests that wait for a place look again."""
        while self._waiting and number:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else it was cancelled
                waiter.set_result(None)
                number -= 1

    def _count_error(self, url: str, error: Exception) -> None:
        """Count errors that a server answers; log the first one, and the first of too many requests."""
        if isinstance(error, Lost) and (error.is_error or error.is_busy):
            kind = url, error.is_error
            if not self._errors[kind]:
                logger.warning("%s: %s", url, error)
            self._errors[kind] += 1

    async def _enough(self) -> None:
        """Wait until ``min_servers`` answer."""
        while len(self.live) < self._settings.min_servers:
            if not self._slowest and all(self._errors[url, True] >= _ERRORS for url in self._keepers):
                raise TrainingError(f"{self._name}: servers answer nothing but errors: {self._reasons()}")
            self._require_patience(self._settings.min_servers)
            await asyncio.sleep(_AGAIN_S)

    def _require_patience(self, needed: int) -> None:
        """Raise ``LostServersError`` if the last server has left for ``patience_s``."""
        if time.monotonic() - self._left_at > self._settings.patience_s:
            raise LostServersError(
                f"{self._name}: {len(self.live)} servers answer, {needed} are needed (min_servers="
                f"{self._settings.min_servers}), for {self._settings.patience_s:.0f} s: {self._reasons()}"
            )

    def _reasons(self) -> str:
        logs = {server.url: f"\n{server.last_lines()}" for server in self.own}
        return "; ".join(f"{url}: {error}{logs.get(url, '')}" for url, error in self.out.items())

    async def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probs of the ids of each row but the first, each given those before it."""
        await self.lose_others()
        requests = [Request(number, ids, SCORED) for number, ids in enumerate(rows)]
        tasks = [asyncio.create_task(self.answer(request, 1, VLLMWire.score)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def answer(
        self, request: Request, n: int, call: Callable[[VLLMWire, Request, str, float], Awaitable[T]]
    ) -> T:
        """Return what the first server gives that answers ``call``; each attempt begins at the start.

        ``n`` adjacent requests have one prompt.
        """
        if not all(0 <= token < self.vocabulary for token in request.ids):
            raise ModelError(
                f"row {request.row} has token ids beyond the vocabulary of {self.vocabulary}, which would "
                "end vLLM's server"
            )
        failures, stale = Counter[Server](), Counter[str]()
        last, busy_since = "", 0.0
        while True:
            deaths = Counter(server.url for server in failures if server not in self.live)
            total, urls = deaths.total(), ", ".join(deaths)
            is_clear = len(deaths) > 1 or len(self._keepers) == 1  # else the server may be the cause
            if total >= (_DEADLY if is_clear else 2 * _DEADLY):
                raise TrainingError(f"{_named(request)}: {total} servers died of it ({urls}); last {last}")
            async with self._suspects if total >= _DEADLY - 1 else contextlib.nullcontext():
                server = await self._place(request, n, failures, deaths, last)
                sent_at = time.monotonic()
                try:
                    answer = await call(server.wire, request, self._version, self._deadline_s)
                except Refused as error:
                    raise TrainingError(f"{server.url}: {error} ({_named(request)})") from None
                except Lost as error:
                    last = f"{server.url}: {error}" + "; raise http.deadline_s" * error.by_deadline
                    self.counts["rollout/lost_requests"] += 1
                    self.counts["rollout/lost_tokens"] += error.tokens
                    self._count_error(server.url, error)
                    busy_since = (busy_since or sent_at) if error.is_busy else 0.0
                    if busy_since and time.monotonic() - busy_since < self._settings.patience_s:
                        await asyncio.sleep(_AGAIN_S)  # in its place: fewer are sent meanwhile
                        continue
                    if error.is_stale:  # it was started again meanwhile, and this request has not ended it
                        stale[server.url] += 1
                        if stale[server.url] == _DEADLY:
                            raise TrainingError(
                                f"{server.url}: {error}, after {_DEADLY} transfers; are there several "
                                "servers behind this address?"
                            ) from None
                    else:
                        failures[server] += 1
                    await self._check(server, error, sent_at)
                else:
                    server.answered_at = time.monotonic()
                    server.served += 1
                    self._slowest = max(self._slowest, server.answered_at - sent_at)
                    return answer
                finally:
                    server.running -= 1
                    self._wake(1)

    async def _place(
        self, request: Request, n: int, failures: Counter[Server], deaths: Counter[str], last: str
    ) -> Server:
        """Wait for a place on the least loaded of the servers with the fewest ``deaths``, and take it."""
        while True:
            await self._enough()
            left = [server for server in self.live if failures[server] < self._settings.retries]
            if not left:
                raise TrainingError(f"{_named(request)}: it failed on every live server; the last was {last}")
            if free := [server for server in left if server.running < server.places]:
                # by n: samples of one prompt go together, for the prefix cache
                server = min(
                    free, key=lambda one: (deaths[one.url], one.running // n / one.places, -one.running)
                )
                server.running += 1
                return server
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    @property
    def _version(self) -> str:
        return self.sealed.version if self.sealed else self._expected.get("weight_version", FIRST_VERSION)

    @property
    def _deadline_s(self) -> float:
        # not by the slowest alone: the first answers are short, and another may be a hundred times as long
        return self._settings.deadline_s or max(10 * self._slowest, self._settings.patience_s)

    async def _check(self, server: Server, error: Lost, sent_at: float) -> None:
        """Find out whether a server that lost a request has died."""
        if error.by_deadline:
            if server.answered_at < sent_at:  # else it is alive, whatever its health route answers
                silence_s = time.monotonic() - sent_at
                self._lose(server, Lost(f"no answer since {silence_s:.0f} s"), sent_at)
            return
        for _ in range(0 if error.is_stale else self._settings.retries):
            if server not in self.live or await server.wire.is_healthy():
                return
            await asyncio.sleep(_AGAIN_S)
        self._lose(server, error)

    async def checksums(self) -> dict[str, list[dict[str, int]]]:
        """Return the checksums of every live server, by URL."""
        found: dict[str, list[dict[str, int]]] = {}

        async def read(server: Server) -> None:
            try:
                found[server.url] = await server.wire.checksums(self._weights, self._settings.patience_s)
            except (Lost, Refused) as error:
                self._lose(server, error)

        while not found:
            await self._enough()
            await asyncio.gather(*map(read, self.live))
        return found

    async def close(self) -> None:
        """Cancel what is under way, and end the loop."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        asyncio.get_running_loop().stop()

    def take_counts(self) -> dict[str, float]:
        """Return metrics since the last call."""
        served = [server.served - server.counted for server in self.live]
        for server in self.live:
            server.counted = server.served
        imbalance = max(served) * len(served) / sum(served) if any(served) else 1.0
        counted = {name: self.counts[name] for name in _COUNTED}
        self.counts.clear()
        return {"rollout/servers_live": len(served), "rollout/server_imbalance": imbalance, **counted}


class PoolThread:
    """The thread that a pool's requests run in, until ``close``, or until this object is collected."""

    def __init__(self, pool: Pool) -> None:
        """Wait for the servers; the errors are those of ``Pool.open``."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._loop, pool)
        try:
            self.run(pool.open())
        except BaseException:  # whose traceback keeps this object, and so its servers
            self.close()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``work`` in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``; an error of the wait cancels it."""
        future = self.start(work)
        try:
            # in steps: an exception that ends this thread (``controller.threads``) comes between them
            while not concurrent.futures.wait([future], LOOK_S).done:
                pass
            return future.result()
        finally:
            future.cancel()


def _close(loop: asyncio.AbstractEventLoop, pool: Pool) -> None:
    # it does not wait for the loop: the garbage collector may run this in the loop's thread
    asyncio.run_coroutine_threadsafe(pool.close(), loop)
    for server in pool.own:
        server.stop()
    if pool.sealed is not None:
        pool.sealed.close()


def _allow_files(needed: int, lower: str) -> None:
    """Raise the limit of open files; ``ConfigError`` if the system does not allow so many more."""
    needed += len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(_FILES)
    if 0 <= hard < needed:  # -1: no limit
        raise ConfigError(
            f"a connection for each place, and others, are {needed} files, and this process may open {hard}: "
            f"lower {lower}, or let root raise the hard limit (`ulimit -Hn`, nofile in limits.conf)"
        )
    if 0 <= soft < needed:
        resource.setrlimit(_FILES, (needed, hard))


def _named(request: Request) -> str:
    digest = hashlib.blake2b(str(request.ids).encode(), digest_size=6).hexdigest()
    batch = "the batch" if request.batch is None else f"batch {request.batch}"
    return f"row {request.row} of {batch}, {len(request.ids)} tokens of digest {digest}"

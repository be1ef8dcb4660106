"""``strop serve``: chat completions of a model, without sessions: each request has its whole history.

Requests are sampled together, a few tokens at a time: between two slices, requests that have arrived
join, and those leave that are complete, or whose client is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Never

from strop.agents.chat import TOO_LONG, ChatFormat, Refusal, read_request
from strop.agents.server import Reply, Server
from strop.agents.session import Node
from strop.config.backends import ROLLOUTS
from strop.config.placement import rollout_in_words
from strop.config.roles import model_paths, tokenizer_paths
from strop.config.schema import Config
from strop.controller.pools import Role
from strop.data.pictures.expand import PromptPictures, load_processor
from strop.errors import ModelError, traceback_of
from strop.listening import Address
from strop.models.source import OF_PROCESSORS
from strop.rollout.agents import flight_of
from strop.rollout.base import MANY, SamplingParams
from strop.rollout.in_flight import InFlight
from strop.terminal import printable
from strop.trainer.build import fetch_tokenizer, require_whole
from strop.workers.policy import ActorRolloutRefWorker

logger = logging.getLogger(__name__)

_TOGETHER_S = 0.01
"""Seconds in which requests arrive that begin together."""
_SLICE = 32
"""Tokens that each request gets before others may join."""


@dataclass(eq=False)
class _Chat:
    """A request that is sampled."""

    node: Node
    params: SamplingParams
    limit: int
    done: asyncio.Future[None]

    def take(self, form: ChatFormat, ids: list[int], *, is_stopped: bool) -> bool:
        """Take what is sampled; return True if it is the whole answer."""
        node, stops = self.node, self.node.request.stop
        node.ids, node.is_stopped = ids, is_stopped
        count, has_stop = form.cut_at_stop(node.ids, stops)
        del node.ids[count:]
        node.is_cut = not (is_stopped or has_stop)
        return not node.is_cut or len(node.ids) >= self.limit

    def settle(self, error: Exception | None = None) -> None:
        """Answer the client, or raise ``error`` for it."""

        def settle() -> None:
            if self.done.done():  # the client is gone
                return
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

        self.done.get_loop().call_soon_threadsafe(settle)


class _Handler:
    """The ``Handler`` of requests of clients, for the thread that samples."""

    def __init__(self, name: str, form: ChatFormat, params: SamplingParams) -> None:
        self._name, self._form, self._params = name, form, params
        self._arrived = queue.SimpleQueue[_Chat]()

    def models(self) -> Sequence[str]:
        return [self._name]

    async def answer(self, key: str, body: dict[str, Any], retry: int | None, mark: str | None) -> Reply:
        request = read_request(body, seeded=True)
        temperature = request.sampling.get("temperature", self._params.temperature)
        top_p, seed = request.sampling.get("top_p", self._params.top_p), body.get("seed")
        if not (0 <= temperature <= 2 and 0 < top_p <= 1):
            raise Refusal(400, f"temperature={temperature:g}, top_p={top_p:g}: expected 0 to 2, and 0 to 1")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise Refusal(400, f"seed={seed!r:.80}: expected a whole number")
        if request.tools:
            self._form.bridge(request)
            self._form.parser()
        shown, most = self._form.prompt(request), self._params.max_tokens
        ids = shown.ids
        if len(ids) >= most:
            problem = f"{TOO_LONG}: {len(ids)} tokens, and {most} fit with an answer"
            raise Refusal(400, problem, TOO_LONG)
        params = replace(self._params, temperature=temperature, top_p=top_p)
        drawn = (secrets.randbits(63) if seed is None else seed) % 2**63
        node = Node(None, request, ids, secrets.token_hex(12), drawn, shown.images_at)
        limit = min(request.max_tokens or most, most - len(ids))
        chat = _Chat(node, params, limit, asyncio.get_running_loop().create_future())
        self._arrived.put(chat)
        await chat.done
        node.answer = self._form.read(request, ids, node.ids)
        return Reply(node.key, node.answer, node.message(), len(ids), len(node.ids), node.is_cut)

    def arrivals(self, *, wait: bool) -> list[_Chat]:
        """Return the requests that have arrived; ``wait`` for one, and for those right after it."""
        found = []
        if wait:
            found.append(self._arrived.get())
            time.sleep(_TOGETHER_S)
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def serve(self, engine: Any) -> Never:
        """Sample for ever; an error is that of the requests that are sampled together."""
        while True:
            chats: list[_Chat] = []
            try:
                with engine.waves(self._params, keeps=True) as wave:
                    while True:
                        chats += self.arrivals(wait=not chats)
                        chats[:] = [chat for chat in chats if not chat.done.cancelled()]
                        if chats:
                            self._sample(chats, wave)
            except Exception as error:  # noqa: BLE001 - the next request may be another one
                logger.error("%s", printable(traceback_of(error)))
                for chat in chats:
                    chat.settle(error)

    def _sample(self, chats: list[_Chat], wave: Any) -> None:
        """Sample a slice of those with the parameters of the first one; take out what is answered."""
        alike = [chat for chat in chats if chat.params == chats[0].params]
        found = _in_flight(alike)
        wave([found], 0)
        for row, chat in enumerate(alike):
            if chat.take(self._form, found.ids(row), is_stopped=bool(found.stopped[row])):
                chats.remove(chat)
                chat.settle()
        chats.sort(key=alike.__contains__)  # the others come first the next time


def _in_flight(chats: Sequence[_Chat]) -> InFlight:
    """Return requests of equal parameters, to get a slice each: seeds of vLLM depend on where it begins."""
    limits = [min(len(chat.node.ids) + _SLICE, chat.limit) for chat in chats]
    nodes = [chat.node for chat in chats]
    has_pictures = any(node.images_at for node in nodes)
    found = flight_of(nodes, chats[0].params, limits, shows_pictures=has_pictures)
    found.names = chats
    return found


def _texts_of(config: Config, tokenizer: Any, folder: Path) -> PromptPictures | None:
    """Return the texts of pictures; None for a model of text, or one whose pictures cannot be read here."""
    if not any((folder / name).is_file() for name in OF_PROCESSORS):
        return None
    try:
        name = config.actor_rollout_ref.rollout.name
        if (package := ROLLOUTS[name].missing_for_pictures()) is not None:
            raise ModelError(f"{name} reads them with {package}: install it, or use --rollout hf")
        data = config.data
        bounds = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
        processor = load_processor(folder, tokenizer, **bounds)
        return None if processor is None else PromptPictures(processor)
    except ModelError as error:
        logger.warning("messages with pictures are refused: %s", error)
        return None


@contextlib.contextmanager
def serving(
    config: Config, *, host: str, port: int, token: str | None
) -> Generator[tuple[Address, Callable[[], Never]]]:
    """Load the model and listen; yield the address, and a function that answers until an interrupt.

    ``host``, ``port``, ``token`` and errors are those of ``Address``.
    """
    model = config.actor_rollout_ref.model
    Address(host, port).socket.close()  # one that is taken is an error before the model is loaded
    logger.info("%s", rollout_in_words(config))
    paths = model_paths(config).values(), tokenizer_paths(config).values()
    tokenizer = fetch_tokenizer(config, model, models=paths[0], tokenizers=paths[1], weights=True)
    require_whole(paths[0])
    logger.info("loading the model")
    worker = ActorRolloutRefWorker(config, Role.ActorRollout)
    if (texts := _texts_of(config, tokenizer, worker.model_options(model)["path"])) is not None:
        worker.set_pictures(MANY)
    worker.init_model()
    worker.sync_rollout(0)
    engine: Any = worker.rollout
    length = config.data.max_prompt_length + config.data.max_response_length
    params = SamplingParams.from_config(config.actor_rollout_ref.rollout, validate=True)
    form = ChatFormat(config, tokenizer, engine.eos_token_ids, config.agent.parser, texts)
    name = Path(model.lora_adapter_path or model.path).name
    handler = _Handler(name, form, replace(params, max_tokens=length, n=1))
    address = Address(host, port, token)
    server = Server(handler, address, key_in_path=False)
    try:
        yield address, partial(handler.serve, engine)
    finally:
        server.close()

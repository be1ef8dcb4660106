"""Requests and answers of vLLM's server. Another kind of server is another class like ``VLLMWire``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from strop.connection import Connection, Lost, Refused
from strop.errors import ConfigError, TrainingError

_ANSWER_BYTES, _TOKEN_BYTES = 1 << 16, 4096
_AGAIN_S, _ANSWER_S = 0.5, 10.0
_MINUS_INFINITY = -9999.0  # as vLLM writes it
_NEEDED = {"max_model_len", "max_num_seqs", "kernels", "ordinary_tokens"}
NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
"""Values that every request carries, else the server's generation configuration decides."""
SCORED = {
    **NEUTRAL, "temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0, "stop_token_ids": [],
    "ignore_eos": True, "detokenize": False,
}  # fmt: skip
"""Sampling of requests for the log-probs of their own ids; vLLM generates a token at least.

Greedy: one that is drawn may be an id that no token has.
"""
FIRST_VERSION = "default"
"""Version of the weights that a server starts with."""
ARGUMENTS: dict[str, Any] = {
    "enable_scale_out": True,
    "weight_transfer_config": {"backend": "strop"},
    "worker_extension_cls": "strop.rollout.vllm.server.Extension",
    "middleware": "strop.rollout.vllm.server.RequireToken",
}
"""Arguments that make an engine a server of strop's."""


class Request(NamedTuple):
    """A sample, or the turn of one, to generate."""

    row: int
    ids: list[int]
    sampling: Mapping[str, Any]
    batch: int | None = None
    """Number of its batch, where several are in flight."""


Answer = tuple[list[int], list[float], str]
"""Ids and log-probs of a sample, or of a turn, and vLLM's reason for its end."""


class VLLMWire:
    """One server. The methods raise ``Lost`` and ``Refused``."""

    def __init__(self, connection: Connection, vocabulary: int) -> None:
        self._connection, self._vocabulary = connection, vocabulary

    async def is_healthy(self) -> bool:
        """Return True if the health route answers."""
        with contextlib.suppress(Lost, Refused):
            await self._connection.call("/health", _ANSWER_S)
            return True
        return False

    async def facts(self, deadline_s: float) -> dict[str, Any]:
        """Return ``facts_of_engine``; ``ConfigError`` for a server that answers without the token.

        Others could give it weights.
        """
        with contextlib.suppress(Refused):
            if self._connection.has_token:
                await self._connection.call("/health", deadline_s, with_token=False)
                raise ConfigError(
                    "it answers without the token: start it with STROP_TOKEN and --middleware "
                    "strop.rollout.vllm.server.RequireToken"
                )
        return await self.facts_of_engine(deadline_s)

    async def facts_of_engine(self, deadline_s: float) -> dict[str, Any]:
        """Return what ``strop.rollout.vllm.server.Extension`` reads of the engine."""
        try:
            of_ranks = await self._rpc("strop_facts", deadline_s)
        except Refused as error:
            raise Refused(f"{error}; start it as in strop docs http_rollout") from None
        processes = int((await self._connection.call("/get_world_size", deadline_s)).get("world_size") or 0)
        found = of_ranks[0] | {"ranks": len(of_ranks), "engines": max(processes // len(of_ranks), 1)}
        if missing := _NEEDED - found.keys():
            raise Refused(
                f"its facts have no {', '.join(sorted(missing))}: another version of strop is there"
            )
        return found

    async def version(self, deadline_s: float) -> str:
        """Return the version of the engine's weights."""
        return str((await self._connection.call("/weight_info", deadline_s)).get("weight_version"))

    async def is_paused(self, deadline_s: float) -> bool:
        """Return True if requests wait: weights are being sent, or the run that sent them was killed."""
        return (await self._connection.call("/is_paused", deadline_s)).get("is_paused") is True

    async def checksums(self, names: Sequence[str], deadline_s: float) -> list[dict[str, int]]:
        """Return ``held_checksums`` of each rank of the engine, of a server with several of the first."""
        parts = await self._rpc("strop_checksums", deadline_s, list(names))
        return [{name: int(value) for name, value in part.items()} for part in parts]

    async def _rpc(self, method: str, deadline_s: float, *arguments: Any) -> list[dict[str, Any]]:
        body = {"method": method, "args": arguments}
        answer = await self._connection.call("/collective_rpc", deadline_s, body)
        found = answer.get("results")
        if not (isinstance(found, list) and found and all(isinstance(part, dict) for part in found)):
            raise Lost(f"/collective_rpc answers {str(answer)[:200]} to {method}")
        return found

    async def generate(self, request: Request, version: str, deadline_s: float) -> Answer:
        """Return a sample by the weights ``version``.

        Raises ``TrainingError`` for an answer that is none to this request: a server with other settings
        would spoil the run.
        """
        answer = await self._generate(request, deadline_s, request.sampling["max_tokens"])
        return self.parse(answer, request.sampling, version)

    async def _generate(self, request: Request, deadline_s: float, most: int, **more: Any) -> dict[str, Any]:
        body = {"token_ids": request.ids, "sampling_params": request.sampling, **more}
        limit = _ANSWER_BYTES + _TOKEN_BYTES * most
        return await self._connection.call("/inference/v1/generate", deadline_s, body, limit)

    async def score(self, request: Request, version: str, deadline_s: float) -> list[float]:
        """Return the log-prob of each id but the first, given those before it, by the weights ``version``.

        Raises ``TrainingError`` for an answer that is none to this request, as ``generate`` does.
        """
        salt = secrets.token_hex(16)  # no cached keys and values, for which vLLM gives no log-probs
        answer = await self._generate(request, deadline_s, len(request.ids), cache_salt=salt)
        return self.scores_of(answer, request.ids, version)

    def scores_of(self, answer: dict[str, Any], ids: list[int], version: str) -> list[float]:
        """Return the log-probs of an answer; see ``score``."""
        self.parse(answer, SCORED, version)
        found: Any = answer.get("prompt_logprobs")
        try:
            pairs = zip(found[1:], ids[1:], strict=True)
            scores = [item[str(token)]["logprob"] for item, token in pairs]
        except (TypeError, KeyError, ValueError):
            raise TrainingError(
                f"{self._connection.url} answered no log-prob of each of the {len(ids)} ids: "
                f"{str(found)[:200]}"
            ) from None
        for value in scores:
            if not (isinstance(value, float | int) and _MINUS_INFINITY < value <= 0):
                raise TrainingError(f"{self._connection.url} answered the log-prob {value}")
        return scores

    def parse(self, answer: Any, sampling: Mapping[str, Any], version: str) -> Answer:
        """Return the sample of an answer; see ``generate``."""
        try:
            choice = answer["choices"][0]
            ids, reason = list(choice["token_ids"] or []), choice["finish_reason"]
            log_probs = [item["logprob"] for item in (choice["logprobs"] or {}).get("content") or []]
            versions = {str(span["version"]) for span in choice.get("weight_versions") or []}
        except (TypeError, KeyError, IndexError, AttributeError):
            raise Lost(f"an answer of another form: {str(answer)[:200]}") from None
        if reason == "abort":
            raise Lost("it aborted a request without being requested to", tokens=len(ids))
        other = ", ".join(versions - {version})
        if other == FIRST_VERSION:
            raise Lost(f"its weights are {other}, not {version}", is_stale=True)
        most, last = sampling["max_tokens"], ids[-1] if ids else None
        is_token = [type(token) is int and 0 <= token < self._vocabulary for token in ids]
        # vLLM writes NaN, too, as its minus infinity
        is_number = [
            isinstance(value, float | int) and _MINUS_INFINITY < value < math.inf for value in log_probs
        ]
        strips = reason == "stop" and not sampling.get("stop") and last not in sampling["stop_token_ids"]
        for is_wrong, what in (
            (other, f"a sample by the weights {other}, requested from {version}: another run uses it, too"),
            (
                ids and not versions,
                "a sample that names no version of its weights: start it with vLLM >= 0.32",
            ),
            (len(log_probs) != len(ids), f"{len(ids)} tokens with {len(log_probs)} log-probs"),
            (not 1 <= len(ids) <= most, f"{len(ids)} tokens, where 1 to {most} were requested"),
            (not all(is_token), f"token ids beyond the vocabulary of {self._vocabulary}"),
            (not all(is_number), "log-probs that are no finite numbers; have the weights diverged?"),
            (reason not in ("stop", "length", "repetition"), f"the end of a sample for {reason!r}"),
            (
                reason == "length" and len(ids) < most,
                f"{len(ids)} of {most} tokens: its --max-model-len is small",
            ),
            (strips, f"a sample that ended without a stop token ({last}): the server strips stop tokens"),
        ):
            if is_wrong:
                raise TrainingError(f"{self._connection.url} answered {what}")
        return ids, log_probs, reason

    async def transfer(
        self, offer: Callable[[], Mapping[str, Any]], version: str, patience_s: float
    ) -> float:
        """Load the weights that ``offer`` says how to get; return the seconds of the pause."""
        begun = time.monotonic()

        async def post(route: str, **body: Any) -> Any:
            return await self._connection.call(route, patience_s, body)

        await post("/pause?mode=abort")
        try:
            await post("/start_weight_update")
        except (Lost, Refused):
            # A trainer that died in a transfer has left one open. Weights are loaded whole or not at all.
            with contextlib.suppress(Lost, Refused):
                await post("/finish_weight_update")
            await post("/start_weight_update")
        offered = await asyncio.to_thread(offer)
        await post("/update_weights", update_info={**offered, "version": version})
        await post("/finish_weight_update", weight_version=version)
        # keys and values of the old weights
        while (await post("/reset_prefix_cache")).get("success") is not True:
            if time.monotonic() - begun > patience_s:
                raise Lost(f"/reset_prefix_cache had no success within {patience_s:.0f} s")
            await asyncio.sleep(min(_AGAIN_S, patience_s))
        if (found := await self.version(patience_s)) != version:
            raise Lost(f"its weights are {found} after the transfer of {version}")
        await post("/resume")
        return time.monotonic() - begun


def differences(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> Sequence[str]:
    """Return in words what differs in a server from what the run ``expected`` of it."""
    most = min(facts["max_model_len"], expected["max_model_len"])  # a longer one does no harm
    found = {**facts, "max_model_len": most}
    pairs = ((name, found.get(name, value), value) for name, value in expected.items())
    return [*filter(None, (_first_difference(*pair) for pair in pairs))]


def _first_difference(name: str, found: Any, expected: Any) -> str:
    """Return in words the first difference of two values of JSON; "" if they are equal."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = {**expected, **found}
        if "model_type" in expected:  # a part of a model: another version of transformers has other keys
            names = [key for key in expected if key in found]
        parts = [(f"{name}.{key}", found.get(key), expected.get(key)) for key in names]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        parts = [(f"{name}.{place}", *pair) for place, pair in enumerate(pairs)]
    else:
        return "" if found == expected else f"{name} is {found!r}, expected {expected!r}"
    return next(filter(None, (_first_difference(*part) for part in parts)), "")


def facts_of(
    urls: Sequence[str], token: str | None, proxy: str | None
) -> dict[str, dict[str, Any] | Exception]:
    """Return the facts of every server, or the error instead."""

    async def all_facts() -> list[Any]:
        wires = [VLLMWire(Connection(url, token, proxy), 0) for url in urls]
        return await asyncio.gather(*(wire.facts(_ANSWER_S) for wire in wires), return_exceptions=True)

    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop
        found = thread.submit(lambda: asyncio.run(all_facts())).result()
    return dict(zip(urls, found, strict=True))

"""A fake of vLLM's server: a sample is a function of ids, seed and weights, and any route may be scripted.

A script has the form of ``../shared/cases/reported/fake_server.py``: {"/path": [answer, ...]}, of which the
last one repeats; answer: {"status", "json" or "text", "headers", "delay": s, "until": an event, "hang",
"drop", "close_after", "endless"}, or None for what the fake does otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from typing import Any

import torch
from safetensors import safe_open

from strop.errors import ModelError
from strop.rollout.transfer.broadcast import received_file
from strop.rollout.vllm.arguments import vocabulary_digest
from strop.rollout.weights import checksums

import tiny_model

GENERATE = "/inference/v1/generate"
FACTS = {
    "dtype": "float32",
    "quantization": None,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "max_model_len": 64,
    "reads_text": False,
    "unsupported": None,
    "vocabulary": vocabulary_digest(tiny_model.build_tokenizer()),
    "ordinary_tokens": vocabulary_digest(tiny_model.build_tokenizer(), added=False),
    "max_num_seqs": 8,
    "cuts_prompts_on_a_cpu": False,
    "compiles_on_a_cpu": False,
    "kernels": {"vllm": "0.32.0", "enforce_eager": True},
}


class FakeVLLM:
    """Serve from its construction to ``kill``, on ``host``; ``start`` serves again, as a fresh server."""

    def __init__(
        self,
        script: dict[str, list[Any]] | None = None,
        *,
        idle_close: float | None = None,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        vocabulary: int = 61,
        **facts: Any,
    ) -> None:
        self.script = {path: list(answers) for path, answers in (script or {}).items()}
        self.facts, self.idle_close, self.token, self.host = {**FACTS, **facts}, idle_close, token, host
        self.vocabulary, self.delay, self.poison = vocabulary, 0.0, None
        self.seen: list[dict[str, Any]] = []
        self.most_open = 0
        self.engines = 1
        self.port = port
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.start()
        self.url = f"http://{host}:{self.port}"

    def start(self) -> None:
        self.version, self.checksums, self.paused, self._pending = "default", {}, False, None
        self.facts["started"] = random.SystemRandom().random()
        self._open: set[asyncio.StreamWriter] = set()
        self._in(self._serve())

    def _in(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._connection, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """Close every connection without an answer, and the port."""
        self._in(self._close())

    async def _close(self) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _die_and_come_back(self) -> None:
        await self._close()
        await asyncio.sleep(1.2)
        self.version, self.checksums = "default", {}
        await self._serve()

    def bodies(self, path: str = GENERATE) -> list[Any]:
        return [json.loads(seen["body"] or "null") for seen in self.seen if seen["path"] == path]

    def paths(self) -> list[str]:
        return [seen["path"] for seen in self.seen]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.most_open = max(self.most_open, len(self._open))
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            while await self._answered(reader, writer):
                pass
        self._open.discard(writer)
        writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.idle_close)
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        path = path.partition("?")[0]
        self.seen.append({"method": method, "path": path, "headers": headers, "body": body.decode()})
        answer = self._next(path)
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            answer = {"status": 401, "json": {"error": "token"}}
        if answer is None:
            answer = await self._default(path, json.loads(body or b"null"))
        await asyncio.sleep(answer.get("delay", 0))
        while "until" in answer and not answer["until"].is_set():
            await asyncio.sleep(0.01)
        if answer.get("hang"):
            await asyncio.Event().wait()
        if answer.get("drop"):
            return False
        text = (answer["text"] if "text" in answer else json.dumps(answer.get("json", {}))).encode()
        length = 1 << 40 if answer.get("endless") else len(text)
        status = f"HTTP/1.1 {answer.get('status', 200)} X\r\ncontent-type: application/json\r\n"
        status += "".join(f"{name}: {value}\r\n" for name, value in answer.get("headers", {}).items())
        writer.write(f"{status}content-length: {length}\r\n\r\n".encode() + text)
        while answer.get("endless"):
            writer.write(b"x" * 65536)
            await writer.drain()
        await writer.drain()
        return not answer.get("close_after")

    def _next(self, path: str) -> Any:
        answers = self.script.get(path)
        if not answers:
            return None
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def _default(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/collective_rpc":
            found = self.facts if body["method"] == "strop_facts" else self.checksums
            return {"json": {"results": [found]}}
        if path == "/update_weights":
            try:
                self._pending = await asyncio.to_thread(self.loaded, **body["update_info"])
            except ModelError as error:
                return {"status": 500, "text": str(error)}
        elif path == "/finish_weight_update" and self._pending is not None:
            self.checksums, self._pending, self.version = self._pending, None, body["weight_version"]
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/get_world_size":
            return {"json": {"world_size": self.engines}}
        elif path == "/is_paused":
            return {"json": {"is_paused": self.paused}}
        elif path == "/reset_prefix_cache":
            return {"json": {"success": True}}
        elif path == "/weight_info":
            return {"json": {"weight_version": self.version}}
        elif path == GENERATE:
            await asyncio.sleep(self.delay)
            if body["sampling_params"].get("seed", -1) == self.poison:
                self._loop.create_task(self._die_and_come_back())
                return {"hang": True}
            return {"json": self.sample(body)}
        return {"json": {}}

    def loaded(self, version: str, path: str = "", sender: Any = None) -> dict[str, int]:
        """Return the checksums of the weights of a file, as an update does to the engine."""
        with (
            received_file(sender, 0) if sender else contextlib.nullcontext(path) as found,
            safe_open(found, "pt") as file,
        ):
            assert file.metadata()["version"] == version
            return checksums(((name, file.get_tensor(name)) for name in list(file.keys())), torch.float32)

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        weights = sum(map(int, self.checksums.values()))
        draw = random.Random(f"{body['token_ids']} {sampling.get('seed')} {weights}")
        stops, most = sampling["stop_token_ids"], sampling["max_tokens"]
        ids = [draw.randrange(10, self.vocabulary) for _ in range(draw.randint(1, most + 2))]
        ids = [token for token in ids if token not in stops] or [10]
        ended = len(ids) < most
        ids = [*ids, stops[0]] if ended else ids[:most]
        answer = wire_answer(ids, [-draw.random() for _ in ids], "stop" if ended else "length", self.version)
        if "prompt_logprobs" in sampling:
            answer["prompt_logprobs"] = self.scores(body["token_ids"])
        return answer

    def scores(self, ids: list[int]) -> list[Any]:
        """Return the form of vLLM's log-probs of a prompt."""
        draws = [-random.Random(str(ids[: place + 1])).random() for place in range(1, len(ids))]
        found = [{str(token): {"logprob": draw}} for token, draw in zip(ids[1:], draws, strict=True)]
        return [None, *found]


def wire_answer(
    token_ids: list[int], log_probs: list[float], finish_reason: str, weight_version: str
) -> dict[str, Any]:
    """Return vLLM's form of an answer."""
    content = [{"token_id": i, "logprob": value} for i, value in zip(token_ids, log_probs, strict=False)]
    spans = [{"version": weight_version, "start": 0, "end": len(token_ids)}]
    choice = {"token_ids": token_ids, "finish_reason": finish_reason, "logprobs": {"content": content}}
    return {"choices": [{**choice, "index": 0, "weight_versions": spans}]}

"""``HTTPRollout``: token ids to servers, token ids and log-probs back, weights by a sealed file.

A sample is a function of its ids and its seed, so it does not matter which server answers, how many there
are, or whether one has died: a lost request is sent again from the sample's start.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from strop.errors import ModelError
from strop.models.deferred import defer_causal_lm
from strop.models.loader import dtype_named, end_token_ids, hidden_token_ids
from strop.protocol import DataProto
from strop.rollout.base import Finished, RolloutSpec, Samples
from strop.rollout.episodes import Episodes
from strop.rollout.http.kind import KIND, expected_facts, token_of, transfer_folder
from strop.rollout.http.pool import Pool
from strop.rollout.http.sealed import SealedWeights
from strop.rollout.http.start import OwnServer, command
from strop.rollout.http.wire import ARGUMENTS, NEUTRAL, Answer, Request
from strop.rollout.in_flight import InFlight
from strop.rollout.queued import QueuedRollout
from strop.rollout.vllm.arguments import (
    FIXED,
    model_facts,
    sampling_arguments,
    server_arguments,
    whole_prompts,
)
from strop.rollout.vllm.checkpoint import CheckpointWeights
from strop.rollout.vllm.kind import extra_sampling
from strop.rollout.weights import checksums, require_equal_checksums

T = TypeVar("T")


class HTTPRollout(QueuedRollout):
    """Generate on servers that hold copies of the policy."""

    def __init__(
        self,
        weights: CheckpointWeights,
        pool: Pool,
        *,
        dtype: torch.dtype,
        sampling: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        **options: Any,
    ) -> None:
        """Wait for the servers; the errors are those of ``Pool.open``.

        ``sampling`` are further fields of ``SamplingParams``, ``folder`` is that of the sealed files (None:
        in memory), ``options`` are those of ``QueuedRollout``.
        """
        super().__init__(**options)
        self._weights, self._pool, self._dtype, self._folder = weights, pool, dtype, folder
        self._sampling_options = dict(sampling or {})
        self._sealed: SealedWeights | None = None
        self._name, self._transfers = secrets.token_hex(4), 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()
        self._closing = weakref.finalize(self, _close, self._loop, pool)
        try:
            self._run(pool.open())
        except BaseException:  # whose traceback keeps this object, and so its servers
            self._closing()
            raise

    @classmethod
    def build(cls, spec: RolloutSpec) -> HTTPRollout:
        """See ``RolloutEngine.build``; the weights come with the first update."""
        config: Any = spec.config
        rollout, settings = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.http
        model, _ = defer_causal_lm(**spec.model)
        end_ids, dtype = end_token_ids(model, spec.tokenizer), dtype_named(KIND.dtype(config), spec.device)
        weights, own, token = CheckpointWeights(model), [], token_of(settings)
        if not settings.urls:
            token = secrets.token_hex(32)
            arguments = server_arguments(spec, model.config, KIND.ranks(config), settings.start.n)
            on_a_cpu = whole_prompts(arguments) if spec.device.type == "cpu" else {}
            line = command({**arguments, **on_a_cpu, **FIXED, **ARGUMENTS}, settings.start.args)
            logs = Path(config.trainer.default_local_dir).expanduser() / "servers"
            own = [OwnServer(line, token, logs / f"{number}.log") for number in range(settings.start.n)]
        expected = expected_facts(config, str(dtype).removeprefix("torch.")) | model_facts(model.config)
        verify = partial(require_held, weights, dtype) if rollout.verify_weights_every else None
        vocabulary = model.config.get_text_config().vocab_size
        return cls(
            weights,
            Pool(settings, expected, vocabulary, token, own, verify),
            dtype=dtype,
            sampling=extra_sampling(config),
            folder=transfer_folder(config),
            pad_token_id=spec.tokenizer.pad_token_id,
            eos_token_ids=end_ids,
            hidden_token_ids=hidden_token_ids(model, spec.tokenizer),
            episodes=Episodes.of(spec, end_ids),
        )

    def _columns_of(self, batch: InFlight) -> DataProto:
        found = super()._columns_of(batch)
        if batch.prompts.meta_info.get("mode", "train") == "train":  # what came since the last iteration
            found.meta_info["rollout_metrics"] = self._pool.take_counts()
        return found

    def _complete(self, batches: Sequence[InFlight], version: int, finished: Finished | None) -> None:
        """Generate until each sample has ended; each turn is answered, and the next begins, at once.

        Later batches wait: the servers' speed must not decide.
        """
        batch = batches[0]
        self._weights.ledger.require_complete()
        arrived = SimpleQueue[tuple[int, Callable[[], None]]]()
        running: dict[int, Future[Answer] | None] = {}

        def go_on(row: int) -> None:
            if bool(batch.decoding[row]):
                answering = self._pool.answer(self._request(batch, row), batch.params.n)
                future = asyncio.run_coroutine_threadsafe(answering, self._loop)
                future.add_done_callback(
                    lambda done: arrived.put((row, partial(self._insert, batch, row, version, done)))
                )
                running[row] = future
            elif bool(batch.waiting[row]):
                assert self._episodes is not None
                running[row] = None
                self._episodes.ask(batch, row, arrived)
            else:
                self.advanced(1, 0)
                batch.report(finished if self._episodes is None else None, row)

        try:
            for row in range(len(batch.lengths)):
                go_on(row)
            while running:
                row, insert = arrived.get()
                insert()
                del running[row]
                go_on(row)
        finally:
            for future in running.values():
                if future is not None:
                    future.cancel()

    def _insert(self, batch: InFlight, row: int, version: int, done: Future[Answer]) -> None:
        ids, log_probs, truncated = done.result()
        columns = ([ids], [log_probs], [len(ids)], [truncated])
        batch.add(torch.tensor([row]), Samples(*map(torch.tensor, columns)), version)
        self.advanced(0, len(ids))

    def _request(self, batch: InFlight, row: int) -> Request:
        ids = batch.prompt_ids[row // batch.params.n].tolist() + batch.ids(row)
        if not all(0 <= token < self._pool.vocabulary for token in ids):
            raise ModelError(
                f"row {row} has token ids beyond the vocabulary of {self._pool.vocabulary}, which would "
                "end vLLM's server"
            )
        sampling = sampling_arguments(batch, row, self._sampling_options, self.eos_token_ids)
        return Request(row, ids, NEUTRAL | sampling)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """See ``RolloutEngine.update_weights``: write them to a file that all servers then read."""
        if not self._weights.ledger.open:
            if self._sealed is not None:
                self._sealed.close()  # of an update that failed
            self._transfers += 1
            version = f"{self._name}/{self._transfers}"
            self._sealed = SealedWeights(version, self._weights.shapes(self._dtype), self._folder)
        assert self._sealed is not None
        for name, weight in self._weights.sent(weights):
            self._sealed.write(name, weight)
        if last:
            self._weights.ledger.end()
            self._sealed.seal()
            sealed, self._sealed = self._sealed, None
            self._run(self._pool.transfer(sealed))

    def checksums(self) -> dict[str, int]:
        """See ``RolloutEngine.checksums``; ``ModelError`` if two servers hold different weights."""
        held = {url: self._weights.held(parts) for url, parts in self._run(self._pool.checksums()).items()}
        first_url, first = next(iter(held.items()))
        for url, found in held.items():
            if differing := [name for name in first if found.get(name) != first[name]]:
                raise ModelError(f"{url} and {first_url} hold different weights: {', '.join(differing[:3])}")
        return first

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def release(self) -> None:
        """Do nothing: the servers' memory is not the trainer's."""


def _close(loop: asyncio.AbstractEventLoop, pool: Pool) -> None:
    # it does not wait for the loop: the garbage collector may run this in the loop's thread
    asyncio.run_coroutine_threadsafe(pool.close(), loop)
    for server in pool.own:
        server.stop()
    if pool.sealed is not None:
        pool.sealed.close()


def require_held(
    weights: CheckpointWeights, dtype: torch.dtype, sealed: SealedWeights, parts: list[dict[str, int]]
) -> None:
    """Raise ``ModelError`` unless a joiner's checksums are those of the sealed weights."""
    with safe_open(sealed.path, "pt") as file:
        expected = checksums(((name, file.get_tensor(name)) for name in weights.layout.shapes()), dtype)
    require_equal_checksums(expected, weights.held(parts), int(sealed.version.partition("/")[2]))

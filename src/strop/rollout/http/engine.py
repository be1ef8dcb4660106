"""``HTTPRollout``: token ids to servers, token ids and log-probs back, weights by a sealed file.

A sample is a function of its ids and its seed, so it does not matter which server answers, how many there
are, or whether one has died: a lost request is sent again from the sample's start.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strop.errors import ModelError
from strop.models.deferred import defer_causal_lm
from strop.models.folder import end_token_ids
from strop.models.loader import dtype_named, hidden_token_ids
from strop.protocol import DataProto
from strop.rollout.base import Finished, RolloutSpec
from strop.rollout.episodes import Episodes
from strop.rollout.http.clock import due
from strop.rollout.http.kind import KIND, expected_facts, token_of, transfer_folder
from strop.rollout.http.pool import Pool, PoolThread
from strop.rollout.http.sealed import SealedWeights, delete_left, new_name
from strop.rollout.http.start import OwnServer, command
from strop.rollout.http.wire import ARGUMENTS, NEUTRAL, Answer, Request, VLLMWire
from strop.rollout.in_flight import InFlight
from strop.rollout.queued import QueuedRollout
from strop.rollout.vllm.arguments import (
    FIXED,
    model_facts,
    row_of_samples,
    sampling_arguments,
    server_arguments,
    vocabulary_digest,
    whole_prompts,
)
from strop.rollout.vllm.checkpoint import CheckpointWeights
from strop.rollout.vllm.kind import extra_sampling
from strop.rollout.weights import checksums, require_equal_checksums

PIECE = 64
"""Most tokens of a request for a sample of a later batch."""


class HTTPRollout(QueuedRollout):
    """Generate on servers that hold copies of the policy."""

    def __init__(
        self,
        weights: CheckpointWeights | None,
        pool: Pool,
        *,
        dtype: torch.dtype,
        slots: int,
        fixed_slots: bool = False,
        sampling: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        **options: Any,
    ) -> None:
        """Wait for the servers; the errors are those of ``Pool.open``.

        ``weights`` None: the servers have those that are evaluated.
        ``slots``: samples at once on the clock of batches ahead (``due``); those of a state that is restored
        take their place, unless they are ``fixed_slots``.
        ``sampling`` are further fields of ``SamplingParams``, ``folder`` is that of the sealed files (None:
        in memory), ``options`` are those of ``QueuedRollout``.
        """
        super().__init__(**options)
        self._weights, self._pool, self._dtype, self._folder = weights, pool, dtype, folder
        self._sampling_options, self._slots, self._fixed_slots = dict(sampling or {}), slots, fixed_slots
        self._sealed: SealedWeights | None = None
        self._name, self._transfers = new_name(), 0
        if folder is not None:
            delete_left(folder)
        self._thread = PoolThread(pool)

    @classmethod
    def build(cls, spec: RolloutSpec) -> HTTPRollout:
        """See ``RolloutEngine.build``; the weights come with the first update."""
        config: Any = spec.config
        rollout, settings = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.http
        model, _ = defer_causal_lm(**spec.model)
        end_ids = end_token_ids(model.generation_config, spec.tokenizer)
        dtype = dtype_named(KIND.dtype(config), spec.device)
        weights = None if settings.keep_weights else CheckpointWeights(model)
        own, token = [], token_of(settings)
        if not settings.urls:
            token = secrets.token_hex(32)
            arguments = server_arguments(spec, model.config, KIND.ranks(config), settings.start.n)
            on_a_cpu = whole_prompts(arguments) if spec.device.type == "cpu" else {}
            line = command({**arguments, **on_a_cpu, **FIXED, **ARGUMENTS}, settings.start.args)
            logs = Path(config.trainer.default_local_dir).expanduser() / "servers"
            own = [OwnServer(line, token, logs / f"{number}.log") for number in range(settings.start.n)]
        expected = expected_facts(config, str(dtype).removeprefix("torch.")) | model_facts(model.config)
        if weights is None:  # of the model the tokenizer alone counts
            expected = expected_facts(config) | {"vocabulary": vocabulary_digest(spec.tokenizer)}
        verify = partial(require_held, weights, dtype) if rollout.verify_weights_every and weights else None
        vocabulary = model.config.get_text_config().vocab_size
        broadcasts = rollout.weight_transfer == "broadcast"
        return cls(
            weights,
            Pool(
                *(settings, expected, vocabulary, token, own, verify),
                weights=() if weights is None else weights.names,
                broadcasts=broadcasts,
                keeps_weights=weights is None,
            ),
            dtype=dtype,
            slots=KIND.slots(config),
            fixed_slots=settings.slots is not None,
            sampling=extra_sampling(config),
            folder=transfer_folder(config),
            pad_token_id=spec.tokenizer.pad_token_id,
            eos_token_ids=end_ids,
            hidden_token_ids=hidden_token_ids(model, spec.tokenizer),
            episodes=Episodes.of(spec, end_ids),
        )

    def columns_of(self, batch: InFlight) -> DataProto:
        found = super().columns_of(batch)
        if batch.prompts.meta_info.get("mode", "train") == "train":  # what came since the last iteration
            found.meta_info["rollout_metrics"] = self._pool.take_counts()
        return found

    def _complete(self, batches: Sequence[InFlight], version: int, finished: Finished | None) -> None:
        """Generate until each sample of the oldest batch has ended; each turn is answered as it ends.

        Samples of later batches are generated in pieces, and then cut to what they are due.
        """
        if self._weights is not None:
            self._weights.ledger.require_complete()
        else:
            self._thread.run(self._pool.lose_others())
        oldest, n_first = batches[0], len(batches[0].lengths)
        places = [(batch, row) for batch in batches for row in range(len(batch.lengths))]
        begun = torch.cat([batch.lengths for batch in batches])
        arrived = SimpleQueue[tuple[int, Callable[[], None]]]()
        running: dict[int, Future[Answer] | None] = {}

        def go_on(number: int) -> None:
            batch, row = places[number]
            if bool(batch.decoding[row]):
                request = self._request(batch, row, PIECE if number >= n_first else None)
                answering = self._pool.answer(request, batch.params.n, VLLMWire.generate)
                future = running[number] = self._thread.start(answering)
                insert = partial(self._insert, batch, row, version)
                future.add_done_callback(lambda done: arrived.put((number, partial(insert, done))))
            elif bool(batch.waiting[row]):
                assert self._episodes is not None
                running[number] = None
                self._episodes.ask(batch, row, arrived)  # of the oldest batch: the number is its row
            elif batch is oldest:
                self.advanced(1, 0)
                batch.report(finished if self._episodes is None else None, row)

        def dues() -> tuple[list[int], bool]:
            new = (torch.cat([batch.lengths for batch in batches]) - begun).tolist()
            has_ended = torch.cat([batch.complete for batch in batches]).tolist()
            later = list(zip(new[n_first:], has_ended[n_first:], strict=True))
            return due(new[:n_first], later, self._slots)

        try:
            for number in range(len(places)):
                go_on(number)
            while not (bool(oldest.complete.all()) and dues()[1]):
                number, insert = self._arrival(arrived)
                insert()
                answered = running.pop(number)
                if answered is not None and number < n_first:
                    self.advanced(0, len(answered.result()[0]))
                go_on(number)
        finally:
            for future in running.values():
                if future is not None:
                    future.cancel()
        for (batch, row), first, new in zip(
            places[n_first:], begun[n_first:].tolist(), dues()[0], strict=True
        ):
            self._pool.counts["rollout/cut_tokens"] += int(batch.lengths[row]) - first - new
            batch.cut(row, first + new)

    def _insert(self, batch: InFlight, row: int, version: int, done: Future[Answer]) -> None:
        batch.add(torch.tensor([row]), row_of_samples(*done.result()), version)

    def _request(self, batch: InFlight, row: int, most: int | None) -> Request:
        ids = batch.prompt_ids[row // batch.params.n].tolist() + batch.ids(row)
        sampling = sampling_arguments(batch, row, self._sampling_options, self.eos_token_ids)
        sampling["max_tokens"] = min(sampling["max_tokens"], most or sampling["max_tokens"])
        if "min_tokens" in sampling:
            sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
        return Request(row, ids, NEUTRAL | sampling, batch.prompts.meta_info.get("batch"))

    def in_flight(self) -> dict[str, Any]:
        """See ``RolloutEngine.in_flight``: nothing of a server is in it."""
        return super().in_flight() | {"slots": self._slots}

    def restore(self, state: dict[str, Any]) -> None:
        """See ``RolloutEngine.restore``; the clock goes on as before, with other servers, too."""
        if not self._fixed_slots:
            self._slots = state.get("slots", self._slots)
        super().restore(state)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """See ``RolloutEngine.update_weights``: write them to a file that all servers then get."""
        assert self._weights is not None
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
            self._thread.run(self._pool.transfer(sealed))

    def checksums(self) -> dict[str, int] | None:
        """See ``RolloutEngine.checksums``; ``ModelError`` if two servers hold different weights."""
        if self._weights is None:  # compared as each server joined
            return None
        found = self._thread.run(self._pool.checksums())
        held = {url: self._weights.held(parts) for url, parts in found.items()}
        first_url, first = next(iter(held.items()))
        for url, other in held.items():
            if differing := [name for name in first if other.get(name) != first[name]]:
                raise ModelError(f"{url} and {first_url} hold different weights: {', '.join(differing[:3])}")
        return first

    def release(self) -> None:
        """Do nothing: the servers' memory is not the trainer's."""

    def close(self) -> None:
        """End the requests, and the servers of the run: a traceback may keep this object alive."""
        self._thread.close()


def require_held(
    weights: CheckpointWeights, dtype: torch.dtype, sealed: SealedWeights, parts: list[dict[str, int]]
) -> None:
    """Raise ``ModelError`` unless a joiner's checksums are those of the sealed weights."""
    with safe_open(sealed.path, "pt") as file:
        expected = checksums(((name, file.get_tensor(name)) for name in weights.layout.shapes()), dtype)
    require_equal_checksums(expected, weights.held(parts), int(sealed.version.partition("/")[2]))

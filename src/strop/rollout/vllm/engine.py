"""``VLLMRollout``: token ids in, token ids and log-probs out, on weights that the trainer sends.

The engine runs in the worker's process: next to the actor, it copies weights from the actor's tensors. The
price is vLLM's scheduler in the worker's Python. Every rank runs an engine. With tensor parallelism the ranks
of a group run one engine together, in lockstep on the same requests.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

# vLLM reads these when it is imported; those that are set already are kept.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run in this process, which holds the weights
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # it adds up in no fixed order: a call would not repeat
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # share the trainer's threads
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
} | os.environ

from vllm import LLM
from vllm import SamplingParams as VLLMSamplingParams
from vllm.distributed import get_tp_group
from vllm.exceptions import VLLMError
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from strop import pictures
from strop.data.pictures.expand import PromptPictures
from strop.data.pictures.parts import digests_of
from strop.errors import ConfigError, ModelError, TrainingError
from strop.models.deferred import defer_causal_lm
from strop.models.folder import end_token_ids
from strop.models.loader import hidden_token_ids
from strop.protocol import DataProto
from strop.rollout.base import (
    PROMPT_COLUMNS,
    Finished,
    GenerationStopped,
    RolloutSpec,
    Samples,
    SamplingParams,
    tokens_only,
)
from strop.rollout.episodes import Episodes
from strop.rollout.in_flight import InFlight, together
from strop.rollout.queued import QueuedRollout, Wave
from strop.rollout.vllm.arguments import (
    ENDS,
    FIXED,
    engine_arguments,
    row_of_samples,
    sampling_arguments,
    whole_prompts,
    why_unsupported,
)
from strop.rollout.vllm.checkpoint import CheckpointWeights
from strop.rollout.vllm.held import constants, held_checksums
from strop.rollout.vllm.kind import extra_sampling, seed_per_sample
from strop.rollout.vllm.settings import (
    IN_PROCESS,
    drawing_from,
    joined,
    keeping_model_classes,
    keeping_process_state,
)
from strop.rollout.weights import UNEQUAL

logger = logging.getLogger(__name__)
_AHEAD = 2
"""Requests that the engine has, relative to those that it runs at once: pictures of a request are prepared
when it is added, and kept until it ends."""
_LOOK_EVERY = 16
"""Steps of an engine over several ranks from one look at ``stopping`` to the next, which is a collective."""


class VLLMRollout(QueuedRollout):
    """Generate on a copy of the policy in vLLM's layout; sleep between ``release`` and an update."""

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: Mapping[str, Any],
        *,
        device: torch.device,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        hidden_token_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed_per_sample: bool | None = None,
        rank: int = 0,
        world_size: int = 1,
        texts: PromptPictures | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        """Start the engine; ``ModelError`` with vLLM's reason if it fails.

        ``model`` gives names and shapes of the weights; its parameters may be on the meta device.
        ``arguments`` are those of ``engine_arguments``, ``sampling`` further fields of ``SamplingParams``.
        ``seed_per_sample=False`` seeds each call instead of each sample; None: where that is faster.
        ``texts``: those of pictures, where prompts have some. See ``QueuedRollout`` for others.
        """
        super().__init__(
            pad_token_id=pad_token_id,
            eos_token_ids=eos_token_ids,
            hidden_token_ids=hidden_token_ids,
            episodes=episodes,
        )
        self._sleeps = bool(arguments.get("enable_sleep_mode"))
        self._weights = CheckpointWeights(model)
        self._name = type(model).__name__
        self._asleep = False
        self._texts = texts
        if reason := why_unsupported(model.config, device.type, pictures=texts is not None):
            raise ModelError(reason)
        on_a_cpu = whole_prompts(arguments) if device.type == "cpu" else {}
        self._options = sampling_options(sampling or {})
        # Collect dropped engines now: their later finalizers would destroy state shared by all engines.
        gc.collect()
        with keeping_process_state(), keeping_model_classes(), joined(rank, world_size):
            try:
                self._llm = LLM(
                    **{**arguments, **on_a_cpu, **FIXED},
                    disable_log_stats=True,
                    seed=0,
                    weight_transfer_config={"backend": IN_PROCESS},
                )
            except (ValueError, RuntimeError, AssertionError, LookupError, VLLMError) as error:
                reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
                raise ModelError(f"rollout.name=vllm: the engine did not start: {reason}") from error
        self._worker: Any = self._llm.llm_engine.model_executor.driver_worker.worker
        # right as they are: with pictures the weights were loaded from their files
        self._constants = {} if texts is None else constants(self._worker.model_runner.get_model())
        if seed_per_sample is None:
            # vLLM 0.32's newer runner draws from (seed, position) in one kernel. The older one overwrites the
            # noise row by row, from a generator for each request with a seed: on a GPU a launch a row.
            seed_per_sample = device.type == "cpu" or self._llm.llm_engine.vllm_config.use_v2_model_runner
        self._seed_per_sample = seed_per_sample
        if not seed_per_sample and rank == 0:
            logger.warning(
                "actor_rollout_ref.rollout.seed_per_sample=False: samples depend on the other samples of "
                "their call, so on batch size, number of ranks and vLLM's settings (strop docs generation)"
            )

    @classmethod
    def build(cls, spec: RolloutSpec) -> VLLMRollout:
        """See ``RolloutEngine.build``; the weights come with the first update."""
        model, _ = defer_causal_lm(**spec.model)
        end_ids = end_token_ids(model.generation_config, spec.tokenizer)
        return cls(
            model,
            engine_arguments(spec, model.config),
            device=spec.device,
            pad_token_id=spec.tokenizer.pad_token_id,
            eos_token_ids=end_ids,
            hidden_token_ids=hidden_token_ids(model, spec.tokenizer),
            sampling=extra_sampling(spec.config),
            seed_per_sample=seed_per_sample(spec.config),
            rank=spec.rank,
            world_size=spec.world_size,
            texts=spec.picture_texts,
            episodes=Episodes.of(spec, end_ids),
        )

    def _begun(self, prompts: DataProto, params: SamplingParams) -> InFlight:
        """Return the samples of all ranks of the tensor-parallel group, each of which submits all of them."""
        names = (*PROMPT_COLUMNS, "seeds", "images")
        columns = prompts.select(*(name for name in names if name in prompts.batch))
        of_ranks, rank = gathered(columns.to("cpu")), get_tp_group().rank_in_group
        if (episodes := self._episodes) is None:
            return InFlight(prompts, params, of_ranks, rank)
        batch = InFlight(prompts, params, of_ranks, rank, **episodes.options)
        first = batch.own.start // params.n

        def begun() -> tuple[list[Tensor], Tensor]:
            episodes.begin(batch)
            return batch.prompt_ids[first : first + len(prompts)], batch.ended[batch.own]

        # what the resets of the other ranks returned, and lost
        prompt_ids, ended = zip(*together(begun, gathered), strict=True)
        batch.prompt_ids, batch.ended = [*itertools.chain(*prompt_ids)], torch.cat(ended)
        return batch

    def restore(self, state: dict[str, Any]) -> None:
        """See ``RolloutEngine.restore``. Each rank has saved its own samples. Collective."""
        together(partial(super().restore, state), gathered)
        for batch in self._queue:
            batch.restore_others(gathered)

    @torch.no_grad()
    def _complete(self, batches: Sequence[InFlight], version: int, finished: Finished | None) -> None:
        """Generate until the first of ``batches`` is complete; the samples of the others queue behind it.

        What is running then is aborted, and its tokens are kept; the next call goes on with them as part of a
        prompt. So a sample goes on in the same way whether new weights, other calls, a resume or nothing lies
        between two calls, and no request sees two versions of the weights. A call that fails changes nothing.
        Later batches advance with any ``params``. A tensor-parallel group completes the batches of all its
        ranks, which so stay in lockstep.
        """
        self._begin()
        if self._episodes is None:
            self._decode(batches, version, finished)
        elif len(batches) == 1 and self._seed_per_sample and get_tp_group().world_size == 1:
            self._play(self._episodes, batches[0], version)
        else:
            wave = partial(self._decode, batches, version, None)
            self._episodes.complete(batches, wave, gathered, self.advanced)

    def _begin(self) -> None:
        self._weights.ledger.require_complete()
        # Cached prompts may be of older weights, or of calls that a resumed run does not repeat.
        if not self._llm.reset_prefix_cache():
            raise TrainingError("vLLM cannot reset its prefix cache: requests of an earlier call are running")
        if self._texts is not None:
            self._llm.llm_engine.reset_encoder_cache()  # it is by picture, whatever the weights are

    @contextlib.contextmanager
    def waves(self, params: SamplingParams, *, keeps: bool = False) -> Generator[Wave]:
        """See ``QueuedRollout.waves``: they share the prefix cache."""
        self._begin()
        with torch.no_grad():
            yield lambda batches, version: self._decode(batches, version, None)

    def _play(self, episodes: Episodes, batch: InFlight, version: int) -> None:
        """Generate until a batch is complete; a turn is answered, and the next one begins, while others run.

        Only for a batch alone, whose samples depend on their seeds and not on what runs with them: otherwise
        the time of an answer would change samples.
        """
        engine = self._llm.llm_engine
        arrived = SimpleQueue[tuple[int, Callable[[], None]]]()
        running: dict[str, int] = {}
        asked: set[int] = set()
        names = map(str, itertools.count())
        at_once = engine.vllm_config.scheduler_config.max_num_seqs

        def go_on(row: int) -> None:
            if bool(batch.waiting[row]):
                asked.add(row)
                episodes.ask(batch, row, arrived)
            elif bool(batch.decoding[row]):
                running[name := next(names)] = row
                self._add(name, batch, row, RequestOutputKind.FINAL_ONLY)
            else:
                self.advanced(1, 0)

        waiting = deque(range(len(batch.lengths)))
        try:
            while running or asked or waiting:
                while waiting and len(running) < _AHEAD * at_once:
                    go_on(waiting.popleft())
                self.require_going_on()
                while asked and not (running and arrived.empty()):
                    row, insert = self._arrival(arrived)
                    insert()
                    asked.remove(row)
                    go_on(row)
                self.advanced(0, min(len(running), at_once))
                for output in list[Any](engine.step()) if running else []:
                    row = running.pop(output.request_id)
                    batch.add(torch.tensor([row]), _samples(output.outputs[0]), version)
                    go_on(row)
        finally:
            engine.abort_request(list(running))

    def _decode(self, batches: Sequence[InFlight], version: int, finished: Finished | None) -> None:
        """Generate until each sample, or turn, of the first of ``batches`` has ended."""
        oldest = batches[0]
        for row in oldest.complete.nonzero()[:, 0].tolist():
            oldest.report(finished, row)
        left = int(oldest.decoding.sum())
        if left == 0:
            return
        with contextlib.nullcontext() if self._seed_per_sample else drawing_from(call_seed(batches)):
            outputs = self._run(batches, left, finished)
        new = [(batch, torch.tensor([row]), _samples(output)) for batch, row, output in outputs]
        for batch, rows, samples in new:
            batch.add(rows, samples, version)

    def _run(
        self, batches: Sequence[InFlight], left: int, finished: Finished | None
    ) -> list[tuple[InFlight, int, CompletionOutput]]:
        """Return what is generated of each sample until ``left`` of the first batch have ended."""
        engine, oldest = self._llm.llm_engine, batches[0]
        running = {
            f"{place}/{row}": (batch, row)
            for place, batch in enumerate(batches)
            for row in batch.decoding.nonzero()[:, 0].tolist()
        }
        outputs: dict[str, tuple[InFlight, int, CompletionOutput]] = {}
        at_once = self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        share = (oldest.own.stop - oldest.own.start) / len(oldest.complete)  # other ranks report theirs
        advanced = self.advanced if self._episodes is None else tokens_only(self.advanced)
        advanced(share * (len(oldest.complete) - left), 0)
        number, waiting = 0, deque(running)
        try:
            while left:
                while waiting and engine.get_num_unfinished_requests() < _AHEAD * at_once:
                    batch, row = running[key := waiting.popleft()]
                    # Of a later batch the tokens are needed whenever the first one is complete.
                    kind = RequestOutputKind.FINAL_ONLY if batch is oldest else RequestOutputKind.CUMULATIVE
                    self._add(key, batch, row, kind)
                self._look(number)
                number += 1
                steps, before = list[Any](engine.step()), left
                for output in steps:
                    batch, row = running[output.request_id]
                    (generated,) = output.outputs
                    outputs[output.request_id] = batch, row, generated
                    if not output.finished:
                        continue
                    del running[output.request_id]
                    if batch is oldest:
                        left -= 1
                        batch.report(finished, row, generated.token_ids)
                # about: outputs come with the last token of a sample
                advanced(share * (before - left), share * min(before, at_once))
        finally:
            engine.abort_request([*running.keys() - set(waiting)])
        return [*outputs.values()]

    def _look(self, step: int) -> None:
        """Raise ``GenerationStopped`` once ``stopping`` is set, on all ranks before the same step."""
        group = get_tp_group()
        if group.world_size == 1:
            self.require_going_on()
        elif step % _LOOK_EVERY == 0:
            stopping = torch.tensor(int(self.stopping.is_set()))
            torch.distributed.all_reduce(stopping, torch.distributed.ReduceOp.MAX, group.cpu_group)
            if stopping:
                raise GenerationStopped

    def _add(self, key: str, batch: InFlight, row: int, kind: RequestOutputKind) -> None:
        self._llm.llm_engine.add_request(key, self._prompt(batch, row), self._sampling(batch, row, kind))

    def _prompt(self, batch: InFlight, row: int) -> Any:
        """Return what a request continues.

        vLLM expands the placeholders of pictures itself: the result is compared with the tokens of the batch.
        """
        ids = [*batch.prompt_ids[row // batch.params.n].tolist(), *batch.ids(row)]
        in_turns = batch.images_at_of(row)
        digests = [*batch.pictures_of(row), *digests_of(in_turns)]
        if self._texts is None or not digests:
            return tokens_input(ids)
        first = len(ids) - len(in_turns)
        images_at = [*self._texts.images_at(ids[:first], batch.pictures_of(row)), *in_turns]
        mark = self._texts.mark
        # a placeholder that was sampled before a picture came would be taken for that picture's
        plain = [
            int(not mark) if one == mark and not at else one for one, at in zip(ids, images_at, strict=True)
        ]
        prompt: Any = {
            "prompt_token_ids": self._texts.unexpanded(plain, images_at),
            "multi_modal_data": {"image": [pictures.opened(digest) for digest in digests]},
            "multi_modal_uuids": {"image": [*map(pictures.name, digests)]},
        }
        (rendered,) = list[Any](self._llm.renderer.render_cmpl([prompt]))
        if (found := rendered["prompt_token_ids"]) != plain:
            raise TrainingError(
                f"vLLM makes other tokens of a prompt's pictures than the data set: {len(found)}, beginning "
                f"with {found[:20]}, expected {len(plain)}, {plain[:20]}; do the image processors agree?"
            )
        return {**rendered, "prompt_token_ids": ids}

    def _sampling(self, batch: InFlight, row: int, kind: RequestOutputKind) -> VLLMSamplingParams:
        """Return the parameters of the request that continues a sample."""
        arguments = sampling_arguments(
            batch, row, self._options, self.eos_token_ids, seeded=self._seed_per_sample
        )
        return VLLMSamplingParams(**arguments, flat_logprobs=True, output_kind=kind)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """See ``RolloutEngine.update_weights``; the next generation drops the prefix cache."""
        if not self._weights.ledger.open:
            if self._asleep:
                self._llm.wake_up(tags=["weights"])
            self._worker.start_weight_update()
        try:
            self._worker.update_weights({"weights": self._weights.sent(weights)})
        except ModelError:
            raise
        except (KeyError, ValueError, RuntimeError, AssertionError, VLLMError) as error:
            raise ModelError(f"weight transfer: vLLM's {self._name} does not load them: {error}") from error
        if not last:
            return
        self._weights.ledger.end()
        self._worker.finish_weight_update()
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False

    def checksums(self) -> dict[str, int]:
        """See ``RolloutEngine.checksums``; collective over the ranks of a tensor-parallel group.

        With pictures also ``UNEQUAL`` for constants of the model that are no longer those it started with.
        """
        model = self._worker.model_runner.get_model()
        now = constants(model) if self._constants else {}
        changed = {name: UNEQUAL for name, value in self._constants.items() if now.get(name) != value}
        return self._weights.held(gathered(held_checksums(model, self._weights.names) | changed))

    def release(self) -> None:
        """Free weights and KV cache where vLLM can sleep (on a GPU)."""
        if self._sleeps and not self._asleep:
            # level 2 drops the weights, which the next update sends; level 1 would copy them to the CPU
            self._llm.sleep(level=2)
            self._weights.ledger.forget()
            self._asleep = True

    def close(self) -> None:
        """See ``QueuedRollout.close``; on a GPU the engine ends, so that the process may have another one.

        vLLM 0.32 unmaps the memory of a sleeping engine a second time, and allocates none after that error.
        """
        super().close()
        if not self._sleeps:
            return
        try:
            if self._asleep:
                self._llm.wake_up()
                self._asleep = False
            self._llm.llm_engine.engine_core.shutdown()
        except Exception as error:  # noqa: BLE001 - it would replace the error for which the run ends
            logger.warning("warning: vLLM's engine could not be ended: %s", error)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks of the tensor-parallel group."""
    group = get_tp_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert further ``SamplingParams`` to vLLM's classes; ``ConfigError`` for values that those refuse."""
    classes = {
        "structured_outputs": StructuredOutputsParams,
        "repetition_detection": RepetitionDetectionParams,
    }
    made = dict(options)
    for name in classes.keys() & made.keys():
        key, fields = f"actor_rollout_ref.rollout.{name}", classes[name].__annotations__
        if unknown := options[name].keys() - fields:
            raise ConfigError(f"{key} has no {', '.join(sorted(unknown))}; it has {', '.join(fields)}")
        try:
            made[name] = classes[name](**options[name])
        except (TypeError, ValueError, VLLMError) as error:
            raise ConfigError(f"{key}={options[name]}: {error}") from error
    return made


def call_seed(batches: Sequence[InFlight]) -> int:
    """Return the seed of an engine call, a function of its samples' seeds and of their tokens so far."""
    done = sum(int(batch.lengths.sum()) for batch in batches)
    words = np.random.SeedSequence((done, *itertools.chain(*(batch.seeds for batch in batches))))
    return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _samples(output: CompletionOutput) -> Samples:
    """Return what a request generated, as one row; ``TrainingError`` if vLLM gave it up."""
    ids, reason = output.token_ids, output.finish_reason
    if reason is not None and (reason not in ENDS or not ids):
        raise TrainingError(f"vLLM ended a sample after {len(ids)} tokens for the reason {reason!r}")
    log_probs: Any = output.logprobs
    return row_of_samples(ids, log_probs.logprobs, reason)

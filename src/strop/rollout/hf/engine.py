"""Rollout ``hf``: generation in this process with a transformers model.

``HFRollout`` generates on the actor's own module where that is not sharded, or on the copy of a replica
(``strop.rollout.hf.replica``). ``check_decoding`` compares step-by-step decoding with one forward pass when a
rollout is built.

Shapes: R rows (samples), T tokens, S stop ids.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from strop.config.memory.facts import facts_of_loaded
from strop.errors import ModelError
from strop.models.attention import leave_out_cudnn, portable_attention
from strop.models.folder import end_token_ids
from strop.models.heads import model_errors
from strop.models.inputs import Reader
from strop.models.loader import hidden_token_ids
from strop.models.passes.low_precision import low_precision
from strop.models.vision import PictureReader, reader_of
from strop.protocol import DataProto, sequence_columns
from strop.rollout.base import Advanced, Finished, RolloutSpec, Samples, SamplingParams, tokens_only
from strop.rollout.hf.decoding import Contexts, Kept, decode
from strop.rollout.hf.kv_cache import attention_windows
from strop.rollout.hf.packed_linear import layers_of_one_input, packed_linears
from strop.rollout.in_flight import InFlight
from strop.rollout.queued import QueuedRollout, Wave
from strop.rollout.sampling import draw_uniforms

if TYPE_CHECKING:
    from strop.rollout.episodes import Episodes

_PACK_FROM = 8
"""Decoding steps from which packing the weights of linear layers pays off."""
_CHECK_PROMPTS = ((1, 2, 3, 4, 5), (0, 0, 3, 2, 1))
_CHECK_LENGTHS = (5, 3)


class HFRollout(QueuedRollout):
    """Generate with a transformers causal LM in place: on the trainer's weights, with a cache per call.

    Not compiled: ``torch.compile`` of a decoding step took 300 s on a CPU and gave 1.08x; packing linear
    layers takes milliseconds and gives more. On a CPU long generations pack a copy of the large linear layers
    for the length of a call (``strop.rollout.hf.packed_linear``): the memory of one more model in the compute
    dtype. A sample's random numbers depend on its seed alone. Keys and values of all samples are computed
    again at every ``finish``. Samples of later batches get as many tokens as the longest response of the
    oldest one still needs, whatever ``micro_batch_size`` is.
    """

    _episodes: Episodes | _TrialTurns | None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        hidden_token_ids: Sequence[int] | None = None,
        compute_dtype: torch.dtype | None = None,
        micro_batch_size: int | None = None,
        reader: Reader | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        """Check that ``model`` can be decoded; ``ModelError`` if not.

        ``micro_batch_size``: samples generated at once, None for all; it changes memory, never a sample. See
        ``QueuedRollout`` for others.
        """
        super().__init__(
            pad_token_id=pad_token_id, eos_token_ids=eos_token_ids, hidden_token_ids=hidden_token_ids
        )
        leave_out_cudnn()
        self.model, self.micro_batch_size, self._reader = model, micro_batch_size, reader or Reader()
        self._windows = attention_windows(model.config)
        parameters = inspect.signature(model.forward).parameters
        missing = {"position_ids", "past_key_values", "logits_to_keep"} - parameters.keys()
        if missing:
            raise ModelError(
                f"rollout.name=hf: {type(model).__name__} does not take {', '.join(sorted(missing))}"
            )
        self.compute_dtype: torch.dtype | None = None
        with (
            torch.no_grad(),
            _eval_mode(model),
            portable_attention(model),
            model_errors(model, "rollout.name=hf: "),
            layers_of_one_input(model) as self._groups,
        ):
            check_decoding(model, self.generate, self._reader, _check_prompts(model))
            if isinstance(self._reader, PictureReader):
                check_decoding(model, self.generate, self._reader, self._reader.trial_prompts())
            if episodes is not None:
                self._episodes = _TrialTurns()
                check_decoding(model, self.generate, self._reader, _check_prompts(model), turns=True)
        self.compute_dtype = compute_dtype  # set after the check, which bfloat16 rounding would blur
        self._episodes = episodes  # likewise: the check has no rows

    @classmethod
    def build(cls, spec: RolloutSpec) -> HFRollout:
        if spec.shared_model is None:
            raise RuntimeError("HFRollout generates on the actor's module, and this spec has none")
        return cls(
            spec.shared_model, compute_dtype=spec.compute_dtype, **rollout_options(spec, spec.shared_model)
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """Do nothing: the weights are the trainer's."""

    def checksums(self) -> dict[str, int] | None:
        """Return None: the weights are the trainer's."""

    def release(self) -> None:
        """Do nothing: the weights are the trainer's."""

    @torch.no_grad()
    def _complete(self, batches: Sequence[InFlight], version: int, finished: Finished | None) -> None:
        """Generate until the first of ``batches`` is complete, together with those of equal parameters."""
        if self._episodes is None:
            with self._ready(batches[0].params):
                self._decode(batches, version, finished)
            return
        alike = [batch for batch in batches if batch.params == batches[0].params]
        with self._ready(batches[0].params):
            wave = partial(self._decode, alike, version, None, Kept())
            self._episodes.complete(alike, wave, advanced=self.advanced)

    @contextlib.contextmanager
    def waves(self, params: SamplingParams, *, keeps: bool = False) -> Generator[Wave]:
        kept = Kept() if keeps else None
        with torch.no_grad(), self._ready(params):
            yield lambda batches, version: self._decode(batches, version, None, kept)

    @contextlib.contextmanager
    def _ready(self, params: SamplingParams) -> Generator[None]:
        """Prepare the model for ``decode`` in the body."""
        pack = params.max_tokens >= _PACK_FROM
        packs = (
            packed_linears(self.model, self.compute_dtype, self._groups)
            if pack
            else contextlib.nullcontext(())
        )
        with (
            _eval_mode(self.model),
            portable_attention(self.model),  # contexts are padded, and the cache makes the mask
            packs as packed,
            low_precision(self.model, self.compute_dtype, besides=packed),
        ):
            yield

    def _decode(
        self,
        batches: Sequence[InFlight],
        version: int,
        finished: Finished | None,
        kept: Kept | None = None,
    ) -> None:
        """Generate until each sample, or turn, of the first of ``batches`` has ended.

        ``kept``: keys and values are kept from one call to the next, if all samples are generated at once.
        """
        oldest, params = batches[0], batches[0].params
        for row in oldest.complete.nonzero()[:, 0].tolist():
            oldest.report(finished, row)
        rows = [row for batch in batches if batch.params == params for row in _decoding_of(batch)]
        awaited = sum(row.batch is oldest for row in rows)
        if not awaited:
            return
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        stop_ids_S = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self.model.device)
        advanced = self.advanced if kept is None else tokens_only(self.advanced)
        advanced(len(oldest.complete) - awaited, 0)
        longest = 0  # most new tokens of an awaited sample: the others get as many, however many run at once
        size = self.micro_batch_size or len(rows)
        for part, first in _parts(rows, awaited, size):
            most = params.max_tokens if first else longest
            samples = decode(
                self.model,
                self._reader,
                self._windows,
                _contexts_of(part, self.model.device),
                None if params.greedy else _uniforms_of(part),
                [min(row.batch.room(row.sample), most) for row in part],
                params,
                stop_ids_S,
                self.compute_dtype or self.model.dtype,
                awaited=first or len(part),
                finished=None if finished is None else _reporting(part[:first], finished),
                advanced=advanced if first else None,
                # between turns positions go on from the number of tokens, which pictures change
                kept=kept if len(rows) <= size and not _has_pictures(oldest) else None,
                names=[row.name for row in part],
                before_pass=self.require_going_on,
            )
            _append(part, samples, version)
            longest = max(longest, int(samples.lengths[:first].max()) if first else 0)


def _parts(rows: Sequence[_Row], awaited: int, size: int) -> Iterator[tuple[Sequence[_Row], int]]:
    """Yield rows to decode at once, and how many of them, the first, are awaited.

    All in one part if they fit, else the awaited ones before the others.
    """
    if len(rows) <= size:
        yield rows, awaited
        return
    for start in range(0, awaited, size):
        yield rows[start : min(start + size, awaited)], min(size, awaited - start)
    for start in range(awaited, len(rows), size):
        yield rows[start : start + size], 0


def rollout_options(spec: RolloutSpec, model: PreTrainedModel) -> dict[str, Any]:
    """Return the options of ``HFRollout`` that a worker's description of it decides."""
    from strop.rollout.episodes import Episodes  # need pydantic, which the engine does not
    from strop.rollout.hf.kind import samples_at_once

    end_ids = end_token_ids(model.generation_config, spec.tokenizer)
    return {
        "reader": reader_of(model, spec.image_processor),
        "episodes": Episodes.of(spec, end_ids),
        "pad_token_id": spec.tokenizer.pad_token_id,
        "eos_token_ids": end_ids,
        "hidden_token_ids": hidden_token_ids(model, spec.tokenizer),
        "micro_batch_size": samples_at_once(
            spec.config, facts_of_loaded(model.config, model.num_parameters())
        ),
    }


class _Row(NamedTuple):
    """A sample to continue: its batch, its number there, and its tokens so far."""

    batch: InFlight
    sample: int
    length: int

    @property
    def name(self) -> Hashable:
        """The name of the sample, from one call to the next."""
        return self.batch.names[self.sample] if self.batch.names else (self.batch, self.sample)


def _decoding_of(batch: InFlight) -> list[_Row]:
    samples = batch.decoding.nonzero()[:, 0]
    return [_Row(batch, *row) for row in zip(samples.tolist(), batch.lengths[samples].tolist(), strict=True)]


def _contexts_of(part: Sequence[_Row], device: torch.device) -> Contexts:
    """Return what the rows continue; rows without a token share the context of their prompt."""
    shared: dict[int, int] = {}
    contexts: list[Tensor] = []
    of_row, images, images_at = [], [], []
    has_pictures = any(_has_pictures(row.batch) for row in part)
    for batch, sample, length in part:
        prompt, place = sample // batch.params.n, len(contexts)
        if length:
            contexts.append(torch.cat([batch.prompt_ids[prompt], batch.tokens[sample, :length]]))
        elif (place := shared.setdefault(id(batch.prompt_ids[prompt]), place)) == len(contexts):
            contexts.append(batch.prompt_ids[prompt])
        of_row.append(place)
        if has_pictures and len(images) < len(contexts):
            images.append(batch.images[prompt] if batch.images else torch.empty(0, dtype=torch.long))
            images_at.append(torch.tensor(batch.images_at_of(sample), dtype=torch.long))
    if not has_pictures:
        return Contexts.pad(contexts, of_row, device)
    columns = {
        "images": pad_sequence(images, batch_first=True),
        "images_at": pad_sequence(images_at, batch_first=True, padding_side="left"),
        "continued": torch.tensor([*map(len, images_at)]),
    }
    return Contexts.pad(contexts, of_row, device, columns)


def _has_pictures(batch: InFlight) -> bool:
    return bool(batch.images) or batch.images_at is not None


def _uniforms_of(part: Sequence[_Row]) -> Tensor:
    """Return the random numbers [R, T] of each row's next tokens; T is the most that a row needs."""
    tokens = part[0].batch.params.max_tokens
    # from the stream's beginning: a sample is continued without a generator's state
    uniforms_RT = draw_uniforms([row.batch.turn_seeds[row.sample] for row in part], tokens)
    lengths_R1 = torch.tensor([[row.length - int(row.batch.begun[row.sample])] for row in part])
    columns_RT = lengths_R1 + torch.arange(tokens - int(lengths_R1.min()))
    return uniforms_RT.gather(1, columns_RT.clamp(max=tokens - 1))


def _reporting(awaited: Sequence[_Row], finished: Finished) -> Callable[[int, list[int]], None]:
    """Return a callback of ``decode`` that forwards whole responses of ``awaited`` rows to ``finished``."""

    def report(row: int, token_ids: list[int]) -> None:
        if row < len(awaited):
            batch, sample, _ = awaited[row]
            batch.report(finished, sample, token_ids)

    return report


def _append(part: Sequence[_Row], samples: Samples, version: int) -> None:
    """Add the new tokens of each row to its batch; a batch's rows are adjacent."""
    start = 0
    for batch, group in itertools.groupby(part, key=attrgetter("batch")):
        numbers = torch.tensor([row.sample for row in group])
        new = Samples(*(column[start : start + len(numbers)].cpu() for column in samples[:4]))
        batch.add(numbers, new, version)
        start += len(numbers)


@contextlib.contextmanager
def _eval_mode(model: PreTrainedModel) -> Generator[None]:
    """Put every module into eval mode, and restore its mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _TrialTurns:
    """Two turns of a token, with two tokens between them, in place of ``Episodes``."""

    options: ClassVar[dict[str, Any]] = {"turn_length": 2}
    stopping: threading.Event

    def begin(self, batch: InFlight) -> InFlight:
        return batch

    def complete(
        self, batches: Sequence[InFlight], decode: Callable[[], None], *, advanced: Advanced
    ) -> None:
        (batch,) = batches
        decode()
        for row in range(len(batch.lengths)):
            batch.insert(row, batch.prompt_ids[0][:2].tolist())
        decode()
        batch.ended[:] = 1

    def columns(self, batch: InFlight) -> DataProto:
        return DataProto()


def _check_prompts(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return two short prompts of text."""
    mask = (torch.arange(5) >= 5 - torch.tensor(_CHECK_LENGTHS)[:, None]).long()
    return sequence_columns(torch.tensor(_CHECK_PROMPTS) % model.config.get_text_config().vocab_size, mask)


def check_decoding(
    model: PreTrainedModel,
    generate: Callable[[DataProto, SamplingParams], DataProto],
    reader: Reader,
    prompts: Mapping[str, Tensor],
    *,
    turns: bool = False,
) -> None:
    """Raise ``ModelError`` if decoded log-probs differ from those of a plain forward pass.

    Decodes four tokens after two prompts, with ``turns`` those of ``_TrialTurns``. A family whose
    cache, positions or masks work differently from what this package assumes would otherwise train on wrong
    samples. Call it in eval mode, in float32, without gradient.
    """
    vocabulary = model.config.get_text_config().vocab_size
    stops = tuple(range(vocabulary)) if turns else ()
    params = SamplingParams(max_tokens=4, do_sample=False, ignore_eos=True, stop_token_ids=stops)
    decoded = generate(DataProto(dict(prompts)), params).to(model.device)
    images = {name: column for name, column in prompts.items() if name == "images"}
    inputs = reader.inputs({**decoded.batch, **images})
    with inputs.around(model):
        # logits from the last column of the prompts on predict the new tokens
        first = prompts["input_ids"].shape[1] - 1
        whole = model(**inputs.arguments(), use_cache=False).logits[:, first:-1]
    expected = whole.float().log_softmax(-1)
    spread = float(expected.std(-1).max())
    expected = expected.gather(2, decoded.batch["responses"][..., None])[..., 0]
    found, mask = decoded.batch["rollout_log_probs"], decoded.batch["response_mask"]
    error = float(((found - expected) * mask).abs().max())
    # A wrong mask or position moves log-probs by a good part of their spread; rounding does not.
    tolerance = 1e-5 + spread * (0.01 if model.dtype == torch.float32 else 0.1)
    if error > tolerance:
        raise ModelError(
            f"rollout.name=hf decodes {type(model).__name__} wrongly{' after pictures' * bool(images)}: "
            f"log-probs differ from a plain forward pass by {error:.3g} (tolerance {tolerance:.3g}); use "
            "another rollout back-end"
        )

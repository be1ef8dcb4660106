"""Interface between a policy and the back-end that generates with it.

``SamplingParams`` are the parameters of a call, ``RolloutEngine`` is the protocol of a back-end,
``build_rollout`` constructs one. ``seeds_of`` and ``answer`` check the columns of a request and make those of
its response.

Shapes: B prompts of P columns, R = B x n samples of T token columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from strop.algorithms.token_tree import plain
from strop.config.backends import ROLLOUTS, load_backend
from strop.errors import ConfigError, DataError, TrainingError
from strop.protocol import DataProto, sequence_columns

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from strop.agents.program import ProgramPool
    from strop.config.schema import Config
    from strop.config.schema.policy import RolloutConfig
    from strop.data.pictures.expand import PromptPictures
    from strop.environments.loading import Environments
    from strop.environments.pool import EnvironmentPool


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one call; the configuration's schema checks their ranges."""

    max_tokens: int
    """Longest response, in tokens, including the stop token."""
    n: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """Divisor of the logits; 0: greedy."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 or 0: off."""
    top_p: float = 1.0
    """After top-k, sample among the fewest likeliest tokens that hold this much probability; 1: off."""
    do_sample: bool = True
    """False: greedy, regardless of the other fields."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the end-of-sequence tokens."""
    ignore_eos: bool = False
    """Do not stop at the end-of-sequence tokens; ``stop_token_ids`` still stop."""

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken instead of a sampled one."""
        return not self.do_sample or self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True if top-k or top-p changes the distribution that is sampled from."""
        return self.top_k > 0 or self.top_p < 1

    @classmethod
    def from_config(cls, rollout: RolloutConfig, validate: bool = False) -> SamplingParams:
        """Read the section ``actor_rollout_ref.rollout``, or with ``validate`` its ``val_kwargs``."""
        source = rollout.val_kwargs if validate else rollout
        return cls(
            max_tokens=rollout.response_length,
            n=source.n,
            temperature=source.temperature,
            top_k=source.top_k,
            top_p=source.top_p,
            do_sample=source.do_sample,
            stop_token_ids=tuple(rollout.stop_token_ids),
            ignore_eos=rollout.ignore_eos,
        )


Finished = Callable[[int, int, list[int]], None]
"""Callback for a sample that is complete before the call returns: row of its prompt, index among the prompt's
samples, token ids including the stop token."""


Advanced = Callable[[float, float], None]
"""Callback of progress: samples that have become complete, and tokens sampled, since the last call."""


def tokens_only(advanced: Advanced) -> Advanced:
    """Return a callback for decoding that ends turns, not samples."""
    return lambda _, tokens: advanced(0, tokens)


LOOK_S = 0.25
"""Longest time between two looks at ``stopping`` while a generation waits for others."""


class GenerationStopped(Exception):
    """A generation was left because the run is ending: nothing waits for its samples."""


class RolloutEngine(Protocol):
    """Generate responses. A new back-end is one class with these methods and an entry in ``ROLLOUTS``."""

    advanced: Advanced
    """Set before ``generate`` and ``finish``, which may call it for the samples that they wait for."""
    stopping: threading.Event
    """Set like ``advanced``. Once another thread sets its flag, both raise ``GenerationStopped`` soon.

    The flags of ranks are set at different times. Ranks that generate together leave together, so that all
    take part in the collectives of the next call.
    """

    @classmethod
    def build(cls, spec: RolloutSpec) -> RolloutEngine:
        """Construct the engine from a worker's description of it."""
        ...

    def generate(
        self, prompts: DataProto, params: SamplingParams, finished: Finished | None = None
    ) -> DataProto:
        """Return ``params.n`` adjacent rows for every prompt, with the columns that ``answer`` makes.

        ``finished`` is called at most once for a sample; samples that end late may be left out. Samples in
        flight (``admit``) wait meanwhile.
        """
        ...

    def admit(self, batch: int, prompts: DataProto, params: SamplingParams) -> None:
        """Queue ``params.n`` samples of every prompt as batch number ``batch``, behind those queued before.

        Nothing is computed before the next ``finish``. The columns are those of ``generate``. Raises
        ``TrainingError`` if ``batch`` is not above the numbers that are queued.
        """
        ...

    def finish(self, batch: int, version: int, finished: Finished | None = None) -> DataProto:
        """Generate until every sample of ``batch``, the oldest one queued, is complete; return and forget it.

        Samples of later batches with equal ``params`` are generated with it and stay in flight: they keep
        their tokens and log-probs, also over ``update_weights``, after which they are continued with the new
        weights (keys and values are computed again). How far they get depends on the queue alone, never on
        the clock, and not at all on ``generate`` calls in between.

        ``version`` is that of the weights. The columns are those of ``generate``, and ``rollout_versions``
        [R, T] int32, the version that sampled each token (-1 beyond the response). ``finished`` is called for
        samples of ``batch`` only, also for those that were complete before this call. Raises
        ``TrainingError`` if ``batch`` is not the oldest.
        """
        ...

    def in_flight(self) -> dict[str, Any]:
        """Return what is generated of the queued batches, as tensors and plain values for ``torch.save``.

        A copy: later calls do not change it, and ``torch.load`` reads it with ``weights_only=True``. Prompts
        are not part of it.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``in_flight`` returned; the same batches have been admitted again before.

        The next ``finish`` then returns what it would have returned in the engine that saved them. Raises
        ``CheckpointError`` if the batches, their numbers of samples or ``max_tokens`` do not fit.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """Load weights by their names in the model; a no-op where they are shared with the trainer.

        An update may be split over several calls, all but the last with ``last=False``. Raises ``ModelError``
        for a parameter that is unknown, misshapen, duplicated or, after the last call, missing.
        """
        ...

    def checksums(self) -> dict[str, int] | None:
        """Return ``strop.rollout.weights.checksum`` of the weights that the engine computes with.

        By name in a checkpoint (``strop.models.checkpoint_layout``), in the engine's dtype; None where the
        weights are the trainer's.
        """
        ...

    def release(self) -> None:
        """Free the memory of a copy of the weights until the next update."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """Description of a worker's rollout; a back-end reads the fields that it needs."""

    config: Config
    model: Mapping[str, Any]
    """Arguments of ``load_causal_lm``: ``path`` (a local folder) and the loader's options."""
    tokenizer: PreTrainedTokenizerBase
    tokenizer_path: Path
    device: torch.device
    rank: int = 0
    world_size: int = 1
    """Size of the worker group; with more than one rank, ``torch.distributed`` is initialized."""
    image_processor: Any | None = None
    """The model's image processor, of transformers, where rows have pictures."""
    max_pictures: int = 0
    """Most pictures of a row."""
    shared_model: PreTrainedModel | None = None
    """The actor's module; None: the rollout needs a copy of the weights."""
    compute_dtype: torch.dtype | None = None
    """Dtype of passes of the shared model, whose weights are float32; None: float32."""
    weights: Iterable[tuple[str, Tensor]] | None = None
    """The actor's current weights; None: start from the files of ``model``."""
    environments: Environments | None = None
    """The classes and tools that answer turns; None: samples have no turns."""
    environment_pool: EnvironmentPool | None = None
    """The processes of ``environments``."""
    program_pool: ProgramPool | None = None
    """The processes of agent programs, whose sessions samples are; None: samples are no sessions."""

    @cached_property
    def picture_texts(self) -> PromptPictures | None:
        """The texts of pictures, by the model's processor; None where rows have none."""
        if not self.max_pictures:
            return None
        from strop.data.pictures.expand import PromptPictures, load_processor  # imports rich

        data = self.config.data
        bounds = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
        return PromptPictures(load_processor(self.model["path"], self.tokenizer, **bounds))


def build_rollout(name: str, spec: RolloutSpec) -> RolloutEngine:
    """Import and construct the back-end ``name``, on the actor's module if there is one that it can share.

    Raises ``ConfigError`` with the known names if there is no such back-end.
    """
    if name not in ROLLOUTS:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name!r} is unknown (known: {', '.join(ROLLOUTS)})"
        )
    kind = ROLLOUTS[name]
    reference = kind.replica if kind.shared is None or spec.shared_model is None else kind.shared
    engine: Any = kind.load(reference).build(spec)
    if spec.program_pool is None:
        return engine
    return load_backend("strop.rollout.agents:AgentRollout")(engine, spec)  # needs aiohttp


MANY = 999
"""Pictures of a context where only its length bounds them; vLLM's own default."""
PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")


class Samples(NamedTuple):
    """Tokens and float32 log-probs [R, T] (undefined from ``lengths`` on), lengths [R] and truncated [R]."""

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    truncated: Tensor
    sampled: Tensor | None = None
    """Tokens [R, T] that the policy sampled; None: all up to ``lengths``."""
    follows: Tensor | None = None
    """[R, T] of ``strop.algorithms.token_tree``; None: each token follows the one before it."""
    over: Tensor | None = None
    """[R] of those that end though they are truncated, before any limit; None: none does."""


def seeds_of(prompts: DataProto, params: SamplingParams) -> list[int]:
    """Return the seeds of all R samples in order; an empty list if greedy.

    Raises ``DataError`` if a column is missing or misshapen, or a prompt is empty or not left-padded.
    """
    needed = PROMPT_COLUMNS if params.greedy else (*PROMPT_COLUMNS, "seeds")
    missing = [name for name in needed if name not in prompts.batch]
    if missing:
        raise DataError(f"generate: the prompts have no column {', '.join(missing)}")
    mask_BP = prompts.batch["attention_mask"].bool()
    # left-padded: a real last column, and no padding behind a token
    misplaced_B = ~mask_BP[:, -1] | (mask_BP[:, 1:] < mask_BP[:, :-1]).any(1)
    if misplaced_B.any():
        row = int(misplaced_B.nonzero()[0])
        raise DataError(f"generate: prompt {row} is empty or not left-padded (see its attention_mask)")
    if params.greedy:
        return []
    seeds = prompts.batch["seeds"]
    if seeds.shape != (len(prompts), params.n):
        raise DataError(
            f"generate: seeds have shape {list(seeds.shape)}, expected [{len(prompts)}, {params.n}]: "
            "one for each sample of each prompt"
        )
    return seeds.flatten().tolist()


def answer(
    prompts: DataProto,
    params: SamplingParams,
    samples: Samples,
    *,
    pad_token_id: int,
    eos_token_ids: Sequence[int] | None = None,
    hidden_token_ids: Sequence[int] | None = None,
) -> DataProto:
    """Return the batch of samples, ``params.n`` rows per prompt, with the prompts' other columns repeated.

    Columns: prompts [R, P], responses, response_mask, rollout_log_probs [R, T], input_ids, attention_mask,
    position_ids [R, P + T], truncated [R]; with ``eos_token_ids`` also stop_tokens [R], with
    ``hidden_token_ids`` (those that decoding leaves out) also hidden_tokens [R], and follows [R, T] if
    ``samples`` have it. Raises ``TrainingError`` if a log-prob is not finite.
    """
    device = prompts.batch["input_ids"].device
    lengths, truncated = samples.lengths.to(device), samples.truncated.to(device)
    present = torch.arange(params.max_tokens, device=device) < lengths[:, None]
    sampled = present if samples.sampled is None else present & samples.sampled.to(device)
    log_probs = samples.log_probs.to(device).masked_fill(~sampled, 0.0)
    if not log_probs.isfinite().all():
        raise TrainingError("generate: the model's logits are not finite; have its weights diverged?")
    responses = samples.tokens.to(device).masked_fill(~present, pad_token_id)
    # columns of the data of these names give way to those of turns
    own = () if samples.sampled is None else ("conversation", "image_files")
    rest = DataProto(
        {name: column for name, column in prompts.batch.items() if name not in (*PROMPT_COLUMNS, "seeds")},
        {name: column for name, column in prompts.non_tensor_batch.items() if name not in own},
        prompts.meta_info,
    )
    prompt_ids, prompt_mask = (
        prompts.batch[name].repeat_interleave(params.n, dim=0) for name in ("input_ids", "attention_mask")
    )
    attention_mask = torch.cat([prompt_mask, present.to(prompt_mask.dtype)], dim=1)
    generated = {
        "prompts": prompt_ids,
        "responses": responses,
        **sequence_columns(torch.cat([prompt_ids, responses], dim=1), attention_mask),
        "response_mask": sampled.float(),
        "rollout_log_probs": log_probs,
        "truncated": truncated,
    }
    if samples.follows is not None:
        follows = samples.follows.to(device, torch.int32)
        generated["follows"] = torch.where(present, follows, plain(*present.shape).to(device))
    if eos_token_ids is not None:
        ends = _is_any(responses, (*eos_token_ids, *params.stop_token_ids)) & sampled
        generated["stop_tokens"] = ends.sum(1)
    if hidden_token_ids is not None:
        # the stop token at the end of a turn is not in the text either, as it should be: it is not counted
        goes_on = sampled[:, 1:]
        if "follows" in generated:  # a second call with the same context
            goes_on = goes_on & (generated["follows"] == plain(*sampled.shape).to(device))[:, 1:]
        is_last = sampled & ~torch.nn.functional.pad(goes_on, (0, 1))
        position = torch.arange(params.max_tokens, device=device)
        is_end = is_last & (~truncated[:, None] | (position < lengths[:, None] - 1))
        generated["hidden_tokens"] = (_is_any(responses, hidden_token_ids) & sampled & ~is_end).sum(1)
    return rest.repeat(params.n).union(DataProto.from_dict(generated))


def _is_any(tokens: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.isin(tokens, torch.tensor(ids, dtype=tokens.dtype, device=tokens.device))

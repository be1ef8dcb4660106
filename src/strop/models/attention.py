"""Attention of packed rows, in which each sequence attends to itself alone.

``packed_attention`` replaces a model's ``sdpa`` or ``eager`` by one call per run of equally long sequences,
and ``sdpa`` by a single call of torch's flash-attention on a GPU in 16 bits; the package flash-attn takes the
lengths itself, FlexAttention a mask (``strop.models.flex_attention``).
``SharedPrompts`` lays out rows with shared prompts, in which each prompt attends to itself once, each
response to prompt and itself; ``WholeSequences`` attends. ``portable_attention`` is for padded passes that
run everywhere. ``attention_for`` selects the back-end with which a model is loaded.

Shapes: N tokens of the packed row, S sequences of one length K (a run) with T queries each, M queries or keys
of all runs, Q query heads, G key-value heads, A of either, D head size; B padded rows of L columns.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from strop.errors import ConfigError, ModelError
from strop.models.flex_attention import FLEX, PACKED_FLEX
from strop.models.passes.micro_batch import send
from strop.models.passes.runs import Run, pieces_of, runs_of
from strop.models.passes.short_attention import attends_by_products, attention_by_products
from strop.models.ulysses import SHARED_ATTENTION, SequenceGroup

_FLOAT32_UP_TO = 512
"""Longest sequence that attends in float32 on a CPU, if not by products. There torch's bfloat16 attention is
slower than float32 with casts: forward and backward 3.0x with 96 tokens, 1.8-2.3x with 128, 1.2x with 256,
1.0x with 512."""
_LARGEST_HEAD, _HEAD_STEP = 256, 8
"""Largest head size of flash-attention, and the number that its head sizes are multiples of."""
_SUMMED_AT_ONCE = 1 << 24
"""Numbers of a 16-bit gradient that are converted to float32 together: 64 MiB."""
# No mask functions are registered for these two, so transformers makes no mask.
_PACKED = "strop_packed"
_PACKED_EAGER = "strop_packed_eager"

AttendOnce = Callable[..., Tensor]
"""Attention of sequences of one length, with the arguments and result of ``attend``."""


def config_parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and the configurations inside it, such as ``text_config``."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from config_parts(part)


def score_cap(config: PretrainedConfig) -> float | None:
    """Return the soft cap of attention scores (Gemma 2, VaultGemma), or None."""
    caps = (getattr(part, "attn_logit_softcapping", None) for part in config_parts(config))
    return next((cap for cap in caps if cap), None)


def attention_for(
    config: PretrainedConfig, requested: str | None, *, key: str = "model.attn_implementation"
) -> str | None:
    """Return the attention back-end to load a model with; None: transformers' choice.

    transformers prefers ``sdpa`` and ignores that it has no soft cap; a model with one gets ``eager``.
    Families with attention sinks support no ``sdpa``, so transformers' choice is right for them.

    Raises ``ConfigError``, which names ``key``, if ``sdpa`` is requested for a model with a soft cap.
    """
    cap = score_cap(config)
    if cap is None:
        return requested
    if requested == "sdpa":
        raise ConfigError(
            f"{key}=sdpa: this {config.model_type} model caps its attention scores "
            f"(attn_logit_softcapping={cap}), and sdpa does not; set {key} to null or eager, or on a GPU to "
            "flash_attention_2"
        )
    return requested or "eager"


class Sequences:
    """Lengths of the sequences of a packed row, as the kinds of attention take them."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self._lengths, self._device = lengths, device

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(S, K) of each run: that many neighbouring sequences of the same length."""
        return tuple((len(list(same)), length) for length, same in itertools.groupby(self._lengths))

    @cached_property
    def ends(self) -> Tensor:
        """Ends of the sequences, from 0, int32 on the device."""
        ends = list(itertools.accumulate(self._lengths, initial=0))
        return send(torch.tensor(ends, dtype=torch.int32), self._device)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._lengths)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequences | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    whole_sequences: WholeSequences | None = None,
    attend_once: AttendOnce,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence: query [1, Q, N, D], key and value [1, G, N, D] -> [1, N, Q, D].

    Calls transformers' ``sdpa`` or the family's ``eager`` once per run, so that grouped heads, scaling and a
    family's other ``options`` mean the same as in its padded pass; or torch's flash-attention once.
    """
    if whole_sequences is not None and position_bias is None:
        attended = whole_sequences.attend(attend_once, module, query, key, value, sliding_window, **options)
        return attended, None
    if sequences is None or position_bias is not None:
        raise ModelError(
            f"{type(module).__name__} does not pass the lengths of packed sequences to attention"
        )
    if attend_once is attend and not options.get("dropout") and takes_lengths(query, value):
        tokens = (_tokens(heads) for heads in (query, key, value))
        ends, longest = sequences.ends, sequences.longest
        scaling = options.get("scaling")
        return _by_lengths(*tokens, ends, ends, longest, longest, sliding_window, scaling)[None], None
    # split instead of slices: the backward pass of each slice would allocate a gradient of full size
    sizes = [number * length for number, length in sequences.runs]
    parts = zip(*(heads.transpose(1, 2)[0].split(sizes) for heads in (query, key, value)), strict=True)
    outputs = []
    for (number, length), tokens in zip(sequences.runs, parts, strict=True):
        heads = [part.unflatten(0, (number, length)).transpose(1, 2) for part in tokens]
        mask_KK = _mask([0], length, length, sliding_window, query.device)
        outputs.append(attend_once(module, *heads, mask_KK, **options).flatten(0, 1))
    return torch.cat(outputs)[None], None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Call transformers' ``sdpa``: query [S, Q, T, D], key and value [S, G, K, D] -> [S, T, Q, D].

    ``mask`` [1 or S, 1, T, K] is float32, -inf for the keys that a query does not attend to; None: causal.
    """
    in_float32 = query.device.type == "cpu" and key.shape[2] <= _FLOAT32_UP_TO
    with torch.autocast("cpu", enabled=False) if in_float32 else nullcontext():
        if attends_by_products(query, key, value) and not options.get("dropout"):
            return attention_by_products(query, key, value, mask, options.get("scaling"))
        heads = [states.float() if in_float32 else states for states in (query, key, value)]
        mask = mask if mask is None else mask.to(heads[0].dtype)
        output, _ = sdpa_attention_forward(module, *heads, attention_mask=mask, **options)
    return output.to(value.dtype)


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Call the family's own eager attention, with its caps and sinks; shapes and mask as in ``attend``."""
    if mask is None:
        length = key.shape[2]
        mask = torch.full((1, 1, length, length), -torch.inf, device=key.device).triu(1)
    output, _ = _eager_function(module)(module, query, key, value, mask.to(query.dtype), **options)
    return output.to(value.dtype)


def _eager_function(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """Return the function ``eager_attention_forward`` of the file that defines the attention's class.

    transformers passes the function to the attention interface as a default only, not to a replacement.
    """
    kind = type(getattr(module, "overlaid", module))  # a shared row passes a proxy
    for base in kind.__mro__:  # FSDP2 and users subclass
        function = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ModelError(f"the file of {kind.__name__} has no function eager_attention_forward")


AttentionInterface.register(_PACKED, partial(_packed_attention, attend_once=attend))
AttentionInterface.register(_PACKED_EAGER, partial(_packed_attention, attend_once=attend_eagerly))


@cache
def run_outside_graphs() -> None:
    """Keep the attention of packed rows out of ``torch.compile``'s graphs, until the process ends."""
    functions = AttentionInterface()
    for name in (_PACKED, _PACKED_EAGER, SHARED_ATTENTION):
        AttentionInterface.register(name, torch.compiler.disable(functions[name]))


def _mask(
    firsts: list[int], queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Return the mask [1 or S, 1, T, K] of T queries from each of ``firsts`` on over the first K keys.

    None for plain causal attention: the same tokens as queries and keys, within the window.
    """
    if not any(firsts) and (window is None or keys <= window):
        return None
    firsts_S = send(torch.tensor(firsts if len(set(firsts)) > 1 else firsts[:1]), device)
    # Queries that are padding may lie behind the last key: they must attend to something, too.
    place_ST = (firsts_S[:, None] + torch.arange(queries, device=device)).clamp(max=keys - 1)
    distance_STK = place_ST[..., None] - torch.arange(keys, device=device)
    hidden_STK = distance_STK < 0
    if window is not None:
        hidden_STK |= distance_STK >= window
    return torch.zeros(hidden_STK.shape, device=device).masked_fill_(hidden_STK, -torch.inf)[:, None]


@contextmanager
def attention_set_to(model: PreTrainedModel, implementation: str) -> Generator[None]:
    """Attend with the back-end ``implementation`` in the body."""
    before = [(part, part._attn_implementation) for part in config_parts(model.config)]
    model.config._attn_implementation = implementation  # its setter reaches the other parts
    try:
        yield
    finally:
        for part, own in before:  # outer parts first
            part._attn_implementation = own


def packed_attention(
    model: PreTrainedModel, group: SequenceGroup | None = None
) -> AbstractContextManager[None]:
    """Replace the model's attention by attention per sequence; flash-attention takes the lengths itself.

    With a ``group`` the replacement attends over whole rows, of which the model has a part. Attention is
    restored after the body, because a rollout generates with the same model, from padded prompts.
    """
    shared = SHARED_ATTENTION if group is not None else None
    return attention_set_to(model, shared or row_attention(model.config._attn_implementation))


def row_attention(implementation: str) -> str:
    """Return the back-end for packed rows of a model that was loaded with ``implementation``.

    Checkpointing selects the back-end inside a packed pass, so one for packed rows is returned unchanged.
    """
    if is_flash(implementation):
        return implementation
    if implementation in (FLEX, PACKED_FLEX):
        return PACKED_FLEX
    return _PACKED_EAGER if implementation in ("eager", _PACKED_EAGER) else _PACKED


def portable_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Replace flash-attention and FlexAttention in the body: both need a GPU, and make their own masks.

    The replacement is ``sdpa`` where it computes the same, else ``eager``.
    """
    implementation = model.config._attn_implementation
    if is_flash(implementation) or implementation == FLEX:
        implementation = "sdpa" if model._supports_sdpa and score_cap(model.config) is None else "eager"
    return attention_set_to(model, implementation)


def is_flash(implementation: str | None) -> bool:
    """Return True for flash-attention, which takes the lengths of sequences itself."""
    return implementation is not None and implementation.startswith("flash_attention")


class SharedPrompts:
    """Places of queries and keys of rows with shared prompts: each prompt once, and each response.

    A response attends to its prompt and itself. Each kind of attention has a layout, computed on first use.
    """

    def __init__(
        self,
        mask_BL: Tensor,
        computed_BL: Tensor,
        place_BL: Tensor,
        starts: list[list[int]],
        *,
        device: torch.device,
    ) -> None:
        """Prepare the layout for attention on ``device``, from tensors on the CPU.

        ``mask_BL`` marks real tokens, ``computed_BL`` those in the packed row, ``place_BL`` is each token's
        place there. ``starts`` has, for each row, the tokens at which a separately attending piece begins.
        """
        self._starts, self._lengths, self._device = starts, mask_BL.sum(dim=1).tolist(), device
        token_BL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
        self._place_BK = place_BL.new_zeros(len(self._lengths), max(self._lengths))
        rows, columns = mask_BL.nonzero(as_tuple=True)
        self._place_BK[rows, token_BL[rows, columns]] = place_BL[rows, columns]
        self._token_N, self._row_N = token_BL[computed_BL], computed_BL.nonzero()[:, 0]

    @cached_property
    def runs(self) -> tuple[list[Run], Tensor, Tensor, Tensor]:
        """Runs, their queries and keys, and the tokens' places among the queries.

        A run pads pieces to the longest. The padding follows a piece, so none of its tokens attends to it.
        """
        place_BK, runs = self._place_BK, runs_of(self._starts, self._lengths)
        queries, keys, laid_BK, laid = [], [], torch.zeros_like(place_BK), 0
        for run in runs:
            rows_S1, firsts_S1, lengths_S1 = (
                torch.tensor(column)[:, None] for column in (run.rows, run.firsts, run.lengths)
            )
            steps_T = torch.arange(run.queries)
            tokens_ST = (firsts_S1 + steps_T).clamp(max=place_BK.shape[1] - 1)
            queries.append(place_BK[rows_S1, tokens_ST].flatten())
            keys.append(place_BK[run.rows, : run.keys].flatten())
            real_ST = steps_T < lengths_S1
            places_ST = torch.arange(laid, laid + real_ST.numel()).view_as(real_ST)
            laid_BK[rows_S1.expand_as(real_ST)[real_ST], tokens_ST[real_ST]] = places_ST[real_ST]
            laid += real_ST.numel()
        columns = torch.cat(queries), torch.cat(keys), laid_BK[self._row_N, self._token_N]
        queries_M, keys_M, laid_N = (send(column, self._device) for column in columns)
        return runs, queries_M, keys_M, laid_N

    @cached_property
    def by_lengths(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
        """Queries and keys of all pieces, tokens' places among the queries, ends, and the longest pieces."""
        device, columns = self._device, self._place_BK.shape[1]
        pieces = torch.tensor(pieces_of(self._starts, self._lengths), dtype=torch.long)
        first_S, end_S, row_S = pieces.t()
        q_lengths_S = end_S - first_S
        queries_M, q_ends = _ranges(row_S * columns + first_S, q_lengths_S)
        keys_M, k_ends = _ranges(row_S * columns, end_S)
        laid = torch.zeros(self._place_BK.numel(), dtype=torch.long)
        laid[queries_M] = torch.arange(len(queries_M))
        places = self._place_BK.flatten()
        return (
            send(places[queries_M], device),
            send(places[keys_M], device),
            send(laid[self._row_N * columns + self._token_N], device),
            send(q_ends.int(), device),
            send(k_ends.int(), device),
            int(q_lengths_S.max()),
            int(end_S.max()),
        )


class WholeSequences:
    """Attention of one pass over rows with shared prompts; masks, which can be large, are freed with it."""

    def __init__(self, prompts: SharedPrompts) -> None:
        self._prompts = prompts
        self._masks: dict[int | None, list[Tensor | None]] = {}

    def attend(
        self,
        attend_once: AttendOnce,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        **options: Any,
    ) -> Tensor:
        """Attend: query [1, Q, N, D], key and value [1, G, N, D] of computed tokens -> [1, N, Q, D]."""
        if attend_once is attend and not options.get("dropout") and takes_lengths(query, value):
            return self._attend_by_lengths(query, key, value, window, options.get("scaling"))
        runs, queries_M, keys_M, laid_N = self._prompts.runs
        if window not in self._masks:
            self._masks[window] = [
                _mask(run.firsts, run.queries, run.keys, window, query.device) for run in runs
            ]
        # One selection and a split: a selection per run would allocate a gradient of full size each.
        sizes = [len(run.rows) * run.queries for run in runs]
        queries = _tokens(query).index_select(0, queries_M).split(sizes)
        sizes = [len(run.rows) * run.keys for run in runs]
        keys, values = (_copies(_tokens(states), keys_M).split(sizes) for states in (key, value))
        outputs = []
        for run, mask, *tokens in zip(runs, self._masks[window], queries, keys, values, strict=True):
            heads = [part.unflatten(0, (len(run.rows), -1)).transpose(1, 2) for part in tokens]
            outputs.append(attend_once(module, *heads, mask, **options).flatten(0, 1))
        return torch.cat(outputs).index_select(0, laid_N)[None]

    def _attend_by_lengths(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
    ) -> Tensor:
        """Attend in one call of torch's flash-attention for all pieces, without padding."""
        queries_M, keys_M, laid_N, q_ends, k_ends, longest_q, longest_k = self._prompts.by_lengths
        output = _by_lengths(
            _tokens(query).index_select(0, queries_M),
            *(_copies(_tokens(states), keys_M) for states in (key, value)),
            *(q_ends, k_ends, longest_q, longest_k),
            window,
            scaling,
        )
        return output.index_select(0, laid_N)[None]


def _by_lengths(
    query_MQD: Tensor,
    key_MGD: Tensor,
    value_MGD: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    longest_q: int,
    longest_k: int,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Call torch's flash-attention for sequences of different lengths, which end at ``ends`` -> [M, Q, D].

    The last query of a sequence attends to its last key.
    """
    # Imported here: the module imports torch's compiler, which takes seconds.
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    is_grouped = query_MQD.shape[1] != key_MGD.shape[1]
    groups = {"enable_gqa": is_grouped} if _has_enable_gqa(varlen_attn) else {}
    return varlen_attn(
        *(query_MQD, key_MGD, value_MGD),
        *(q_ends, k_ends, longest_q, longest_k),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **groups,
    )


@cache
def _has_enable_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Return True if grouped heads need the option ``enable_gqa``, which torch 2.11 does not have."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def takes_lengths(query: Tensor, value: Tensor) -> bool:
    """Return True if torch's own flash-attention for sequences of different lengths can attend here."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % _HEAD_STEP == 0  # sdpa pads others
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _ranges(start_S: Tensor, length_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return start, start + 1, ... of each range [M], and where ranges end in it, from 0 [S + 1]."""
    ends = torch.cat([length_S.new_zeros(1), length_S.cumsum(0)])
    offsets_S = start_S - ends[:-1]
    return torch.arange(int(ends[-1])) + offsets_S.repeat_interleave(length_S), ends


def _copies(states_NAD: Tensor, places_M: Tensor) -> Tensor:
    """Return the states at ``places_M`` [M, A, D]; gradients of copies of a token add up in float32."""
    if _rounds_each_sum(states_NAD):
        return _Copies.apply(states_NAD, places_M)
    return states_NAD.index_select(0, places_M)


def _rounds_each_sum(states: Tensor) -> bool:
    """Return True if the gradient of ``index_select`` is rounded at each copy of a token, as on GPUs.

    A prompt's token has a copy for each sample. On a CPU torch adds them in float32.
    """
    return states.element_size() == 2 and states.device.type != "cpu"


class _Copies(torch.autograd.Function):
    """See ``_copies``."""

    @staticmethod
    def forward(ctx: Any, states_NAD: Tensor, places_M: Tensor) -> Tensor:
        ctx.save_for_backward(places_M)
        ctx.shape = states_NAD.shape
        return states_NAD.index_select(0, places_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MAD: Tensor) -> tuple[Tensor, None]:
        (places_M,) = ctx.saved_tensors
        total_NAD = gradient_MAD.new_zeros(ctx.shape, dtype=torch.float32)
        rows = max(_SUMMED_AT_ONCE // ctx.shape[1:].numel(), 1)
        for places, part in zip(places_M.split(rows), gradient_MAD.split(rows), strict=True):
            total_NAD.index_add_(0, places, part.float())
        return total_NAD.to(gradient_MAD.dtype), None


def _tokens(heads: Tensor) -> Tensor:
    """Convert [1, A, N, D] to [N, A, D]."""
    return heads.transpose(1, 2)[0]

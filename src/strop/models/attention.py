"""Attention of packed rows, in which each sequence attends to itself alone.

``packed_attention`` replaces a model's ``sdpa`` or ``eager`` by one call per run of equally long sequences,
and ``sdpa`` by a single call of torch's flash-attention on a GPU in 16 bits; the package flash-attn takes the
lengths itself, FlexAttention a mask (``strop.models.flex_attention``).
``WholeSequences`` attends in rows with shared prompts (``strop.models.passes.shared_prompts``).
``portable_attention`` is for padded passes that run everywhere.

Shapes: N tokens of the packed row, S sequences of one length K (a run) with T queries each, M queries or keys
of all runs, Q query heads, G key-value heads, A of either, D head size; B padded rows of L columns.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from strop.errors import ModelError
from strop.models.flex_attention import FLEX, PACKED_FLEX
from strop.models.folder import config_parts, score_cap
from strop.models.passes.micro_batch import send
from strop.models.passes.shared_prompts import Run, SharedPrompts, copies_of
from strop.models.passes.short_attention import attends_by_products, attention_by_products
from strop.models.passes.varlen import attention_by_lengths, takes_lengths
from strop.models.transformers_private import attention_name, set_attention_name, supports_sdpa
from strop.models.ulysses import SHARED_ATTENTION, SequenceGroup

_FLOAT32_UP_TO = 512
"""Longest sequence that attends in float32 on a CPU, if not by products. There torch's bfloat16 attention is
slower than float32 with casts: forward and backward 3.0x with 96 tokens, 1.8-2.3x with 128, 1.2x with 256,
1.0x with 512."""
_LARGEST_GROUPED = 256
"""Largest head size whose grouped heads transformers leaves to torch; it repeats others itself."""
# No mask functions are registered for these two, so transformers makes no mask.
_PACKED = "strop_packed"
_PACKED_EAGER = "strop_packed_eager"

AttendOnce = Callable[..., Tensor]
"""Attention of sequences of one length, with the arguments and result of ``attend``."""


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
    if _attends_by_lengths(attend_once, query, value, options):
        tokens = (_tokens(heads) for heads in (query, key, value))
        lengths = sequences.ends, sequences.ends, sequences.longest, sequences.longest
        attended = attention_by_lengths(*tokens, *lengths, sliding_window, options.get("scaling"))
        return attended[None], None
    # split instead of slices: the backward pass of each slice would allocate a gradient of full size
    sizes = [number * length for number, length in sequences.runs]
    parts = zip(*(heads.transpose(1, 2)[0].split(sizes) for heads in (query, key, value)), strict=True)
    outputs = []
    for (number, length), tokens in zip(sequences.runs, parts, strict=True):
        heads = [part.unflatten(0, (number, length)).transpose(1, 2) for part in tokens]
        # None for plain causal attention, which sdpa runs without a mask in memory
        mask_KK = _mask([0], length, length, sliding_window, query.device)
        outputs.append(attend_once(module, *heads, mask_KK, **options).flatten(0, 1))
    return torch.cat(outputs)[None], None


def _attends_by_lengths(
    attend_once: AttendOnce, query: Tensor, value: Tensor, options: dict[str, Any]
) -> bool:
    """Return True if torch's varlen kernel, which has no dropout, can attend for all sequences at once."""
    return attend_once is attend and not options.get("dropout") and takes_lengths(query, value)


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
        # torch has no kernel for grouped heads in float32 on a GPU: it would keep all T x K scores
        keeps_scores = mask is None and query.device.type != "cpu" and query.dtype == torch.float32
        if keeps_scores and key.shape[3] == value.shape[3] <= _LARGEST_GROUPED:
            groups = query.shape[1] // key.shape[1]
            heads[1:] = (repeat_kv(states, groups) for states in heads[1:])
        mask = mask if mask is None else mask.to(heads[0].dtype)
        output, _ = sdpa_attention_forward(module, *heads, attention_mask=mask, **options)
    return output.to(value.dtype)


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Call the family's own eager attention, with its caps and sinks; shapes and mask as in ``attend``."""
    if mask is None:
        length = key.shape[2]
        # eager attention adds the mask that it gets and is not causal without one
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
    before = [(part, attention_name(part)) for part in config_parts(model.config.get_text_config())]
    set_attention_name(model.config, implementation)
    try:
        yield
    finally:
        for part, own in before:  # outer parts first
            set_attention_name(part, own)


def packed_attention(
    model: PreTrainedModel, group: SequenceGroup | None = None
) -> AbstractContextManager[None]:
    """Replace the model's attention by attention per sequence; flash-attention takes the lengths itself.

    With a ``group`` the replacement attends over whole rows, of which the model has a part. Attention is
    restored after the body, because a rollout generates with the same model, from padded prompts.
    """
    shared = SHARED_ATTENTION if group is not None else None
    return attention_set_to(model, shared or row_attention(attention_name(model.config)))


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
    implementation = attention_name(model.config)
    if is_flash(implementation) or implementation == FLEX:
        implementation = "sdpa" if supports_sdpa(model) and score_cap(model.config) is None else "eager"
    return attention_set_to(model, implementation)


def leave_out_cudnn() -> None:
    """Leave cuDNN's attention, which torch prefers on an H100, H200 or B200, out of ``sdpa`` in this process.

    It makes a plan for each new length, in 1 s on a B200 (modelscope/FunASR, issue 3704). For good, as the
    switch belongs to the process: threads that set and restored it would restore each other's.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def is_flash(implementation: str | None) -> bool:
    """Return True for flash-attention, which takes the lengths of sequences itself."""
    return implementation is not None and implementation.startswith("flash_attention")


class WholeSequences:
    """Attention of one pass over rows with shared prompts; masks, which can be large, are freed with it."""

    def __init__(self, prompts: SharedPrompts, seen_together: Tensor | None = None) -> None:
        """``seen_together``: see ``strop.models.inputs.PassInputs``."""
        self._prompts, self._together_BK = prompts, seen_together
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
        if self._together_BK is None and _attends_by_lengths(attend_once, query, value, options):
            return self._attend_by_lengths(query, key, value, window, options.get("scaling"))
        runs, queries_M, keys_M, laid_N = self._prompts.runs
        if window not in self._masks:
            self._masks[window] = [self._mask(run, window, query.device) for run in runs]
        # One selection and a split: a selection per run would allocate a gradient of full size each.
        sizes = [len(run.rows) * run.queries for run in runs]
        queries = _tokens(query).index_select(0, queries_M).split(sizes)
        sizes = [len(run.rows) * run.keys for run in runs]
        keys, values = (copies_of(_tokens(states), keys_M).split(sizes) for states in (key, value))
        outputs = []
        for run, mask, *tokens in zip(runs, self._masks[window], queries, keys, values, strict=True):
            heads = [part.unflatten(0, (len(run.rows), -1)).transpose(1, 2) for part in tokens]
            outputs.append(attend_once(module, *heads, mask, **options).flatten(0, 1))
        return torch.cat(outputs).index_select(0, laid_N)[None]

    def _mask(self, run: Run, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask of a run, in which tokens that are seen together are not hidden."""
        if self._together_BK is None:
            return _mask(run.firsts, run.queries, run.keys, window, device)
        keys_SK = self._together_BK[run.rows, : run.keys]
        places_ST = torch.tensor(run.firsts)[:, None] + torch.arange(run.queries)
        queries_ST = keys_SK.gather(1, places_ST.clamp(max=run.keys - 1))
        together_STK = (queries_ST[..., None] == keys_SK[:, None]) & (keys_SK[:, None] > 0)
        plain = _mask(run.firsts, run.queries, run.keys, window, torch.device("cpu"))
        if plain is None:
            plain = torch.full((run.keys, run.keys), -torch.inf).triu(1)[None, None]
        return send(plain.masked_fill(together_STK[:, None], 0.0), device)

    def _attend_by_lengths(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
    ) -> Tensor:
        """Attend in one call of torch's flash-attention for all pieces, without padding."""
        queries_M, keys_M, laid_N, q_ends, k_ends, longest_q, longest_k = self._prompts.by_lengths
        output = attention_by_lengths(
            _tokens(query).index_select(0, queries_M),
            *(copies_of(_tokens(states), keys_M) for states in (key, value)),
            *(q_ends, k_ends, longest_q, longest_k),
            window,
            scaling,
        )
        return output.index_select(0, laid_N)[None]


def _tokens(heads: Tensor) -> Tensor:
    """Convert [1, A, N, D] to [N, A, D]."""
    return heads.transpose(1, 2)[0]

"""Packed passes compute a prompt once for all of its samples; test_packing.py has the numbers."""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import SimpleNamespace

import families
import pytest
import torch
from families import GROUPS, Groups
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from strop.engines.micro_batches import MicroBatching
from strop.models import attention, prompts_once
from strop.models.passes import shared_prompts, varlen
from strop.models.policy import PolicyModel
from strop.models.prompts_once import first_with_prompt
from strop.protocol import DataProto

from builders import random_samples


@pytest.fixture(autouse=True)
def no_earlier_layouts(monkeypatch):
    monkeypatch.setattr(prompts_once, "_recent", OrderedDict())


@pytest.mark.parametrize(("role", "reads_last"), [("actor", 0), ("critic", 0), ("reward model", 1)])
def test_a_prompt_is_computed_once_and_a_last_token_only_where_it_is_read(role, reads_last):
    packed, _ = families.pair(role, "Qwen2")
    computed = []
    embeddings = packed.hugging_face_model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, output: computed.append(args[0].numel()))
    groups = [(7, [6, 1, 5, 6]), (1, [1]), (4, [2, 3])]
    with torch.no_grad():
        packed(families.samples(groups, order=0))
    prompts, responses = 7 + 1 + 4, [6, 1, 5, 6, 1, 2, 3]
    assert computed == [prompts + sum(responses) - (0 if reads_last else len(responses))]


def test_prompts_that_differ_in_a_token_or_in_their_padding_are_not_shared():
    prompts = torch.tensor([[5, 7], [5, 7], [5, 8], [0, 7], [0, 7]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [0, 1]])
    batch = {
        "input_ids": torch.cat([prompts, torch.full((5, 1), 3)], dim=1),
        "attention_mask": torch.cat([mask, torch.ones(5, 1, dtype=torch.long)], dim=1),
        "response_mask": torch.ones(5, 1),
    }
    assert first_with_prompt(batch).tolist() == [0, 0, 2, 3, 4]


@settings(max_examples=40, derandomize=True)
@given(groups=GROUPS, order=st.integers(0, 99), rows=st.integers(1, 5))
def test_packed_micro_batches_keep_the_samples_of_a_prompt_together(groups, order, rows):
    batch = families.samples(groups, order)
    in_order = torch.cat(MicroBatching(rows=rows).split(DataProto(batch), packed=True))
    assert sorted(in_order.tolist()) == list(range(len(batch["input_ids"])))
    prompts = first_with_prompt(batch)[in_order]
    changes = int((prompts[1:] != prompts[:-1]).sum())
    assert changes == len(prompts.unique()) - 1
    lengths = batch["attention_mask"].sum(dim=1)
    assert lengths[in_order[0]] == lengths.max()


@given(rows=st.integers(1, 40), cap=st.integers(11, 60), seed=st.integers(0, 99))
def test_packed_micro_batches_are_filled_with_real_tokens_up_to_the_cap(rows, cap, seed):
    samples, micro = random_samples(rows, seed=seed), MicroBatching(max_tokens=cap)
    lengths = samples.batch["attention_mask"].sum(dim=1)
    pieces = micro.split(samples, packed=True)
    tokens = [int(lengths[piece].sum()) for piece in pieces]
    assert sorted(torch.cat(pieces).tolist()) == list(range(rows))
    assert max(tokens) <= cap
    firsts = [int(lengths[piece[0]]) for piece in pieces]
    assert all(filled + first > cap for filled, first in zip(tokens, firsts[1:], strict=False))
    assert len(pieces) <= len(micro.split(samples))


@pytest.fixture
def attention_calls(monkeypatch):
    """Queries, keys and autocast of each call of attention."""
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, *args, **kwargs):
        seen.append((query, key, torch.is_autocast_enabled("cpu")))
        return attend(query, key, *args, **kwargs)

    packed = PolicyModel(families.model("Qwen2"), packed=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return packed, seen


# Without their last tokens, the responses of the first have 10, 9, 8, 2 and 0 tokens.
CALLS: list[tuple[Groups, int, list[tuple[int, int, int]]]] = [
    ([(7, [11, 10, 9, 3, 1])], 0, [(3, 10, 17), (1, 2, 9), (1, 7, 7)]),
    ([(7, [4]), (6, [3]), (2, [2])], 0, [(2, 10, 10), (1, 3, 3)]),
    ([(7, [11, 10, 9, 3, 1])], 200, [(5, 10, 17)]),
]


@pytest.mark.parametrize(
    ("groups", "one_call", "expected"), CALLS, ids=["a shared prompt", "nothing shared", "little padding"]
)
def test_sequences_of_like_length_attend_together_and_a_shared_prompt_once(
    attention_calls, monkeypatch, groups, one_call, expected
):
    packed, seen = attention_calls
    monkeypatch.setattr(shared_prompts, "_ONE_CALL", one_call)
    with torch.no_grad():
        packed(families.samples(groups, order=0))
    shapes = [(len(query), query.shape[2], key.shape[2]) for query, key, _ in seen]
    assert shapes == expected * 2  # in both layers


def test_short_sequences_attend_in_float32_under_bfloat16_autocast(attention_calls):
    """torch's bfloat16 kernel is slower for them on a CPU; the gradient is nearer to float32 then."""
    packed, seen = attention_calls
    batch = families.samples([(7, [6, 1, 5, 6]), (4, [2, 3])])
    _, expected, _ = families.gradient(packed, batch)
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, gradient, _ = families.gradient(packed, batch)
    assert {(query.dtype, autocast) for query, _, autocast in seen} == {(torch.float32, False)}
    assert outputs["log_prob"].dtype == torch.float32
    assert (gradient - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize(
    ("head", "of_values", "dtype", "taken"),
    [
        (64, 64, torch.bfloat16, True),
        (256, 256, torch.float16, True),
        (100, 100, torch.bfloat16, False),  # open_llama_3b
        (288, 288, torch.bfloat16, False),
        (192, 128, torch.bfloat16, False),  # DeepSeek-V3
        (64, 64, torch.float32, False),
    ],
)
def test_flash_attention_takes_equal_heads_of_a_multiple_of_8(monkeypatch, head, of_values, dtype, taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query, value = (
        SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=torch.Size([1, 2, 5, size]))
        for size in (head, of_values)
    )
    assert varlen.takes_lengths(query, value) is taken


@pytest.mark.parametrize("family", ["Qwen2", "Qwen2 with windows", "Mistral"])
@pytest.mark.parametrize("role", ["actor", "reward model"])
@pytest.mark.parametrize("has_enable_gqa", [True, False])
def test_attention_by_lengths_on_a_gpu_has_the_figures_and_gradients_of_padded_rows(
    monkeypatch, has_enable_gqa, role, family
):
    calls = []

    def counted(*arguments, enable_gqa=False, **options):
        calls.append(arguments)
        return families.varlen_attn(*arguments, **options, enable_gqa=enable_gqa)

    def of_torch_211(*arguments, scale, window_size):
        return counted(*arguments, scale=scale, window_size=window_size, enable_gqa=True)

    packed, padded = families.pair(role, family)
    monkeypatch.setattr(attention, "takes_lengths", lambda query, value: True)
    monkeypatch.setitem(
        sys.modules,
        "torch.nn.attention.varlen",
        SimpleNamespace(varlen_attn=counted if has_enable_gqa else of_torch_211),
    )
    for groups in ([(7, [6, 1, 5, 0]), (1, [1]), (4, [2, 3])], [(3, [1])], [(2, [5, 5]), (6, [4])]):
        families.assert_same(packed, padded, families.samples(groups, order=1))
    assert len(calls) == 3 * 2  # one call a layer


class _Additions(TorchDispatchMode):
    """Dtypes in which numbers are added at indices: on a CPU torch adds 16-bit ones in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if "index_add" in operator.name():
            self.dtypes.add(arguments[0].dtype)
        return operator(*arguments, **options or {})


@pytest.mark.parametrize("at_once", [1 << 24, 3000])
@pytest.mark.parametrize("by_lengths", [False, True])
def test_gradients_of_a_prompts_keys_are_rounded_once_however_many_samples_it_has(
    monkeypatch, by_lengths, at_once
):
    batch = families.samples([(7, [6] * 64), (3, [2])])
    prompts = prompts_once.PromptsOnce.of(batch, with_last=False)._shared_prompts
    copies: list[torch.Tensor] = []

    def attend(module, query, key, value, mask):
        copies.extend((key, value))
        return query.transpose(1, 2)

    def by_ends(query, key, value, *ends):
        copies.extend((key, value))
        return query

    monkeypatch.setattr(shared_prompts, "_rounds_each_sum", lambda states: states.element_size() == 2)
    monkeypatch.setattr(shared_prompts, "_SUMMED_AT_ONCE", at_once)
    monkeypatch.setattr(attention, "takes_lengths", lambda query, value: by_lengths)
    monkeypatch.setattr(attention, "attention_by_lengths", by_ends)
    monkeypatch.setattr(attention, "attend", attend)
    generator = torch.Generator().manual_seed(0)
    n_tokens = 7 + 64 * 5 + 3 + 1
    states = torch.randn(3, 1, 2, n_tokens, 8, generator=generator).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        copies.clear()
        query, key, value = states.to(dtype)
        leaves = [key.requires_grad_(), value.requires_grad_()]
        attention.WholeSequences(prompts).attend(attend, torch.nn.Identity(), query, *leaves, None)
        generator.manual_seed(1)
        # alike, as gradients of a prompt's tokens are: random ones would cancel
        upstream = [(1 + torch.rand(c.shape, generator=generator)).bfloat16().to(dtype) for c in copies]
        with _Additions() as additions:
            found.append(([*copies], torch.autograd.grad(copies, leaves, upstream)))
        assert additions.dtypes == {torch.float32 if dtype == torch.bfloat16 else dtype}
    (ours, gradients), (theirs, exact) = found
    for copy, expected in zip(ours, theirs, strict=True):
        assert torch.equal(copy.double(), expected)
    for gradient, expected in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert ((gradient.double() - expected).abs() <= (2**-8 + 2**-20) * expected).all()


def test_policy_and_critic_share_the_layout_of_the_same_samples(monkeypatch):
    laid_out, lay_out = [], shared_prompts.SharedPrompts.__init__
    monkeypatch.setattr(
        shared_prompts.SharedPrompts,
        "__init__",
        lambda *args, **own: laid_out.append(1) or lay_out(*args, **own),
    )
    batch = families.samples([(5, [3, 4]), (2, [3])], order=0)
    models = [families.pair(role, "Qwen2")[0] for role in ("actor", "critic")]
    laid_out.clear()
    with torch.no_grad():
        for model in models:
            model(batch)
        assert len(laid_out) == 1
        other = batch["input_ids"].clone()
        width = other.shape[1] - batch["response_mask"].shape[1]
        other[1, :width] = (other[1, :width] + 1) % int(other.max())  # no longer the prompt of the first row
        shared, apart = (models[0]({**batch, "input_ids": ids}) for ids in (batch["input_ids"], other))
    assert len(laid_out) == 2
    assert not torch.equal(shared["log_prob"][1], apart["log_prob"][1])


def test_layouts_are_remembered_up_to_a_number_of_tokens(monkeypatch):
    packed, _ = families.pair("actor", "Qwen2")
    batches = [families.samples([(5, [3, length])], order=0) for length in (1, 2, 3, 4)]
    sizes = [batch["attention_mask"].numel() for batch in batches]
    monkeypatch.setattr(prompts_once, "_REMEMBERED", sum(sizes[2:]))
    layouts = [packed.packing(batch) for batch in batches]
    assert packed.packing(batches[2]) is layouts[2]
    assert packed.packing(batches[3]) is layouts[3]
    assert packed.packing(batches[0]) is not layouts[0]
    monkeypatch.setattr(prompts_once, "_REMEMBERED", 0)  # one that is too large is remembered alone
    assert packed.packing(batches[1]) is packed.packing(batches[1])


def test_layouts_of_short_rows_are_forgotten_after_a_number_of_them(monkeypatch):
    monkeypatch.setattr(prompts_once, "_LAYOUTS", 2)
    packed, _ = families.pair("actor", "Qwen2")
    for length in range(1, 6):
        packed.packing(families.samples([(5, [length])]))
    assert len(prompts_once._recent) == 2

"""Packed passes give what padded ones give, for any lengths and in every family that they accept."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from types import SimpleNamespace

import families
import pytest
import torch
import transformers
from families import FAMILIES, GROUPS, assert_same, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from largest import Largest
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strop.errors import ModelError
from strop.models import flex_attention, prompts_once
from strop.models.attention import attend
from strop.models.packing import Packing
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel

from messages import mentions, naming

KEY = "actor_rollout_ref.model.use_remove_padding=True"


@pytest.fixture(scope="module")
def policies():
    """Pairs (packed, padded) by family and checkpointing."""
    built = {}
    for family, checkpointing in itertools.product(("Qwen2", "Llama"), (False, True)):
        built[family, checkpointing] = families.pair("actor", family)
        if checkpointing:
            built[family, checkpointing][0].train().enable_gradient_checkpointing()
    return built


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
@settings(max_examples=25, derandomize=True)
@given(groups=GROUPS, order=st.integers(0, 99), all_truncated=st.booleans())
def test_log_probs_entropies_and_gradients_are_those_of_padded_passes(
    policies, family, checkpointing, groups, order, all_truncated
):
    if all_truncated:
        longest = max(max(responses) for _, responses in groups)
        groups = [(prompt, [longest] * len(responses)) for prompt, responses in groups]
    batch = families.samples(groups, order)
    assert_same(*policies[family, checkpointing], batch, temperature=0.8, with_hidden=True)


EDGES = {
    "one token each": [(1, [1]), (1, [1])],
    "a row alone": [(4, [3])],
    "an empty micro-batch": [(3, [0])],
    "several rows without anything to learn": [(3, [0]), (7, [0]), (1, [0])],
    "one in eight": [(1, [1]), (7, [6]), (2, [1]), (7, [6]), (7, [6])],
    "shared prompts": [(7, [6, 1, 5, 6]), (1, [1]), (4, [2, 3])],
}


@pytest.mark.parametrize("groups", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", families.ROLES)
def test_every_role_in_every_family_at_the_edges(role, family, groups):
    require_same(role, *families.pair(role, family), families.samples(groups))


def require_same(role, packed, padded, batch):
    """Require equal outputs and gradients, which are 0 where there is nothing to learn."""
    if batch["response_mask"].any() or role == "reward model":
        assert_same(packed, padded, batch)
        return
    outputs, gradient, reached = families.gradient(packed, batch)
    assert not any(output.any() for output in outputs.values())
    assert not gradient.any()
    assert len(reached) == len(list(packed.parameters()))


def test_sequences_are_those_of_the_model_alone():
    """Against transformers, one sequence at a time and without any padding, windows included."""
    model = families.model("Qwen2 with windows")
    batch = rows((5, 6), (1, 1), (3, 2), (4, 1))
    with torch.no_grad():
        found = PolicyModel(model, packed=True)(batch)["log_prob"]
        for row in range(4):
            mask = batch["attention_mask"][row].bool()
            ids = batch["input_ids"][row][mask]
            log_softmax = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            length = int(batch["response_mask"][row].sum())
            expected = log_softmax[-length - 1 : -1].gather(-1, ids[-length:, None])[:, 0]
            torch.testing.assert_close(found[row, :length], expected, atol=1e-5, rtol=1e-5)


def test_padding_ids_have_no_effect():
    packed = PolicyModel(families.model("Llama"), packed=True)
    batch = rows((1, 6), (7, 1))
    poisoned = {**batch, "input_ids": torch.where(batch["attention_mask"] == 1, batch["input_ids"], 10**6)}
    with torch.no_grad():
        assert torch.equal(packed(batch)["log_prob"], packed(poisoned)["log_prob"])


def test_the_full_kl_is_that_of_padded_passes():
    roles = families.pair("actor", "Llama")
    batch = rows((2, 3), (5, 1), (1, 0))
    with torch.no_grad():
        batch["ref_hidden"] = roles[0](batch, with_hidden=True)["hidden"] + 0.1
    for role in roles:
        role.keep_reference_head()
    assert_same(*roles, batch, with_full_kl=True)


def test_the_models_own_attention_is_restored_even_after_an_error():
    """A rollout generates with the same model."""
    model = families.model("Qwen2")
    packed = PolicyModel(model, packed=True)
    with torch.no_grad():
        packed(rows((2, 3)))
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        packed({**rows((2, 3)), "input_ids": torch.full((1, 5), 10**6)})
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["Llama", "Qwen2 with windows"])
def test_nothing_grows_with_the_square_of_the_packed_length(family):
    role = PolicyModel(families.model(family), packed=True)
    largest = []
    for n_rows in (32, 64):
        with Largest() as mode:
            families.gradient(role, rows(*((1 + row % 7, 1 + row % 5) for row in range(n_rows))))
        largest.append(mode.elements)
    assert largest[1] <= 2.1 * largest[0]


def test_flash_attention_receives_the_ends_of_sequences(monkeypatch):
    """The kernel needs a GPU, so the test compares the arguments that each layer passes to it."""
    calls = []

    def varlen(module, query, key, value, attention_mask, **options):
        calls.append((options["max_length_q"], options["max_length_k"]))
        assert attention_mask is None
        assert options["cu_seq_lens_q"].dtype == torch.int32
        return families.flash_attention(module, query, key, value, attention_mask, **options)

    model = families.model("Llama")
    model.config._attn_implementation = "flash_attention_2"
    packed, padded = PolicyModel(model, packed=True), PolicyModel(families.model("Llama"))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", varlen)
    assert_same(packed, padded, rows((2, 3), (5, 1), (1, 6)))
    assert calls == [(7, 7)] * 2


@pytest.mark.parametrize("family", ["Qwen2", "Qwen2 with windows", "Mistral"])
def test_rows_without_shared_prompts_attend_in_one_call_on_a_gpu(monkeypatch, family):
    """As in a reward model's inference, whose batches have no responses."""
    calls = []

    @functools.wraps(families.varlen_attn)
    def counted(*arguments, **options):
        calls.append((arguments[3].tolist(), options["window_size"]))
        return families.varlen_attn(*arguments, **options)

    packed, padded = families.pair("reward model", family)
    monkeypatch.setattr("strop.models.attention.takes_lengths", lambda query, value: True)
    varlen = SimpleNamespace(varlen_attn=counted)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    batch = rows((5, 6), (1, 1), (3, 2), (4, 1), (2, 3))
    del batch["response_mask"]
    assert_same(packed, padded, batch)
    windows = {"Qwen2": [-1, -1], "Qwen2 with windows": [-1, 2], "Mistral": [3, 3]}[family]
    assert calls == [([0, 11, 13, 18, 23, 28], (window, 0)) for window in windows]


def test_grouped_heads_are_repeated_for_a_gpu_in_float32(monkeypatch):
    """There torch would keep all scores. With a mask, or for large heads, transformers repeats them."""
    seen = []

    def sdpa(module, query, key, value, **options):
        seen.append((query.shape[1], key.shape[1], value.shape[1]))
        return query.transpose(1, 2), None

    def heads(width, device="meta", dtype=torch.float32):
        return [torch.randn(2, count, 5, width, device=device).to(dtype) for count in (6, 2, 2)]

    monkeypatch.setattr("strop.models.attention.sdpa_attention_forward", sdpa)
    mask = torch.zeros(1, 1, 5, 5, device="meta")
    attend(nn.Module(), *heads(8), None)
    attend(nn.Module(), *heads(8, dtype=torch.bfloat16), None)
    attend(nn.Module(), *heads(8), mask)
    attend(nn.Module(), *heads(512), None)
    attend(nn.Module(), *heads(8, "cpu"), None)
    assert seen == [(6, 6, 6), *[(6, 2, 2)] * 4]
    query, key, value = heads(8, "cpu")
    options = {"is_causal": True, "enable_gqa": True}
    expected = nn.functional.scaled_dot_product_attention(query, key, value, **options)
    key, value = (states.repeat_interleave(3, dim=1) for states in (key, value))
    found = nn.functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_layers_serve_rows_of_other_lengths_without_more_graphs():
    packed, padded = families.pair("reward model", "Qwen2")
    packed.compile_layers()
    torch._dynamo.utils.counters.clear()
    graphs = []
    for lengths in (((5, 6), (1, 1)), ((3, 2), (4, 1), (4, 1)), ((2, 2),)):
        batch = rows(*lengths)
        del batch["response_mask"]
        torch.testing.assert_close(packed(batch), padded(batch), atol=1e-5, rtol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1
    assert graphs[0] > 0


FLEX_EDGES = ("a row alone", "one in eight", "shared prompts")


@pytest.fixture
def flex_on_a_cpu(monkeypatch):
    """Let torch compute FlexAttention's gradient on a CPU: it has one, from all scores, and refuses it."""
    flex = torch.nn.attention.flex_attention
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("flex_on_a_cpu")
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(groups, id=name, marks=[] if name in FLEX_EDGES else [pytest.mark.slow])
        for name, groups in EDGES.items()
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", families.ROLES)
def test_flex_attention_gives_what_eager_attention_gives_padded(role, family, groups):
    packed, padded = families.pair(role, family)
    packed.hugging_face_model.config._attn_implementation = "flex_attention"
    padded.hugging_face_model.config._attn_implementation = "eager"  # has Gemma 2's cap of scores, too
    require_same(role, packed, padded, families.samples(groups))


@pytest.mark.usefixtures("flex_on_a_cpu")
def test_flex_attention_shares_prompts_and_may_be_checkpointed(monkeypatch):
    packed, padded = families.pair("actor", "Qwen2 with windows")
    packed.hugging_face_model.config._attn_implementation = "flex_attention"
    packed.train().enable_gradient_checkpointing()
    lengths = []
    attend = flex_attention.flex_attention

    def counting(query, *states, **options):
        lengths.append(query.shape[2])
        return attend(query, *states, **options)

    monkeypatch.setattr(flex_attention, "flex_attention", counting)
    assert_same(packed, padded, families.samples([(7, [6, 2, 5]), (3, [4])]))
    assert set(lengths) == {7 + 6 + 2 + 5 + 3 + 4 - 4}  # last tokens are not computed
    assert len(lengths) == 4  # two layers, again in the backward pass


@pytest.mark.slow
@pytest.mark.usefixtures("flex_on_a_cpu")
def test_flex_attention_in_compiled_layers_makes_one_mask_a_pass(monkeypatch):
    packed, padded = families.pair("actor", "Qwen2")
    packed.hugging_face_model.config._attn_implementation = "flex_attention"
    packed.compile_layers()
    made, make = [], flex_attention.create_block_mask
    monkeypatch.setattr(
        flex_attention, "create_block_mask", lambda *args, **own: made.append(1) or make(*args, **own)
    )
    for groups in ([(7, [6, 2, 5]), (3, [4])], [(5, [6, 1])], [(2, [3, 4, 4])]):
        made.clear()
        prompts_once._recent.clear()  # of other tests' rows
        assert_same(packed, padded, families.samples(groups))
        assert len(made) == 1


@pytest.mark.usefixtures("flex_on_a_cpu")
def test_flex_attention_has_the_sinks_of_a_family():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    packed, padded = (families.model("GptOss", **experts) for _ in range(2))
    for model, attention in ((packed, "flex_attention"), (padded, "eager")):
        model.config._attn_implementation = attention
        for number, layer in enumerate(model.model.layers):
            nn.init.normal_(layer.self_attn.sinks, number, 2.0, generator=torch.Generator().manual_seed(1))
    batch = families.samples([(7, [6, 2, 5]), (3, [4])])
    assert_same(PolicyModel(packed, packed=True), PolicyModel(padded), batch)


class _Regions(TorchDispatchMode):
    """Counts calls of compiled functions that selective checkpointing can see."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.count += operator.name() == "inductor_compiled_code"
        return operator(*arguments, **options or {})


@pytest.mark.slow
def test_selective_checkpointing_computes_flex_attention_once(monkeypatch):
    """Dense attention stands in for it: torch compiles no gradient of FlexAttention for a CPU."""

    def attend(query, key, value, *, block_mask, scale, enable_gqa, **options):
        places = torch.arange(query.shape[2])
        mask = block_mask.mask_mod(0, 0, places[:, None], places)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=enable_gqa
        )

    monkeypatch.setattr(flex_attention, "flex_attention", attend)
    run = flex_attention._run
    monkeypatch.setattr(
        flex_attention, "_run", lambda function, _, *args, **options: run(function, True, *args, **options)
    )
    packed, padded = families.pair("actor", "Qwen2")
    packed.hugging_face_model.config._attn_implementation = "flex_attention"
    packed.train().enable_gradient_checkpointing(selective=True)
    prompts_once._recent.clear()  # of other tests' rows
    with _Regions() as regions:
        assert_same(packed, padded, families.samples([(7, [6, 2, 5]), (3, [4])]))
    assert regions.count == 2 * 2  # forward and backward, two layers


@pytest.mark.slow
@torch.no_grad()
def test_compiled_as_on_a_gpu_flex_attention_gives_the_same(monkeypatch):
    """The forward pass: torch has no compiled gradient for a CPU."""
    packed, padded = families.pair("actor", "Qwen2 with windows")
    packed.hugging_face_model.config._attn_implementation = "flex_attention"
    run, ran = flex_attention._run, []

    def as_on_a_gpu(function, on_gpu, *args, **options):
        ran.append(function.__name__)
        return run(function, True, *args, **options)

    monkeypatch.setattr(flex_attention, "_run", as_on_a_gpu)
    prompts_once._recent.clear()  # of other tests' rows
    for groups in ([(7, [6, 2, 5]), (3, [4])], [(70, [60, 9]), (30, [40])], [(2, [3, 4, 4])]):
        ran.clear()
        batch = families.samples(groups)
        torch.testing.assert_close(packed(batch), padded(batch), atol=1e-5, rtol=1e-5)
        assert ran == ["create_block_mask", "flex_attention"] * 2  # two layers, one of them with a window


def test_flex_attention_reads_no_mask_of_all_pairs_on_large_rows():
    """Blocks that no pair of tokens needs are left out of the mask."""
    packing = Packing(torch.ones(8, 256, dtype=torch.bool), torch.device("cpu"))
    mask = packing.options("flex_attention")["pieces"].mask(None)
    dense = mask.to_dense()[0, 0]  # blocks of 128 tokens: two for each sequence, three of four visible
    assert dense.shape == (16, 16)
    assert torch.equal(dense, torch.block_diag(*[torch.tensor([[1, 0], [1, 1]])] * 8).int())


# ------------------------------------------------------------------------------------------------ refusals


REFUSED = {
    "AttentionInterface": transformers.BloomConfig(vocab_size=19, hidden_size=32, n_layer=1, n_head=2),
    "linear_attention": transformers.MambaConfig(vocab_size=19, hidden_size=32, num_hidden_layers=1),
    "layers of type conv": families.config(
        "Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8, conv_L_cache=3
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_family_that_cannot_be_packed_is_refused_by_the_name_of_the_key(reason):
    model = transformers.AutoModelForCausalLM.from_config(REFUSED[reason])
    with pytest.raises(ModelError, match=naming(KEY, reason)):
        PolicyModel(model, packed=True)
    assert not PolicyModel(model, packed="auto").packed


def test_auto_packs_a_model_that_supports_it():
    assert PolicyModel(families.model("Llama"), packed="auto").packed is True


WINDOWS = {
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Mistral": {},
    "Gemma2": {"query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_longer_than_any_check_are_checked_and_stay_as_they_are(family):
    model = families.model(family, **{**WINDOWS[family], "sliding_window": 4096})
    PolicyModel(model, packed=True)
    windows = [getattr(module, "sliding_window", None) for module in model.modules()]
    assert model.config.sliding_window == 4096
    assert {window for window in windows if window is not None} <= {4096}


# These make a mask by the window and do not pass the window to attention.
MASK_ONLY = {
    "Qwen2Moe": {"use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1},
    "Phimoe": {"num_local_experts": 2},
}


@pytest.mark.parametrize("family", MASK_ONLY)
def test_a_family_whose_windows_are_in_its_mask_alone_is_refused(family):
    model = families.model(family, **MASK_ONLY[family], sliding_window=4096)
    with pytest.raises(ModelError, match=naming(KEY)):
        PolicyModel(model, packed=True)
    assert model.config.sliding_window == 4096
    without = {**MASK_ONLY[family], "use_sliding_window": False, "sliding_window": None}
    PolicyModel(families.model(family, **without), packed=True)


def test_a_critic_that_cannot_be_packed_is_refused_by_the_name_of_its_key():
    config = copy.deepcopy(REFUSED["AttentionInterface"])
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ModelError, match=naming("critic.model.use_remove_padding=True")):
        ValueModel(model, packed=True)


class _LeakingMLP(nn.Module):
    """Mixes each token with the one before it in its row, as a convolution or a recurrence would."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        before = nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        return self.inner(hidden + 0.3 * before)


def _leak(model):
    model.model.layers[0].mlp = _LeakingMLP(model.model.layers[0].mlp)


def _number_positions_itself(model):  # a learned table, say, that position_ids do not reach
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output + 0.1 * torch.arange(output.shape[1])[:, None]
    )


def _drop_lengths(model):
    attention = model.model.layers[0].self_attn
    attend = attention.forward
    attention.forward = lambda *args, sequences=None, **options: attend(*args, **options)


def _drop_a_window(model):
    model.model.layers[1].self_attn.sliding_window = None


def _take_no_options(model):
    attention = model.model.layers[0].self_attn
    attend = attention.forward

    def strict(hidden_states, attention_mask, position_embeddings, position_ids, past_key_values, use_cache):
        return attend(hidden_states, position_embeddings, attention_mask)

    attention.forward = strict


@pytest.mark.parametrize(
    ("damage", "family", "reason"),
    [
        (_leak, "Llama", "when sequences are packed"),
        (_number_positions_itself, "Llama", "when sequences are packed"),
        (_drop_a_window, "Qwen2 with windows", "when sequences are packed"),
        (_drop_lengths, "Llama", "lengths"),
        (_take_no_options, "Llama", "unexpected keyword argument"),
    ],
)
def test_a_model_whose_packed_pass_is_not_its_padded_one_is_refused(damage, family, reason, caplog):
    window = {"sliding_window": 4096} if family == "Qwen2 with windows" else {}
    model = families.model(family, **window)
    damage(model)
    with pytest.raises(ModelError, match=naming(KEY, reason)):
        PolicyModel(model, packed=True)
    assert not PolicyModel(model).packed
    padded = PolicyModel(model, packed="auto")
    assert not padded.packed
    assert mentions(caplog.text, KEY.replace("True", "auto"), reason)
    with pytest.raises(ModelError, match=naming("ulysses_sequence_parallel_size=2", reason)):
        padded.share_sequences(SimpleNamespace(size=2))


def test_flex_attention_is_compiled_past_torchs_limit(monkeypatch):
    """Past it torch would run the operations one by one: all scores of a row."""
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def attend(query, mask):
        return query + len(mask)

    compiled = torch.compile(attend, backend=counted)
    monkeypatch.setattr(flex_attention, "_compiled", lambda function: compiled)
    masks = [f"{number:0{number}}" for number in range(1, 13)]  # each with different guards
    for mask in masks:
        flex_attention._run(attend, True, torch.zeros(3), mask)
    assert len(graphs) == len(masks)


def test_dropout_and_biases_are_refused_by_flex_attention():
    layer, row = nn.Identity(), torch.zeros(1, 2, 4, 16)
    pieces = flex_attention.Pieces(torch.zeros(4, dtype=torch.int), torch.full((4,), -1), torch.arange(4))
    flex_attention._packed_flex(layer, row, row, row, None, pieces=pieces, dropout=0, position_bias=None)
    for name, value in (("dropout", 0.1), ("position_bias", torch.zeros(1, 2, 4, 4))):
        with pytest.raises(ModelError, match=naming("Identity", name, "attn_implementation=flex_attention")):
            flex_attention._packed_flex(layer, row, row, row, None, pieces=pieces, **{name: value})

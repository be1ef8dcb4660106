"""Packed passes give what padded ones give, for any lengths and in every family that they accept."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strop.errors import ModelError
from strop.models.policy import PolicyModel
from strop.models.scorer import SequenceScorer, ValueModel

from messages import naming

SIZE = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.08,  # attention matters: at the usual 0.02 it hardly moves a small model
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
FAMILIES = {
    "Qwen2": {},
    "Qwen2 with windows": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 8},
    "Qwen3": {},
}


def _model(family: str, head: str = "ForCausalLM", **extra):
    name = family.split()[0]
    config = getattr(transformers, f"{name}Config")(
        **SIZE, **{**FAMILIES.get(family, {}), **extra}, num_labels=1
    )
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(config)
    model.config._attn_implementation = "sdpa"
    return model


def _batch(lengths: list[tuple[int, int]], *, all_truncated: bool = False) -> dict[str, torch.Tensor]:
    """Rows of (prompt, response) lengths; a response of 0 is a row that only fills up a rank's share."""
    prompt_width = max(prompt for prompt, _ in lengths)
    response_width = max(max(response for _, response in lengths), 1)
    prompts = torch.tensor([prompt for prompt, _ in lengths])[:, None]
    responses = torch.tensor([response for _, response in lengths])[:, None]
    if all_truncated:
        responses = torch.full_like(responses, response_width)
    prompt_mask = torch.arange(prompt_width) >= prompt_width - prompts
    # the row that fills up is a copy of another: its response is there, and not to be learned from
    response_mask = torch.arange(response_width) < responses
    present = torch.arange(response_width) < responses.clamp(min=1)
    mask = torch.cat([prompt_mask, present], dim=1).long()
    ids = torch.randint(3, 19, mask.shape, generator=torch.Generator().manual_seed(len(lengths))) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "responses": ids[:, prompt_width:],
        "response_mask": response_mask.float(),
    }


LENGTHS = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=6)


def _gradient(role, batch, **options):
    """Outputs, and the gradient of a random combination of them, as one vector."""
    role.zero_grad(set_to_none=True)
    outputs = role(batch, **options)
    generator = torch.Generator().manual_seed(4)
    weighted = [(torch.randn(out.shape, generator=generator) * out).sum() for out in outputs.values()]
    sum(weighted).backward()
    used = {name: w.grad for name, w in role.named_parameters() if w.grad is not None}
    return outputs, torch.cat([grad.flatten() for grad in used.values()]), list(used)


def _assert_same(packed, padded, batch, **options):
    found, gradient, reached = _gradient(packed, batch, **options)
    expected, expected_gradient, expected_reached = _gradient(padded, batch, **options)
    assert list(found) == list(expected)
    for name, output in found.items():
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, expected[name], atol=1e-5, rtol=1e-5)
    assert reached == expected_reached  # an empty micro-batch too takes part in every collective
    difference = (gradient.double() - expected_gradient.double()).norm()
    assert difference <= 1e-6 * expected_gradient.double().norm()


@pytest.fixture(scope="module")
def policies():
    """(packed, padded) by family and checkpointing."""
    built = {}
    for family in ("Qwen2", "Llama"):
        for checkpointing in (False, True):
            pair = PolicyModel(_model(family), packed=True), PolicyModel(_model(family))
            if checkpointing:
                pair[0].train().enable_gradient_checkpointing()
            built[family, checkpointing] = pair
    return built


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
@settings(max_examples=25, derandomize=True)
@given(lengths=LENGTHS, all_truncated=st.booleans())
def test_log_probs_entropies_and_gradients_are_those_of_padded_passes(
    policies, family, checkpointing, lengths, all_truncated
):
    packed, padded = policies[family, checkpointing]
    _assert_same(
        packed, padded, _batch(lengths, all_truncated=all_truncated), temperature=0.8, with_hidden=True
    )


EDGES = {
    "one token each": [(1, 1), (1, 1)],
    "a row alone": [(4, 3)],
    "an empty micro-batch": [(3, 0)],
    "several rows without anything to learn": [(3, 0), (7, 0), (1, 0)],
    "one in eight": [(1, 1), (7, 6), (2, 1), (7, 6), (7, 6)],
}


@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ["actor", "critic", "reward model"])
def test_every_role_in_every_family_at_the_edges(role, family, lengths):
    wrapper, head = {
        "actor": (PolicyModel, "ForCausalLM"),
        "critic": (ValueModel, "ForSequenceClassification"),
        "reward model": (SequenceScorer, "ForSequenceClassification"),
    }[role]
    packed, padded = wrapper(_model(family, head), packed=True), wrapper(_model(family, head))
    batch = _batch(lengths)
    if not batch["response_mask"].any() and role != "reward model":
        with torch.no_grad():
            assert all(not output.any() for output in packed(batch).values())
        _, gradient, reached = _gradient(packed, batch)
        assert not gradient.any()
        assert len(reached) == len(list(packed.parameters()))
    else:
        _assert_same(packed, padded, batch)


def test_sequences_are_those_of_the_model_alone():
    """Against transformers, one sequence at a time and without any padding, windows included."""
    model = _model("Qwen2 with windows")
    batch = _batch([(5, 6), (1, 1), (3, 2), (4, 1)])
    with torch.no_grad():
        found = PolicyModel(model, packed=True)(batch)["log_prob"]
        for row in range(4):
            mask = batch["attention_mask"][row].bool()
            ids = batch["input_ids"][row][mask]
            log_softmax = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            length = int(batch["response_mask"][row].sum())
            expected = log_softmax[-length - 1 : -1].gather(-1, ids[-length:, None])[:, 0]
            torch.testing.assert_close(found[row, :length], expected, atol=1e-5, rtol=1e-5)


def test_a_window_is_not_ignored():
    batch = _batch([(7, 6), (7, 6)])
    with torch.no_grad():
        found = PolicyModel(_model("Qwen2 with windows"), packed=True)(batch)["log_prob"]
        whole = PolicyModel(_model("Qwen2"), packed=True)(batch)["log_prob"]
    assert (found - whole).abs().max() > 1e-3


def test_what_stands_in_padding_does_not_matter():
    packed = PolicyModel(_model("Llama"), packed=True)
    batch = _batch([(1, 6), (7, 1)])
    poisoned = {**batch, "input_ids": torch.where(batch["attention_mask"] == 1, batch["input_ids"], 10**6)}
    with torch.no_grad():
        assert torch.equal(packed(batch)["log_prob"], packed(poisoned)["log_prob"])


def test_the_full_kl_is_that_of_padded_passes():
    roles = PolicyModel(_model("Llama"), packed=True), PolicyModel(_model("Llama"))
    batch = _batch([(2, 3), (5, 1), (1, 0)])
    with torch.no_grad():
        batch["ref_hidden"] = roles[0](batch, with_hidden=True)["hidden"] + 0.1
    for role in roles:
        role.keep_reference_head()
    _assert_same(*roles, batch, with_full_kl=True)


def test_the_models_own_attention_comes_back_even_after_an_error():
    """A rollout generates with the same model, and asks what attention it has."""
    model = _model("Qwen2")
    packed = PolicyModel(model, packed=True)
    with torch.no_grad():
        packed(_batch([(2, 3)]))
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        packed({**_batch([(2, 3)]), "input_ids": torch.full((1, 5), 10**6)})
    assert model.config._attn_implementation == "sdpa"


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("family", ["Llama", "Qwen2 with windows"])
def test_nothing_grows_with_the_square_of_the_packed_length(family):
    role = PolicyModel(_model(family), packed=True)
    largest = []
    for rows in (32, 64):
        with _Largest() as mode:
            _gradient(role, _batch([(1 + row % 7, 1 + row % 5) for row in range(rows)]))
        largest.append(mode.elements)
    assert largest[1] <= 2.1 * largest[0]


def test_flash_attention_is_told_where_sequences_end(monkeypatch):
    """Its kernel needs a GPU; what reaches it in each layer is what it takes."""
    calls = []

    def varlen(module, query, key, value, attention_mask, *, cu_seq_lens_q, cu_seq_lens_k, **options):
        calls.append((options["max_length_q"], options["max_length_k"]))
        assert attention_mask is None
        assert torch.equal(cu_seq_lens_q, cu_seq_lens_k)
        assert cu_seq_lens_q.dtype == torch.int32
        outputs = []
        ends = cu_seq_lens_q.tolist()
        for start, end in itertools.pairwise(ends):
            parts = [heads[:, :, start:end] for heads in (query, key, value)]
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    *parts, is_causal=True, scale=options["scaling"], enable_gqa=True
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2), None

    model = _model("Llama")
    padded = PolicyModel(_model("Llama"))
    model.config._attn_implementation = "flash_attention_2"
    packed = PolicyModel(model, packed=True)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", varlen)
    _assert_same(packed, padded, _batch([(2, 3), (5, 1), (1, 6)]))
    assert calls == [(7, 7)] * 2


REFUSED = {
    "Bloom": (
        transformers.BloomConfig(vocab_size=19, hidden_size=32, n_layer=1, n_head=2),
        "AttentionInterface",
    ),
    "Mamba": (
        transformers.MambaConfig(vocab_size=19, hidden_size=32, num_hidden_layers=1),
        "linear_attention",
    ),
    "Lfm2": (
        transformers.Lfm2Config(
            **{**SIZE, "layer_types": ["conv", "full_attention"]}, block_multiple_of=8, conv_L_cache=3
        ),
        "layers of type conv",
    ),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_family_that_cannot_be_packed_is_refused_by_the_name_of_the_key(config, reason):
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=rf"^actor_rollout_ref\.model\.use_remove_padding=True: .*{reason}"):
        PolicyModel(model, packed=True)


WINDOWS = {
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Mistral": {},
    "Gemma2": {"query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_longer_than_any_check_are_checked_and_stay_as_they_are(family):
    model = _model(family, **WINDOWS[family], sliding_window=4096)
    PolicyModel(model, packed=True)
    windows = [getattr(module, "sliding_window", None) for module in model.modules()]
    assert model.config.sliding_window == 4096
    assert {window for window in windows if window is not None} <= {4096}


# These make a mask by the window and do not tell attention of it.
MASK_ONLY = {
    "Qwen2Moe": {"use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1},
    "Phimoe": {"num_local_experts": 2},
}


@pytest.mark.parametrize("family", MASK_ONLY)
def test_a_family_whose_windows_are_in_its_mask_alone_is_refused(family):
    key = "actor_rollout_ref.model.use_remove_padding=True"
    model = _model(family, **MASK_ONLY[family], sliding_window=4096)
    with pytest.raises(ModelError, match=naming(key)):
        PolicyModel(model, packed=True)
    assert model.config.sliding_window == 4096
    without = {**MASK_ONLY[family], "use_sliding_window": False, "sliding_window": None}
    PolicyModel(_model(family, **without), packed=True)


def test_eager_attention_is_refused_by_the_name_of_the_critics_key():
    model = _model("Llama", "ForSequenceClassification")
    model.config._attn_implementation = "eager"
    with pytest.raises(ModelError, match=naming("critic.model.use_remove_padding=True", "eager", "sdpa")):
        ValueModel(model, packed=True)


class _LeakingMLP(nn.Module):
    """Mixes each token with the one before it, as a convolution or a recurrence would."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden + 0.3 * hidden.roll(1, dims=1))


DAMAGES = {
    "leak": "when sequences are packed",
    "positions of its own": "when sequences are packed",
    "lengths are dropped": "lengths",
    "a window is dropped": "when sequences are packed",
    "no such option": "unexpected keyword argument",
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=DAMAGES)
def test_a_model_whose_packed_pass_is_not_its_padded_one_is_refused(damage, reason):
    model = _model("Llama" if damage != "a window is dropped" else "Qwen2 with windows", sliding_window=4096)
    layer = model.model.layers[0]
    if damage == "a window is dropped":
        model.model.layers[1].self_attn.sliding_window = None
    elif damage == "leak":
        layer.mlp = _LeakingMLP(layer.mlp)
    elif damage == "positions of its own":  # a learned table, say, that position_ids do not reach
        model.model.embed_tokens.register_forward_hook(
            lambda module, inputs, output: output + 0.1 * torch.arange(output.shape[1])[:, None]
        )
    elif damage == "no such option":
        attend = layer.self_attn.forward

        def strict(
            hidden_states, attention_mask, position_embeddings, position_ids, past_key_values, use_cache
        ):
            return attend(hidden_states, position_embeddings, attention_mask)

        layer.self_attn.forward = strict
    else:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, sequence_runs=None, **options: attend(*args, **options)
    with pytest.raises(ModelError, match=rf"^actor_rollout_ref\.model\.use_remove_padding=True: .*{reason}"):
        PolicyModel(model, packed=True)
    PolicyModel(model)

"""Packed passes compute a prompt once for all of its samples, and give what padded passes give."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engines.micro_batches import MicroBatching
from strop.models.policy import PolicyModel
from strop.models.prompts_once import first_with_prompt
from strop.models.scorer import SequenceScorer, ValueModel
from strop.protocol import DataProto

FAMILIES = {
    "Qwen2": {},
    "Qwen2 with windows": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 8},
}
ROLES = {
    "actor": (PolicyModel, "ForCausalLM"),
    "critic": (ValueModel, "ForSequenceClassification"),
    "reward model": (SequenceScorer, "ForSequenceClassification"),
}
Groups = list[tuple[int, list[int]]]
"""(tokens of the prompt, tokens of each of its responses)."""
GROUPS = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=3
)


def _model(family: str, head: str):
    config = getattr(transformers, f"{family.split()[0]}Config")(
        vocab_size=19,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.08,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        num_labels=1,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    model = getattr(transformers, family.split()[0] + head)(config)
    model.config._attn_implementation = "sdpa"
    return model


def _batch(groups: Groups, order: int = 0) -> dict[str, torch.Tensor]:
    """Samples of these prompts, in a random order."""
    generator = torch.Generator().manual_seed(order)
    prompt_width = max(prompt for prompt, _ in groups)
    response_width = max(max(responses) for _, responses in groups)
    rows = []
    for prompt, responses in groups:
        prompt_ids = torch.zeros(prompt_width, dtype=torch.long)
        prompt_ids[prompt_width - prompt :] = torch.randint(3, 19, (prompt,), generator=generator)
        for response in responses:
            ids = torch.randint(3, 19, (response_width,), generator=generator)
            rows.append(torch.cat([prompt_ids, ids * (torch.arange(response_width) < response)]))
    ids = torch.stack(rows)[torch.randperm(len(rows), generator=generator)]
    mask = (ids > 0).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "responses": ids[:, prompt_width:],
        "response_mask": mask[:, prompt_width:].float(),
    }


def _gradient(role, batch):
    """Outputs, and the gradient of a random combination of them."""
    role.zero_grad(set_to_none=True)
    outputs = role(batch)
    generator = torch.Generator().manual_seed(4)
    sum((torch.randn(out.shape, generator=generator) * out).sum() for out in outputs.values()).backward()
    return outputs, torch.cat([w.grad.flatten() for w in role.parameters() if w.grad is not None]).double()


def _assert_same(packed, padded, batch):
    found, gradient = _gradient(packed, batch)
    expected, expected_gradient = _gradient(padded, batch)
    for name, output in found.items():
        torch.testing.assert_close(output, expected[name], atol=1e-5, rtol=1e-5)
    assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()


@pytest.fixture(scope="module", params=[False, True], ids=["", "checkpointing"])
def policies(request):
    packed, padded = PolicyModel(_model("Qwen2", "ForCausalLM"), packed=True), None
    padded = PolicyModel(_model("Qwen2", "ForCausalLM"))
    if request.param:
        packed.train().enable_gradient_checkpointing()
    return packed, padded


@settings(max_examples=40, derandomize=True)
@given(groups=GROUPS, order=st.integers(0, 99))
def test_samples_that_share_prompts_have_the_gradient_of_padded_passes(policies, groups, order):
    _assert_same(*policies, _batch(groups, order))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ROLES)
def test_every_role_shares_prompts_in_every_family(role, family):
    wrapper, head = ROLES[role]
    packed, padded = wrapper(_model(family, head), packed=True), wrapper(_model(family, head))
    _assert_same(packed, padded, _batch([(7, [6, 1, 5, 6]), (1, [1]), (4, [2, 3])]))


@pytest.mark.parametrize("role", ROLES)
def test_a_prompt_is_computed_once_and_a_last_token_only_where_it_is_read(role):
    wrapper, head = ROLES[role]
    packed = wrapper(_model("Qwen2", head), packed=True)
    computed = []
    embeddings = packed.hugging_face_model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, output: computed.append(args[0].numel()))
    groups = [(7, [6, 1, 5, 6]), (1, [1]), (4, [2, 3])]
    with torch.no_grad():
        packed(_batch(groups))
    prompts, responses = 7 + 1 + 4, [6, 1, 5, 6, 1, 2, 3]
    assert computed == [prompts + sum(responses) - (len(responses) if role != "reward model" else 0)]


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
    batch = _batch(groups, order)
    pieces = MicroBatching(rows=rows).split(DataProto(batch), packed=True)
    in_order = torch.cat(pieces)
    assert sorted(in_order.tolist()) == list(range(len(batch["input_ids"])))
    prompts = first_with_prompt(batch)[in_order]
    changes = int((prompts[1:] != prompts[:-1]).sum())
    assert changes == len(prompts.unique()) - 1
    lengths = batch["attention_mask"].sum(dim=1)
    assert lengths[in_order[0]] == lengths.max()


def _calls(monkeypatch, groups: Groups) -> list[tuple[int, int, int]]:
    """(sequences, queries, keys) of each call of attention in the first layer."""
    packed, seen = PolicyModel(_model("Qwen2", "ForCausalLM"), packed=True), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, *args, **kwargs):
        seen.append((len(query), query.shape[2], key.shape[2]))
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        packed(_batch(groups))
    return seen[: len(seen) // 2]


def test_a_shared_prompt_attends_once_and_responses_of_like_length_together(monkeypatch):
    # without their last tokens the responses have 10, 9, 8, 2 and 0
    calls = _calls(monkeypatch, [(7, [11, 10, 9, 3, 1])])
    assert calls == [(1, 7, 7), (3, 10, 17), (1, 2, 9)]


def test_sequences_that_share_nothing_attend_as_wholes_those_of_like_length_together(monkeypatch):
    assert _calls(monkeypatch, [(7, [4]), (6, [3]), (2, [2])]) == [(2, 10, 10), (1, 3, 3)]


def test_short_sequences_attend_in_float32_under_bfloat16_autocast(monkeypatch):
    """torch's bfloat16 kernel is slower for them on a CPU; the gradient is nearer to float32 then."""
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query, *args, **kwargs):
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return attend(query, *args, **kwargs)

    packed = PolicyModel(_model("Qwen2", "ForCausalLM"), packed=True)
    batch = _batch([(7, [6, 1, 5, 6]), (4, [2, 3])])
    _, expected = _gradient(packed, batch)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, gradient = _gradient(packed, batch)
    assert set(seen) == {(torch.float32, False)}
    assert outputs["log_prob"].dtype == torch.float32
    assert (gradient - expected).norm() <= 2e-2 * expected.norm()

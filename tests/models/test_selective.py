"""Selective checkpointing: every operator of a layer is kept or recomputed by decision."""

from __future__ import annotations

import families
import pytest
import torch
import torch.nn.attention.varlen
from torch._higher_order_ops.flex_attention import flex_attention
from transformers import GptOssConfig, GptOssForCausalLM

from strop.models import selective
from strop.models.comparison import try_kept_results
from strop.models.policy import PolicyModel
from strop.models.selective import KeptResults

RECOMPUTED = """
_softmax _to_copy _unsafe_view add alias arange bitwise_or_ cat clamp clone cumsum div_ empty_like expand
floor_divide ge gelu histc index index_put_ index_select lift_fresh lt masked_fill_ mean mul mul_ neg pow
rsqrt scalar_tensor select silu slice sort split split_with_sizes sub sum t topk transpose unsqueeze view
where zeros zeros_like
"""
OF_OTHER_KINDS = """
_cslt_sparse_mm _flash_attention_forward_no_dropout_inplace _foreach_mm _int_mm _native_multi_head_attention
_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps _sparse_addmm _sparse_mm
_sparse_semi_structured_addmm _sparse_semi_structured_mm _triton_multi_head_attention
_triton_scaled_dot_attention _weight_int4pack_mm _weight_int8pack_mm addbmm hspmm scaled_dot_product_attention
smm sparse_sampled_addmm sspaddmm
"""
"""Sparse, on integers, without gradients, or made of others before checkpointing sees them."""


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "Gemma2", "Mixtral", "Olmo2", "Phi3"])
@pytest.mark.parametrize("packed", [False, True])
def test_each_operator_of_a_step_is_classified(family, packed, monkeypatch):
    met, decide = set(), KeptResults.policy

    def record(self, context, operator, *arguments, **options):
        met.add(selective.name_of(operator))
        return decide(self, context, operator, *arguments, **options)

    monkeypatch.setattr(KeptResults, "policy", record)
    module = PolicyModel(families.model(family), packed=packed).train()
    module.enable_gradient_checkpointing(selective=True)
    module.figures(families.samples([(5, [6, 3]), (2, [4])])).sum().backward()
    kept = met & selective.KEPT_OPERATORS
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {"aten::mm", attention, *(["aten::_grouped_mm"] if family == "Mixtral" else [])} <= kept
    undecided = met - kept - {f"aten::{name}" for name in RECOMPUTED.split()}
    assert not undecided, f"add {undecided} to KEPT_OPERATORS, or here to RECOMPUTED"


def test_flex_attention_is_kept_where_torch_does_not_compile_it():
    assert flex_attention.name() in selective.KEPT_OPERATORS


def test_every_product_and_attention_of_torch_is_in_the_table():
    assert torch.nn.attention.varlen  # registers an operator
    found = {
        name
        for name in (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
        if name.startswith(("aten::", "torch_attn::")) and not name.endswith(("backward", "_out"))
        if name.endswith("mm") or "attention" in name or "attn" in name
    }
    assert found - selective.KEPT_OPERATORS == {f"aten::{name}" for name in OF_OTHER_KINDS.split()}


RECOMPUTED_PRODUCTS = {"grouped_mm": {"aten::_grouped_mm"}, "batched_mm": {"aten::bmm"}, "eager": set()}


@pytest.mark.parametrize("experts", RECOMPUTED_PRODUCTS)
def test_experts_that_add_their_bias_in_place(experts):
    """The gradients are those of the pass without checkpointing."""
    config = GptOssConfig(
        vocab_size=19, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    config._experts_implementation = experts
    gradients = []
    for kept in (False, True):
        torch.manual_seed(0)
        module = PolicyModel(GptOssForCausalLM(config), packed=False).train()
        if kept:
            module.enable_gradient_checkpointing(selective=True)
            try_kept_results(module)
            assert module.kept_results.recomputed == RECOMPUTED_PRODUCTS[experts]
        module.figures(families.samples([(5, [6, 3]), (2, [4])])).sum().backward()
        gradients.append([weight.grad for weight in module.parameters() if weight.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    torch.testing.assert_close(gradients[1], gradients[0])

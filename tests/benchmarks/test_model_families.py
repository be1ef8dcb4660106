"""Every model family that transformers can generate text with is exact in every role, or refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import model_families
import tiny_families

from strop.errors import ModelError

REPRESENTATIVE = {
    "llama": dict.fromkeys(model_families.COLUMNS, "exact"),
    "granite": dict.fromkeys(model_families.COLUMNS, "exact"),  # scaled logits, no class for critics
    "lfm2": {"padded": "exact", "packed": "conv", "hf rollout": "conv", "critic": "exact"},
    "llama4_text": {"padded": "exact", "packed": "chunked", "hf rollout": "chunked", "critic": "exact"},
    "falcon, alibi": dict.fromkeys(model_families.COLUMNS, "alibi=True is not supported"),
    "mllama": {"padded": "exact", "critic": "exact"},  # a text model in the files of one with images
    "recurrent_gemma": {"padded": "its passes depend on padding", "critic": "its passes depend on padding"},
    "xlnet": {"padded": "no causal model", "critic": "score"},
}


@pytest.mark.fast("llama", "falcon, alibi", "xlnet")
@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_a_family_is_exact_or_refused_with_the_reason(family):
    (found,) = model_families.run([family])
    assert not found.wrong
    for column, expected in REPRESENTATIVE[family].items():
        verdict = found.verdicts[column]
        assert verdict == "exact" if expected == "exact" else expected in verdict


CHECKPOINTED = {
    "qwen3": {},
    "gpt_oss": {},  # adds a bias in place to products of experts
    # writes into a product through a view that torch does not see
    "gemma3n_text": {
        **{"num_hidden_layers": 2, "intermediate_size": [64, 64], "activation_sparsity_pattern": [0.5, 0.0]},
        **{"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    },
    "granitemoehybrid": {},
}


@pytest.mark.parametrize("family", CHECKPOINTED)
def test_gradients_with_checkpointing_are_those_without(family, tmp_path):
    """``test_every_family_is_exact_or_refused`` compares those of all families."""
    built = model_families.Family(family, tmp_path, **CHECKPOINTED[family])
    assert built.checkpointing() == "exact"


def test_a_family_that_cannot_be_checkpointed_is_refused_by_the_key(tmp_path):
    built = model_families.Family("ctrl", tmp_path)
    with pytest.raises(ModelError, match=r"model\.enable_gradient_checkpointing: set it to False: CTRLLM"):
        built.checkpointing()


@pytest.mark.slow
@pytest.mark.parametrize("start", range(8))
def test_every_family_is_exact_or_refused(start):
    names = tiny_families.families()[start::8]
    wrong = {found.family: found.wrong for found in model_families.run(names) if found.wrong}
    assert not wrong


def test_a_wrong_model_is_found(monkeypatch):
    """Without this the comparison might hold whatever the passes compute."""
    from strop.models.policy import PolicyModel

    forward = PolicyModel.forward
    monkeypatch.setattr(
        PolicyModel,
        "forward",
        lambda self, batch, **options: {
            name: output + 2e-4 * torch.ones_like(output)
            for name, output in forward(self, batch, **options).items()
        },
    )
    (found,) = model_families.run(["llama"])
    assert set(found.wrong) >= {"padded", "packed"}

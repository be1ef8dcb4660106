"""The highest probability that a frozen final norm and output layer allow."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from strop.models.frozen_head import frozen_head

HIDDEN, WORDS = 16, 24


def save_model(folder, kind, *, scale: float, **config):
    """A model whose output layer has rows of independent normal numbers of this size."""
    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(kind(**{**shape, **config}))
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, scale)
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_f" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model


LLAMA = {"intermediate_size": 32, "tie_word_embeddings": False}
KINDS = {
    "llama": (transformers.LlamaConfig, LLAMA),
    "tied": (transformers.LlamaConfig, {**LLAMA, "tie_word_embeddings": True}),
    "gemma": (transformers.Gemma2Config, {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}),
    "gpt2": (transformers.GPT2Config, {"n_embd": HIDDEN, "n_layer": 1, "n_head": 2}),
    # norms that center, of classes other than torch's
    "cohere": (transformers.CohereConfig, {"intermediate_size": 32, "logit_scale": 1.0}),
    "olmo": (transformers.OlmoConfig, {"intermediate_size": 32}),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_probability_is_about_the_best_that_any_hidden_state_gives(tmp_path, name):
    """The best is found by gradient ascent on the input of the model's own norm."""
    kind, config = KINDS[name]
    model = save_model(tmp_path, kind, scale=0.2, **config)
    ids = [3, 3, 5, 7]
    found, layer = frozen_head(tmp_path, ids, ())
    decoder = model.base_model
    norm = decoder.ln_f if name == "gpt2" else decoder.norm
    states = torch.randn(4, HIDDEN, requires_grad=True)
    optimizer = torch.optim.Adam([states], lr=0.05)
    for _ in range(500):
        logits = model.get_output_embeddings()(norm(states))
        if cap := getattr(model.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        best = logits.log_softmax(-1)[range(4), ids]
        optimizer.zero_grad()
        (-best.sum()).backward()
        optimizer.step()
    best = best.exp().median().item()
    assert 0.75 * best < found <= best + 1e-3
    assert layer == {"llama": "lm_head", "olmo": "lm_head", "gpt2": "wte"}.get(name, "embed_tokens")


def test_it_falls_with_the_size_of_the_rows(tmp_path):
    kind, config = KINDS["llama"]
    values = []
    for scale in (1.0, 0.1, 0.01):
        save_model(tmp_path / str(scale), kind, scale=scale, **config)
        values.append(frozen_head(tmp_path / str(scale), range(WORDS), ())[0])
    assert values[0] > 0.99
    # logits of at most sqrt(H) x the norm of a row: 0.01 x 4 x 4 = 0.16
    assert values[2] == pytest.approx(1 / WORDS, rel=math.exp(0.3) - 1)
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("name", "whole", "looks"),
    [
        ("llama", ["lm_head"], False),
        ("llama", ["embed_tokens", "norm"], True),
        ("tied", ["embed_tokens"], False),
        ("tied", ["lm_head"], False),
    ],
)
def test_an_output_layer_that_is_trained_is_not_looked_at(tmp_path, name, whole, looks):
    kind, config = KINDS[name]
    save_model(tmp_path, kind, scale=0.1, **config)
    assert (frozen_head(tmp_path, [1], whole) is not None) == looks

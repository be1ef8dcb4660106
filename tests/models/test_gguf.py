"""A GGUF file loads as an ordinary float32 model, with the weights that it holds."""

from __future__ import annotations

import families
import gguf
import numpy as np
import pytest
import torch

from strop.config.batch_plan import BatchPlan
from strop.config.load import load_config
from strop.config.memory.facts import read_model_facts
from strop.config.memory.forecast import forecast
from strop.models.loader import load_causal_lm, load_scorer

HIDDEN, HEADS, LAYERS, INNER, VOCABULARY = 32, 4, 2, 64, 19
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@pytest.fixture(scope="module")
def original():
    sizes = {"num_key_value_heads": HEADS, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    return families.model("Llama", tie_word_embeddings=True, **sizes).eval()


def _as_gguf_stores_it(name: str, weight: np.ndarray) -> np.ndarray:
    """Interleave, as llama.cpp does, the two halves of each head's rotary dimensions in queries and keys."""
    if name not in ("attn_q", "attn_k"):
        return weight
    return weight.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def file(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    state = original.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(LAYERS):
        for short, name in NAMES.items():
            weight = state[f"model.layers.{layer}.{name}.weight"].numpy()
            writer.add_tensor(f"blk.{layer}.{short}.weight", _as_gguf_stores_it(short, weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("whole_folder", [False, True])
def test_logits_are_those_of_the_model_that_was_written(original, file, whole_folder):
    loaded = load_causal_lm(file.parent if whole_folder else file).eval()
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    ids = torch.arange(10)[None] % VOCABULARY
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)


def test_it_trains_and_saves_as_a_hugging_face_folder(file, tmp_path):
    loaded = load_causal_lm(file)
    loaded(torch.arange(5)[None]).logits.sum().backward()
    assert loaded.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    loaded.save_pretrained(tmp_path)
    again = load_causal_lm(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))


def test_a_critic_starts_from_it_with_a_fresh_head(file):
    assert load_scorer(file, fresh_head_seed=1).score.weight.shape == (1, HIDDEN)


def test_its_sizes_are_read_from_its_header(original, file, tmp_path):
    facts = read_model_facts(str(file.parent))
    assert facts == read_model_facts(str(file))
    assert facts.parameters == sum(weight.numel() for weight in original.parameters())
    sizes = (facts.layers, facts.hidden, facts.vocabulary, facts.heads, facts.kv_width, facts.context)
    assert sizes == (LAYERS, HIDDEN, VOCABULARY, HEADS, HIDDEN, 64)
    config = load_config([f"actor_rollout_ref.model.path={file}", "data.train_files=train.parquet"])
    assert forecast(config, BatchPlan.from_config(config)).peak is not None
    for number, content in enumerate((b"", b"GGUF", file.read_bytes()[:500], b"\xff" * 500)):
        (broken := tmp_path / f"{number}.gguf").write_bytes(content)
        assert read_model_facts(str(broken)) is None

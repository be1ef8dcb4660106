"""The warning of an output layer under which adapters cannot learn, at the start of runs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from strop.models.loader import load_tokenizer
from strop.trainer.frozen_head import first_tokens, warn_of_frozen_head

import tiny_model
from messages import mentions


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model whose tied output layer is near its initialisation, and one whose layer is not."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_model.build_tokenizer()
    for name, size in (("new", 0.02), ("trained", 1.0)):
        model = tiny_model.build_model(tokenizer, hidden=32)
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(0, size)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def warned(folder, caplog, **keys) -> list[str]:
    caplog.clear()
    model = SimpleNamespace(
        **{
            "path": str(folder), "lora_rank": 8, "lora_adapter_path": None, "modules_to_save": (),
            "trust_remote_code": False, "override_config": {}, **keys,
        }
    )  # fmt: skip
    rows = [{"input_ids": torch.tensor([3, 4, 5]), "response": torch.tensor([6, 1])}] * 3
    with caplog.at_level(logging.WARNING):
        warn_of_frozen_head("model", model, load_tokenizer(folder), rows, SimpleNamespace(cache_dir=None))
    return [record.getMessage() for record in caplog.records]


def test_an_output_layer_near_its_initialisation_is_named_with_the_remedy(folders, caplog):
    (line,) = warned(folders / "new", caplog)
    assert mentions(line, "model.lora_rank=8", "model.path=", "model.modules_to_save=[embed_tokens]")
    for quiet in ({"lora_rank": 0}, {"modules_to_save": ("embed_tokens",)}, {"lora_adapter_path": "there"}):
        assert warned(folders / "new", caplog, **quiet) == []
    assert warned(folders / "trained", caplog) == []


def test_a_model_whose_weights_cannot_be_read_alone_is_left_to_the_worker(caplog, tmp_path):
    """Its router's buffer is in a file of torch's, which only transformers reads."""
    tokenizer = tiny_model.build_tokenizer()
    shape = {"hidden_size": 16, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 0}
    config = Glm4MoeConfig(vocab_size=len(tokenizer), **shape, **heads, **experts)
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert warned(tmp_path, caplog) == []


def test_tokens_are_of_the_first_prompts_and_answers(folders):
    tokenizer = load_tokenizer(folders / "new")
    prompt, answer = torch.arange(200) % 10 + 3, tokenizer.encode("12", add_special_tokens=False)
    rows = [{"input_ids": prompt, "reward_model": {"style": "rule", "ground_truth": "12"}}] * 4
    found = first_tokens(rows, tokenizer)
    assert len(found) == 256
    assert found[: 256 - 8] == [*prompt.tolist(), *prompt.tolist()][: 256 - 8]
    assert found[-8:] == answer * 4
    for other in ({"reward_model": {"ground_truth": {"a": 1}}}, {"response": "text", "chosen": None}, {}):
        assert first_tokens([{"input_ids": prompt, **other}], tokenizer) == prompt.tolist()
    chosen = first_tokens([{"input_ids": prompt[:2], "chosen": torch.tensor([7])}], tokenizer)
    assert chosen == [*prompt[:2].tolist(), 7]

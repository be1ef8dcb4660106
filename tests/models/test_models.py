from __future__ import annotations

import json

import families
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.config.memory.facts import facts_of_loaded, read_model_facts
from strop.errors import ModelError
from strop.models.deferred import defer_causal_lm, defer_scorer
from strop.models.folder import end_token_ids, generation_config_of, load_model_config
from strop.models.loader import (
    hidden_token_ids,
    load_causal_lm,
    load_scorer,
    load_tokenizer,
    locate,
)
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel
from strop.models.source import write_config

import picture_models
import tiny_model
from builders import random_samples
from byte_tokenizer import byte_tokenizer
from messages import naming


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


OWN_LOGITS = {  # families whose logits are not simply the output layer's
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 2.0},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 4.0},
    "Mistral": {},
}


@pytest.mark.parametrize("family", OWN_LOGITS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_those_of_the_models_own_logits(family, temperature):
    model = families.model(family, **OWN_LOGITS[family]).eval()
    samples = random_samples(5)
    columns, mask = samples.batch, samples.batch["response_mask"]
    with torch.no_grad():
        outputs = PolicyModel(model)(columns, temperature=temperature)
        logits = model(
            input_ids=columns["input_ids"],
            attention_mask=columns["attention_mask"],
            position_ids=columns["position_ids"],
        ).logits[:, 5:-1]
    log_softmax = (logits / temperature).log_softmax(-1)
    expected = log_softmax.gather(-1, columns["responses"][..., None])[..., 0] * mask
    torch.testing.assert_close(outputs["log_prob"], expected, atol=1e-5, rtol=1e-5)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1) * mask
    torch.testing.assert_close(outputs["entropy"], entropy, atol=1e-5, rtol=1e-5)


def test_a_family_that_changes_its_logits_in_an_unknown_way_is_refused():
    class Doubled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    with pytest.raises(ModelError, match="logits"):
        PolicyModel(Doubled(families.config("Llama")))


def test_full_kl_is_the_sum_over_the_vocabulary_and_its_gradient_reaches_the_policy_only(folder):
    reference, trained = load_causal_lm(folder), load_causal_lm(folder)
    policy = PolicyModel(trained)
    policy.keep_reference_head()
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    columns = dict(random_samples(4).batch)
    with torch.no_grad():
        columns["ref_hidden"] = PolicyModel(reference)(columns, with_hidden=True)["hidden"]
    found = policy(columns, temperature=0.8, with_full_kl=True)["full_kl"]

    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    p = (trained(**inputs).logits[:, 5:-1] / 0.8).log_softmax(-1)
    q = (reference(**inputs).logits[:, 5:-1] / 0.8).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1) * columns["response_mask"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert found.sum() > 0.01
    found.sum().backward()
    assert all(weight.grad is None for weight in reference.parameters())
    assert trained.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_a_fresh_value_head_has_the_std_of_the_formula_and_depends_on_the_seed_alone(tmp_path):
    wide = tiny_model.save(tmp_path / "wide", hidden=512, layers=1)
    head = load_scorer(wide, fresh_head_seed=3).score
    assert head.bias is None
    assert head.weight.std().item() == pytest.approx(1 / 513**0.5, rel=0.1)
    torch.manual_seed(99)
    assert torch.equal(head.weight, load_scorer(wide, fresh_head_seed=3).score.weight)
    assert not torch.equal(head.weight, load_scorer(wide, fresh_head_seed=4).score.weight)


def test_a_language_model_is_not_taken_for_a_reward_model(folder):
    with pytest.raises(ModelError, match=naming("score")):
        load_scorer(folder, fresh_head_seed=None)


def test_dropout_is_off_and_overrides_are_applied(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=19, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.3, attn_pdrop=0.2, embd_pdrop=0.1
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, override_config={"embd_pdrop": 0.5})
    assert (loaded.config.resid_pdrop, loaded.config.attn_pdrop, loaded.config.embd_pdrop) == (0, 0, 0.5)


def test_a_tokenizer_of_mistral_keeps_its_chat_template(tmp_path):
    """Next to tekken.json transformers takes mistral_common's, if that is installed, as with vLLM."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    written["tokenizer_class"] = "LlamaTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tekken.json").write_text("{}")
    assert load_tokenizer(tmp_path).chat_template == tokenizer.chat_template


def test_sizes_that_differ_from_layer_to_layer_are_read(tmp_path):
    """Gemma 4's layers of full attention have wider heads; transformers refuses to name one width for all."""
    kinds = ["sliding_attention", "full_attention"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    config = transformers.Gemma4TextConfig(
        hidden_size=32, num_hidden_layers=2, layer_types=kinds, vocab_size=19, **heads
    )
    config.save_pretrained(tmp_path)
    loaded = load_model_config(tmp_path)
    assert loaded.per_layer_attributes == {"head_dim"}
    for facts in (facts_of_loaded(loaded), read_model_facts(str(tmp_path))):
        assert (facts.head_size, facts.kv_width, facts.layers) == (16, 32, 2)


def test_an_override_is_laid_over_a_configuration_inside(tmp_path):
    picture_models.make("qwen2_5_vl", tmp_path)
    plain = load_model_config(tmp_path)
    found = load_model_config(tmp_path, override_config={"text_config": {"attention_dropout": 0.1}})
    assert type(found.text_config) is type(plain.text_config)
    assert found.text_config.to_dict() == plain.text_config.to_dict() | {"attention_dropout": 0.1}


def test_an_override_of_the_rope_names_its_base(tmp_path):
    families.model("Llama").save_pretrained(tmp_path)
    yarn = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ModelError, match=naming("override_config.rope_scaling", "'rope_theta': 10000.0")):
        load_model_config(tmp_path, override_config={"rope_scaling": yarn})
    with pytest.raises(
        ModelError, match=naming("override_config.rope_theta", "override_config.rope_parameters")
    ):
        load_model_config(tmp_path, override_config={"rope_theta": 5e5})
    found = load_model_config(tmp_path, override_config={"rope_scaling": {**yarn, "rope_theta": 5e5}})
    assert found.rope_parameters == {**yarn, "rope_theta": 5e5}


def test_weights_are_float32_whatever_the_file_holds(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert {weight.dtype for weight in load_causal_lm(tmp_path).parameters()} == {torch.float32}


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token(folder, tmp_path):
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    load_causal_lm(folder).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == tokenizer.eos_token_id


def test_a_folder_without_a_vocabulary_is_an_error_that_names_it(folder, tmp_path):
    load_causal_lm(folder).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=naming(tmp_path, "tokenizer")):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ModelError, match=naming("'<|endoftext|>'")):
        load_tokenizer(tmp_path)


def test_a_custom_tokenizer_is_loaded_unchanged(tmp_path):
    own = tiny_model.build_tokenizer("ab ")  # AutoTokenizer reads it as a Qwen2Tokenizer, which loses spaces
    own.save_pretrained(tmp_path)  # without a model, too
    assert load_tokenizer(tmp_path).decode(own.encode("a b")) == "a b"
    tiny_model.build_model(own, hidden=32).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("a b") == own.encode("a b")
    assert loaded.decode(loaded.encode("a b")) == "a b"
    assert (loaded.pad_token, loaded.eos_token) == (own.pad_token, own.eos_token)
    assert loaded.chat_template == own.chat_template


def test_every_declared_end_token_counts(folder):
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    model.generation_config.eos_token_id = [1, 7]
    assert end_token_ids(model.generation_config, tokenizer) == [1, 7]


@pytest.mark.parametrize(
    ("written", "override", "expected"), [(7, {}, 7), (7, {"eos_token_id": [5, 6]}, [5, 6]), (None, {}, None)]
)
def test_end_tokens_of_a_configuration_are_those_of_the_model_however_it_is_loaded(
    tmp_path, written, override, expected
):
    """Also where it names none: Llama's class would add 2, which may be any character of a vocabulary."""
    families.model("Llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": written}
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (
        load_causal_lm(tmp_path, override_config=override),
        defer_causal_lm(tmp_path, override_config=override)[0],
    ):
        assert model.generation_config.eos_token_id == expected
        write_config(tmp_path / "out", model, torch.float32)
        exported = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        assert exported.get("eos_token_id") == written
    assert generation_config_of(tmp_path, override).eos_token_id == expected


def test_special_tokens_and_ids_without_a_token_are_hidden_by_decoding(folder):
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    assert hidden_token_ids(model, tokenizer) == [0, 1, 2, 3]
    model.config.vocab_size = len(tokenizer) + 2  # padded, as many vocabularies are
    hidden = hidden_token_ids(model, tokenizer)
    assert hidden == [0, 1, 2, 3, 19, 20]
    texts = [tokenizer.decode([5, token_id, 6], skip_special_tokens=True) for token_id in range(21)]
    nothing = tokenizer.decode([5, 6])
    assert [token_id for token_id, text in enumerate(texts) if text == nothing] == hidden


def test_a_folder_without_a_model_is_an_error_with_what_was_expected(tmp_path):
    with pytest.raises(ModelError, match=naming("config.json", ".gguf")):
        locate(tmp_path)
    with pytest.raises(ModelError, match=naming("no such folder")):
        locate(tmp_path / "missing")


def test_a_damaged_weight_file_is_one_clear_error(folder, tmp_path):
    load_causal_lm(folder).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="load"):
        load_causal_lm(tmp_path)


def test_values_forget_the_mean_score_of_the_reward_model_they_start_from(folder, tmp_path):
    scorer = load_scorer(folder, fresh_head_seed=1)
    scorer.config.strop_reward_mean, scorer.config.strop_reward_std = 3.0, 2.0
    ValueModel(scorer).hugging_face_model.save_pretrained(tmp_path)
    assert "strop_reward" not in (tmp_path / "config.json").read_text()


def test_an_encoder_decoder_model_is_refused_before_it_is_loaded(tmp_path):
    transformers.BartConfig(d_model=8, encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path)
    for load in (load_causal_lm, defer_causal_lm):
        with pytest.raises(ModelError, match=naming("bart", "encoder-decoder")):
            load(tmp_path)


def test_a_configuration_that_transformers_fails_on_is_an_error_with_its_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "hidden_size": 32}')
    with pytest.raises(ModelError, match=naming(tmp_path, "hidden_size * expand")):
        load_causal_lm(tmp_path)


def test_a_critic_of_a_family_without_a_class_starts_from_each_model_of_the_family(tmp_path):
    """Its weights have the names of the language model, and ``score.weight``, in both ways of loading."""
    families.model("Granite").save_pretrained(tmp_path / "language")
    critic = load_scorer(tmp_path / "language", fresh_head_seed=1)
    critic.save_pretrained(tmp_path / "critic")
    stored = load_file(tmp_path / "critic" / "model.safetensors")
    language = load_file(tmp_path / "language" / "model.safetensors")
    assert stored.keys() == {*(name for name in language if name.startswith("model.")), "score.weight"}
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["GraniteForSequenceClassification"]
    for folder, seed in (("language", 1), ("critic", None)):
        deferred, source = defer_scorer(tmp_path / folder, fresh_head_seed=seed)
        assert source.readable
        assert {name for name, _ in deferred.named_parameters()} == stored.keys()
        assert all(torch.equal(weight, stored[name]) for name, weight in source.stream())
    with pytest.raises(ModelError, match=naming("score")):
        load_scorer(tmp_path / "language", fresh_head_seed=None)

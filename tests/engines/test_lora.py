"""LoRA adapters in the torch engine, in one process and sharded; the oracles are transformers and peft."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import lora_jobs as lora
import pytest
import sharded_jobs as jobs
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from strop.checkpoint.export import export
from strop.engines.base import weights_hash
from strop.errors import CheckpointError, ConfigError, ModelError
from strop.models.loader import load_tokenizer
from strop.protocol import DataProto, sequence_columns
from strop.rollout.base import SamplingParams
from strop.rollout.hf import packed_linear
from strop.rollout.hf.engine import HFRollout
from strop.rollout.weights import WeightLedger
from strop.torch_private import multiplies_bfloat16

import tiny_model
from messages import naming
from ranks import Ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
families = importlib.import_module("families")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'"
)

WHOLE = {"modules_to_save": ("embed_tokens", "norm")}
AUTO = {"policy": AutoModelForCausalLM, "value": AutoModelForSequenceClassification}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=64)


@pytest.fixture(scope="module")
def trained(folder):
    engine = lora.build(folder)
    lora.update(engine, "policy")
    return engine


@pytest.fixture(scope="module")
def trained_whole(folder):
    """The same with the embedding, which is the output layer too, and all norms trained whole."""
    engine = lora.build(folder, **WHOLE)
    lora.update(engine, "policy")
    return engine


@pytest.fixture(params=["trained", "trained_whole"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as found:
        yield found


def logits(model):
    ids_BL = jobs.samples().batch["input_ids"][:, -5:]
    with torch.no_grad():
        return model.eval()(ids_BL).logits


@pytest.mark.parametrize("settings", [{}, WHOLE])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_an_adapted_model_begins_as_its_base_bit_for_bit(folder, kind, packed, settings):
    adapted = lora.build(folder, kind, packed=packed, checkpointing=True, **settings)
    base = lora.build(folder, kind, lora=False, trained=False, packed=packed)
    samples = jobs.samples()
    for name, figure in base.infer(samples, lora.MICRO).items():
        assert torch.equal(adapted.infer(samples, lora.MICRO)[name], figure), name
    assert weights_hash(adapted.named_weights()) == weights_hash(base.named_weights())


@pytest.mark.parametrize("settings", [{}, WHOLE])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_only_what_is_trained_moves_and_has_moments(folder, kind, settings):
    engine = lora.build(folder, kind, **settings)
    whole = ("lora_", "score", "embed_tokens", "norm") if settings else ("lora_", "score")
    before = {name: weight.clone() for name, weight in engine.module.named_parameters()}
    lora.update(engine, kind)
    after = dict(engine.module.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if any(part in name for part in whole)}
    assert any("score" in name for name in moved) == (kind == "value")
    trained = sum(after[name].numel() for name in moved)
    states = engine._optimizer.state.values()
    moments = sum(state[k].nbytes for state in states for k in ("exp_avg", "exp_avg_sq"))
    assert moments == 8 * trained


def test_with_adapters_off_it_is_the_base_and_afterwards_itself_again(folder, either):
    base, samples = lora.build(folder, lora=False, trained=False), jobs.samples()
    now, weights = either.infer(samples, lora.MICRO)["log_prob"], weights_hash(either.named_weights())
    expected = base.infer(samples, lora.MICRO)["log_prob"]
    with either.base_model():
        assert torch.equal(either.infer(samples, lora.MICRO)["log_prob"], expected)
        assert weights_hash(either.named_weights()) == weights_hash(base.named_weights())
    assert torch.equal(either.infer(samples, lora.MICRO)["log_prob"], now)
    assert weights_hash(either.named_weights()) == weights
    assert (now - expected).abs().max() > 1e-3
    assert all(weight.requires_grad for weight in either.module.trainable())


def test_weights_are_sent_merged_under_the_names_and_shapes_of_the_base(folder, either):
    shapes = {
        name: weight.shape for name, weight in AUTO["policy"].from_pretrained(folder).named_parameters()
    }
    ledger = WeightLedger(shapes)
    ledger.begin()
    exact = dict(either.named_weights())
    for name, weight in either.named_weights(dtype=torch.bfloat16):
        ledger.take(name, weight)
        assert torch.equal(weight, exact[name].bfloat16()), name  # merged in float32, and rounded once
    ledger.end()


def test_generation_runs_on_the_adapted_module(either):
    HFRollout(either.module.hugging_face_model, pad_token_id=0, eos_token_ids=[1])  # checks its decoding


@pytest.mark.skipif(not multiplies_bfloat16(), reason="a CPU without products in bfloat16")
def test_layers_of_one_input_share_a_product_in_any_dtype(folder, monkeypatch):
    smallest = dict.fromkeys((torch.float32, torch.bfloat16), 1)
    monkeypatch.setattr(packed_linear, "_SMALLEST", smallest)
    product, products = packed_linear.blocked_linear, []
    monkeypatch.setattr(packed_linear, "blocked_linear", lambda *x: products.append(x) or product(*x))
    ids, counts = torch.tensor([[3, 4, 5]]), []
    for dtype in smallest:
        model = lora.build(folder).module.hugging_face_model
        rollout = HFRollout(model, pad_token_id=0, eos_token_ids=[1], compute_dtype=dtype)
        prompts = DataProto(sequence_columns(ids, torch.ones_like(ids)))
        rollout.generate(prompts, SamplingParams(max_tokens=9, do_sample=False, ignore_eos=True))
        counts.append(len(products))
    assert counts[1] == 2 * counts[0]


@pytest.mark.fast("policy-settings1", "value-settings0")
@pytest.mark.parametrize(
    "settings", [{}, WHOLE, {"modules_to_save": ("head", "mlp"), "exclude_modules": ".*q_proj"}]
)
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_exports_are_what_transformers_and_peft_load(folder, tmp_path, kind, settings):
    if kind == "value" and "head" in settings.get("modules_to_save", ()):
        settings = {"modules_to_save": ("score", "mlp"), "exclude_modules": ["q_proj"]}
    lora.save_everything(folder, tmp_path, kind, **settings)
    engine = lora.build(folder, kind, **settings)
    engine.load(tmp_path / "state")
    expected = logits(engine.module.hugging_face_model)
    options = {"num_labels": 1} if kind == "value" else {}
    by_peft = AUTO[kind].from_pretrained(tmp_path / "adapter", **options)
    assert torch.allclose(logits(by_peft), expected, atol=1e-6)
    base = AUTO[kind].from_pretrained(folder, **options)
    by_peft = importlib.import_module("peft").PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(logits(by_peft), expected, atol=1e-6)
    by_peft = by_peft.merge_and_unload()
    assert (logits(by_peft) - expected).abs().max() < 1e-5
    assert kind == "value" or by_peft.lm_head.weight is by_peft.model.embed_tokens.weight
    merged = AUTO[kind].from_pretrained(tmp_path / "merged")
    assert (logits(merged) - expected).abs().max() < 1e-5
    whole = export(tmp_path / "adapter", tmp_path / "by command", merge=True)
    again = dict(AUTO[kind].from_pretrained(whole).named_parameters())
    for name, weight in merged.named_parameters():
        assert torch.equal(again[name], weight), name
    assert json.loads((whole / "config.json").read_text())["architectures"] == [type(merged).__name__]
    load_tokenizer(whole)


@pytest.mark.parametrize("settings", [{}, WHOLE])
def test_files_hold_what_is_trained_and_little_else(tmp_path, settings):
    folder = tiny_model.save(tmp_path / "model", hidden=128)
    engine = lora.build(folder, rank=8, **settings)
    trained = sum(weight.numel() for weight in engine.module.trainable())
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "adapter", load_tokenizer(folder))
    state = sum(file.stat().st_size for file in (tmp_path / "state").iterdir())
    assert 12 * trained < state <= 1.1 * 12 * trained
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size <= 1.1 * 4 * trained


def test_an_adapter_of_a_folder_is_trained_further(folder, either, tmp_path):
    either.export(tmp_path, load_tokenizer(folder))
    again = lora.build(folder, rank=0, folder=tmp_path)
    assert weights_hash(again.named_weights()) == weights_hash(either.named_weights())
    names = [[name for name, _ in engine.module.saved_parameters()] for engine in (again, either)]
    assert names[0] == names[1]
    base = lora.build(folder, lora=False, trained=False)
    with again.base_model():
        assert weights_hash(again.named_weights()) == weights_hash(base.named_weights())
    assert weights_hash(again.named_weights()) == weights_hash(either.named_weights())
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as tensors:
        assert all(name.startswith("base_model.model.") for name in tensors.keys())  # noqa: SIM118
    with pytest.raises(ConfigError, match=naming("lora_rank=8", "rank 4")):
        lora.build(folder, rank=8, folder=tmp_path)


def test_what_cannot_be_adapted_is_refused_by_name(folder, tmp_path, trained):
    for modules in ("all", ["nonesuch"], ["lm_head"], ["embed_tokens"]):
        with pytest.raises(ConfigError, match=naming("target_modules")):
            lora.build(folder, target_modules=modules)
    for name in ("nonesuch", "rotary_emb"):
        with pytest.raises(ConfigError, match=naming("modules_to_save", name)):
            lora.build(folder, modules_to_save=("norm", name))
    with pytest.raises(ConfigError, match=naming("score")):
        lora.build(folder, "value", target_modules=["score", "q_proj"])
    trained.export(tmp_path / "adapter", load_tokenizer(folder))
    other = tiny_model.save(tmp_path / "other", hidden=32)
    with pytest.raises(ModelError, match=naming("lora_adapter_path", "lora_A")):
        lora.build(other, rank=0, folder=tmp_path / "adapter")
    with pytest.raises(ModelError, match=naming("LoRA adapter", str(folder), "lora_adapter_path", "--merge")):
        lora.build(tmp_path / "adapter")


def test_an_embedding_that_was_trained_apart_from_its_output_layer_is_refused(
    folder, trained_whole, tmp_path
):
    """peft's default; the model has one weight for both."""
    trained_whole.export(tmp_path, load_tokenizer(folder))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is True
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "ensure_weight_tying": False}))
    with pytest.raises(ModelError, match=naming("lora_adapter_path", "ensure_weight_tying", "apart")):
        lora.build(folder, rank=0, folder=tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("init_lora_weights", "olora"), ("layer_replication", [[0, 2], [1, 2]])]
)
def test_an_adapter_that_changes_its_base_is_refused(folder, trained, tmp_path, key, value):
    trained.export(tmp_path, load_tokenizer(folder))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=naming("lora_adapter_path", key, "merge_and_unload")):
        lora.build(folder, rank=0, folder=tmp_path)


def test_experts_are_named_and_their_attention_can_be_adapted(tmp_path):
    tiny_model.save(tmp_path, hidden=32)
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    families.model("Qwen3Moe", **extra).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=naming("target_modules", "experts", "[q_proj,")):
        lora.build(tmp_path)
    engine, base = lora.build(tmp_path, target_modules=["q_proj", "v_proj"]), lora.build(tmp_path, lora=False)
    infer = [each.infer(jobs.samples(), lora.MICRO)["log_prob"] for each in (engine, base)]
    assert torch.equal(*infer)
    lora.update(engine, "policy")
    engine.export(tmp_path / "adapter", load_tokenizer(tmp_path))
    export(tmp_path / "adapter", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(engine.module.hugging_face_model), atol=1e-5, rtol=0)


def test_a_state_of_adapters_on_other_modules_is_refused(folder, trained, tmp_path):
    trained.save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="adapters"):
        lora.build(folder, rank=8).load(tmp_path / "state")
    q, k = (lora.build(folder, target_modules=[name]) for name in ("q_proj", "o_proj"))
    q.save(tmp_path / "q")
    with pytest.raises(CheckpointError, match="other modules"):
        k.load(tmp_path / "q")


@pytest.mark.slow
@pytest.mark.parametrize(("lora_on", "merged"), [(False, False), (True, False), (True, True)])
def test_an_export_that_rank_zero_cannot_write_keeps_no_other_rank_waiting(
    folder, ranks, tmp_path, lora_on, merged
):
    out = tmp_path / "file"
    first, second = ranks.run(2, partial(lora.export_to_a_file, lora=lora_on, merged=merged), folder, out)
    assert first == second
    assert str(out) in first[0]
    assert not first[1]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [{}, WHOLE])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_two_ranks_are_one(folder, ranks, tmp_path, kind, whole):
    for settings in ({"packed": True, "checkpointing": True}, {}):
        settings = {**settings, **whole}
        start, end, base = lora.train(folder, kind, settings)
        for found in ranks.run(2, lora.train, folder, kind, settings):
            for expected, weights in zip((start, end, base), found, strict=True):
                assert expected.keys() == weights.keys()
                for name, weight in expected.items():
                    torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)
            assert all(torch.equal(found[0][name], weight) for name, weight in start.items())
    by_two, _ = ranks.run(2, partial(lora.save_everything, **whole), folder, tmp_path / "2", kind)
    assert ranks.run(2, partial(lora.resume, **whole), folder, tmp_path / "2", kind) == [by_two, by_two]
    by_one = lora.save_everything(folder, tmp_path / "1", kind, **whole)
    assert lora.resume(folder, tmp_path / "1", kind, **whole) == by_one
    assert lora.build(folder, kind, trained=False, **whole).load(tmp_path / "2" / "state") is None
    for export_of in ("adapter", "merged"):
        files = [
            tmp_path / n / export_of / f
            for n in "12"
            for f in ("adapter_model.safetensors", "model.safetensors")
        ]
        first, second = [file for file in files if file.exists()]
        with safe_open(first, framework="pt") as ours, safe_open(second, framework="pt") as theirs:
            assert set(ours.keys()) == set(theirs.keys())
            for name in ours.keys():  # noqa: SIM118
                torch.testing.assert_close(ours.get_tensor(name), theirs.get_tensor(name), atol=1e-5, rtol=0)

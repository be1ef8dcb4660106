"""The memory of the machine, and forecasts beside it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from strop.config.batch_plan import BatchPlan
from strop.config.checks import memory
from strop.config.checks.check import check
from strop.config.load import load_config, load_tree
from strop.config.machine import _group_limits, machine_memory
from strop.config.memory.facts import ModelFacts, _encoder, read_model_facts
from strop.config.memory.forecast import forecast, supervised_forecast
from strop.config.memory.shapes import PictureBytes, encoder
from strop.config.trees import DPO, REWARD_MODELLING, SFT
from strop.rollout.hf.kind import samples_at_once

from messages import mentions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50, num_key_value_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture
def installed(monkeypatch):
    """Return a function that sets the memory of this machine."""
    return lambda size: monkeypatch.setattr("strop.config.machine.machine_memory", lambda: size)


def settings(model, *overrides):
    return [
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu",
        "data.train_files=a", "data.val_files=b", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8", *overrides,
    ]  # fmt: skip


def memory_lines(lines):
    return [line for line in lines if line.startswith("memory:")]


def test_a_warning_above_the_memory_and_an_error_above_twice_it(model, installed):
    config = load_config(settings(model, "actor_rollout_ref.rollout.micro_batch_size_per_gpu=8192"))
    need = forecast(config, BatchPlan.from_config(config)).peak
    for size, n_warnings, n_errors in [
        (need, 0, 0),
        (need - 1, 1, 0),
        (need // 2, 1, 0),
        (need // 2 - 1, 0, 1),
    ]:
        installed(size)
        result = check(config)
        assert (len(memory_lines(result.warnings)), len(memory_lines(result.errors))) == (
            n_warnings,
            n_errors,
        )
    assert mentions(
        memory_lines(result.errors)[0], "generation: weights' copy, KV cache", "micro_batch_size_per_gpu"
    )


def test_processes_on_this_machine_share_its_memory(model, installed):
    small = (
        *("data.train_batch_size=256", "actor_rollout_ref.rollout.micro_batch_size_per_gpu=8"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    )
    one = load_config(settings(model, *small, "trainer.n_gpus_per_node=1"))
    need = forecast(one, BatchPlan.from_config(one)).peak
    installed(need * 2)
    assert not memory_lines(check(one).warnings)
    eight = check(load_config(settings(model, *small, "trainer.n_gpus_per_node=8")))
    assert mentions(memory_lines(eight.warnings + eight.errors)[0], "8 processes")
    pools = ("trainer.resource_pools={a: [1], b: [3]}", "trainer.placement={RefPolicy: b}")
    apart = check(load_config(settings(model, *small, *pools)))  # the reference alone needs little
    assert not memory_lines(apart.warnings + apart.errors)


def test_samples_generated_at_once_fit_the_memory_beside_the_models(model, installed):
    config = load_config(settings(model))
    facts = read_model_facts(str(model))
    held = 20 * facts.parameters  # trained, and the reference
    cache = 1024 * 2 * 2 * 8 * 4  # tokens, keys and values, layers, width, bytes
    counts = []
    for size in (16 << 20, 64 << 20, 256 << 20):
        installed(size)
        counts.append(samples_at_once(config, facts))
        assert 1 <= counts[-1] * cache < size - held
        assert forecast(config, BatchPlan.from_config(config)).peak < size + (10 << 20)
    assert counts[0] * 16 < counts[2] * 1.2
    assert counts[2] > 256 * 2**20 / cache / 4
    installed(1)
    assert samples_at_once(config, facts) == 1
    chosen = load_config(settings(model, "actor_rollout_ref.rollout.micro_batch_size_per_gpu=7"))
    assert samples_at_once(chosen, facts) == 7


def test_no_memory_of_the_driver_is_compared_with_that_of_gpus_elsewhere(model, installed, monkeypatch):
    monkeypatch.setattr("strop.config.machine.gpu_memory", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cluster = ("trainer.device=cuda", "trainer.worker_group=ray", "trainer.n_gpus_per_node=8")
    config = load_config([*settings(model), *cluster])
    counts = []
    for size in (1 << 20, 1 << 40):
        installed(size)
        result = check(config)
        assert not memory_lines(result.warnings + result.errors)
        counts.append(samples_at_once(config, read_model_facts(str(model))))
    assert counts[0] == counts[1] > 1


def test_the_defaults_for_pairs_fit_16_gb_at_half_a_billion_parameters(monkeypatch, installed):
    installed(16_000_000_000)
    qwen = ModelFacts(494_032_768, 24, 896, 151_936, 14, 2, 128, 32_768)
    for module in ("forecast", "choices"):
        monkeypatch.setattr(f"strop.config.memory.{module}.read_model_facts", lambda path: qwen)
    for tree in (REWARD_MODELLING, DPO):
        config = load_tree(tree, ["model.path=m", "data.train_files=a", "trainer.device=cpu"])
        assert supervised_forecast(config).peak < 15e9


@pytest.mark.parametrize(
    ("tree", "sequences", "has_logits"), [(SFT, 8, True), (REWARD_MODELLING, 4, False), (DPO, 4, True)]
)
def test_supervised_runs_are_compared_too(model, installed, tree, sequences, has_logits):
    rows = "update.use_dynamic_bsz=False"
    config = load_tree(tree, [f"model.path={model}", "data.train_files=a", "trainer.device=cpu", rows])
    parameters = read_model_facts(str(model)).parameters
    need = supervised_forecast(config)
    tokens = sequences * 1024
    logits = min(tokens * 50, 1 << 25) * 4 * 3 if has_logits else 0
    assert need.peak == 16 * parameters + tokens * 2 * 16 * 68 + logits
    for size, n_warnings, n_errors in [(need.peak, 0, 0), (need.peak - 1, 1, 0), (need.peak // 2 - 1, 0, 1)]:
        installed(size)
        result = check(config)
        assert (len(memory_lines(result.warnings)), len(memory_lines(result.errors))) == (
            n_warnings,
            n_errors,
        )


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4096", "memory.max": "8192"}, [4096, 8192]),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "512"}, [512]),
        ("0::/elsewhere\n", {"memory.max": "77"}, [77]),  # a container sees its own group at the top
        ("0::/\n3:cpu:/x\n", {}, []),
    ],
)
def test_limits_of_control_groups(tmp_path, membership, limits, expected):
    (tmp_path / "cgroup").write_text(membership)
    for name, text in limits.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert list(_group_limits(tmp_path / "cgroup", tmp_path / "fs")) == expected
    assert machine_memory() > 0


def test_facts_of_a_model_in_the_hubs_cache(model, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(
        "strop.config.memory.facts.try_to_load_from_cache", lambda name, file: str(snapshot / file)
    )
    assert read_model_facts("owner/name") == read_model_facts(str(model))


GB = 10**9
QWEN_7B = ModelFacts(7_615_616_512, 28, 3584, 152_064, 28, 4, 512, 32_768)


@pytest.fixture
def on_gpus(monkeypatch):
    """Return a function that gives a machine GPUs, and returns the lines of a 7B run on them about vLLM."""

    def lines(*options, size=80 * GB, gpus=1):
        monkeypatch.setattr("strop.config.machine.gpu_memory", lambda: size)
        monkeypatch.setattr("strop.config.memory.forecast.read_model_facts", lambda path: QWEN_7B)
        monkeypatch.setattr("strop.config.checks.memory.read_model_facts", lambda path: QWEN_7B)
        monkeypatch.setattr("strop.rollout.vllm.kind.read_model_facts", lambda path: QWEN_7B)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        config = load_config(
            settings(
                "m", "actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda",
                "actor_rollout_ref.rollout.max_num_seqs=256", "algorithm.kl_ctrl.kl_coef=0",
                "actor_rollout_ref.model.compute_dtype=bfloat16", *options,
            )
        )  # fmt: skip
        return list(memory.share(config, BatchPlan.from_config(config)))

    return lines


UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


def test_vllms_share_of_a_gpu_and_what_the_trainer_keeps_there_fit_together(on_gpus):
    # 16 bytes a parameter over 8 ranks: 15.2 of 80 GB
    assert on_gpus(f"{UTILIZATION}=0.8", gpus=8) == []
    ((level, text),) = on_gpus(f"{UTILIZATION}=0.85", gpus=8)
    assert level == "warning"
    assert mentions(text, f"{UTILIZATION}=0.85 is 63.3 GiB", "14.2 GiB", "actor: weights", "0.8 at most")
    assert "CUDA graphs" in text
    eager = "actor_rollout_ref.rollout.enforce_eager=True"
    assert "CUDA graphs" not in on_gpus(f"{UTILIZATION}=0.85", eager, gpus=8)[0].text
    # kept during the update, which takes some
    awake = "actor_rollout_ref.rollout.free_cache_engine=False"
    ((_, text),) = on_gpus(f"{UTILIZATION}=0.8", awake, gpus=8)
    assert mentions(text, "actor update: activations", "actor: weights")
    assert on_gpus(f"{UTILIZATION}=0.3", awake, "actor_rollout_ref.model.enable_gradient_checkpointing=True",
                   gpus=8) == []  # fmt: skip


def test_a_uses_gpus_of_its_own_shares_them_with_nobody(on_gpus):
    apart = (
        "actor_rollout_ref.hybrid_engine=False", "trainer.resource_pools={learner: [4], rollout: [4]}",
        "trainer.placement={Rollout: rollout}",
    )  # fmt: skip
    assert on_gpus(f"{UTILIZATION}=0.95", *apart, gpus=8) == []


def test_vllm_keeps_its_memory_while_others_in_its_pool_are_updated_if_it_generates_ahead(on_gpus):
    """Of critic and rollout on 4 GPUs, the critic's update is counted beside vLLM."""
    shared = (
        "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.hybrid_engine=False", "trainer.resource_pools={learner: [4], rollout: [4]}",
        "trainer.placement={Rollout: rollout, Critic: rollout}",
    )  # fmt: skip
    # of the critic 16 bytes a parameter over 4 ranks: 30.5 of 80 GB
    assert on_gpus(f"{UTILIZATION}=0.6", *shared, gpus=8) == []
    ((level, text),) = on_gpus(f"{UTILIZATION}=0.6", *shared, "trainer.async_steps=1", gpus=8)
    assert level == "warning"
    assert mentions(text, "critic: weights", "critic update: activations")


def test_vllms_share_holds_what_vllm_needs(on_gpus):
    """A 7B model in bfloat16 has 15.2 GB: 7.6 on each of two ranks."""
    alone = ("trainer.val_only=False", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    ((level, text),) = on_gpus(f"{UTILIZATION}=0.15", *alone, gpus=8)  # 12 GB
    assert level == "error"
    assert mentions(text, "11.2 GiB", "weights 14.2 GiB", "max_num_batched_tokens=8192")
    # 1.0 GB for 8,192 tokens and 0.5 GB for 256 x 152,064 logits, three times in float32
    ((level, text),) = on_gpus(f"{UTILIZATION}=0.2", *alone, gpus=8)  # 16 GB
    assert level == "warning"
    assert mentions(text, "activations of 8,192 tokens 0.9 GiB", "logits of 256 sequences 0.4 GiB")
    fewer = "actor_rollout_ref.rollout.max_num_batched_tokens=256"
    assert on_gpus(f"{UTILIZATION}=0.2", *alone, fewer, gpus=8) == []
    assert on_gpus(f"{UTILIZATION}=0.15", gpus=8) == []  # two ranks each


def test_hidden_states_of_a_teacher_are_counted_where_the_samples_are(model, monkeypatch):
    def checked(*keys):
        config = load_config(settings(model, f"teacher.model.path={model}", *keys))
        need = forecast(config, BatchPlan.from_config(config)).resident
        assert need["teacher: weights"] > 0
        layer = need.get("teacher: output layer beside the actor")
        assert layer == (None if {"teacher.top_k=3", "teacher.kl=sampled"} & {*keys} else 50 * 16 * 4)
        return need.get("samples: hidden states, likeliest words"), check(config).errors

    large = ("data.train_batch_size=1024", "data.max_response_length=1000")
    tokens = 1024 * 8 * 1000
    assert checked(*large)[0] == tokens * 16 * 4
    assert checked(*large, "teacher.top_k=3")[0] == tokens * (3 + 4) * 4
    assert checked(*large, "teacher.kl=sampled")[0] is None
    # ids, masks and log-probs take 32 bytes a token, the hidden states of a response 64
    monkeypatch.setattr("strop.config.checks.inputs.machine_memory", lambda: tokens * 90)
    found = [
        any("columns alone" in line for line in checked(*large, *keys)[1])
        for keys in ((), ("teacher.kl=sampled",))
    ]
    assert found == [True, False]


def pictured(model, *overrides):
    """Return the forecasts of a run without pictures, and with one of 24 x 24 patches in each row."""
    pixels = 4 * 576 * 3 * 14 * 14
    config = load_config(
        settings(model, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", *overrides)
    )
    plan, pictures = BatchPlan.from_config(config), PictureBytes(pixels, 300 << 20, 5)
    return pixels, forecast(config, plan), forecast(config, plan, pictures=pictures)


@pytest.mark.parametrize(
    ("key", "layers"),
    [("actor_rollout_ref.model.freeze=[]", 4), ("actor_rollout_ref.model.freeze=[encoder]", 1)],
)
def test_the_forecast_has_the_pictures_of_a_micro_batch(model, tmp_path, key, layers):
    vision = {"num_hidden_layers": 4, "hidden_size": 256, "patch_size": 14}
    text = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "vision_config": vision}))
    off = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
    pixels, before, after = pictured(tmp_path, key, off)
    assert after.resident["pictures: files, processed pixels"] == 5 + (256 << 20)
    name = "actor update: activations, logits"
    # two rows; 68 bytes for each patch, layer and unit
    assert after.phases[name] - before.phases[name] == 2 * pixels + 2 * 576 * layers * 256 * 68
    assert after.phases.keys() == before.phases.keys()


def test_pictures_for_a_model_whose_encoder_is_not_known_have_no_forecast(model):
    _, _, after = pictured(model)
    assert after.phases["actor update: activations, logits"] is None


@pytest.mark.parametrize("kind", ["siglip", "qwen"])
def test_the_activations_of_an_encoder_are_about_what_a_pass_keeps(kind):
    sizes = {"hidden_size": 256, "patch_size": 14, "attn_implementation": "sdpa"}
    if kind == "siglip":
        own = SiglipVisionConfig(
            num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, image_size=336, **sizes
        )
        module, given = SiglipVisionModel(own), (torch.randn(1, 3, 336, 336),)
    else:
        own = Qwen2_5_VLVisionConfig(
            depth=4, num_heads=4, intermediate_size=684, out_hidden_size=512, **sizes
        )
        given = torch.randn(576, 3 * 2 * 14 * 14), torch.tensor([[1, 24, 24]])
        module = Qwen2_5_VisionTransformerPretrainedModel(own)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*given)
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    facts = ModelFacts(1, 1, 1, 1, 1, 1, 1, 1, encoder=_encoder(own.to_dict()))
    off = load_config(settings("m", "actor_rollout_ref.model.enable_gradient_checkpointing=False"))
    pixels = given[0].nbytes
    assert 0.9 < measured / (encoder(facts, pixels, off.actor_rollout_ref.model) - pixels) < 1.6

"""The rollout's keys with vLLM: resolved values and checks."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from strop.config.backends import ROLLOUTS
from strop.config.checks import learning, processes
from strop.config.checks.check import check
from strop.config.checks.keys import check_keys
from strop.config.load import as_config, load_config, to_yaml
from strop.config.memory.facts import ModelFacts
from strop.config.placement import processes_per_node, rollout_in_words, settled
from strop.errors import ConfigError
from strop.rollout.vllm.kind import enforce_eager, extra_sampling, seed_per_sample, tensor_parallel_size

from messages import Message, mentions, naming

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = (f"{ROLLOUT}.name=vllm", "trainer.device=cpu")


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: ModuleSpec(name, None, origin=name) if name == "vllm" else find(name, *more),
    )


def rules(config):
    return ROLLOUTS[config.actor_rollout_ref.rollout.name].rules(config)


def rollout_dtype(config):
    return ROLLOUTS[config.actor_rollout_ref.rollout.name].dtype(config)


def refused(*options):
    return [finding.text for finding in check_keys(load_config(options)) if finding.level == "error"]


def findings(rule, *options):
    return [finding.text for finding in rule(load_config([*VLLM, *options]))]


def test_the_dtype_is_the_trainers_unless_it_is_written():
    assert rollout_dtype(load_config([*VLLM, "actor_rollout_ref.model.compute_dtype=float32"])) == "float32"
    assert rollout_dtype(load_config([*VLLM, f"{ROLLOUT}.dtype=bfloat16"])) == "bfloat16"
    assert rollout_dtype(load_config([*VLLM, f"{ROLLOUT}.dtype=auto"])) == "auto"


PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ((), 1),
        (("trainer.n_gpus_per_node=2",), 1),
        (("trainer.n_gpus_per_node=4", f"{PARALLEL}=2"), 2),
        (("trainer.n_gpus_per_node=4", f"{PARALLEL}=3"), None),
    ],
)
def test_the_tensor_parallel_size_divides_the_ranks(options, size):
    if size is None:
        with pytest.raises(ConfigError, match=naming("=3", "4 ranks")):
            tensor_parallel_size(load_config([*VLLM, *options]))
        assert len(findings(rules, *options)) == 1
    else:
        assert tensor_parallel_size(load_config([*VLLM, *options])) == size


@pytest.mark.parametrize(
    ("parameters", "memory", "size"),
    [
        (7_600_000_000, 80, 1),
        (7_600_000_000, 16, 2),  # 15 GB of weights
        (32_000_000_000, None, 2),  # of 80 GiB, where the driver has no GPU
        (7_600_000_000, None, 1),
        (None, 80, 1),
    ],
)
def test_a_model_that_fits_on_one_gpu_is_not_divided(parameters, memory, size, monkeypatch):
    facts = ModelFacts(parameters, 28, 3584, 152_064, 28, 4, 512, 32_768) if parameters else None
    monkeypatch.setattr("strop.rollout.vllm.kind.read_model_facts", lambda path: facts)
    monkeypatch.setattr("strop.config.machine.gpu_memory", lambda: memory and memory * 2**30)
    options = ("trainer.device=cuda", "trainer.n_gpus_per_node=4", "trainer.worker_group=ray")
    config = load_config([*VLLM, *options, "actor_rollout_ref.model.compute_dtype=bfloat16"])
    assert tensor_parallel_size(config) == size
    assert tensor_parallel_size(load_config([*VLLM, *options, f"{PARALLEL}=4"])) == 4


MIXED = (f"{ROLLOUT}.dtype=bfloat16", "actor_rollout_ref.model.compute_dtype=float32")


@pytest.mark.parametrize(
    ("rule", "options", "parts"),
    [
        (rules, MIXED, ["rollout_is corrects"]),
        (rules, (*MIXED, "actor_rollout_ref.actor.rollout_is=token"), None),
        (rules, (*MIXED, "actor_rollout_ref.actor.use_rollout_log_probs=True"), None),
        (rules, (), None),
        (learning.sampling, (f"{ROLLOUT}.min_p=0.3", f"{ROLLOUT}.stop=[x]"), [f"{ROLLOUT}.min_p"]),
        (learning.sampling, (f"{ROLLOUT}.stop=[x]",), None),
        (
            rules,
            (
                "trainer.async_steps=2",
                f"{ROLLOUT}.stop=[x]",
                f"{ROLLOUT}.bad_words=[y]",
                f"{ROLLOUT}.min_p=1",
            ),
            [f"{ROLLOUT}.bad_words and {ROLLOUT}.stop: ", "trainer.async_steps=1"],
        ),
        (rules, ("trainer.async_steps=1", f"{ROLLOUT}.stop=[x]"), None),
        (rules, ("trainer.async_steps=4", f"{ROLLOUT}.min_tokens=3"), None),
        (rules, (f"{ROLLOUT}.temperature=2.5",), [f"{ROLLOUT}.temperature=2.5", "2 at most"]),
        (rules, (f"{ROLLOUT}.temperature=2.5", f"{ROLLOUT}.do_sample=False"), None),
        (
            rules,
            (f"{ROLLOUT}.val_kwargs.temperature=3", f"{ROLLOUT}.val_kwargs.do_sample=True"),
            [f"{ROLLOUT}.val_kwargs.temperature=3"],
        ),
        (rules, (f"{ROLLOUT}.min_tokens=513", "data.max_response_length=512"), ["min_tokens=513", "512"]),
        (
            rules,
            (f"{ROLLOUT}.max_num_batched_tokens=256", f"{ROLLOUT}.max_num_seqs=512"),
            ["256", "512"],
        ),
    ],
)
def test_doubtful_settings_of_vllm_are_one_finding_each(rule, options, parts):
    assert findings(rule, *options) == ([] if parts is None else [Message(*parts)])


@pytest.mark.parametrize(
    ("gpus", "options", "eager"),
    [
        ("0", ["trainer.device=auto"], False),
        ("0", ["trainer.device=auto", f"{ROLLOUT}.enforce_eager=True"], True),
        ("0", ["trainer.device=cpu"], True),
        ("", ["trainer.device=auto"], True),
        ("", ["trainer.device=auto", f"{ROLLOUT}.enforce_eager=False"], False),
    ],
)
def test_cuda_graphs_are_on_where_there_are_gpus(monkeypatch, gpus, options, eager):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = load_config([f"{ROLLOUT}.name=vllm", *options])
    assert enforce_eager(config) is eager
    assert settled(config).actor_rollout_ref.rollout.enforce_eager is eager


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ((), None),
        ((f"{ROLLOUT}.seed_per_sample=False",), None),
        (("trainer.async_steps=2",), None),
        (("trainer.async_steps=2", f"{ROLLOUT}.seed_per_sample=True"), None),
        (
            ("trainer.async_steps=2", f"{ROLLOUT}.seed_per_sample=False"),
            ["seed_per_sample=False", "async_steps=2", "worker_group=ray"],
        ),
        (
            ("trainer.async_steps=2", f"{ROLLOUT}.seed_per_sample=False", "trainer.worker_group=ray"),
            None,
        ),
        (("trainer.async_steps=2", f"{ROLLOUT}.seed_per_sample=False", f"{ROLLOUT}.name=hf"), None),
    ],
)
def test_one_seed_a_call_is_refused_beside_another_thread(options, parts):
    assert findings(rules, *options) == ([] if parts is None else [Message(*parts)])


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ([], None),
        (["trainer.async_steps=1"], True),
        (["trainer.async_steps=1", "trainer.worker_group=ray"], None),
        (["trainer.async_steps=1", "trainer.val_only=True"], None),
        ([f"{ROLLOUT}.seed_per_sample=False"], False),
    ],
)
def test_samples_have_seeds_where_the_learner_uses_the_same_generators(options, chosen):
    assert seed_per_sample(load_config([f"{ROLLOUT}.name=vllm", *options])) is chosen


@pytest.mark.parametrize(
    ("size", "options", "is_told"),
    [
        (300 * 2**20, [], True),
        (300 * 2**20, ["trainer.device=cpu"], False),
        (300 * 2**20, [f"{ROLLOUT}.name=vllm"], False),
        (1000, [], False),
    ],
)
def test_hf_with_a_large_model_on_a_gpu_is_told_of_vllm(monkeypatch, tmp_path, size, options, is_told):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    told = [Message(f"{ROLLOUT}.name=hf", "GPU", "vllm", "CUDA graphs")] if is_told else []
    defaults = [f"actor_rollout_ref.model.path={tmp_path}", f"{ROLLOUT}.name=hf", "trainer.device=auto"]
    config = load_config([*defaults, *options])
    assert [finding.text for finding in rules(config)] == told


def test_only_what_was_set_is_passed_to_vllm():
    assert extra_sampling(load_config(list(VLLM))) == {}
    options = (f"{ROLLOUT}.min_p=0.1", f"{ROLLOUT}.stop=[stop here]", f"{ROLLOUT}.repetition_penalty=1.2")
    found = extra_sampling(load_config([*VLLM, *options, f"{ROLLOUT}.logit_bias={{5: 1.5}}"]))
    assert found == {"min_p": 0.1, "stop": ["stop here"], "repetition_penalty": 1.2, "logit_bias": {5: 1.5}}


def test_the_file_of_a_run_repeats_it():
    config = load_config(list(VLLM))
    again = as_config(settled(config).model_dump())
    for resolve in (rollout_dtype, enforce_eager, tensor_parallel_size, processes_per_node):
        assert resolve(again) == resolve(config)


@pytest.mark.parametrize(
    ("key", "value"), [("presence_penalty", "1.0"), ("min_tokens", "1"), ("min_p", "1.0"), ("stop", "[x]")]
)
def test_hf_refuses_what_only_vllm_samples(key, value):
    assert Message(f"{ROLLOUT}.{key}=", f"{ROLLOUT}.name=hf", "only vllm") in refused(
        f"{ROLLOUT}.name=hf", f"{ROLLOUT}.{key}={value}"
    )
    assert Message("only vllm") not in refused(f"{ROLLOUT}.name=hf")


@pytest.mark.parametrize(
    ("gpus", "size", "device", "engine"),
    [
        (0, 1000, "auto", "hf"),
        (0, 300 * 2**20, "auto", "hf"),
        (0, 3 * 2**30, "auto", "vllm"),
        (1, 1000, "auto", "vllm"),
        (1, 1000, "cpu", "hf"),
        (0, 1000, "cuda", "vllm"),  # as on a cluster's node without GPUs
    ],
)
def test_small_models_on_a_cpu_are_sampled_without_vllm(monkeypatch, tmp_path, gpus, size, device, engine):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: ModuleSpec(name, None, origin=name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)  # takes no space
    options = [f"actor_rollout_ref.model.path={tmp_path}", f"trainer.device={device}"]
    config = load_config(options)
    assert config.actor_rollout_ref.rollout.name == engine
    assert mentions(rollout_in_words(config), engine, "auto")


def test_a_gguf_model_is_sampled_without_vllm(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: ModuleSpec(name, None, origin=name))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf", "elsewhere/model.gguf"):
        config = load_config([f"actor_rollout_ref.model.path={path}", "trainer.device=cuda"])
        assert mentions(rollout_in_words(config), "hf", "GGUF")
    options = ["actor_rollout_ref.model.path=elsewhere/model.gguf", f"{ROLLOUT}.name=vllm"]
    assert any("reads no GGUF" in line for line in check(load_config(options)).errors)


def test_without_vllm_the_error_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    assert findings(processes.back_ends) == [Message(f"{ROLLOUT}.name=vllm", "vllm is not installed")]


@pytest.mark.parametrize("name", ["null", "auto"])
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_the_engine_is_chosen_once_by_what_is_installed(monkeypatch, tmp_path, engine, name):
    folder = f"trainer.default_local_dir={tmp_path}/run"
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: ModuleSpec(name, None, origin=name) if engine == "vllm" else None,
    )
    config = load_config([f"{ROLLOUT}.name={name}", folder])
    assert config.actor_rollout_ref.rollout.name == engine
    assert mentions(rollout_in_words(config), engine, "auto")
    assert f"{ROLLOUT}.name" not in config.written
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: ModuleSpec(name, None, origin=name) if engine == "hf" else None,
    )
    assert load_config([folder]).actor_rollout_ref.rollout.name == engine
    written = load_config([f"{ROLLOUT}.name=hf", folder])
    assert written.actor_rollout_ref.rollout.name == "hf"
    assert "auto" not in rollout_in_words(written)

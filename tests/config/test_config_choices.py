"""Micro-batches by tokens where no size is written, and the caps that are chosen for them."""

from __future__ import annotations

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from strop.cli.check import tables
from strop.config.batch_plan import MICRO_BATCHES, BatchPlan, MicroBatchSize, resolve_micro_batch
from strop.config.checks.check import check
from strop.config.keys import value_at
from strop.config.load import load_config, load_tree, to_yaml
from strop.config.memory.choices import MOST_ON_A_GPU, MOST_TOKENS
from strop.config.memory.facts import ModelFacts
from strop.config.memory.forecast import forecast
from strop.config.trees import DPO, REWARD_MODELLING, SFT
from strop.trainer.run_folder import RunFolder

from messages import mentions

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
SIZE, CAP = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"
ROW = 1024  # data.max_prompt_length + data.max_response_length
QWEN = ModelFacts(494_032_768, 24, 896, 151_936, 14, 2, 128, 32_768)


@pytest.fixture
def installed(monkeypatch):
    """Return a function that sets the memory of this machine."""
    return lambda size: monkeypatch.setattr("strop.config.machine.machine_memory", lambda: size)


@pytest.fixture
def qwen(monkeypatch):
    """Make every model one of half a billion parameters."""
    for module in ("forecast", "choices"):
        monkeypatch.setattr(f"strop.config.memory.{module}.read_model_facts", lambda path: QWEN)


def sizes(*overrides):
    config = load_config(["trainer.device=cpu", f"{ROLLOUT}.name=hf", *overrides])
    found = {name: resolve_micro_batch(config, name) for name in MICRO_BATCHES}
    return {name: size.max_tokens if size.rows is None else -size.rows for name, size in found.items()}


EVERYWHERE = dict.fromkeys(MICRO_BATCHES, MOST_TOKENS)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ([], {}),
        ([f"{SIZE}=2"], {"actor": 2}),
        ([f"{ACTOR}.ppo_micro_batch_size=6"], {"actor": 6}),
        ([f"{SIZE}=null"], {}),
        ([f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"], {"log_prob": 4}),
        ([f"{REF}.log_prob_micro_batch_size_per_gpu=4"], {"ref": 4}),
        (["critic.ppo_micro_batch_size_per_gpu=4"], {"critic": 4, "values": 4}),
        (["critic.forward_micro_batch_size_per_gpu=4"], {"critic": 8, "values": 4}),
        (["reward_model.micro_batch_size=3"], {"reward_model": 3}),
        # use_dynamic_bsz of the actor decides for all that follow it, as in verl
        (
            [f"{ACTOR}.use_dynamic_bsz=False"],
            {"actor": 8, "log_prob": 16, "ref": 16, "critic": 8, "values": 8, "reward_model": 16},
        ),
        ([f"{ACTOR}.use_dynamic_bsz=True", f"{SIZE}=2", f"{REF}.log_prob_micro_batch_size_per_gpu=4"], {}),
        (["critic.use_dynamic_bsz=False"], {"critic": 8, "values": 8, "reward_model": 16}),
    ],
)
def test_tokens_decide_for_each_pass_unless_rows_are_written_for_it(overrides, rows):
    assert sizes(*overrides) == EVERYWHERE | {name: -number for name, number in rows.items()}


def test_a_gpu_gets_more_tokens_a_pass(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("strop.config.machine.gpu_memory", lambda: 80 << 30)
    on_gpu = dict.fromkeys(MICRO_BATCHES, MOST_ON_A_GPU)
    assert sizes("trainer.device=cuda") == sizes("trainer.device=auto") == on_gpu
    assert sizes() == EVERYWHERE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as on a cluster's node without GPUs
    assert sizes("trainer.device=cuda", "trainer.worker_group=ray") == on_gpu


def test_gpus_of_unknown_size_get_eight_rows_and_reduced_gradients_whatever_the_driver_has(
    monkeypatch, installed, qwen
):
    """As on the head of a cluster, which has none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sync = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
    cluster = ("trainer.device=cuda", "trainer.worker_group=ray", "trainer.n_gpus_per_node=8")
    rows = ("data.max_prompt_length=64", "data.max_response_length=64")
    for gpu, memory, cap, whole in (
        (None, 1 << 30, 8 * 128, False),
        (None, 1 << 40, 8 * 128, False),
        (80 << 30, 1 << 30, MOST_ON_A_GPU, True),
    ):
        monkeypatch.setattr("strop.config.machine.gpu_memory", lambda gpu=gpu: gpu)
        installed(memory)
        assert sizes(*cluster, *rows) == dict.fromkeys(MICRO_BATCHES, cap)
        assert value_at(load_config([*cluster, *rows, f"{ROLLOUT}.name=hf"]), sync) is whole
    monkeypatch.setattr("strop.config.machine.gpu_memory", lambda: None)
    assert sizes(*cluster)["actor"] == MOST_ON_A_GPU  # no more tokens than on known ones
    assert sizes(*cluster, "data.max_response_length=9000")["actor"] == 9000 + 512  # a whole row


def test_a_script_of_verl_that_writes_sizes_gets_them():
    script = [f"{SIZE}=16", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
              f"{REF}.log_prob_micro_batch_size_per_gpu=32", "critic.ppo_micro_batch_size_per_gpu=8",
              "reward_model.micro_batch_size_per_gpu=4", f"{CAP}=16384"]  # fmt: skip
    assert sizes(*script) == {
        "actor": -16, "log_prob": -32, "ref": -32, "critic": -8, "values": -8, "reward_model": -4
    }  # fmt: skip


@pytest.mark.parametrize("tree", [SFT, REWARD_MODELLING, DPO])
def test_supervised_runs_too(tree):
    def update(*overrides):
        return load_tree(tree, ["trainer.device=cpu", *overrides]).update

    assert (update().use_dynamic_bsz, update().max_token_len_per_gpu) == (True, MOST_TOKENS)
    rows = update("update.micro_batch_size_per_gpu=3")
    assert (rows.use_dynamic_bsz, rows.micro_batch_size_per_gpu) == (False, 3)
    assert not update("update.use_dynamic_bsz=False").use_dynamic_bsz
    both = update("update.use_dynamic_bsz=True", "update.micro_batch_size_per_gpu=3")
    assert (both.use_dynamic_bsz, both.max_token_len_per_gpu) == (True, MOST_TOKENS)
    a_row = 40_000 if tree is SFT else 80_000  # two sequences of a pair
    assert update("data.max_response_length=39488").max_token_len_per_gpu == a_row


def test_a_written_cap_rules_and_those_that_follow_it_follow():
    found = sizes(f"{CAP}=2048", "critic.forward_max_token_len_per_gpu=5000")
    of_policy = dict.fromkeys(("actor", "log_prob", "ref"), 2048)
    assert found == EVERYWHERE | of_policy | {"values": 5000, "reward_model": 5000}


def test_the_cap_is_what_fits_beside_the_models_between_one_row_and_the_most(qwen, installed):
    found = []
    for gib in (1, 16, 20, 26, 64, 512):
        installed(gib << 30)
        found.append(sizes("algorithm.adv_estimator=grpo"))
        config = load_config(["trainer.device=cpu", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=hf"])
        memory = forecast(config, BatchPlan.from_config(config))
        if found[-1]["actor"] > ROW:
            assert memory.peak < gib << 30
    caps = [sizes["actor"] for sizes in found]
    assert caps == sorted(caps)
    assert (caps[0], caps[-1]) == (ROW, MOST_TOKENS)
    assert any(ROW < cap < MOST_TOKENS for cap in caps)
    # a pass without gradients keeps the activations of one layer
    assert all(sizes["log_prob"] >= sizes["actor"] for sizes in found)
    assert any(sizes["log_prob"] > sizes["actor"] for sizes in found)


def test_checkpointing_and_ranks_that_share_a_sequence_count(qwen, installed):
    installed(20 << 30)
    grpo = "algorithm.adv_estimator=grpo"
    plain, kept = sizes(grpo), sizes(grpo, "actor_rollout_ref.model.enable_gradient_checkpointing=True")
    assert kept["actor"] > plain["actor"]
    installed(1 << 30)
    shared = load_config(
        ["trainer.device=cpu", "trainer.n_gpus_per_node=4", f"{ACTOR}.ulysses_sequence_parallel_size=4"]
    )
    assert shared.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == ROW // 4
    assert resolve_micro_batch(shared, "actor", ranks=4) == MicroBatchSize(max_tokens=ROW)


def test_a_model_of_unknown_size_gets_eight_rows():
    assert sizes("data.max_prompt_length=100", "data.max_response_length=28")["actor"] == 1024
    assert sizes("actor_rollout_ref.model.path=owner/name")["actor"] == MOST_TOKENS
    assert sizes("data.max_response_length=8000")["actor"] == max(8512, MOST_TOKENS)


def test_sizes_that_cannot_be_are_reported_as_ever():
    for overrides, found in (
        (["+trainer.placement.Critic=nowhere"], ["trainer.placement.Critic=nowhere"]),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=3", "trainer.n_gpus_per_node=4"],
            [f"{ACTOR}.ulysses_sequence_parallel_size=3", f"{REF}.ulysses_sequence_parallel_size=3"],
        ),
        ([f"{ACTOR}.ppo_mini_batch_size=5000"], [f"{ACTOR}.ppo_mini_batch_size=5000"]),
    ):
        lines = check(load_config(overrides)).errors
        assert all(any(line.startswith(words) for line in lines) for words in found)


def test_a_run_folder_keeps_its_cut_on_another_machine(qwen, installed, tmp_path):
    def run(*overrides, folder="run"):
        return load_config(["trainer.device=cpu", f"trainer.default_local_dir={tmp_path / folder}",
                            "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=m", *overrides]
        )  # fmt: skip

    def cap(config):
        return config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu

    installed(20 << 30)
    first = run()
    RunFolder(tmp_path / "run").write_config(first)
    installed(512 << 30)
    assert cap(run(folder="other")) == MOST_TOKENS > cap(first)
    assert run() == first  # and so "configuration as before" when it resumes
    assert cap(run(f"trainer.resume_mode={tmp_path / 'run' / 'global_step_3'}", folder="other")) == cap(first)
    # unless another run begins there, which need not fit with it, or rows are longer
    assert cap(run("trainer.resume_mode=disable")) == MOST_TOKENS
    assert cap(run("actor_rollout_ref.model.path=n")) == MOST_TOKENS
    assert cap(run("data.max_response_length=9000")) == 9512
    assert cap(run(f"{CAP}=3000")) == 3000
    # a run that was cut by rows has no cap to keep
    saved = yaml.safe_load(to_yaml(first))
    saved["actor_rollout_ref"]["actor"]["use_dynamic_bsz"] = False
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(saved))
    assert cap(run()) == MOST_TOKENS


def test_the_saved_configuration_is_read_back_as_it_is(tmp_path, qwen, installed):
    installed(20 << 30)
    config = load_config(["trainer.device=cpu", "actor_rollout_ref.model.path=m", f"{ROLLOUT}.name=hf"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    installed(512 << 30)
    assert load_config(config_path=tmp_path / "config.yaml") == config


def test_the_advice_names_the_key_that_makes_the_update_smaller(qwen, installed):
    def advice(*overrides, gib=14):
        config = load_config(
            ["trainer.device=cpu", "algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0",
             f"{ROLLOUT}.name=hf", f"{ROLLOUT}.micro_batch_size_per_gpu=1", *overrides]
        )  # fmt: skip
        installed(gib << 30)
        result = check(config)
        (line,) = [line for line in result.warnings + result.errors if line.startswith("memory:")]
        assert "actor update" in line
        return line

    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing=True"
    written = advice(f"{CAP}=16384")
    assert mentions(written, f"lower {CAP}=16384 (at least {ROW})", checkpointing)
    assert mentions(advice(f"{SIZE}=16"), f"lower {SIZE}", checkpointing)
    one_row = advice(f"{CAP}=16384", "data.max_response_length=15872")
    assert (checkpointing in one_row, CAP in one_row) == (True, False)
    last = advice(f"{SIZE}=1", "data.max_response_length=400000", checkpointing)
    assert ("data.max_response_length" in last, SIZE in last) == (True, False)


def test_check_shows_the_cut_of_a_supervised_run(tmp_path, installed, capsys):
    from rich.console import Console

    shape = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50)).save_pretrained(tmp_path)
    for overrides, words in (
        (["trainer.device=cpu"], f"up to {MOST_TOKENS:,} tokens each, chosen from the memory"),
        (["update.max_token_len_per_gpu=2048"], "up to 2,048 tokens each"),
        (["update.micro_batch_size_per_gpu=3"], "3 rows each"),
    ):
        config = load_tree(SFT, [f"model.path={tmp_path}", "data.train_files=a", *overrides])
        Console(width=120).print(tables(check(config), config))
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "micro-batches on" in line]
        assert line.strip().split("  ")[-1].strip() == words


def test_gradients_are_reduced_once_where_whole_ones_fit(qwen, installed, tmp_path):
    def chosen(*overrides):
        config = load_config(["trainer.device=cpu", f"{ROLLOUT}.name=hf", "trainer.n_gpus_per_node=2",
                              f"trainer.default_local_dir={tmp_path}", *overrides])  # fmt: skip
        fsdp = config.actor_rollout_ref.actor.fsdp_config, config.critic.model.fsdp_config
        return config, *(section.use_no_sync_for_gradient_accumulation for section in fsdp)

    installed(24 << 30)
    config, *tight = chosen()
    assert tight == [False, False]
    need = forecast(config, BatchPlan.from_config(config))
    installed(512 << 30)
    RunFolder(tmp_path).write_config(config)
    assert chosen()[1:] == (False, False)  # as in the run that may be continued
    (tmp_path / "config.yaml").unlink()
    config, *wide = chosen()
    assert wide == [True, True]
    assert chosen("trainer.n_gpus_per_node=1")[1:] == (False, False)  # nothing to reduce
    key = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
    written, *other = chosen(
        f"{key}=False", f"{CAP}={config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu}"
    )
    assert other == [False, True]
    # the forecast counts them
    name = "actor update: activations, logits"
    found, without = (forecast(c, BatchPlan.from_config(c)).phases[name] for c in (config, written))
    assert found - without == 4 * QWEN.parameters
    assert need.peak < 12 << 30
    kept = chosen(f"{ACTOR}.fsdp_config.reshard_after_forward=False", f"{key}=False")[0]
    assert forecast(kept, BatchPlan.from_config(kept)).phases[name] - without == 4 * QWEN.parameters

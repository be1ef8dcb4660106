"""Runs that learn from a teacher."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import strop
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_config, load_tree
from strop.config.trees import PPO
from strop.errors import ConfigError, StropError
from strop.trainer.build import build_trainer

import runs
import tiny_model
from builders import one_row
from killing import kill

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'"
)
REWARD = "reward_model.reward_manager=naive"
ALONE = (
    "reward_model.reward_manager=none",
    "algorithm.adv_estimator=grpo",
    "algorithm.kl_ctrl.kl_coef=0",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.logger=[jsonl]",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = runs.make_inputs(tmp_path_factory.mktemp("distillation"))
    tiny_model.save(folder / "teacher", hidden=48, seed=5)
    return folder


def options(inputs, run, *extra, teacher="teacher"):
    return runs.overrides(inputs, run, *ALONE, f"teacher.model.path={inputs / teacher}", *extra)


def values(run, key):
    return [line[key] for line in map(json.loads, (run / "metrics.jsonl").open())]


@pytest.mark.parametrize(
    "keys",
    [
        ["teacher.kl=reverse"],
        ["teacher.kl=forward", "actor_rollout_ref.model.use_remove_padding=False"],
        ["teacher.kl=js", "teacher.js_weight=0.3"],
        ["teacher.kl=reverse", "teacher.top_k=4"],
        ["teacher.kl=sampled"],
    ],
    ids=lambda keys: "-".join(key.rpartition(".")[2] for key in keys),
)
def test_a_student_comes_to_a_wider_teacher(inputs, tmp_path, keys):
    runs.train(options(inputs, tmp_path, *keys, "trainer.total_training_steps=8"))
    kl = values(tmp_path, "teacher/kl")
    assert kl[0] > 0
    assert kl[-1] < 0.6 * kl[0]
    assert min(values(tmp_path, "teacher/entropy")) > 0
    if "teacher.kl=sampled" not in keys:
        assert 0 <= values(tmp_path, "teacher/agreement")[0] <= 1


SERVED = ("teacher.model.path=''", "teacher.servers=[http://127.0.0.1:1]", "teacher.kl=sampled")


def problems(inputs, *extra, teacher="teacher"):
    return check(load_config(options(inputs, inputs / "run", *extra, teacher=teacher))).errors


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["teacher.model.path=reference"], ["reference", "lora_rank"]),
        (["teacher.kl=sampled", "teacher.use=loss"], ["teacher.use", "auto"]),
        (["teacher.use=advantage"], ["teacher.use", "auto"]),
        (["teacher.model.path=''", "teacher.servers=[http://127.0.0.1:1]"], ["servers", "sampled"]),
        (
            [*SERVED, "actor_rollout_ref.rollout.temperature=0.5"],
            ["actor_rollout_ref.rollout.temperature", "servers"],
        ),
        (["teacher.by_source={a: {modle: {path: b}}}", "teacher.model.path=''"], ["by_source.a", "modle"]),
        (["teacher.by_source={a: {model: {path: b}}}"], ["by_source", "teacher.model.path"]),
        *(
            (
                [f"teacher.by_source={{a: {{{entry}}}}}", "teacher.model.path=''"],
                [f"by_source.a.{word}", found],
            )
            for entry, word, found in (
                ("model: {path: b, override_config: 3}", "model.override_config", "3"),
                ("model: {path: b, fsdp_config: {param_offload: true}}", "model", "override_config, "),
                ("model: {path: reference}", "model.path=reference", "name a model"),
                ("model: b", "model", "expected path"),
                ("servers: []", "servers", "[]"),
                ("servers: [3]", "servers.0", "3"),
            )
        ),
        (["teacher.kl=sampled", "teacher.top_k=4"], ["teacher.top_k", "null"]),
        (["teacher.model.path=''"], ["reward_manager=none", "teacher.model.path"]),
        (["algorithm.filter_groups.enable=true"], ["filter_groups", "reward_manager=none"]),
        (["algorithm.kl_ctrl.kl_coef=0.01"], ["kl_coef=0.01", "reward_manager=none", "use_kl_loss"]),
        (["algorithm.adv_estimator=reinforce_plus_plus"], ["adv_estimator", "whitens"]),
        (["algorithm.adv_estimator=gae"], ["adv_estimator", "whitens"]),
        (["actor_rollout_ref.actor.strategy=megatron", "trainer.n_gpus_per_node=2"], ["whole logits"]),
    ],
)
def test_what_fits_no_teacher_is_refused_before_a_model_loads(inputs, keys, words):
    assert any(all(word in line for word in words) for line in problems(inputs, *keys)), problems(
        inputs, *keys
    )


SOURCES = "teacher.model.path=''", "teacher.by_source={{strop/arithmetic: {{model: {{path: {}}}}}, b: {}}}"


def sourced(folder, *extra):
    """Rows of two data sources, each with a teacher."""
    table = pq.read_table(folder / "train.parquet")
    sources = pa.array(["strop/arithmetic" if row % 3 else "b" for row in range(len(table))])
    place = table.schema.names.index("data_source")
    pq.write_table(table.set_column(place, "data_source", sources), folder / "two.parquet")
    return f"data.train_files={folder / 'two.parquet'}"


@pytest.mark.fast("keys2")
@pytest.mark.parametrize("keys", [["teacher.kl=reverse"], ["teacher.top_k=4"], ["teacher.kl=sampled"]])
def test_each_data_source_has_its_teacher(inputs, tmp_path, keys):
    """Of other widths; with one teacher for both sources it is the run with that one."""

    def train(name, *given):
        run = options(inputs, tmp_path / name, *keys, sourced(inputs), *given)
        return runs.hashes(runs.train(run))

    other = f"{{model: {{path: {inputs / 'model'}}}}}"
    same = f"{{model: {{path: {inputs / 'teacher'}}}}}"
    two = train("two", SOURCES[0], SOURCES[1].format(inputs / "teacher", other))
    one = train("one", SOURCES[0], SOURCES[1].format(inputs / "teacher", same))
    whole, kl = train("whole"), [values(tmp_path / name, "teacher/kl") for name in ("one", "whole")]
    assert kl[0] == pytest.approx(kl[1], rel=1e-4)
    if keys != ["teacher.kl=reverse"]:  # two output layers give a gradient in two parts
        assert one == whole
    assert two != one


def test_a_data_source_without_a_teacher_stops_the_run_before_a_model_loads(inputs, tmp_path):
    text = "teacher.by_source={math: {model: {path: " + str(inputs / "teacher") + "}}}"
    with pytest.raises(ConfigError, match="no teacher for the data_source b, strop/arithmetic; it has math"):
        build_trainer(load_config(options(inputs, tmp_path, SOURCES[0], text, sourced(inputs))))


@pytest.mark.parametrize("share", [0, 1])
def test_a_mixture_of_one_model_is_refused(inputs, share):
    with pytest.raises(ConfigError, match=f"js_weight: found {share}, expected float > 0 and < 1"):
        problems(inputs, "teacher.kl=js", f"teacher.js_weight={share}")


def test_a_teacher_of_another_vocabulary_is_refused_before_a_model_loads(inputs, tmp_path):
    """As many words, two of them exchanged."""
    shutil.copytree(inputs / "teacher", tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    file.write_text(json.dumps(tokenizer))
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with pytest.raises(StropError, match=r"teacher\.model\.path") as raised:
        build_trainer(load_config(options(tmp_path, tmp_path / "run", *at(inputs))))
    assert all(text in str(raised.value) for text in ("first, 5, is '1'", "'2' to the model"))


def at(inputs):
    """The student's files where the teacher is in another folder."""
    names = {"actor_rollout_ref.model.path": "model", "data.train_files": "train.parquet"}
    names["data.val_files"] = "val.parquet"
    return [f"{key}={inputs / name}" for key, name in names.items()]


@needs_peft
@pytest.mark.parametrize("kl", ["reverse", "js"])
def test_the_policy_with_its_adapters_off_teaches_nothing_at_first(inputs, tmp_path, kl):
    """And its pass has no dropout, which the update has: two passes are bit-equal."""
    lora = ("actor_rollout_ref.model.lora_rank=4", "teacher.model.path=reference", f"teacher.kl={kl}")
    noise = "actor_rollout_ref.model.override_config={attention_dropout: 0.5}"
    trainer = runs.train(options(inputs, tmp_path, *lora, noise))
    assert "teacher" not in trainer.groups
    worker = trainer.actor.worker
    batch = one_row()
    first, second = worker.compute_teacher(batch), worker.compute_teacher(batch)
    assert all(torch.equal(first.batch[name], second.batch[name]) for name in first.batch)
    own = worker.compute_log_prob(batch).batch["old_log_probs"]
    assert not torch.equal(own, first.batch["teacher_log_prob"])  # adapters are on again
    assert not any(tensor.requires_grad for tensor in first.batch.values())


@needs_peft
@pytest.mark.parametrize("kl", ["reverse", "forward", "js"])
def test_a_teacher_that_is_the_student_changes_nothing(inputs, tmp_path, kl):
    lora = ("actor_rollout_ref.model.lora_rank=4", "teacher.model.path=reference", f"teacher.kl={kl}")
    trainer = runs.train(options(inputs, tmp_path, *lora, "actor_rollout_ref.actor.optim.weight_decay=0"))
    assert values(tmp_path, "teacher/kl") == [0, 0]
    assert values(tmp_path, "actor/grad_norm") == [0, 0]
    assert values(tmp_path, "teacher/agreement") == [1, 1]
    del trainer


def test_another_teacher_gives_another_gradient(inputs, tmp_path):
    tiny_model.save(tmp_path / "other", hidden=32, seed=9)
    one = runs.hashes(runs.train(options(inputs, tmp_path / "one")))
    other = f"teacher.model.path={tmp_path / 'other'}"
    assert runs.hashes(runs.train(options(inputs, tmp_path / "two", other))) != one


@pytest.mark.parametrize("keys", [["teacher.kl=js"], ["teacher.kl=sampled"]])
def test_beside_a_reward_its_part_is_added_after_normalization(inputs, tmp_path, keys):
    trained = runs.train(
        options(inputs, tmp_path / "both", *keys, REWARD, "actor_rollout_ref.rollout.n=2", "teacher.coef=0.1")
    )
    alone = runs.train(
        options(inputs, tmp_path / "none", REWARD, "actor_rollout_ref.rollout.n=2", "teacher.model.path=''")
    )
    assert runs.hashes(trained) != runs.hashes(alone)
    tables = [pq.read_table(tmp_path / name / "rollouts/step_000001.parquet") for name in ("both", "none")]
    both, without = (table.column("advantages").to_pylist() for table in tables)
    if keys == ["teacher.kl=js"]:
        assert both == without
        return
    columns = ("teacher_log_prob", "old_log_probs")
    for row, other, *pair in zip(
        both, without, *(tables[0].column(c).to_pylist() for c in columns), strict=True
    ):
        expected = [a + 0.1 * (p - q) for a, p, q in zip(other, *pair, strict=True)]
        assert row == pytest.approx(expected, abs=1e-2)


SAVED = ("trainer.save_freq=1", "trainer.total_training_steps=5", "data.max_response_length=8")
AHEAD = (
    "actor_rollout_ref.hybrid_engine=false",
    "trainer.resource_pools={learner: [1], rollout: [1], teacher: [1]}",
    "trainer.placement={Rollout: rollout, Teacher: teacher}",
    "trainer.worker_group=local",
    "trainer.async_steps=4",
)


@pytest.mark.fast("one")
@pytest.mark.parametrize(
    "keys", [["teacher.kl=reverse", *AHEAD], ["teacher.kl=sampled"]], ids=["ahead", "one"]
)
def test_a_killed_run_continues_to_the_same_numbers(inputs, tmp_path, keys):
    run = options(inputs, tmp_path / "run", *SAVED, *keys)
    kill("update", 3, run)
    expected = runs.hashes(runs.train(options(inputs, tmp_path / "undisturbed", *SAVED, *keys)))
    assert runs.hashes(runs.train(run)) == expected
    assert runs.metrics(tmp_path / "run") == runs.metrics(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["teacher.top_k=4"], ["teacher.kl=sampled"]])
def test_two_ranks_train_as_one(inputs, tmp_path, keys):
    """A sharded teacher, with the actor and in a pool of its own."""
    # AdamW's default eps, 1e-8, would turn the rounding of a gradient near 0 (1e-10 in one of 2e-8, of a
    # key's bias) into a share of a whole step.
    optim = ("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.eps=1e-5")
    saved = ("trainer.save_freq=2", *optim, *keys)
    runs.train(options(inputs, tmp_path / "one", *saved))
    expected = runs.saved_state(tmp_path / "one" / "global_step_2" / "actor")
    pools = "trainer.resource_pools={main: [1], other: [1]}"
    apart = (pools, "trainer.worker_group=ray", "trainer.placement={Teacher: other}")
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    for name, layout in {"two": ["trainer.n_gpus_per_node=2", micro], "apart": apart}.items():
        trainer = runs.train(options(inputs, tmp_path / name, *saved, *layout))
        trainer.shutdown()
        found = runs.saved_state(tmp_path / name / "global_step_2" / "actor")
        for key, tensor in expected.items():  # weights, and of the optimizer the averages of the gradients
            if tensor.is_floating_point():
                distance = torch.dist(found[key].double(), tensor.double())
                limit = 1e-5 if key.startswith("optimizer") else 1e-4
                assert distance <= limit * tensor.double().norm(), (name, key)


def test_the_command_and_the_function_train_alike_without_a_reward(inputs, tmp_path, capsys, caplog):
    keys = {
        "trainer.total_training_steps": 1,
        "data.max_prompt_length": 8,
        "data.max_response_length": 4,
        "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": "hf",
    }
    names = [str(inputs / name) for name in ("model", "teacher", "train.parquet")]
    given = [f"{key}={value}" for key, value in keys.items()]
    with runs.undrawn():
        assert main(["distill", *names, "--lr", "1e-3", "--out", str(tmp_path / "command"), *given]) == 0
        assert "step 1/1  teacher kl" in capsys.readouterr().out  # and no reward of 0
        assert "--data FILE\n" in caplog.text  # an evaluation has scores: reward_manager=none is not its key
        run = strop.distill(*names, lr=1e-3, out=tmp_path / "function", **keys)
    files = [folder / "final_model" / "model.safetensors" for folder in (tmp_path / "command", run.folder)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert values(tmp_path / "command", "teacher/kl")[0] > 0


def test_with_a_reward_the_recipe_asks_for_groups(inputs, tmp_path):
    config = load_tree(PPO, ["custom_reward_function.path=reward.py"], recipe="distill")
    alone = load_tree(PPO, [], recipe="distill")
    assert [c.actor_rollout_ref.rollout.n for c in (config, alone)] == [8, 1]
    assert [c.reward_model.reward_manager for c in (config, alone)] == ["naive", "none"]


@pytest.mark.parametrize("by_source", [False, True], ids=["one", "by_source"])
def test_a_resume_with_a_teacher_of_other_weights_is_refused(inputs, tmp_path, by_source):
    shutil.copytree(inputs / "teacher", tmp_path / "teacher")
    keys = [f"teacher.model.path={tmp_path / 'teacher'}"]
    if by_source:
        text = f"{{strop/arithmetic: {{model: {{path: {tmp_path / 'teacher'}}}}}}}"
        keys = ["teacher.model.path=''", f"teacher.by_source={text}"]
    run = options(inputs, tmp_path / "run", *SAVED, *keys, "trainer.total_training_steps=1")
    runs.train(run)
    with open(tmp_path / "teacher" / "config.json", "a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match="trains something else"):
        build_trainer(load_config([*run, "trainer.total_training_steps=2"]))


def test_a_teacher_without_a_tokenizer_has_the_size_of_the_policy(inputs, tmp_path, caplog):
    shutil.copytree(inputs / "teacher", tmp_path / "teacher")
    for file in (tmp_path / "teacher").glob("*token*"):
        file.unlink()
    run = options(tmp_path, tmp_path / "run", *at(inputs))
    build_trainer(load_config(run))
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config | {"vocab_size": 32}))
    with pytest.raises(StropError, match="no tokenizer by which to compare"):
        build_trainer(load_config(run))


def test_a_warning_names_the_end_token_if_it_is_another_token_of_the_teacher(inputs, tmp_path, caplog):
    shutil.copytree(inputs / "teacher", tmp_path / "teacher")
    for file in (tmp_path / "teacher").glob("tokenizer*"):
        text = file.read_text().replace("<end>", "<x>").replace("<user>", "<end>")
        file.write_text(text.replace("<x>", "<user>"))
    build_trainer(load_config(options(tmp_path, tmp_path / "run", *at(inputs))))
    assert "id 1 is '<end>' to the tokenizer and '<user>' to this model" in caplog.text

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from strop.config.checks.check import deprecated
from strop.config.keys import value_at
from strop.config.load import as_config, load_config, load_tree, to_yaml
from strop.config.paths import expand, is_url
from strop.config.trees import PPO
from strop.errors import ConfigError

from messages import Message, mentions, naming

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def problems_of(*overrides, **where):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **where)
    return caught.value.problems


@pytest.fixture
def folder(tmp_path):
    """A user's folder: a file without a defaults list, one with it, and a config group."""
    (tmp_path / "plain.yaml").write_text(
        "data: {train_files: [a.parquet, b.parquet]}\n"
        "actor_rollout_ref: "
        "{actor: {optim: {lr: '3e-4'}}, model: {override_config: {attention_dropout: 0.0}}}\n"
    )
    (tmp_path / "composed.yaml").write_text(
        "defaults: [ppo_trainer, algorithm: grpo, _self_]\ntrainer: {total_epochs: 3}\n"
    )
    (tmp_path / "without_base.yaml").write_text("defaults: [algorithm: grpo]\ntrainer: {total_epochs: 3}\n")
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "grpo.yaml").write_text("adv_estimator: grpo\nkl_ctrl: {kl_coef: 0.0}\n")
    (tmp_path / "algorithm" / "rloo.yaml").write_text("adv_estimator: rloo\n")
    return tmp_path


# ------------------------------------------------------------------------------------------------ overrides


def test_overrides_work_as_hydra_users_know_them():
    config = load_config(
        [
            "data.train_batch_size=64",
            "+trainer.total_epochs=2",
            "++algorithm.gamma=0.9",
            "trainer.logger=[console]",
            "actor_rollout_ref.model.override_config={attention_dropout: 0.1, nested: {a: 1}}",
            "+actor_rollout_ref.model.override_config.more=text",
            "~actor_rollout_ref.model.override_config.attention_dropout",
            "data.tokenizer='with space'",
            "data.max_prompt_length=5",
            "data.max_prompt_length=7",
            "data.train_files=[~/a.parquet,'~/b c.parquet',hdfs://x/y]",
            "data.val_files=~/v.parquet",
        ]
    )
    assert config.data.train_batch_size == 64
    assert config.trainer.total_epochs == 2
    assert config.algorithm.gamma == 0.9
    assert config.trainer.logger == ["console"]
    assert config.actor_rollout_ref.model.override_config == {"nested": {"a": 1}, "more": "text"}
    assert config.data.tokenizer == "with space"
    assert config.data.max_prompt_length == config.actor_rollout_ref.rollout.prompt_length == 7
    assert config.data.train_files == ["~/a.parquet", "~/b c.parquet", "hdfs://x/y"]
    assert config.data.val_files == ["~/v.parquet"]


@pytest.mark.parametrize("text", ["1.10", "1e-5", "1E5", "007", "1_000", "+5", "-.5"])
def test_a_number_as_a_name_stays_as_it_was_written(tmp_path, text):
    config = load_config([f"trainer.experiment_name={text}", f"+data.prompt_key={text}"])
    assert (config.trainer.experiment_name, config.data.prompt_key) == (text, text)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(config_path=tmp_path / "config.yaml").trainer.experiment_name == text


@pytest.mark.parametrize(
    ("overrides", "experiment", "folder"),
    [
        (["trainer.experiment_name=a-${trainer.project_name}"], "a-strop", "checkpoints/strop/a-strop"),
        (["trainer.default_local_dir=runs/b"], "b", "runs/b"),
        (["trainer.default_local_dir=runs/b", "trainer.experiment_name=a"], "a", "runs/b"),
    ],
)
def test_the_experiment_and_the_run_folder_name_one_another(overrides, experiment, folder):
    trainer = load_config(overrides).trainer
    assert (trainer.experiment_name, trainer.default_local_dir) == (experiment, folder)


def test_unrelated_runs_have_different_default_folders_and_a_repeated_command_the_same():
    base = ["actor_rollout_ref.model.path=models/a", "data.train_files=data/gsm8k/train.parquet"]

    def folder(*overrides):
        trainer = load_config([*base, *overrides]).trainer
        assert trainer.default_local_dir == f"checkpoints/strop/{trainer.experiment_name}"
        return trainer.default_local_dir

    assert folder().startswith("checkpoints/strop/ppo-a-gsm8k-")
    assert folder() == folder("trainer.total_epochs=3", "actor_rollout_ref.actor.optim.lr=1e-5")
    assert folder() == folder(f"data.train_files={Path('data/gsm8k/train.parquet').absolute()}")
    others = [
        "actor_rollout_ref.model.path=models/b/a", "data.train_files=data/other/gsm8k/train.parquet",
        "custom_reward_function.path=my_reward.py", "custom_reward_function.name=other",
        "reward_model.reward_kwargs.kind=x", "algorithm.adv_estimator=grpo", "trainer.seed=2",
    ]  # fmt: skip
    assert len({folder(), *map(folder, others)}) == 8
    in_folder = load_config(["trainer.default_local_dir=runs/${trainer.experiment_name}/c"]).trainer
    assert in_folder.default_local_dir == f"runs/{in_folder.experiment_name}/c"


def test_everything_that_is_wrong_is_reported_at_once():
    expected = {
        "trainer.totl_epochs=3": Message("trainer.totl_epochs", "trainer.total_epochs"),
        "data.train_batch_size=many": "data.train_batch_size: found 'many', expected int > 0",
        "data.tokenizer=${no.such}": Message("data.tokenizer", "Interpolation", "'no.such'"),
        "data.prompt_key=${data.reward_fn_key}": Message("data.prompt_key", "Recursive interpolation"),
        "data.reward_fn_key=${data.prompt_key}": Message("data.reward_fn_key", "Recursive interpolation"),
        "data.max_prompt_length=???": Message("data.max_prompt_length", "???"),
        "not an override": Message("not an override", "key=value"),
        "data.train_files=a,b": Message("data.train_files=a,b", "key=[a,b]"),
        "hydra.run.dir=x": Message("hydra.run.dir=x", "Hydra's"),
        "=3": Message("=3", "key=value"),
        "~trainer.nothing_there": Message("~trainer.nothing_there"),
        "~trainer.total_epoch": Message("~trainer.total_epoch", "~trainer.total_epochs"),
        "~trainer.seed=5": Message("~trainer.seed=5", "1"),
        "~trainer.device": Message("trainer.device"),
        "~trainer.nnodes.x": Message("~trainer.nnodes.x"),
    }
    problems = problems_of(*expected)
    assert [override for override, problem in expected.items() if problem not in problems] == []
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.max_prompt_length=long", "data.max_prompt_length: found 'long', expected int > 0"),
        ("data.prompt_key.0=x", "data.prompt_key: found {'0': 'x'}, expected string"),
        (
            "reward_model.reward_manager=[a,b]",
            "reward_model.reward_manager: found ['a', 'b'], expected string",
        ),
        ("trainer.logger.x=console", Message("trainer.logger.x=console")),
    ],
)
def test_values_that_refer_to_a_wrong_one_are_not_reported_too(override, problem):
    assert problems_of(override) == [problem]


# ----------------------------------------------------------------------------------------------- users' files


def test_a_file_needs_only_the_keys_that_differ(folder):
    config = load_config(["data.train_batch_size=8"], config_path=folder, config_name="plain")
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.actor_rollout_ref.actor.optim.lr == 3e-4
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.0}
    assert config.data.train_batch_size == 8
    assert config.critic.optim.lr == 1e-5


@pytest.mark.parametrize(
    ("name", "group", "estimator"),
    [
        ("composed", [], "grpo"),
        ("composed.yaml", [], "grpo"),
        ("without_base", [], "grpo"),
        ("composed", ["algorithm=rloo"], "rloo"),
        ("plain", ["+algorithm=rloo"], "rloo"),
    ],
)
def test_config_groups_of_the_users_folder_work(folder, monkeypatch, name, group, estimator):
    monkeypatch.chdir(folder.parent)
    config = load_config([*group, "trainer.seed=3"], config_path=folder.name, config_name=name)
    assert (config.algorithm.adv_estimator, config.trainer.seed, config.algorithm.lam) == (estimator, 3, 1.0)
    assert (config.algorithm.kl_ctrl.kl_coef == 0) == (estimator == "grpo")
    assert config.trainer.total_epochs == (30 if name == "plain" else 3)


def test_a_file_may_be_named_as_the_path_and_may_be_called_like_the_defaults(folder):
    assert load_config(config_path=folder / "composed.yaml").trainer.total_epochs == 3
    (folder / "ppo_trainer.yaml").write_text("trainer: {total_epochs: 4}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(config_path=folder).trainer.total_epochs == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "DictConfig"),
        ("just text", "just text"),
        ("a: [\n", "node content"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("defaults: [wrong]\n", "wrong"),
        ("defaults: [broken]\n", "broken"),
        ("defaults: [algorithm: none_such]\n", "algorithm/none_such"),
    ],
)
def test_a_file_that_cannot_be_composed_is_one_line_that_names_it(folder, text, said):
    (folder / "broken.yaml").write_text(text)
    (problem,) = problems_of(config_path=folder, config_name="broken")
    assert problem.startswith(f"{folder.resolve()}/broken.yaml: ")
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer: {resource_pools: [1]}", ("trainer.resource_pools", "[1]")),
        ("trainer: {logger: {a: 1}}", ("trainer.logger", "{'a': 1}")),
        ("data: {train_files: {a: 1}}", ("data.train_files", "{'a': 1}")),
        ("critic: {optim: [1]}", ("critic.optim", "[1]")),
        # whose default refers to a mapping
        ("critic: {megatron: {override_ddp_config: [1]}}", ("critic.megatron.override_ddp_config", "[1]")),
    ],
)
def test_a_list_in_the_place_of_a_mapping_and_the_reverse_name_the_key(folder, text, said):
    (folder / "own.yaml").write_text(text)
    assert Message(*said) in problems_of(config_path=folder / "own.yaml")
    # what a program passes replaces what the file has, of whichever kind
    key = said[0]
    with pytest.raises(ConfigError) as caught:
        load_tree(PPO, config_path=folder / "own.yaml", values=[{key: {"b": 2}}, {key: [3]}, {key: 7.5}])
    assert Message(key, "7.5") in caught.value.problems


def test_missing_files_and_folders_are_errors_with_the_alternatives(folder):
    assert problems_of(config_path=folder, config_name="nope") == [
        Message(
            "--config-name", "nope.yaml", folder.resolve(), "composed.yaml", "plain.yaml", "without_base.yaml"
        )
    ]
    assert problems_of(config_path="/no/such") == [Message("--config-path", "/no/such")]
    meant = f"did you mean {folder}/plain.yaml?"
    assert problems_of(config_path=folder / "plan.yaml") == [Message("--config-path", meant)]
    assert mentions(problems_of(config_name="other")[0], "ppo_trainer")
    (folder / "bare").mkdir()
    assert mentions(problems_of(config_path=folder / "bare")[0], "YAML")


def test_unknown_keys_in_a_file_and_on_the_command_line_are_reported_together(folder):
    (folder / "typo.yaml").write_text("trainer: {totl_epochs: 3, 7: x}\ndata: {picture_key: images}\n")
    problems = problems_of("algoritm.lam=1", config_path=folder, config_name="typo")
    assert Message("trainer.totl_epochs", "trainer.total_epochs") in problems
    assert Message("algoritm", "algorithm") in problems
    assert Message("trainer.7") in problems
    assert Message("data.picture_key") in problems


def test_the_users_own_hydra_application_is_left_alone(folder):
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(folder), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        load_config(config_path=folder, config_name="composed")
        assert GlobalHydra.instance().hydra is before


# ---------------------------------------------------------------------------------------------------- authors


def test_every_value_has_an_author(folder):
    (folder / "verl.yaml").write_text("trainer: {max_actor_ckpt_to_keep: 5, save_freq: 3}\n")
    model = "actor_rollout_ref.model"
    config = load_tree(
        PPO,
        [
            "data.train_batch_size=64",
            f"+{model}.override_config.a=1",
            "critic.ppo_micro_batch_size_per_gpu=2",
        ],
        config_path=folder / "verl.yaml",
        recipe="grpo",
        values=[{"trainer.seed": 5}, {f"{model}.override_config.b": 2}],
    )
    expected = {
        "trainer.total_epochs": "default",
        "actor_rollout_ref.rollout.prompt_length": "follows data.max_prompt_length",
        "algorithm.adv_estimator": "recipe grpo",
        "trainer.save_freq": f"file {folder / 'verl.yaml'}",
        "trainer.max_ckpt_to_keep": "verl: trainer.max_actor_ckpt_to_keep",
        "trainer.seed": "argument",
        "data.train_batch_size": "override",
        f"{model}.override_config": "argument, override",
        "trainer.experiment_name": "derived: named after what the run trains",
        "critic.use_dynamic_bsz": "derived: tokens, unless a size in rows is written",
    }
    assert {key: PPO.author(config, key) for key in expected} == expected
    batch, mini_batch = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert (batch, mini_batch) == (64, 64)
    assert PPO.author(load_config(["data.train_batch_size=64"]), MINI_BATCH) == (
        "derived: divides data.train_batch_size"
    )


# ------------------------------------------------------------------------------------ mappings, round trips


def test_a_mapping_is_laid_over_the_defaults():
    overlay = {"trainer": {"total_epochs": 2}, "data": {"max_prompt_length": 9}}
    tree = OmegaConf.create(overlay)
    OmegaConf.set_struct(tree, True)
    OmegaConf.set_readonly(tree, True)
    config = as_config(overlay)
    assert config == as_config(tree) == load_config(["trainer.total_epochs=2", "data.max_prompt_length=9"])
    assert tree == overlay
    assert OmegaConf.is_readonly(tree)
    assert config.actor_rollout_ref.rollout.prompt_length == 9
    assert as_config(config) is config
    assert as_config({}) == load_config()


def test_a_mapping_that_cannot_be_read_is_a_config_error():
    with pytest.raises(ConfigError, match="configuration: "):
        as_config({"trainer": {"seed": object()}})
    with pytest.raises(ConfigError, match=naming("trainer.seed")):
        as_config({"trainer": {"seedd": 1}})


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.model.override_config={a: {b: [1, x, null]}}", "data.tokenizer='ü: #1'"],
        ["critic.ppo_micro_batch_size=64", "actor_rollout_ref.model.external_libs=[a,b]"],
    ],
)
def test_a_config_survives_yaml_pickle_and_dict(tmp_path, overrides):
    config = load_config(overrides)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(config_path=tmp_path / "config.yaml") == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert as_config(config.model_dump()) == config


# -------------------------------------------------------------------------------------------- deprecated keys


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        (
            "",
            ["actor_rollout_ref.actor.ppo_micro_batch_size=32"],
            {"actor_rollout_ref.actor.ppo_micro_batch_size": (32, None)},
        ),
        # The critic's forward size follows its deprecated update size unless it is set.
        ("", ["critic.ppo_micro_batch_size=64"], {"critic.forward_micro_batch_size": (64, None)}),
        (
            "",
            ["critic.ppo_micro_batch_size=64", "critic.forward_micro_batch_size_per_gpu=3"],
            {"critic.forward_micro_batch_size": (None, 3)},
        ),
        # Both in one file stay, for the check to report.
        (
            "actor_rollout_ref: {ref: {log_prob_micro_batch_size: 4, log_prob_micro_batch_size_per_gpu: 2}}",
            [],
            {"actor_rollout_ref.ref.log_prob_micro_batch_size": (4, 2)},
        ),
        (
            "defaults: [ppo_trainer, _self_]\nreward_model: {micro_batch_size: 4}",
            [],
            {"reward_model.micro_batch_size": (4, None)},
        ),
    ],
)
def test_a_deprecated_micro_batch_size_replaces_its_successor(tmp_path, file, overrides, expected):
    (tmp_path / "mine.yaml").write_text(file)
    config = load_config(overrides, config_path=tmp_path / "mine.yaml")
    for key, sizes in expected.items():
        assert (value_at(config, key), value_at(config, f"{key}_per_gpu")) == sizes


def test_deprecated_keys_are_named_with_their_successors():
    assert list(deprecated(load_config())) == []
    sizes = "actor_rollout_ref.actor.ppo_micro_batch_size"
    libs = "actor_rollout_ref.model.external_lib"
    config = load_config([f"{sizes}=32", f"{libs}s=my_models"])
    assert config.actor_rollout_ref.model.external_lib == config.critic.model.external_lib == "my_models"
    lines = [finding.text for finding in deprecated(config) if finding.level == "warning"]
    assert len(lines) == 2
    assert Message(f"{sizes}=32", f"{sizes}_per_gpu") in lines
    assert Message(f"{libs}s", libs) in lines


# ------------------------------------------------------------------------------------------------------ paths


def test_home_is_expanded_in_local_paths_only(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert expand("~/data/x.parquet") == "/home/someone/data/x.parquet"
    assert expand("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert expand("hdfs://host/~x") == "hdfs://host/~x"


def test_a_name_that_no_file_system_takes_is_an_error_without_a_traceback():
    assert expand(f"{'a' * 255}/{'é' * 127}") == f"{'a' * 255}/{'é' * 127}"
    for name in ("a" * 256, "é" * 128):
        with pytest.raises(ConfigError, match=naming("255 bytes", name[:70])):
            expand(f"runs/{name}")
    assert is_url("s3://bucket/x")
    assert not is_url("/local/x")


@pytest.mark.parametrize("name", ["own.yml", "own.conf"])
def test_a_file_of_any_name_is_read(tmp_path, name):
    (tmp_path / "part.yaml").write_text("data: {max_prompt_length: 77}\n")
    (tmp_path / name).write_text("defaults: [part, _self_]\ntrainer: {total_epochs: 3}\n")
    for options in ({"config_path": tmp_path / name}, {"config_path": tmp_path, "config_name": name}):
        config = load_config(**options)
        assert (config.trainer.total_epochs, config.data.max_prompt_length) == (3, 77)
    assert name.endswith(".conf") or any(
        name in str(line) for line in problems_of(config_path=tmp_path, config_name="x")
    )

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings

import pytest
from omegaconf import OmegaConf

from strop.config.checks.check import deprecated
from strop.config.load import as_config, load_config, to_yaml
from strop.config.paths import expand, is_url
from strop.errors import ConfigError

from messages import Message, mentions, naming


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
            "trainer.experiment_name=a-${trainer.project_name}",
        ]
    )
    assert config.data.train_batch_size == 64
    assert config.trainer.total_epochs == 2
    assert config.algorithm.gamma == 0.9
    assert config.trainer.logger == ["console"]
    assert config.actor_rollout_ref.model.override_config == {"nested": {"a": 1}, "more": "text"}
    assert config.data.tokenizer == "with space"
    assert config.trainer.default_local_dir == "checkpoints/strop/a-strop"


def test_later_overrides_win_and_interpolations_follow():
    config = load_config(["data.max_prompt_length=5", "data.max_prompt_length=7", "critic.model.path=/own"])
    assert config.actor_rollout_ref.rollout.prompt_length == 7
    assert config.critic.model.path == "/own"
    assert config.critic.model.tokenizer_path == config.actor_rollout_ref.model.path


def test_the_experiment_and_the_run_folder_name_one_another():
    def names(*overrides):
        trainer = load_config(overrides).trainer
        return trainer.experiment_name, trainer.default_local_dir

    assert names() == ("ppo", "checkpoints/strop/ppo")
    assert names("trainer.experiment_name=a") == ("a", "checkpoints/strop/a")
    assert names("trainer.default_local_dir=runs/b") == ("b", "runs/b")
    assert names("trainer.default_local_dir=runs/b", "trainer.experiment_name=a") == ("a", "runs/b")
    within = "runs/${trainer.experiment_name}/c"
    assert names(f"trainer.default_local_dir={within}") == ("ppo", "runs/ppo/c")


def test_what_follows_a_wrong_or_missing_value_is_not_reported_too():
    assert problems_of("data.max_prompt_length=long") == [
        "data.max_prompt_length: found 'long', expected int > 0"
    ]
    (problem,) = problems_of("data.max_prompt_length=???")
    assert mentions(problem, "data.max_prompt_length", "???")


def test_paths_that_begin_with_a_tilde_need_no_quotes():
    config = load_config(
        ["data.train_files=[~/a.parquet,'~/b c.parquet',hdfs://x/y]", "data.val_files=~/v.parquet"]
    )
    assert config.data.train_files == ["~/a.parquet", "~/b c.parquet", "hdfs://x/y"]
    assert config.data.val_files == ["~/v.parquet"]


def test_everything_that_is_wrong_is_reported_at_once():
    problems = problems_of(
        "trainer.totl_epochs=3",
        "data.train_batch_size=many",
        "data.tokenizer=${no.such}",
        "data.prompt_key=${data.reward_fn_key}",
        "data.reward_fn_key=${data.prompt_key}",
        "data.max_prompt_length=???",
        "not an override",
        "data.train_files=a,b",
        "hydra.run.dir=x",
        "=3",
        "~trainer.nothing_there",
        "~trainer.total_epoch",
        "~trainer.seed=5",
        "~trainer.device",
    )
    text = "\n".join(problems)
    assert Message("trainer.totl_epochs", "trainer.total_epochs") in problems
    assert "data.train_batch_size: found 'many', expected int > 0" in problems
    assert Message("data.tokenizer", "Interpolation", "'no.such'") in problems
    assert "data.prompt_key: Recursive interpolation detected" in problems
    assert Message("data.max_prompt_length") in problems
    assert mentions(text, "key=value")
    assert mentions(text, "data.train_files=a,b", "key=[a,b]")
    assert mentions(text, "hydra.run.dir=x", "Hydra's")
    assert Message("=3", "key=value") in problems
    assert Message("~trainer.nothing_there") in problems
    assert Message("~trainer.total_epoch", "~trainer.total_epochs") in problems
    assert Message("~trainer.seed=5", "1") in problems
    assert Message("trainer.device") in problems
    assert all("\n" not in problem for problem in problems)


def test_an_override_below_a_value_is_refused():
    assert problems_of("data.prompt_key.0=x") == ["data.prompt_key: found {'0': 'x'}, expected string"]
    assert mentions(problems_of("trainer.logger.x=console")[0], "trainer.logger.x=console")
    assert problems_of("~trainer.seed.x") == [Message("~trainer.seed.x")]


# ----------------------------------------------------------------------------------------------- users' files


def test_a_file_needs_only_the_keys_that_differ(folder):
    config = load_config(["data.train_batch_size=8"], config_path=folder, config_name="plain")
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.actor_rollout_ref.actor.optim.lr == 3e-4
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.0}
    assert config.data.train_batch_size == 8
    assert config.critic.optim.lr == 1e-5


@pytest.mark.parametrize("name", ["composed", "composed.yaml", "without_base"])
def test_config_groups_of_the_users_folder_work(folder, name):
    config = load_config(config_path=str(folder), config_name=name)
    assert (config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef) == ("grpo", 0.0)
    assert config.trainer.total_epochs == 3
    assert config.algorithm.lam == 1.0


def test_a_group_is_chosen_on_the_command_line(folder):
    config = load_config(["algorithm=rloo", "trainer.seed=3"], config_path=folder, config_name="composed")
    assert (config.algorithm.adv_estimator, config.trainer.seed) == ("rloo", 3)
    config = load_config(["+algorithm=rloo"], config_path=folder, config_name="plain")
    assert config.algorithm.adv_estimator == "rloo"


def test_a_file_may_be_named_as_the_path_and_may_be_called_like_the_defaults(folder):
    assert load_config(config_path=folder / "composed.yaml").trainer.total_epochs == 3
    (folder / "ppo_trainer.yaml").write_text("trainer: {total_epochs: 4}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(config_path=folder).trainer.total_epochs == 4


def test_an_empty_file_changes_nothing(folder):
    (folder / "empty.yaml").write_text("")
    assert load_config(config_path=folder / "empty.yaml") == load_config()


def test_relative_folders_are_relative_to_the_current_one(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert load_config(config_path=folder.name, config_name="composed").trainer.total_epochs == 3


def test_a_search_path_of_the_users_is_followed(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "base.yaml").write_text("trainer: {seed: 11}\n")
    (folder / "far.yaml").write_text("defaults: [base, _self_]\n")
    config = load_config([f"hydra.searchpath=[file://{other}]"], config_path=folder, config_name="far")
    assert config.trainer.seed == 11


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "DictConfig"),
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


def test_missing_files_and_folders_say_what_there_is(folder):
    assert problems_of(config_path=folder, config_name="nope") == [
        Message(
            "--config-name", "nope.yaml", folder.resolve(), "composed.yaml", "plain.yaml", "without_base.yaml"
        )
    ]
    assert problems_of(config_path="/no/such") == [Message("--config-path", "/no/such")]
    assert mentions(problems_of(config_name="other")[0], "ppo_trainer")
    (folder / "bare").mkdir()
    assert mentions(problems_of(config_path=folder / "bare")[0], "YAML")


def test_unknown_keys_in_a_file_and_on_the_command_line_are_reported_together(folder):
    (folder / "typo.yaml").write_text("trainer: {totl_epochs: 3, 7: x}\ndata: {image_key: images}\n")
    problems = problems_of("algoritm.lam=1", config_path=folder, config_name="typo")
    assert Message("trainer.totl_epochs", "trainer.total_epochs") in problems
    assert Message("algoritm", "algorithm") in problems
    assert Message("trainer.7") in problems
    assert Message("data.image_key") in problems


def test_the_users_own_hydra_application_is_left_alone(folder):
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(folder), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        load_config(config_path=folder, config_name="composed")
        assert GlobalHydra.instance().hydra is before


# ------------------------------------------------------------------------------------- mappings and round
# trips


def test_a_mapping_is_laid_over_the_defaults():
    overlay = {"trainer": {"total_epochs": 2}, "data": {"max_prompt_length": 9}}
    from_dict, from_omegaconf = as_config(overlay), as_config(OmegaConf.create(overlay))
    assert from_dict == from_omegaconf == load_config(["trainer.total_epochs=2", "data.max_prompt_length=9"])
    assert from_dict.actor_rollout_ref.rollout.prompt_length == 9
    assert as_config(from_dict) is from_dict
    assert as_config({}) == load_config()


def test_a_closed_omegaconf_tree_is_accepted_and_left_as_it_was():
    tree = OmegaConf.create({"trainer": {"total_epochs": 2}})
    OmegaConf.set_struct(tree, True)
    OmegaConf.set_readonly(tree, True)
    assert as_config(tree).trainer.total_epochs == 2
    assert tree == {"trainer": {"total_epochs": 2}}
    assert OmegaConf.is_readonly(tree)


def test_a_mapping_that_cannot_be_read_is_a_config_error():
    with pytest.raises(ConfigError, match="configuration: "):
        as_config({"trainer": {"seed": object()}})
    with pytest.raises(ConfigError, match=naming("trainer.seed")):
        as_config({"trainer": {"seedd": 1}})


def test_a_config_survives_yaml_pickle_and_dict(tmp_path):
    config = load_config(
        ["actor_rollout_ref.model.override_config={a: {b: [1, x, null]}}", "data.tokenizer='ü: #1'"]
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(config_path=tmp_path / "config.yaml") == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert as_config(config.model_dump()) == config


# ------------------------------------------------------------------------------------------- deprecated keys


def deprecations(config):
    return [finding.text for finding in deprecated(config) if finding.level == "warning"]


def test_a_deprecated_micro_batch_size_sets_its_successor_aside_and_says_so():
    config = load_config(["actor_rollout_ref.actor.ppo_micro_batch_size=32"])
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_micro_batch_size, actor.ppo_micro_batch_size_per_gpu) == (32, None)
    assert deprecations(config) == [
        Message(
            "actor_rollout_ref.actor.ppo_micro_batch_size=32",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        )
    ]


def test_the_critics_forward_size_follows_its_deprecated_update_size_unless_it_is_set():
    critic = load_config(["critic.ppo_micro_batch_size=64"]).critic
    assert (critic.forward_micro_batch_size, critic.forward_micro_batch_size_per_gpu) == (64, None)
    critic = load_config(
        ["critic.ppo_micro_batch_size=64", "critic.forward_micro_batch_size_per_gpu=3"]
    ).critic
    assert (critic.forward_micro_batch_size, critic.forward_micro_batch_size_per_gpu) == (None, 3)


def test_both_keys_in_one_file_stay_for_the_check_to_report(folder):
    (folder / "both.yaml").write_text(
        "actor_rollout_ref: {ref: {log_prob_micro_batch_size: 4, log_prob_micro_batch_size_per_gpu: 2}}\n"
    )
    ref = load_config(config_path=folder / "both.yaml").actor_rollout_ref.ref
    assert (ref.log_prob_micro_batch_size, ref.log_prob_micro_batch_size_per_gpu) == (4, 2)


def test_a_deprecated_key_in_a_file_with_the_defaults_in_its_list_counts_as_written(folder):
    (folder / "old.yaml").write_text("defaults: [ppo_trainer, _self_]\nreward_model: {micro_batch_size: 4}\n")
    rewards = load_config(config_path=folder / "old.yaml").reward_model
    assert (rewards.micro_batch_size, rewards.micro_batch_size_per_gpu) == (4, None)


def test_external_libs_is_external_lib():
    config = load_config(["actor_rollout_ref.model.external_libs=my_models"])
    assert config.actor_rollout_ref.model.external_lib == "my_models"
    assert config.critic.model.external_lib == "my_models"
    assert deprecations(config) == [
        Message("actor_rollout_ref.model.external_libs", "actor_rollout_ref.model.external_lib")
    ]
    assert deprecations(load_config()) == []


def test_a_resolved_config_with_a_deprecated_key_reads_back_to_an_equal_one(tmp_path):
    config = load_config(["critic.ppo_micro_batch_size=64", "actor_rollout_ref.model.external_libs=[a,b]"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(config_path=tmp_path / "config.yaml") == config


# ------------------------------------------------------------------------------------------------------ paths


def test_home_is_expanded_in_local_paths_only(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert expand("~/data/x.parquet") == "/home/someone/data/x.parquet"
    assert expand("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert expand("hdfs://host/~x") == "hdfs://host/~x"
    assert is_url("s3://bucket/x")
    assert not is_url("/local/x")


def test_loading_and_checking_import_neither_torch_nor_other_heavy_packages():
    program = (
        "import sys, strop.config.load, strop.config.checks.check, strop.cli.check\n"
        "config = strop.config.load.load_config(['actor_rollout_ref.rollout.name=hf'])\n"
        "strop.config.checks.check.check(config)\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'numpy', 'ray') if name in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ.copy()
    )
    assert done.stdout.strip() == "[]"

from __future__ import annotations

import importlib.util
from inspect import signature

import pytest

from strop.algorithms.advantages import ESTIMATORS
from strop.algorithms.policy_loss import POLICY_LOSSES
from strop.config.checks.check import check
from strop.config.load import load_config, load_tree
from strop.config.names import estimators, is_import_path, needs_critic, policy_losses
from strop.config.trees import SFT
from strop.errors import ConfigError

from messages import Message, mentions, naming

ROLLOUT = "actor_rollout_ref.rollout"


def doubts(result):
    """Warnings other than those about keys without effect."""
    return [line for line in result.warnings if not line.startswith("no effect")]


def test_a_good_configuration_has_no_errors_and_a_plan(report):
    result = report(train_rows=2048)
    assert (result.errors, doubts(result)) == ([], [])
    assert result.plan.iterations == 60
    result.raise_errors()


def test_all_errors_come_together(report):
    result = report(
        "algorithm.adv_estimator=grop", "data.val_files=/no/such.parquet", "data.train_batch_size=7",
        "critic.strategy=megatron", "trainer.logger=[consol]",
    )  # fmt: skip
    assert len(result.errors) == 5
    assert result.plan is None
    with pytest.raises(ConfigError) as caught:
        result.raise_errors()
    assert caught.value.problems == result.errors


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ([], ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"]),
        (["trainer.val_only=True"], ["data.val_files", "actor_rollout_ref.model.path"]),
        (
            ["actor_rollout_ref.model.path=x/y", "data.val_files=v", "reward_model.enable=True"],
            ["data.train_files", "reward_model.model.path"],
        ),
    ],
)
def test_keys_without_a_default_are_required_with_an_example(options, missing):
    errors = [line for line in check(load_config(options)).errors if "not set" in line]
    assert [line.partition(":")[0] for line in errors] == missing
    assert all(f"{key}=" in line for key, line in zip(missing, errors, strict=True))


# ------------------------------------------------------------------------------------------------------ names


def test_names_and_parameters_are_those_that_are_registered():
    for read, registered in ((estimators(), ESTIMATORS), (policy_losses(), POLICY_LOSSES)):
        parameters = {name: frozenset(signature(f).parameters) for name, f in registered.items()}
        assert read == parameters
    assert [name for name in ESTIMATORS if needs_critic(name)] == ["gae"]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "algorithm.adv_estimator=grop",
            ("algorithm.adv_estimator=grop", "grpo?", "gae, grpo, "),
        ),
        ("algorithm.adv_estimator=xyz", ("algorithm.adv_estimator=xyz", "gae")),
        ("actor_rollout_ref.actor.policy_loss=pg", ("actor_rollout_ref.actor.policy_loss=pg",)),
        ("reward_model.reward_manager=naiv", ("naive?",)),
        ("reward_model.reward_manager=primes", ("prime?", "naive, prime")),
        (
            "algorithm.adv_estimator=no_such_package.mine:fn",
            ("no_such_package", "PYTHONPATH"),
        ),
        (
            "trainer.logger=[console,wandbb]",
            ("trainer.logger=wandbb", "wandb?", "console, jsonl, file, tensorboard"),
        ),
    ],
)
def test_unknown_names_are_errors_that_list_the_known_ones(report, override, parts):
    assert report(override).errors == [Message(*parts)]


def test_import_paths_are_accepted(report):
    assert is_import_path("package.module:function")
    assert is_import_path("package.module.function")
    assert not is_import_path("grpo")
    result = report(
        "algorithm.adv_estimator=json:loads", "actor_rollout_ref.actor.policy_loss=os.path.join",
        "reward_model.reward_manager=__main__:Manager", "trainer.logger=[console,json:JSONDecoder]",
    )  # fmt: skip
    assert result.errors == []


def test_a_tracker_without_its_package_is_an_error_that_names_the_extra(report, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    (line,) = report("trainer.logger=[console,wandb]").errors
    assert mentions(line, "trainer.logger=wandb", "'strop[wandb]'")


def test_a_project_name_that_wandb_refuses(report):
    assert report("trainer.project_name='a/b'").errors == []
    (line,) = report("trainer.project_name='a/b'", "trainer.logger=[wandb]").errors
    assert mentions(line, "wandb")


# --------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus_baseline"])
def test_groups_of_one_are_doubtful(report, estimator):
    (line,) = doubts(report(f"algorithm.adv_estimator={estimator}"))
    assert mentions(line, f"{ROLLOUT}.n=1", f"algorithm.adv_estimator={estimator}")
    assert doubts(report(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=4")) == []


def test_rloo_with_groups_of_one_is_an_error(report):
    (line,) = report("algorithm.adv_estimator=rloo").errors
    assert mentions(line, "n >= 2")
    assert report("algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=2").errors == []


def test_estimators_without_groups_take_one_answer(report):
    for estimator in ("gae", "remax", "reinforce_plus_plus"):
        result = report(f"algorithm.adv_estimator={estimator}")
        assert (result.errors, doubts(result)) == ([], [])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{ROLLOUT}.do_sample=False"], f"{ROLLOUT}.do_sample=False"),
        ([f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p"),
        ([f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=5"], f"{ROLLOUT}.top_p and {ROLLOUT}.top_k"),
        ([f"{ROLLOUT}.val_kwargs.n=2"], f"{ROLLOUT}.val_kwargs.n=2"),
    ],
)
def test_doubtful_settings_are_one_warning_each(report, overrides, said):
    result = report(*overrides)
    (line,) = doubts(result)
    assert said in line
    assert result.errors == []


def test_settings_that_look_like_those_and_are_fine(report):
    result = report(
        "algorithm.kl_ctrl.type=adaptive", f"{ROLLOUT}.top_k=0", f"{ROLLOUT}.val_kwargs.n=2",
        f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=0.7",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1", "actor_rollout_ref.actor.optim.warmup_style=cosine",
        "trainer.critic_warmup=2",
    )  # fmt: skip
    assert (result.errors, doubts(result)) == ([], [])


def test_the_floor_of_a_critics_learning_rate_does_not_matter_without_a_critic(report):
    assert (
        doubts(report("critic.optim.min_lr_ratio=0.1", "algorithm.adv_estimator=reinforce_plus_plus")) == []
    )


def test_training_needs_a_temperature_and_validation_alone_does_not(report):
    (line,) = report(f"{ROLLOUT}.temperature=0").errors
    assert mentions(line, f"{ROLLOUT}.temperature=0", "0")
    assert report(f"{ROLLOUT}.temperature=0", "trainer.val_only=True").errors == []


def test_a_critic_warmup_needs_a_critic_and_an_end(report):
    without = report("trainer.critic_warmup=3", "algorithm.adv_estimator=reinforce_plus_plus")
    assert without.errors == []
    assert any(mentions(line, "trainer.critic_warmup=3") for line in without.warnings)
    (line,) = report("trainer.critic_warmup=3", "trainer.total_training_steps=3").errors
    assert mentions(line, "3 iterations")


# ----------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.train_files=[]", "data.train_files"),
        ("actor_rollout_ref.model.path=/no/model", "actor_rollout_ref.model.path=/no/model"),
        ("critic.model.path=./no", "critic.model.path=./no"),
        ("data.tokenizer=/no/tokenizer", "data.tokenizer=/no/tokenizer"),
        (
            "trainer.resume_mode=autom",
            "trainer.resume_mode=autom",
        ),
    ],
)
def test_missing_inputs_are_errors(report, override, part):
    assert report(override).errors == [Message(part)]


def test_a_missing_data_file_says_which_and_what_makes_one(report):
    (line,) = report("data.train_files=[/no/a.parquet,hdfs://host/b.parquet]").errors
    assert mentions(line, "data.train_files", "/no/a.parquet")


def test_urls_and_hub_names_are_left_to_the_download(report):
    result = report(
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", "data.tokenizer=hdfs://host/tokenizer",
        "data.train_files=s3://bucket/train.parquet", "custom_reward_function.path=s3://bucket/r.py",
    )  # fmt: skip
    assert result.errors == []


def test_models_that_the_run_does_not_load_are_not_looked_for(report, tmp_path):
    assert report("critic.model.path=/no/model", "algorithm.adv_estimator=grpo").errors == []
    assert report("reward_model.model.path=/no/model").errors == []
    assert len(report("reward_model.model.path=/no/model", "reward_model.enable=True").errors) == 1
    (tmp_path / "empty").mkdir()
    (line,) = report(f"actor_rollout_ref.model.path={tmp_path}/empty").errors
    assert mentions(line, "config.json")
    (tmp_path / "empty" / "weights.gguf").touch()
    assert report(f"actor_rollout_ref.model.path={tmp_path}/empty").errors == []


def test_a_checkpoint_folder_can_be_named(report, tmp_path):
    assert report(f"trainer.resume_mode={tmp_path}").errors == []


def test_a_model_made_for_shorter_sequences_is_doubtful(report, tmp_path):
    (tmp_path / "model" / "config.json").write_text(
        '{"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10,'
        ' "intermediate_size": 16, "max_position_embeddings": 1000}'
    )
    (line,) = doubts(report())
    assert mentions(line, "data.max_prompt_length=512", "data.max_response_length=512", "1024", "1000")
    assert doubts(report("data.max_prompt_length=488")) == []


def test_deprecated_keys_are_named_and_contradictions_are_errors(report):
    result = report("critic.ppo_micro_batch_size=8", "critic.forward_micro_batch_size_per_gpu=4")
    assert result.errors == []
    (line,) = doubts(result)
    assert mentions(line, "critic.ppo_micro_batch_size=8")
    model = "actor_rollout_ref.model"
    (line,) = report(f"{model}.external_lib=a", f"{model}.external_libs=b").errors
    assert mentions(line, f"{model}.external_lib=a", f"{model}.external_libs=b")


@pytest.mark.parametrize("below", ["", "/run", "/a/b/c"])
def test_a_run_folder_below_a_file_is_an_error(report, tmp_path, below):
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file{below}"
    (line,) = report(f"trainer.default_local_dir={path}").errors
    assert mentions(line, f"trainer.default_local_dir={path}", f"{tmp_path}/file")


def test_a_run_folder_that_cannot_be_made_is_an_error_and_trying_leaves_nothing(report, tmp_path):
    for path in ("/proc/run", "/proc/a/b"):  # where the superuser has every right, and makes no folder either
        (line,) = report(f"trainer.default_local_dir={path}").errors
        assert mentions(line, f"trainer.default_local_dir={path}", "/proc")
    (line,) = report("trainer.default_local_dir=s3://bucket/run").errors
    assert "default_hdfs_dir" in line
    before = sorted(tmp_path.iterdir())
    assert report(f"trainer.default_local_dir={tmp_path}/a/b").errors == []
    assert report(f"trainer.default_local_dir={tmp_path}").errors == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_supervised_run_folder_is_looked_at_too(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=naming(f"default_local_dir={tmp_path}/file/run", f"{tmp_path}/file")
    ):
        check(load_tree(SFT, [f"trainer.default_local_dir={tmp_path}/file/run"])).raise_errors()

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from strop.config.keys import all_keys, nearest, unknown_key, value_at
from strop.config.load import load_config
from strop.config.schema import Config
from strop.config.trees import PPO
from strop.errors import ConfigError

from messages import mentions

FREE = (
    "actor_rollout_ref.actor.policy_loss_kwargs",
    "actor_rollout_ref.model.override_config",
    "critic.model.override_config",
    "reward_model.reward_kwargs",
    "reward_model.parts",
    "trainer.placement",
    "trainer.resource_pools",
)


def paths_in(mapping, prefix=""):
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in FREE:
            yield from paths_in(value, f"{path}.")
        else:
            yield path


def test_schema_and_yaml_hold_exactly_the_same_keys():
    in_yaml = list(paths_in(OmegaConf.to_container(OmegaConf.load(PPO.defaults_file), resolve=False)))
    assert sorted(in_yaml) == sorted(path for path, key in all_keys().items() if not key.is_section)


def test_no_field_has_a_second_default():
    def fields(section):
        for name, field in section.model_fields.items():
            yield f"{section.__name__}.{name}", field
            if hasattr(field.annotation, "model_fields"):
                yield from fields(field.annotation)

    assert [name for name, field in fields(Config) if not field.is_required()] == []


def test_every_key_is_documented_in_one_line_and_its_type_in_words():
    undocumented = [key.path for key in all_keys().values() if not key.doc.strip() or "\n" in key.doc]
    assert undocumented == []
    assert [key.path for key in all_keys().values() if not key.expected] == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data.train_batch_size", "int > 0"),
        ("data.num_workers", "int > 0 or null"),
        ("data.train_files", "string or list of strings"),
        ("algorithm.gamma", "float >= 0 and <= 1"),
        ("data.truncation", "one of error, left, right, middle"),
        ("actor_rollout_ref.actor.rollout_is", "one of token, sequence or null"),
        ("actor_rollout_ref.actor.clip_ratio_c", "float > 1 or null"),
        ("actor_rollout_ref.rollout.stop_token_ids", "list of int >= 0"),
        ("actor_rollout_ref.model.override_config", "mapping"),
        ("actor_rollout_ref.model.external_lib", "string or list of string or null"),
        ("trainer.save_freq", "int > 0, or -1 for never"),
        ("trainer.val_only", "True or False"),
    ],
)
def test_types_read_like_words(path, words):
    assert all_keys()[path].expected == words


def test_a_config_cannot_be_changed():
    config = load_config()
    with pytest.raises(ValidationError):
        config.trainer.total_epochs = 3


def test_numbers_may_arrive_as_text():
    plain = load_config().model_dump()
    plain["actor_rollout_ref"]["actor"]["optim"]["lr"] = "1e-6"
    plain["data"]["train_batch_size"] = "1024"
    plain["trainer"]["experiment_name"] = 7
    config = Config.model_validate(plain)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.data.train_batch_size == 1024
    assert config.trainer.experiment_name == "7"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.total_epochs=True", "trainer.total_epochs: found True, expected int > 0"),
        ("trainer.total_epochs=0", "trainer.total_epochs: found 0, expected int > 0"),
        ("trainer.total_epochs=1.5", "trainer.total_epochs: found 1.5, expected int > 0"),
        ("trainer.save_freq=0", "trainer.save_freq: found 0, expected int > 0, or -1 for never"),
        ("trainer.total_epochs=null", "trainer.total_epochs: found null, expected int > 0"),
        ("algorithm.lam=1.01", "algorithm.lam: found 1.01, expected float >= 0 and <= 1"),
        ("algorithm.lam=nan", "algorithm.lam: found nan, expected float >= 0 and <= 1"),
        ("trainer.val_only=maybe", "trainer.val_only: found 'maybe', expected True or False"),
        (
            "trainer.logger=[console,{a:1}]",
            "trainer.logger: found ['console', {'a': 1}], expected string or list of strings",
        ),
        (
            "critic.optim.betas=[0.9]",
            "critic.optim.betas: found [0.9], expected list of two floats in [0, 1)",
        ),
        ("trainer=5", "trainer: found 5, expected a section (a mapping of keys)"),
        (
            "algorithm.kl_penalty=k4",
            "algorithm.kl_penalty: found 'k4', expected one of kl, k1, abs, mse, k2, low_var_kl, k3, full",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_found_and_expected(override, line):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert caught.value.problems == [line]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.totl_epochs", "trainer.total_epochs"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("algorithm.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("reward_model.model.pth", "reward_model.model.path"),
        ("datta", "data"),
    ],
)
def test_the_nearest_key_is_found(wrong, right):
    assert nearest(wrong) == right


def test_a_key_like_no_other_is_reported_with_what_its_section_has():
    line = unknown_key("algorithm.zzzzzz.qqqq")
    assert mentions(line, "algorithm.zzzzzz.qqqq", "adv_estimator")


def test_value_at_reads_by_full_path():
    assert value_at(load_config(), "actor_rollout_ref.rollout.val_kwargs.n") == 1

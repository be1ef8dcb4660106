from __future__ import annotations

import importlib.util

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from strop.config.derived import written_paths
from strop.config.keys import nearest_key
from strop.config.load import load_config
from strop.config.names import is_installed
from strop.config.schema import Config
from strop.config.trees import PPO
from strop.errors import ConfigError

from messages import mentions, naming


def test_no_field_has_a_second_default():
    """Keys of a back-end have a default in their class or in the file."""

    def fields(section, prefix=""):
        for name, field in section.model_fields.items():
            yield f"{prefix}{name}", field
            if hasattr(field.annotation, "model_fields"):
                yield from fields(field.annotation, f"{prefix}{name}.")

    in_file = written_paths(OmegaConf.to_container(OmegaConf.load(PPO.defaults_file), resolve=False))
    assert [name for name, field in fields(Config) if not field.is_required() and name in in_file] == []


def test_a_config_cannot_be_changed():
    config = load_config()
    with pytest.raises(ValidationError):
        config.trainer.total_epochs = 3


def test_a_section_is_read_as_a_dict_is():
    config = load_config()
    assert config.reward_model.get("reward_manager", "prime") == "naive"
    assert config.trainer.get("of_another_system", 3) == 3
    assert config.get("get") is None


@pytest.mark.parametrize(
    ("override", "found", "expected"),
    [
        ("trainer.total_epochs=True", "True", "int > 0"),
        ("trainer.total_epochs=0", "0", "int > 0"),
        ("trainer.total_epochs=1.5", "1.5", "int > 0"),
        ("trainer.total_epochs=null", "null", "int > 0"),
        ("data.num_workers=0", "0", "int > 0 or null"),
        ("trainer.save_freq=0", "0", "int > 0, or -1 for never"),
        ("algorithm.lam=1.01", "1.01", "float >= 0 and <= 1"),
        ("algorithm.lam=nan", "nan", "float >= 0 and <= 1"),
        ("trainer.val_only=maybe", "'maybe'", "True or False"),
        ("trainer.logger=[console,{a:1}]", "['console', {'a': 1}]", "string or list of strings"),
        ("critic.optim.betas=[0.9]", "[0.9]", "list of two floats in [0, 1)"),
        ("actor_rollout_ref.rollout.stop_token_ids=[-1]", "[-1]", "list of int >= 0"),
        ("actor_rollout_ref.actor.rollout_is=x", "'x'", "one of token, sequence or null"),
        ("data.train_files=2147483648", "2147483648", "string or list of strings"),
        ("trainer=5", "5", "a section (a mapping of keys)"),
        (
            "algorithm.kl_penalty=k4",
            "'k4'",
            "one of kl, k1, abs, mse, k2, low_var_kl, k3, low_var_kl_clamped, full",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_found_and_expected(override, found, expected):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert caught.value.problems == [f"{override.partition('=')[0]}: found {found}, expected {expected}"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.totl_epochs", "trainer.total_epochs"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        (
            "actor_rollout_ref.rolout.val_kwargs.tmperature",
            "actor_rollout_ref.rollout.val_kwargs.temperature",
        ),
        ("trainer.placment.Critic", "trainer.placement"),
        ("reward_model.model.pth", "reward_model.model.path"),
        ("datta", "data"),
    ],
)
def test_the_nearest_key_is_found(wrong, right):
    assert nearest_key(wrong) == right


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("max_tokens", "data.max_response_length"),
        ("best_of", "actor_rollout_ref.rollout.n"),
        ("guided_decoding", "actor_rollout_ref.rollout.structured_outputs"),
    ],
)
def test_names_of_sampling_in_vllm_lead_to_the_key(name, right):
    with pytest.raises(ConfigError, match=naming(f"rollout.{name}", f"did you mean {right}?")):
        load_config([f"+actor_rollout_ref.rollout.{name}=1"])


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.clip_ratio",
        "reward_model.model.fsdp_size",
        "reward_model.use_remove_padding",
    ],
)
def test_no_key_of_another_section_is_proposed(key):
    assert nearest_key(key) is None
    with pytest.raises(ConfigError) as caught:
        load_config([f"{key}=1"])
    assert "did you mean" not in str(caught.value)
    assert mentions(str(caught.value), key)


def test_a_folder_of_its_name_is_no_package(tmp_path, monkeypatch):
    """wandb leaves a folder ``wandb`` where a run was started."""
    (tmp_path / "no_such_tracker" / "run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("no_such_tracker") is not None
    assert not is_installed("no_such_tracker")
    assert is_installed("json")

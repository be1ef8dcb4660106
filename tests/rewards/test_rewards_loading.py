from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.config.load import load_config
from strop.errors import ConfigError
from strop.rewards.custom import CustomReward
from strop.rewards.manager import RewardManager, load_reward_manager

from messages import naming


def test_the_default_is_the_naive_manager_with_the_limits_of_the_configuration(tokenizer: Any):
    config = load_config(
        [
            "reward_model.timeout_s=3",
            "reward_model.error_score=-1",
            "reward_model.max_error_rate=0.25",
            "data.reward_fn_key=origin",
        ]
    )
    manager = load_reward_manager(config, tokenizer, 2)
    assert type(manager) is RewardManager
    assert manager._process.timeout_s == 3.0
    assert manager.error_score == -1.0
    assert manager._budget.max_rate == 0.25
    assert manager.reward_fn_key == "origin"
    assert manager.num_examine == 2


def test_reward_kwargs_reach_the_manager(tokenizer: Any):
    config = load_config(
        ["+reward_model.reward_kwargs={scorer_kwargs: {openai/gsm8k: {method: flexible}}, timeout_s: 4}"]
    )
    manager = load_reward_manager(config, tokenizer, 0, **config.reward_model.reward_kwargs)
    assert manager._process.timeout_s == 4
    with pytest.raises(ConfigError, match=naming("method='loose'")):
        load_reward_manager(config, tokenizer, 0, scorer_kwargs={"openai/gsm8k": {"method": "loose"}})


def test_an_unknown_manager_names_the_known(tokenizer: Any):
    with pytest.raises(ConfigError, match=r"reward_model\.reward_manager='nave' .*'naive'"):
        load_reward_manager(load_config(["reward_model.reward_manager=nave"]), tokenizer, 0)


def test_an_unknown_argument_is_named_with_the_parameters(tokenizer: Any):
    with pytest.raises(ConfigError, match=naming("'temperature'", "timeout_s")):
        load_reward_manager(load_config(), tokenizer, 0, temperature=1.0)


def test_a_custom_function_is_loaded_and_checked(tokenizer: Any, tmp_path: Path):
    path = tmp_path / "reward.py"
    path.write_text("def mine(**sample):\n    return 1.0\n")
    keys = [f"custom_reward_function.path={path}", "custom_reward_function.name=mine"]
    manager = load_reward_manager(load_config(keys), tokenizer, 0)
    manager.validate_sources(["anything"])
    with pytest.raises(ConfigError, match=naming("mine")):
        load_reward_manager(load_config(keys[:1]), tokenizer, 0)


OWN = """
class Small:
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key, bonus=0):
        self.given = (tokenizer, num_examine, compute_score, reward_fn_key, bonus)

class Large:
    def __init__(self, **given):
        self.given = given
"""


@pytest.mark.parametrize("separator", [":", "."])
def test_a_manager_of_ones_own_gets_the_limits_only_if_it_takes_them(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
):
    (tmp_path / "own_manager_of_a_test.py").write_text(OWN)
    (tmp_path / "reward.py").write_text("def compute_score(**sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_manager_of_a_test", raising=False)
    base = [f"custom_reward_function.path={tmp_path / 'reward.py'}"]

    name = f"own_manager_of_a_test{separator}Small"
    config = load_config([*base, f"reward_model.reward_manager={name}"])
    small = load_reward_manager(config, tokenizer, 1, bonus=2)
    assert small.given[0] is tokenizer
    assert small.given[1::2] == (1, "data_source")
    assert isinstance(small.given[2], CustomReward)
    assert small.given[4] == 2
    with pytest.raises(ConfigError, match=re.escape(name)):
        load_reward_manager(config, tokenizer, 1, malus=2)

    name = f"own_manager_of_a_test{separator}Large"
    large = load_reward_manager(load_config([*base, f"reward_model.reward_manager={name}"]), tokenizer, 1)
    assert {"timeout_s", "error_score", "max_error_rate", "tokenizer"} <= large.given.keys()

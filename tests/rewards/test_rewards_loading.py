from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.config.load import load_config
from strop.errors import ConfigError
from strop.rewards.custom import CustomReward
from strop.rewards.loading import load_reward_manager
from strop.rewards.manager import RewardManager
from strop.rewards.worker.pool import default_num_workers

from messages import naming


def test_the_default_is_the_naive_manager_with_the_limits_of_the_configuration(tokenizer: Any):
    keys = ["reward_model.timeout_s=3", "reward_model.error_score=-1", "reward_model.max_error_rate=0.25"]
    manager = load_reward_manager(load_config([*keys, "data.reward_fn_key=origin"]), tokenizer, 2)
    assert type(manager) is RewardManager
    assert manager._pool._processes[0].timeout_s == 3.0
    assert (manager.error_score, manager._budget.max_rate) == (-1.0, 0.25)
    assert (manager.reward_fn_key, manager.num_examine) == ("origin", 2)


def test_prime_is_the_manager_of_several_processes(tokenizer: Any):
    keys = ["reward_model.reward_manager=prime", "reward_model.num_workers=3", "reward_model.timeout_s=4"]
    keys.append("reward_model.memory_limit_mb=300")
    manager = load_reward_manager(load_config(keys), tokenizer, 0)
    assert type(manager) is RewardManager
    assert [process.timeout_s for process in manager._pool._processes] == [4.0] * 3
    assert [process.memory_limit_mb for process in manager._pool._processes] == [300] * 3
    assert len(os.sched_getaffinity(0)) >= default_num_workers() >= 1


def test_reward_kwargs_are_passed_to_the_manager(tokenizer: Any):
    config = load_config(
        ["+reward_model.reward_kwargs={scorer_kwargs: {openai/gsm8k: {method: flexible}}, timeout_s: 4}"]
    )
    manager = load_reward_manager(config, tokenizer, 0, **config.reward_model.reward_kwargs)
    assert manager._pool._processes[0].timeout_s == 4
    with pytest.raises(ConfigError, match=naming("method='loose'")):
        load_reward_manager(config, tokenizer, 0, scorer_kwargs={"openai/gsm8k": {"method": "loose"}})


def test_an_unknown_manager_or_argument_names_the_known_ones(tokenizer: Any):
    with pytest.raises(ConfigError, match=naming("reward_model.reward_manager='nave'", "naive", "prime")):
        load_reward_manager(load_config(["reward_model.reward_manager=nave"]), tokenizer, 0)
    with pytest.raises(ConfigError, match=naming("'temperature'", "timeout_s")):
        load_reward_manager(load_config(), tokenizer, 0, temperature=1.0)


def test_a_custom_function_is_loaded_and_checked(tokenizer: Any, tmp_path: Path):
    path = tmp_path / "reward.py"
    path.write_text("def mine(**sample):\n    return 1.0\n")
    keys = [f"custom_reward_function.path={path}", "custom_reward_function.name=mine"]
    manager = load_reward_manager(load_config(keys), tokenizer, 0)
    manager.validate_sources(["anything"])
    load_reward_manager(load_config(keys[:1]), tokenizer, 0)  # the only function of its file
    with pytest.raises(ConfigError, match=naming("no function other", "mine")):
        load_reward_manager(load_config([keys[0], "custom_reward_function.name=other"]), tokenizer, 0)


OWN = """
class Small:
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key, bonus=0):
        self.given = (tokenizer, num_examine, compute_score, reward_fn_key, bonus)

class Smallest:  # as verl's first
    def __init__(self, tokenizer, num_examine):
        self.given = (tokenizer, num_examine)

class Large:
    def __init__(self, **given):
        self.given = given
"""


@pytest.mark.parametrize("separator", [":", "."])
def test_a_custom_manager_gets_the_limits_only_if_it_takes_them(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
):
    (tmp_path / "own_manager_of_a_test.py").write_text(OWN)
    (tmp_path / "reward.py").write_text("def compute_score(**sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_manager_of_a_test", raising=False)

    def load(name: str, *keys: str, **options: Any) -> Any:
        manager = f"reward_model.reward_manager=own_manager_of_a_test{separator}{name}"
        function = f"custom_reward_function.path={tmp_path / 'reward.py'}"
        return load_reward_manager(load_config([function, manager, *keys]), tokenizer, 1, **options)

    small = load("Small", bonus=2)
    assert small.given[0] is tokenizer
    assert isinstance(small.given[2], CustomReward)
    assert (*small.given[1::2], small.given[4]) == (1, "data_source", 2)
    with pytest.raises(ConfigError, match=naming(f"own_manager_of_a_test{separator}Small", "malus")):
        load("Small", malus=2)
    with pytest.raises(ConfigError, match=naming("reward_model.non_stop_penalty")):
        load("Small", "reward_model.non_stop_penalty=True")
    with pytest.raises(ConfigError, match=naming("reward_model.memory_limit_mb")):
        load("Small", "reward_model.memory_limit_mb=100")
    with pytest.raises(ConfigError, match=naming("Smallest", "custom_reward_function.path")):
        load("Smallest")
    assert load("Smallest", "custom_reward_function.path=null").given == (tokenizer, 1)
    with pytest.raises(ConfigError, match=naming("Smallest", "data.reward_fn_key")):
        load("Smallest", "custom_reward_function.path=null", "data.reward_fn_key=origin")
    assert (
        load("Small", bonus={"len": 3, "deep": {"on": True}}).given[4].deep.on
    )  # as verl's managers read it
    given = load("Large").given
    assert {"timeout_s", "error_score", "max_error_rate", "tokenizer"} <= given.keys()

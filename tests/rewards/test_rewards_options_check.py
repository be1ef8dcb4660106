from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from strop.cli.check import MANAGER_OPTIONS, option_problems
from strop.cli.main import main
from strop.config.load import load_config
from strop.errors import ConfigError
from strop.rewards.manager import RewardManager, load_reward_manager


def test_the_options_of_the_manager_are_its_parameters():
    assert set(MANAGER_OPTIONS) == set(inspect.signature(RewardManager).parameters)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+reward_model.reward_kwargs.foo=3", r"foo"),
        ("+reward_model.reward_kwargs.scorer_kwargs={openai/gsm8kk: {method: flexible}}", "'openai/gsm8kk'"),
        ("+reward_model.reward_kwargs.scorer_kwargs={openai/gsm8k: {methd: flexible}}", "'methd'"),
        ("+reward_model.parts={f: {scorer: format, kwargs: {patern: a}}}", r"parts\.f\.kwargs.*'patern'"),
    ],
)
def test_what_the_run_would_refuse_is_a_problem(override: str, message: str):
    config = load_config([override])
    with pytest.raises(ConfigError, match=message):  # that the run would
        load_reward_manager(config, None, 0, **config.reward_model.reward_kwargs)
    (problem,) = option_problems(config)
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(problem)


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 0),
        (["+reward_model.reward_kwargs.scorer_kwargs={openai/gsm8k: {method: flexible}}"], 0),
        (["+reward_model.reward_kwargs.scorer_kwargs={openai/gsm8k: flexible}"], 1),
        (["+reward_model.reward_kwargs.foo=3", "reward_model.reward_manager=my.module:Manager"], 0),
        (
            [
                "+reward_model.reward_kwargs.scorer_kwargs={openai/gsm8k: {method: flexible}}",
                "custom_reward_function.path=mine.py",
            ],
            1,
        ),
    ],
)
def test_what_the_run_would_take_is_none(overrides: list[str], count: int):
    assert len(option_problems(load_config(overrides))) == count


def test_check_tells_them_with_the_other_errors(capsys: pytest.CaptureFixture[str]):
    arguments = ["+reward_model.reward_kwargs.foo=3", "algorithm.adv_estimator=gea"]
    assert main(["check", *arguments]) == 2
    told = capsys.readouterr().out
    assert "reward_kwargs.foo" in told
    assert "adv_estimator=gea" in told


def test_looking_needs_no_torch():
    code = "import sys, strop.cli.check; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.rewards.custom import load_custom_reward, require_score_signature

from messages import mentions, naming

GOOD = """
from dataclasses import dataclass

@dataclass
class Judge:
    factor: float = 2.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return Judge().factor * (solution_str == ground_truth)

def other(solution_str, ground_truth, **kwargs):
    return 3.0

def _hidden(**kwargs):
    return 0.0

number = 5
"""
SAMPLE = {"data_source": "d", "solution_str": "a", "ground_truth": "a", "extra_info": None}


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(GOOD)
    return path


def test_a_function_is_loaded_by_path_and_name(reward_file: Path):
    assert load_custom_reward(str(reward_file))(**SAMPLE) == 2.0
    assert load_custom_reward(str(reward_file), "other")(**SAMPLE) == 3.0
    assert load_custom_reward(None) is None


def test_a_relative_path_still_holds_after_the_folder_has_changed(
    reward_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    reward = load_custom_reward("reward.py")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(reward))(**SAMPLE) == 2.0
    assert repr(reward) == f"{reward_file}:compute_score"


def test_a_pickle_holds_path_and_name_and_not_the_code(reward_file: Path):
    content = pickle.dumps(load_custom_reward(str(reward_file)))
    assert str(reward_file).encode() in content
    assert b"Judge" not in content


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=naming("custom_reward_function.path=", "nowhere.py")):
        load_custom_reward(str(tmp_path / "nowhere.py"))


def test_a_missing_function_names_those_that_are_there(reward_file: Path):
    with pytest.raises(ConfigError) as error:
        load_custom_reward(str(reward_file), "reward")
    assert mentions(str(error.value), "compute_score", "other")


def test_a_file_without_functions_says_so(tmp_path: Path):
    path = tmp_path / "empty.py"
    path.write_text("import os\n")
    with pytest.raises(ConfigError, match="function"):
        load_custom_reward(str(path))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nimport surely_not_installed\n", r"\(line 2\): ModuleNotFoundError.*PYTHONPATH"),
        ("def f(:\n", "SyntaxError"),
        ("\n\n1 / 0\n", r"\(line 3\): ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
def test_an_error_on_import_is_one_message_with_the_cause(tmp_path: Path, code: str, message: str):
    path = tmp_path / "broken.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match=message) as error:
        load_custom_reward(str(path))
    assert error.value.__cause__ is not None


def test_ctrl_c_during_import_is_not_an_error_of_the_file(tmp_path: Path):
    path = tmp_path / "slow.py"
    path.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_custom_reward(str(path))


def test_a_file_that_is_not_python_is_refused(tmp_path: Path):
    path = tmp_path / "reward.yaml"
    path.write_text("a: 1\n")
    with pytest.raises(ConfigError, match=naming(".py")):
        load_custom_reward(str(path))


def test_something_that_is_not_a_function_is_refused(reward_file: Path):
    with pytest.raises(ConfigError, match=naming("name='number'", "5")):
        load_custom_reward(str(reward_file), "number")


async def coroutine(**kwargs):
    return 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda solution_str, ground_truth: 1.0, "unexpected keyword argument 'data_source'"),
        (lambda a, b, c, d: 1.0, "parameters"),
        (lambda data_source, solution_str, ground_truth: 1.0, "'extra_info'"),
        (lambda data_source, solution_str, ground_truth, extra_info, tokenizer: 1.0, "'tokenizer'"),
        (coroutine, "async"),
    ],
)
def test_a_function_that_cannot_be_called_with_the_four_keywords_is_refused(function, message: str):
    with pytest.raises(ConfigError, match=message):
        require_score_signature(function, "compute_score")


@pytest.mark.parametrize(
    "function",
    [
        lambda data_source, solution_str, ground_truth, extra_info=None: 1.0,
        lambda *, solution_str, **rest: 1.0,
        lambda extra_info, ground_truth, solution_str, data_source: 1.0,
        dict,
    ],
)
def test_any_order_and_any_surplus_is_accepted(function):
    require_score_signature(function, "compute_score")

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.rewards.custom import load_custom_reward

from messages import naming

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


def test_the_only_function_of_a_file_needs_no_name(tmp_path: Path):
    path = tmp_path / "reward.py"
    path.write_text("from math import sqrt\ndef _helper(): pass\ndef mine(response):\n    return 4.0\n")
    found = load_custom_reward(str(path))
    assert pickle.loads(pickle.dumps(found)).name == "mine"
    with pytest.raises(ConfigError, match=naming("no function min", "custom_reward_function.name=mine")):
        load_custom_reward(str(path), "min")


@pytest.mark.parametrize(
    "code",
    [
        "class Mine:\n    def __call__(self, response): return 4.0\nmine = Mine()\n",
        "import functools\n@functools.cache\ndef mine(response): return 4.0\n",
        "from typing import NewType\nText = NewType('Text', str)\ndef mine(response): return 4.0\n",
    ],
)
def test_the_only_function_may_be_an_object_that_can_be_called(tmp_path: Path, code: str):
    (tmp_path / "reward.py").write_text(code)
    found = load_custom_reward(str(tmp_path / "reward.py"))
    assert found is not None
    assert found(response="") == 4.0


def test_a_function_is_pickled_as_its_absolute_path_and_name(
    reward_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps(load_custom_reward("reward.py"))
    assert str(reward_file).encode() in content
    assert b"Judge" not in content
    monkeypatch.chdir("/")
    again = pickle.loads(content)
    assert again(**SAMPLE) == 2.0
    assert repr(again) == f"{reward_file}:compute_score"


@pytest.mark.parametrize(
    ("file", "code", "name", "parts"),
    [
        ("nowhere.py", None, "compute_score", ("custom_reward_function.path=", "nowhere.py")),
        ("reward.yaml", "a: 1\n", "compute_score", (".py",)),
        ("reward.py", GOOD, "reward", ("no function reward", "other", "name=compute_score")),
        ("reward.py", GOOD, "number", ("name=number", "5")),
        ("reward.py", "import os\n", "compute_score", ("no functions",)),
        ("reward.py", "x = 1\nimport not_installed\n", "f", ("line 2", "ModuleNotFoundError", "PYTHONPATH")),
        ("reward.py", "def f(:\n", "f", ("SyntaxError",)),
        ("reward.py", "\n\n1 / 0\n", "f", ("line 3", "ZeroDivisionError: division by zero")),
        ("reward.py", "raise SystemExit(3)\n", "f", ("SystemExit: 3",)),
    ],
)
def test_what_cannot_be_loaded_is_one_message(
    tmp_path: Path, file: str, code: str | None, name: str, parts: tuple[str, ...]
):
    if code is not None:
        (tmp_path / file).write_text(code)
    with pytest.raises(ConfigError, match=naming(*parts)):
        load_custom_reward(str(tmp_path / file), name)


def test_ctrl_c_during_import_is_not_an_error_of_the_file(tmp_path: Path):
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_custom_reward(str(tmp_path / "slow.py"))


def test_a_column_may_have_the_name_self(tmp_path: Path):
    (tmp_path / "reward.py").write_text("def score(response, **columns): return columns['self']")
    found = load_custom_reward(str(tmp_path / "reward.py"))
    assert found is not None
    assert found(**{"response": "3", "self": 2.0}) == 2.0


def test_a_file_that_changes_the_folder_does_so_in_its_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Data, outputs and the file itself have relative paths in the run; the function reads beside itself."""
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "reward.py").write_text(
        "import os\nos.chdir(os.path.dirname(__file__))\n"
        "def score(response): return len(open('table.txt').read())"
    )
    (tmp_path / "rewards" / "table.txt").write_text("123")
    monkeypatch.chdir(tmp_path)
    found = load_custom_reward("rewards/reward.py")
    assert Path.cwd() == tmp_path
    sent = pickle.loads(pickle.dumps(found))
    assert sent(response="") == 3

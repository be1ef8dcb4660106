"""What identifies a function that a program passes as a reward: what it computes with."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from strop.rewards.identity import fingerprint

PROGRAM = """
import dataclasses, datetime, enum, functools, math, os, re, zoneinfo
import numpy as np
import my_helper

SCALE, PATTERN, TABLE = 2.0, re.compile("a+"), {"x": [1, {"p", "q", "r"}]}
WEIGHTS = np.array([1.0, 2.0])
NOON = datetime.datetime(2024, 1, 1, 12, tzinfo=zoneinfo.ZoneInfo("UTC"))

class Kind(enum.Enum):
    GOOD = 1

@dataclasses.dataclass
class Judge:
    factor: float = 3.0
    def __call__(self, response):
        return self.factor * self.of(response)
    def of(self, response):
        return len(response)

def twice(function):
    @functools.wraps(function)
    def call(response):
        return 2 * function(response)
    return call

@functools.cache
def length(text):
    return len(text) if text in {"one", "two", "three"} else even(text)

def even(text, n=1):
    return odd(text, n) if n % 2 else length(text)

def odd(text, n):
    return SCALE * n

@twice
def plain(response):
    return length(response) + math.sqrt(2) + (PATTERN.search(response) is not None)

def others(response, *, kind=Kind.GOOD):
    def inner():
        from my_package.inside import value
        return value(response)
    return my_helper.NUMBER * WEIGHTS[0] + TABLE["x"][0] + inner() + len(os.environ) + NOON.timestamp()

def train(function, **settings):
    return function

scorer = train(lambda response: plain(response) * 1.0, steps=1)
judge = Judge()
bound = judge.of
part = functools.partial(plain, response="a")
lookup = {"a": 1.0}.get
"""
FUNCTIONS = ("plain", "others", "scorer", "judge", "bound", "part", "lookup", "length")


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A helper, and a package whose modules import each other; the folder is on the path."""
    (tmp_path / "my_package").mkdir()
    for name, text in {
        "my_helper": "import numpy\nNUMBER = 1\n",
        "my_package/__init__": "",
        "my_package/inside": "from .deep import value\n",
        "my_package/deep": "from . import side\nimport my_helper\n\n\ndef value(x):\n    return 1\n",
        "my_package/side": "import json\n",
        "my_package/unused": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_")]:  # of another test's folder
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def fingerprints(program):
    names = {"__name__": "__main__"}
    exec(compile(program, "<cell>", "exec"), names)
    return {name: fingerprint(names[name]) for name in FUNCTIONS}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("steps=1", "steps=2", ()),
        ("    return SCALE * n", "    # a comment\n\n    return SCALE * n", ()),
        ('{"one", "two", "three"}', '{"three", "one", "two"}', ()),
        ('{"p", "q", "r"}', '{"r", "q", "p"}', ()),
        ("* 1.0,", "* 1.5,", ("scorer",)),
        ("SCALE, PATTERN, TABLE = 2.0", "SCALE, PATTERN, TABLE = 2.5", ("length", "part", "plain", "scorer")),
        ('re.compile("a+")', 're.compile("b+")', ("part", "plain", "scorer")),
        ("return 2 * function", "return 3 * function", ("part", "plain", "scorer")),
        ("SCALE * n", "SCALE + n", ("length", "part", "plain", "scorer")),
        ('"two", "three"', '"two", "four"', ("length", "part", "plain", "scorer")),
        ("n=1)", "n=2)", ("length", "part", "plain", "scorer")),
        ('{"p", "q", "r"}', '{"p", "q"}', ("others",)),
        ("[1.0, 2.0]", "[1.0, 2.5]", ("others",)),
        ('ZoneInfo("UTC")', 'ZoneInfo("Etc/GMT-1")', ("others",)),
        ("GOOD = 1", "GOOD = 2", ("others",)),
        ("factor: float = 3.0", "factor: float = 4.0", ("bound", "judge")),
        ("return len(response)", "return -len(response)", ("bound", "judge")),
        ('response="a"', 'response="b"', ("part",)),
        ('{"a": 1.0}', '{"a": 1.5}', ("lookup",)),
    ],
)
def test_a_function_is_identified_by_all_that_it_computes_with(modules, old, new, changed):
    assert old in PROGRAM
    before, after = fingerprints(PROGRAM), fingerprints(PROGRAM.replace(old, new))
    assert {name for name in FUNCTIONS if before[name] != after[name]} == set(changed)


@pytest.mark.parametrize(
    ("module", "changed"),
    [("my_helper", {"others"}), ("my_package/inside", set()), ("my_package/deep", set())],
)
def test_modules_among_the_globals_count_by_their_files_alone(modules, module, changed):
    before = fingerprints(PROGRAM)
    (modules / f"{module}.py").write_text((modules / f"{module}.py").read_text() + "MORE = 1\n")
    after = fingerprints(PROGRAM)
    assert {name for name in FUNCTIONS if before[name] != after[name]} == changed


def test_fingerprints_are_the_same_in_every_interpreter(modules):
    from my_package.inside import value

    found = fingerprints(PROGRAM), fingerprint(value)
    program = textwrap.dedent("""
        from test_rewards_identity import PROGRAM, fingerprint, fingerprints
        from my_package.inside import value
        print((fingerprints(PROGRAM), fingerprint(value)))
    """)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "1", "OTHER": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(found), done.stderr


SCRIPT = """
import strop.api

WORDS = {"yes", "no", "maybe", "right", "wrong"}

def in_words(response):
    return float(response in WORDS | {"perhaps", "never"})

class Judge:
    kinds = frozenset(("a", "b", "c"))
    def __init__(self):
        self.seen = {"x", "y", "z"}
    def __call__(self, response):
        return float(response in self.kinds | self.seen)

given = strop.api._Given("train", None, {})
given.reward([in_words, Judge()])
print(sorted(given.functions))
given.reward(Judge())
keys = {"data": {"train_files": "t", "val_files": "v"}, "actor_rollout_ref": {"model": {"path": "m"}}}
print(given.load(keys).trainer.default_local_dir)
"""


def test_a_reward_of_a_script_has_one_name_in_every_process(tmp_path):
    """Sets have another order, and addresses other values, in every interpreter."""
    (tmp_path / "script.py").write_text(SCRIPT)
    found = set()
    for seed in ("0", "1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "script.py"], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    (lines,) = found
    assert "in_words-" in lines
    assert "checkpoints/" in lines


class Level(enum.Enum):
    EASY = 1

    def weight(self):
        return LEVELS[self]


LEVELS = {Level.EASY: 0.5}


def test_keys_may_refer_to_the_values_around_them():
    def score(response):
        return LEVELS[Level.EASY] * len(response)

    assert fingerprint(score) == fingerprint(score)

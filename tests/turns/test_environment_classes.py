"""Classes that cannot be an environment are refused by name, before anything runs."""

from __future__ import annotations

import enum
import functools
import shlex
import subprocess
import sys
import types
from typing import Any, Literal, TypedDict

import pytest

from strop.config.load import load_config
from strop.environments.loading import load_object
from strop.errors import ConfigError
from strop.passed import dumps, passing
from strop.trainer.loop import Run

from scripted import KEYS, Script, answers, call, ended_by, environments_of


class Typed(TypedDict):
    n: int


class Base:
    def reset(self, key, seed):
        self.key = key

    def respond(self, response, turn, secret, uid=None):
        return None


class Misspelt(Base):
    def reset(self, kye):
        pass


class Responds(Base):
    def respond(self, respons):
        return None


class Rewards(Base):
    def reward(self, turns, ended_by, tuns):
        return 0.0


class Made(Base):
    def __init__(self, url):
        self.url = url


class Positional(Base):
    def reset(self, key, /):
        pass


def test_methods_take_columns_and_what_is_known_of_the_sample():
    environments_of(own=Base).require_columns(["key", "secret"])
    with pytest.raises(ConfigError, match=r"respond needs the argument 'secret'"):
        environments_of(own=Base).require_columns(["key"])


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (Misspelt, r"reset needs the argument 'kye'.*did you mean key\?"),
        (Responds, r"respond needs the argument 'respons'.*did you mean response\?"),
        (Rewards, r"reward needs the argument 'tuns'.*did you mean turns\?"),
        (Positional, r"Positional\.reset .*'key' cannot be passed by name"),
        (Made, r"Made\(\) needs the argument 'url'"),
        (lambda word: "", r"the function <lambda> needs 'word': expected a class with a method reset"),
        (
            type("Bare", (), {"respond": Base.respond}),
            r"a method reset\(COLUMN, \.\.\.\), found Bare without",
        ),
    ],
)
def test_a_class_that_cannot_be_an_environment_is_refused(made, named):
    with pytest.raises(ConfigError, match=named):
        environments_of(own=made).require_columns(["key", "secret"])


class Looks:
    def reset(self):
        pass

    def look(self) -> str:
        """Look."""
        return "seen"

    find = look


def test_a_method_of_two_names_is_two_tools():
    environments = environments_of(own=Looks)
    assert [tool["function"]["name"] for tool in environments.schemas[""]] == ["look", "find"]
    assert answers(Script(environments, [[call("find"), "end"]]).play()) == ["seen"]


class Colour(enum.Enum):
    RED = "red"


def takes_any(
    a: list[dict[str, Any]], b: Literal["x"] | None = None, *, c: Typed | tuple[int, str] = (1, "a")
) -> str:
    """Take.

    Args:
        a: a
        b: b
        c: c
    """
    return f"{a} {b} {c}"


def takes_positional(a: int, /) -> str:
    """Take.

    Args:
        a: a
    """
    return ""


def takes_more(*more: int) -> str:
    """Take.

    Args:
        more: more
    """
    return ""


def takes_others(**others: int) -> str:
    """Take.

    Args:
        others: others
    """
    return ""


def takes_colour(a: list[Colour] | None = None) -> str:
    """Take.

    Args:
        a: a
    """
    return ""


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        (takes_positional, "the parameter a.* cannot be passed by name"),
        (takes_more, r"the parameter \*more cannot be passed by name"),
        (takes_others, r"the parameter \*\*others cannot be passed by name"),
        (takes_colour, "the parameter a gets JSON, and its hint is Colour"),
    ],
)
def test_a_tool_that_no_call_can_fill_is_refused(tool, named):
    with pytest.raises(ConfigError, match=f"the tool '{tool.__name__}' .*{named}"):
        environments_of(tool)


def test_a_tool_takes_what_json_has():
    script = Script(environments_of(takes_any), [[call("takes_any", a=[{"k": 1}], c={"n": 2}), "end"]])
    assert answers(script.play()) == ["[{'k': 1}] None {'n': 2}"]


def test_an_environment_among_the_tools_is_refused():
    with pytest.raises(ConfigError, match=r"Looks has reset, .* set environment\.path"):
        environments_of(Looks)


class Typo:
    def reset(self):
        self.number = 0

    @property
    def done(self):
        return self.nunber > 1

    def respond(self, response):
        return "go on"


def test_a_property_done_that_raises_is_not_false():
    result = Script(environments_of(own=Typo), [["a", "b"]]).play()
    assert ended_by(result) == ["error"]


class Truth:
    def reset(self, ground_truth):
        self.truth = ground_truth

    def respond(self, response, turn):
        return self.truth if turn == 0 else None


def test_reset_gets_the_ground_truth_as_reward_functions_do():
    environments = environments_of(own=Truth)
    environments.require_columns(["reward_model"])
    rows = {"reward_model": [{"ground_truth": "17"}], "ground_truth": [None]}
    assert answers(Script(environments, [["a", "b"]], rows=rows).play()) == ["17"]


@functools.cache
def words(n):
    return ["zero"] if n == 0 else [*words(n - 1), f"word {n}"]


class Cached(Base):
    def reset(self): ...

    @functools.cached_property
    def last(self):
        return words(2)[-1]

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def look(self, n: int) -> str:
        """Look.

        Args:
            n: The number.
        """
        return f"{n} {self.last} {words.cache_parameters()['maxsize']}"

    def respond(self, response):
        return None


def test_cached_functions_of_a_file_reach_the_process():
    assert answers(Script(environments_of(own=Cached), [[call("look", n=1), "x"]]).play()) == [
        "1 word 2 None"
    ]


def test_a_submodule_that_an_inner_function_reads_reaches_the_process(tmp_path):
    (tmp_path / "quotes.py").write_text(
        "import urllib.request\n"
        "def run():\n"
        "    def ask():\n"
        "        return urllib.request.Request('http://a').host\n"
        "    return ask()\n"
    )
    function = dumps(load_object(f"{tmp_path / 'quotes.py'}:run", "agent.path"))
    alone = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    found = subprocess.run([sys.executable, "-c", alone], input=function, capture_output=True, check=True)
    assert found.stdout == b"a\n"


@pytest.mark.parametrize("path", ["a.py:A", "mcp:python s.py", "{a: 'a.py:A', b: 'mcp:python s.py'}"])
def test_the_command_of_an_evaluation_has_the_environment_of_the_run(path):
    config = load_config([*KEYS, f"environment.path={path}", "environment.tools=[python]"])
    run = types.SimpleNamespace(trainer=types.SimpleNamespace(config=config))
    keys = shlex.split(Run._evaluation_keys(run))
    assert load_config([*KEYS, *keys]).environment == config.environment


def test_the_command_of_an_evaluation_names_a_class_of_the_program():
    with passing({"function:Base-12ab": Base}):
        config = load_config([*KEYS, "environment.path=function:Base-12ab"])
    run = types.SimpleNamespace(trainer=types.SimpleNamespace(config=config))
    assert Run._evaluation_keys(run) == " environment.path=FILE.py:Base"

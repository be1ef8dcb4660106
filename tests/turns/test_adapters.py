"""Environments and tools from outside: gymnasium, servers of tools, TRL's classes, and the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.data.rl_dataset import RLHFDataset
from strop.data.sources import Rows
from strop.environments import mcp
from strop.environments.gym import load_gym
from strop.environments.loading import load_environments
from strop.environments.mcp import load_mcp
from strop.errors import CheckpointError, ConfigError, DataError
from strop.passed import passing
from strop.rewards.arguments import PlayedTurn
from strop.tools import Python

from byte_tokenizer import CHATML, byte_tokenizer
from scripted import Script, answers, call, conversation, ended_by, environments_of, resumed, settings_of
from trl_environments import GameEnv, IncrementEnv, SelfSamplingEnv, multiply

SERVER = f"{sys.executable} {Path(__file__).parent / 'mcp_server.py'}"


def _named(path: str = "", tools: list[str] | None = None):
    found = load_environments(settings_of(path={"": path} if path else {}, tools=tools or []))
    assert found is not None
    return found


# gymnasium


def test_a_game_of_gymnasium_gives_its_observations_and_rewards():
    gymnasium = pytest.importorskip("gymnasium")
    actions = [2, 2, 1, 1, 1, 2, 2, 1]
    game = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    made = load_gym("FrozenLake-v1")()
    game.reset(seed=5)
    assert made.reset(seed=5) == game.render()
    expected, said, ended = [], [], False
    for number, action in enumerate(actions):
        if ended:
            break
        if number == 1:
            assert "an integer from 0 to 3" in made.respond("right")
            said.append("right")
            expected.append(0.0)
        _, score, terminated, truncated, _ = game.step(action)
        ended = terminated or truncated
        said.append(f"<think>I may take 0 or 1</think>Step {number}: {action}.")
        expected.append(float(score))
        assert made.respond(said[-1]) == (None if ended else game.render())
    assert made.reward([PlayedTurn(text) for text in said]) == expected


def test_rewards_of_a_game_stand_at_their_turns():
    pytest.importorskip("gymnasium")
    game = load_gym("CartPole-v1")()
    first = game.reset(seed=1)
    assert [float(word) for word in first.strip("[]").split(",")] == pytest.approx(
        game._game.unwrapped.state, abs=1e-7
    )
    assert len(first) < 60  # the shortest digits of float32
    for text in ("0", "7", "1"):
        game.respond(text)
    turns = [PlayedTurn("0"), PlayedTurn("7"), PlayedTurn("c", [{"name": "f"}]), PlayedTurn("1")]
    assert game.reward(turns) == [1.0, 0.0, 0.0, 1.0]


def test_a_game_is_played_in_the_process_of_environments():
    pytest.importorskip("gymnasium")
    result = Script(_named("gym:Blackjack-v1"), [["hello", "0"]] * 2, n=2).play()
    assert ended_by(result) == ["environment"] * 2
    assert "expected an integer from 0 to 1" in answers(result)[0]
    assert result.batch["environment_scores"].sum(1).abs().tolist() in ([1.0, 1.0], [1.5, 1.5], [0.0, 0.0])


@pytest.mark.parametrize(
    ("id", "named"),
    [
        ("Pendulum-v1", r"Box\(.*write a class"),
        ("FrozenLake", "write gym:FrozenLake-v1"),
        ("Nosuch-v0", "Nosuch"),
    ],
)
def test_a_game_that_cannot_be_played_by_text_is_an_error(id, named):
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=named):
        load_gym(id)


# servers of tools


@pytest.mark.slow
def test_each_sample_has_a_server_of_its_own_which_a_replay_rebuilds():
    pytest.importorskip("mcp")
    environments = _named(tools=[f"mcp:{SERVER}"])
    scripts = [
        [
            call("add", number=2),
            call("close", function="f", self="s") + call("fail"),
            call("add", number=3),
            "end",
        ],
        [call("add", number=10), call("leave"), call("add", number=1), "end"],
    ]
    before = Script(environments, scripts)
    before.decode()
    before.episodes.answer([(before.batch, row) for row in range(2)])
    before.pool.close()
    result = resumed(before, environments).play()
    assert ended_by(result) == ["stop", "stop"]
    added, returned, error, again = answers(result)
    assert (added, returned, again) == ("2", "f s", "5")
    assert error.startswith("error: ToolError: ")
    assert answers(result, 1) == ["10", *["error: MCPError: Connection closed"] * 2]
    assert result.batch["n_errors"].tolist() == [1, 2]
    assert conversation(result)[0]["calls"] == [{"name": "add", "arguments": {"number": 2}}]
    # a server with a state that samples share answers otherwise
    shared = f"mcp-shared:{SERVER}"
    with pytest.raises(CheckpointError, match=r"add answers .*write mcp: for mcp-shared:"):
        resumed(before, _named(tools=[shared]), tools=[shared]).play()


def test_samples_may_share_a_server_which_is_started_again():
    pytest.importorskip("mcp")

    async def play():
        one, other = shared(), shared()
        assert [await one.call("add", number=2), await other.call("add", number=3)] == ["2", "5"]
        with pytest.raises(Exception, match="Connection closed"):
            await one.call("leave")
        assert await other.call("add", number=1) == "1"

    shared = load_mcp(f"mcp-shared:{SERVER}", "environment.tools")
    asyncio.run(play())


def test_a_server_that_does_not_know_the_session_any_more_gets_another(monkeypatch):
    """One over HTTP was started again between two calls."""
    mcp_types = pytest.importorskip("mcp.types")
    from mcp import MCPError

    made = []

    @contextlib.asynccontextmanager
    async def client(*_):
        made.append(len(made))
        yield SimpleNamespace(call_tool=functools.partial(call_tool, made[-1]))

    async def call_tool(number, name, arguments):
        if number == 0:
            raise MCPError(code=mcp_types.INVALID_REQUEST, message="Session not found")
        return SimpleNamespace(content=[SimpleNamespace(type="text", text="3")], is_error=False)

    async def play():
        with pytest.raises(MCPError):
            await shared().call("add", number=3)
        assert await shared().call("add", number=3) == "3"

    shared = load_mcp(f"mcp-shared:{SERVER}", "environment.tools")
    monkeypatch.setattr(mcp, "_client", client)
    monkeypatch.setattr(mcp, "_shared", {})
    asyncio.run(play())


def test_tools_of_a_server_are_called_over_http():
    pytest.importorskip("mcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*SERVER.split(), str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        remote = load_mcp(f"mcp:http://127.0.0.1:{port}/mcp", "environment.path")
        assert [schema["function"]["name"] for schema in remote.json_schemas][:2] == ["add", "close"]

        async def play():
            one = remote()
            found = await one.call("add", number=4)
            await one.close()
            return found

        assert asyncio.run(play()) == "4"
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("mcp:nosuchprogram", "nosuchprogram"),
        (f"mcp:{sys.executable} nosuch.py", "can't open file.*nosuch.py"),
    ],
)
def test_a_server_that_does_not_start_is_an_error_with_what_it_printed(given, named):
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=f"(?s)environment.tools={given}.*{named}"):
        load_mcp(given, "environment.tools")


class Served:
    """A tool with a schema as servers send them."""

    json_schemas = (
        {
            "type": "function",
            "function": {
                "name": "keep",
                "description": "Keep.",
                "parameters": {
                    "type": "object",
                    "properties": {"any": True, "none": False, "either": {"anyOf": [{"type": "null"}, True]}},
                    "additionalProperties": False,
                },
            },
        },
    )

    def call(self, name, /, **arguments):
        return [name, arguments]


# as that of Qwen3-Coder, which lists the fields of each parameter
TYPED = (
    "{% for tool in tools or [] %}{% for key, one in tool.function.parameters.properties.items() %}"
    "{% for field, value in one.items() %}{% endfor %}{% endfor %}{% endfor %}" + CHATML
)


def test_schemas_that_are_true_or_false_are_read():
    environments = environments_of(Served)
    parameters = environments.schemas[""][0]["function"]["parameters"]
    assert parameters["properties"] == {"any": {}, "either": {"anyOf": [{"type": "null"}, {}]}}
    assert parameters["additionalProperties"] is False
    script = [call("keep", any=[1], either="x"), call("keep", none=1), "end"]
    kept, refused = answers(Script(environments, [script], template=TYPED).play())
    assert json.loads(kept) == ["keep", {"any": [1], "either": "x"}]
    assert "it has no argument 'none'" in refused


# the sandbox


def test_files_of_a_sample_stay_for_its_next_call():
    one, other = Python(), Python()
    assert one.python("import os\nos.mkdir('d')\nopen('d/a','w').write('kept')") == ""
    assert one.python("print(open('d/a').read())") == "kept\n"
    assert "FileNotFoundError" in other.python("print(open('d/a').read())")


def test_output_errors_and_the_last_traceback_are_told_in_their_order():
    text = Python().python("import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 1\nx / 0")
    assert text.startswith("out\nerr\nTraceback")
    assert 'File "<python>", line 5' in text
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in Python().python("print('a'")


@pytest.mark.slow
def test_a_program_that_waits_for_a_core_is_not_ended():
    assert Python.limits.wall_s >= 2 * Python.limits.cpu_s
    short = type("Short", (Python,), {"limits": dataclasses.replace(Python.limits, cpu_s=1)})()
    assert short.python("import time\nprint('before')\ntime.sleep(1.5)\nprint('after')") == "before\nafter\n"
    found = short.python("print('before')\nwhile True: pass")
    assert found == "before\n\n[ended after 1 s of CPU time]"


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("open('a','w').write('x')\nprint('before')\nwhile True: pass", "before\n\n[ended after 5 s]"),
        ("import time\nprint('before')\ntime.sleep(9)", "before\n\n[ended after 5 s]"),
        ("while True: print('x' * 999)", "[ended, because it printed more than 100000 bytes]"),
        ("x = [0] * 10**9", "MemoryError"),
        ("import os\nif os.fork() == 0:\n    while True: pass\nprint('parent')", "parent\n"),
        ("import os, signal\nos.kill(1, signal.SIGINT)\nos.kill(os.getpid(), 9)", "[ended by SIGKILL]"),
        ("for i in range(1001): open(str(i), 'w').close()", "[its files are not kept"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "Error"),
    ],
)
def test_limits_end_a_program_and_not_the_sandbox(program, named):
    tool = Python()
    tool.python("open('kept', 'w').write('1')")
    if "ended after" in named:
        tool.limits = dataclasses.replace(Python.limits, wall_s=5.0)
    assert named in tool.python(program)
    tool.limits = Python.limits
    assert tool.python("print(open('kept').read())") == "1\n"


def test_files_are_rebuilt_by_playing_the_calls_again():
    environments = _named(tools=["python"])
    scripts = [
        [
            call("python", code="open('a','w').write('7')"),
            call("python", code="print(open('a').read())"),
            "end",
        ]
    ]
    before = Script(environments, scripts)
    before.decode()
    before.episodes.answer([(before.batch, 0)])
    before.pool.close()
    assert answers(resumed(before, environments).play()) == ["", "7\n"]


# TRL


def test_a_class_and_a_tool_of_trl_run_as_they_are():
    scripts = [[call("increment", step=2), call("multiply", a=6, b=7), call("increment", step=1), "end"]] * 2
    environments = environments_of(multiply, own=IncrementEnv)
    result = Script(environments, scripts, rows={"target": [3, 4]}).play()
    assert answers(result) == ["2", "42", "3"]
    assert result.batch["environment_scores"].sum(1).tolist() == [1.0, 0.0]


def test_numbers_called_reward_and_properties_are_no_methods():
    scripts = [[call("move", step=3), "never"]]
    factory = functools.partial(GameEnv, goal=3)
    with passing({"function:game-0": factory}):
        environments = _named("function:game-0")
    assert [schema["function"]["name"] for schema in environments.schemas[""]] == ["move"]
    script = Script(environments, scripts)
    result = script.play()
    assert ended_by(result) == ["environment"]
    assert not environments.gives_rewards


def test_a_reset_that_draws_without_its_seed_is_an_error():
    result = Script(environments_of(own=SelfSamplingEnv), [["a"]] * 2, n=2).play()
    assert ended_by(result) == ["stop", "error"]
    assert "argument seed" in result.non_tensor_batch["conversation"][1]


class Closes:
    def reset(self, folder, **row):
        self.folder = folder

    def fail(self) -> str:
        """Fail."""
        raise ValueError("no")

    def close(self):
        Path(self.folder, "closed").touch()


def test_a_lost_sample_is_closed_too(tmp_path):
    environments = environments_of(own=Closes)
    script = Script(environments, [[call("fail")]], rows={"folder": [str(tmp_path)]}, error="end")
    close, script.pool.close = script.pool.close, lambda: None
    assert ended_by(script.play()) == ["error"]
    for _ in range(600):
        if (tmp_path / "closed").exists():
            break
        time.sleep(0.1)
    close()
    assert (tmp_path / "closed").exists()


def test_a_row_has_tools_or_an_environment():
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    rows = [{"prompt": "a", "tools": None}, {"prompt": "b", "tools": tools}]
    table = environments_of(multiply)
    with pytest.raises(DataError, match=r"row 1.*environment\.tools: leave one of the two out"):
        RLHFDataset(Rows("train", rows), byte_tokenizer(), max_prompt_length=900, tools_of=table.tools_of)

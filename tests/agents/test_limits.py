"""What is refused, ended or started again: foreign keys, large bodies, programs that break."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import processes
import psutil
import pytest
from clocks import PROGRAMS, Clock
from scripted_agents import HI, Agents, agents, ids_of

from strop.agents import program
from strop.columns import ENDED_BY
from strop.errors import CheckpointError, ConfigError, RewardError, TrainingError
from strop.rollout.base import GenerationStopped
from strop.trainer.ppo import require_samples


def _sent(url: str, body: Any, key: str, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=300)
    data = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", f"/s/{key}/v1/chat/completions", data, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()), dict(answer.getheaders())


def _error_of(url: str) -> dict[str, Any]:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(url, b"{}", timeout=300)
    return json.loads(error.value.read())["error"]


def _asks(base_url):
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="x", max_retries=0)
    found = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    return found.choices[0].message.content


def _sleeps(base_url):
    import time

    time.sleep(600)


def _ended(result: Any) -> list[str]:
    return [ENDED_BY[code] for code in result.batch["ended_by"].tolist()]


def _error(result: Any, row: int = 0) -> str:
    return json.loads(result.non_tensor_batch["conversation"][row])["error"]


class _Open:
    """A session whose program sleeps, and its key."""

    def __init__(self, **settings: Any) -> None:
        self.agents = Agents(_sleeps, **settings)

    def __enter__(self) -> _Open:
        self._thread = threading.Thread(target=self._play)
        self._thread.start()
        while not self.agents.rollout._plays:
            time.sleep(0.02)
        self.url, (self.key,) = self.agents.rollout._address.url, [*self.agents.rollout._plays]
        while self.agents.rollout._plays[self.key].state == "waiting":
            time.sleep(0.02)
        return self

    def _play(self) -> None:
        try:
            self.result = self.agents.play()
        except TrainingError as error:
            self.error = error

    def __exit__(self, *_: object) -> None:
        self.agents.rollout._settings = SimpleNamespace(timeout=0.0, lockstep=True)
        self._thread.join()
        self.agents.close()


def test_programs_that_compute_are_left_when_the_run_ends():
    with agents(_sleeps) as made:
        timer = threading.Timer(0.5, made.rollout.stopping.set)
        timer.start()
        with pytest.raises(GenerationStopped):
            made.play()
        assert made.engine.contexts == []


def test_requests_that_are_refused_say_why_once():
    tool = {"type": "function", "function": {"name": "f"}}
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    deep = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}
    called = {"role": "assistant", "content": "", "tool_calls": [deep]}
    refused = {
        "not JSON": b"{",
        "messages: found": {},
        "expected role and content": {"messages": ["Hi"]},
        "messages[0]: expected data:image": {"messages": [{"role": "user", "content": [image]}]},
        "expected parts of text": {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "temperature=0.2: the run samples with 1": {"messages": HI, "temperature": 0.2},
        "n=2": {"messages": HI, "n": 2},
        "seed=1": {"messages": HI, "seed": 1},
        "logit_bias": {"messages": HI, "logit_bias": {"5": 1}},
        "response_format": {"messages": HI, "response_format": {"type": "json_object"}},
        "tool_choice={": {"messages": HI, "tools": [tool], "tool_choice": tool},
        "max_tokens=0": {"messages": HI, "max_tokens": 0},
        "temperature=1000": {"messages": HI, "temperature": 10**400},
        "nested too deep": {"messages": [*HI, called, *HI]},
    }
    with _Open() as session:
        for words, body in refused.items():
            status, answer, headers = _sent(session.url, body, session.key)
            assert (status, headers.get("x-should-retry")) == (400, "false"), (words, answer)
            assert words.replace("not JSON", "no JSON") in answer["error"]["message"]
        status, answer, _ = _sent(session.url, b"\x1f\x8b!", session.key, **{"Content-Encoding": "gzip"})
        assert (status, "no JSON" in answer["error"]["message"]) == (400, True)
        status, answer, headers = _sent(session.url, {"messages": HI}, "0" * 32)
        assert (status, headers["x-should-retry"]) == (404, "false")
        error = _error_of(f"{session.url}/s/{session.key}/v1/responses")
        assert "set the chat completions of your library" in error["message"]
        status, answer, _ = _sent(session.url, b" " * (17 << 20), session.key)
        assert (status, answer["error"]["message"]) == (413, "the body exceeds 16 MiB")
        accepted = {"temperature": 1, "top_p": 1.0, "n": 1, "logit_bias": None, "seed": None, "user": "me"}
        assert _sent(session.url, {"messages": HI, **accepted}, session.key)[0] == 200


def _listening() -> set[tuple[str, int]]:
    """Return the addresses on which this process and those that it has started listen."""
    own = psutil.Process()
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in (own, *own.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_nothing_listens_beyond_the_loopback_address():
    before = _listening()  # of other tests
    with _Open():
        found = _listening() - before
    assert [address for address, _ in found] == ["127.0.0.1"]


def test_a_session_that_has_ended_answers_403():
    with agents(_asks) as played:
        batch = played.rollout._begun(played.batch(), played.params)
        played.rollout._complete([batch], 0)
        status, answer, headers = _sent(played.rollout._address.url, {"messages": HI}, batch.plays[0].key)
    assert (status, headers["x-should-retry"]) == (403, "false")
    assert answer["error"]["message"] == "the session has ended"


def _breaks(base_url, number):
    import os
    import sys
    import time
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
    if number == 0:
        time.sleep(600)
    if number == 1:
        raise ValueError("no")
    if number == 2:
        sys.exit(3)
    if number == 3 and os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "271828"])
    if number == 4:
        print("x" * 10_000_000)
    if number == 5:
        return float("nan")
    if number == 6:
        return [1]
    return "ok"


def test_programs_that_break_cost_their_sessions_and_leave_no_process():
    with agents(_breaks, prompts=8, timeout=30) as played:
        result = played.play()
    expected = ["error", "error", "error", "stop", "stop", "error", "error", "stop"]
    assert _ended(result) == expected
    assert "agent.timeout=30 s" in _error(result)
    assert result.batch["n_timeouts"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert "ValueError: no" in _error(result, 1)
    assert "returned nan: expected a text, or a score" in _error(result, 5)
    assert "returned [1]" in _error(result, 6)
    turns = [json.loads(text)["turns"] for text in result.non_tensor_batch["conversation"]]
    assert [[turn["text"] for turn in own] for own in turns] == [["A"]] * 8  # also of those that are lost
    mask = result.batch["response_mask"].bool().any(1).tolist()
    assert mask == [reason != "error" for reason in expected]
    assert not any("271828" in command for command in processes.commands())


def _kills_its_process(base_url, number):
    import os
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
    if number == 1:
        os._exit(9)
    return "ok"


def test_a_process_that_ends_costs_the_session_that_ends_it_alone():
    with agents(_kills_its_process, prompts=4) as played:
        result = played.play()
    assert _ended(result) == ["stop", "error", "stop", "stop"]
    assert "exit status 9" in _error(result, 1)
    sampled = [context for wave in played.engine.contexts for context in wave]
    assert len(sampled) == 4  # programs that are started again get the recorded answers


def _ends_its_process(base_url, number):
    import os
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
    if number == 21:
        os._exit(9)
    return "ok"


@pytest.mark.slow
def test_the_sessions_beside_one_that_ends_its_process_do_not_run_one_by_one():
    with agents(_ends_its_process, prompts=32) as played:
        batch = played.rollout._begun(played.batch(), played.params)
        played.rollout._complete([batch], 0)
    assert [play.session.ended_by for play in batch.plays] == ["stop"] * 21 + ["error"] + ["stop"] * 10
    starts = [play.starts for play in batch.plays]
    assert (starts[21], max(starts[::2]) <= 2) == (6, True), starts  # those that end at once start once
    groups = {(count, place % 2 ** (count - 1)) for place, count in enumerate(starts)}
    assert len(groups) <= 11  # these run one after the other: the first, and two halves of each other start


async def _blocks_its_loop(base_url, number, folder=None):
    import asyncio
    import os
    import time
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    await asyncio.to_thread(urllib.request.urlopen, f"{base_url}/chat/completions", body)
    if number == 1:
        if folder:
            open(os.path.join(folder, str(os.getpid())), "w").close()
        time.sleep(600)
    return "ok"


def test_a_coroutine_that_blocks_the_others_is_lost_alone(monkeypatch, tmp_path):
    clock, noted, plain = Clock(monkeypatch, *PROGRAMS), set(), program._Process._receive
    monkeypatch.setattr(program, "_SILENT_S", 100.0)

    def receive(process):
        """Let time pass once a process is blocked, and all that it wrote before has been read."""
        new, heard_at = {path.name for path in tmp_path.iterdir()} - noted, process._heard_at
        plain(process)
        if new and process._heard_at == heard_at:
            noted.update(new)
            clock.passed += 1000.0

    monkeypatch.setattr(program._Process, "_receive", receive)
    with agents(_blocks_its_loop, prompts=3, timeout=300) as played:
        result = played.play(folder=[str(tmp_path)] * 3)
    assert _ended(result) == ["stop", "error", "stop"]
    assert "blocked its event loop" in _error(result, 1)


@pytest.mark.slow
def test_a_program_that_starts_beside_one_that_was_ended_and_blocks_is_started_again(monkeypatch):
    monkeypatch.setattr(program, "_SILENT_S", 18.0)  # more than the time after which the program is ended
    with agents(_blocks_its_loop, prompts=3, timeout=15, concurrency=1) as played:
        result = played.play()
    assert _ended(result) == ["stop", "error", "stop"]


async def _asks_in_a_thread(base_url):
    import asyncio
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    await asyncio.to_thread(urllib.request.urlopen, f"{base_url}/chat/completions", body)
    return "ok"


def test_coroutines_that_ask_in_threads_have_one_each():
    with agents(_asks_in_a_thread, prompts=40, timeout=200) as played:  # 32 at most by default
        assert _ended(played.play()) == ["stop"] * 40


async def _waits_without_await(base_url, number):
    import asyncio
    import time
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
    if number == 2:
        asyncio.get_running_loop().call_soon(time.sleep, 600)
    return "ok"


@pytest.mark.slow
def test_coroutines_that_wait_for_answers_without_await_run_one_by_one(monkeypatch, caplog):
    monkeypatch.setattr(program, "_SILENT_S", 1.5)
    with agents(_waits_without_await, prompts=3) as played:
        assert _ended(played.play()) == ["stop"] * 3
        assert _ended(played.play()) == ["stop"] * 3  # in a process whose event loop stands still
    assert "without await" in caplog.text


def _asks_often(base_url, number):
    import json
    import urllib.request

    messages = [{"role": "user", "content": "Hi"}]
    for _ in range(9):
        body = json.dumps({"messages": messages}).encode()
        answer = json.load(urllib.request.urlopen(f"{base_url}/chat/completions", body))
        said = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "b"}]
    return "never"


def test_limits_end_a_session_whose_program_does_not_expect_them():
    with agents(_asks_often, max_calls=3) as played:
        result = played.play()
    assert (_ended(result), result.batch["n_turns"].tolist()) == (["turns"], [3])
    with agents(_asks_often, max_tokens=120) as played:
        result = played.play()
    assert _ended(result) == ["length"]
    assert 1 < result.batch["n_turns"].item() < 9
    assert result.batch["truncated"].tolist() == [True]
    assert json.loads(result.non_tensor_batch["conversation"][0])["turns"][-1]["text"] == "A"


def _asks_plainly(base_url):
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
    return "ok"


def test_time_in_which_a_program_waits_for_an_answer_does_not_count(monkeypatch):
    clock = Clock(monkeypatch, "strop.rollout.agents")

    def slowly(context: list[int], seed: int | None) -> str:
        clock.passed += 500.0
        return "A"

    with agents(_asks_plainly, slowly, timeout=300) as played:
        assert _ended(played.play()) == ["stop"]


def _sets_limits(base_url):
    """Return how answers end: by themselves, cut by a limit, at a stop text, and within calls."""
    import json

    import openai

    client = openai.OpenAI(base_url=base_url, api_key="x", max_retries=0)
    messages, reasons = [{"role": "user", "content": "Hi"}], []
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    options = ({}, {"stop": ["e"]}, {"tools": [tool]}, {"tools": [tool], "max_tokens": 45}, {"max_tokens": 3})
    for more in options:
        found = client.chat.completions.create(model="m", messages=messages, **more).choices[0]
        reasons.append(found.finish_reason)
    return json.dumps(reasons)


def test_an_answer_that_a_limit_cuts_ends_by_length():
    says = 'Well <tool_call>{"name": "f", "arguments": {}}</tool_call> and more'
    with agents(_sets_limits, lambda context, seed: says) as played:
        result = played.play()
    reasons = json.loads(json.loads(result.non_tensor_batch["conversation"][0])["response"])
    assert reasons == ["stop", "stop", "tool_calls", "length", "length"]
    assert _ended(result) == ["length"]
    assert result.batch["truncated"].tolist() == result.batch["turn_cut"].tolist() == [True]


def test_a_batch_without_any_answer_is_an_error_with_its_first_cause():
    def never(base_url):
        raise ConnectionError("service away")

    with agents(never, prompts=2) as played, pytest.raises(TrainingError, match="service away"):
        require_samples(played.play())


def test_a_command_that_fails_or_leaves_a_process_is_ended_whole():
    body = '{"messages": [{"role": "user", "content": "Hi"}]}'
    command = f"""read -r row; curl -s "$OPENAI_BASE_URL/chat/completions" -d '{body}' > /dev/null
        (setsid sleep 161803 &)
        echo "$row" | grep -q '"number": 1' && exit 4; echo told"""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with agents(command, prompts=3) as played:
        result = played.play()
        assert processes.none_left(lambda: [one for one in processes.commands() if "161803" in one])
    assert _ended(result) == ["stop", "error", "stop"]
    assert "status 4" in _error(result, 1)
    assert json.loads(result.non_tensor_batch["conversation"][0])["response"] == "told"


def test_programs_that_cannot_be_loaded_are_errors_before_a_model_is(tmp_path):
    from strop.agents.program import load_program
    from strop.config.load import load_config

    keys = ["actor_rollout_ref.model.path=m", "data.train_files=f"]
    (tmp_path / "agent.py").write_text("def run(row, base_url, api_key, colour): ...\n")
    section = load_config([*keys, f"agent.path={tmp_path / 'agent.py'}:run"]).agent
    with pytest.raises(ConfigError, match="needs the argument 'colour'"):
        load_program(section).require_columns(["prompt"])
    section = load_config([*keys, f"agent.path={tmp_path / 'agent.py'}:walk"]).agent
    with pytest.raises(ConfigError, match="has no walk; it has run"):
        load_program(section)


def test_recorded_answers_are_given_again_after_a_resume_and_the_rest_is_sampled():
    options: dict[str, Any] = {"prompts": 2, "max_calls": 3}

    def counts(context: list[int], seed: int | None) -> list[int]:
        return [129 + len(context) % 20, 130 + (seed or 0) % 20, 3]

    with agents(_asks_often, counts, **options) as played:
        played.rollout.admit(1, played.batch(), played.params)
        whole = played.rollout.finish(1, 0)
    with agents(_asks_often, counts, **options) as played:
        batch = played.rollout._begun(played.batch(), played.params)
        played.rollout._complete([batch], 0)
        states = [play.session.state() for play in batch.plays]
        for number, state in enumerate(states):  # of one session two answers are known, of the other none
            kept = [*state["answers"]][: 2 * (1 - number)]
            state["answers"] = {key: state["answers"][key] for key in kept}
            state["prompt"] = state["prompt"] if kept else None
    with agents(_asks_often, counts, **options) as played:
        played.rollout.admit(1, played.batch(), played.params)
        played.rollout.restore({"batches": {1: states}})
        resumed = played.rollout.finish(1, 0)
    for name in ("responses", "response_mask", "prompts", "rollout_log_probs"):
        assert resumed.batch[name].equal(whole.batch[name]), name
    assert resumed.batch["n_replayed"].tolist() == [2, 0]


def test_a_program_that_asks_otherwise_after_a_resume_is_an_error_if_that_is_checked():
    with agents(_asks, replay="check") as played:
        played.rollout.admit(1, played.batch(), played.params)
        known = {"ids": ids_of("A"), "log_probs": [-1.0] * 2, "versions": [0, 0]}
        known |= {"is_stopped": True, "is_complete": True, "is_claimed": True}
        played.rollout.restore({"batches": {1: [{"prompt": None, "answers": {"other": known}}]}})
        with pytest.raises(CheckpointError, match=r"agent\.replay=check"):
            played.rollout.finish(1, 0)


def _gives_up(base_url, number, folder):
    """Give up once, without marking the next request as official clients do; number 1 asks after that."""
    import http.client
    import json
    import os
    import select
    import time
    from urllib.parse import urlsplit

    url = urlsplit(base_url)

    def asked(said):
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
        body = json.dumps({"messages": [{"role": "user", "content": said}]})
        connection.request("POST", f"{url.path}/chat/completions", body)
        return connection

    def answered(connection):
        return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]

    def is_noted(event):
        return os.path.exists(os.path.join(folder, event))

    def wait_for(event):
        while not is_noted(event):
            time.sleep(0.02)

    if number == 1:
        wait_for("leave 0")
        return answered(asked("Hi"))
    first = asked("Hi")
    while not is_noted("submit 0" if number == 0 else "a wave has begun"):
        if select.select([first.sock], [], [], 0.02)[0]:
            return answered(first)
    first.close()
    wait_for(f"leave {number}")
    if number == 0:
        wait_for("submit 1")
        time.sleep(0.2)  # a wave that did not wait would begin meanwhile
    return answered(asked("Then this" if number == 0 else "Hi"))


def _noting(rollout: Any, folder: Path) -> list[str]:
    """Note requests and the ends of their clients in ``folder``, and return all."""
    events = []

    def noting(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            found = plain(*given, **options)
            play = found[0] if name == "submit" else given[0]
            events.append(f"{name} {play.values['row']['number']}")
            (folder / events[-1]).touch()
            return found

        return call

    for name in ("submit", "leave"):
        setattr(rollout, name, noting(name, getattr(rollout, name)))
    return events


def test_lockstep_does_not_wait_for_the_answer_of_a_client_that_is_gone(tmp_path):
    with agents(_gives_up, prompts=2) as played:
        _noting(played.rollout, tmp_path)
        result = played.play(folder=[str(tmp_path)] * 2)
    (wave,) = played.engine.contexts
    texts = [played.tokenizer.decode(context) for context in wave]
    assert ["Then this" in text for text in texts] == [True, False]
    assert result.batch["n_turns"].tolist() == [1, 1]
    assert result.batch["n_abandoned"].tolist() == [1, 0]


def test_an_equal_request_after_one_whose_client_is_gone_is_its_retry(tmp_path):
    events: list[str] = []

    def slowly(context: list[int], seed: int | None) -> str:
        (tmp_path / "a wave has begun").touch()
        deadline = time.monotonic() + 60
        while events.count("submit 2") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        return "A"

    with agents(_gives_up, slowly, replay="check") as played:
        events = _noting(played.rollout, tmp_path)
        batch = played.rollout._begun(played.batch(number=[2], folder=[str(tmp_path)]), played.params)
        played.rollout._complete([batch], 0)
        state = batch.plays[0].session.state()
    assert events == ["submit 2", "leave 2", "submit 2"]
    assert len(played.engine.contexts) == 1
    with agents(_gives_up, replay="check") as played:
        nothing = played.batch(number=[2], folder=[str(tmp_path / "nothing is noted")])
        played.rollout.admit(1, nothing, played.params)
        played.rollout.restore({"batches": {1: [state]}})
        assert played.rollout.finish(1, 0).batch["n_turns"].tolist() == [1]


def test_a_module_that_raises_when_it_is_loaded_ends_the_run_with_its_error(tmp_path):
    (tmp_path / "own.py").write_text("raise OSError('no licence')\n")
    sys.path.insert(0, str(tmp_path))

    def imports(base_url):
        import own  # noqa: F401

    try:
        with (
            agents(imports, prompts=1) as played,
            pytest.raises((TrainingError, RewardError), match="no licence"),
        ):
            require_samples(played.play())
    finally:
        sys.path.remove(str(tmp_path))


def _names_its_process(base_url):
    import os

    import openai

    openai.OpenAI(base_url=base_url, api_key="x").chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}]
    )
    return str(os.getpid())


@pytest.mark.slow
def test_batches_share_a_process_also_if_it_has_waited():
    with agents(_names_its_process) as played:
        first = json.loads(played.play().non_tensor_batch["conversation"][0])["response"]
        time.sleep(2.5)
        second = json.loads(played.play().non_tensor_batch["conversation"][0])["response"]
    assert first == second

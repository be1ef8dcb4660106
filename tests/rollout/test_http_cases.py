"""Failures that other systems were reported with, by name: ``../shared/cases/reported/http.jsonl``."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from clocks import Clock

from strop.errors import ConfigError, TrainingError
from strop.rollout.base import SamplingParams
from strop.rollout.http import start
from strop.rollout.http.wire import NEUTRAL, Lost, VLLMWire

from fake_vllm import GENERATE, FakeVLLM, wire_answer
from http_rollouts import counts, rollout_on
from messages import naming
from tiny_lms import prompts_of, response_ids, tiny_lm

FILE = Path(__file__).parents[3] / "shared" / "cases" / "reported" / "http.jsonl"
pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason=f"cases of other systems are not tested: no {FILE}"
)
PARAMS = SamplingParams(max_tokens=12, n=4, stop_token_ids=(7,))
ONE = SamplingParams(max_tokens=12, stop_token_ids=(3,))


@pytest.fixture
def case(request):
    """The case that the test is named after."""
    cases = {item["case"]: item for item in map(json.loads, FILE.read_text().splitlines())}
    return cases[request.node.name.split("_")[1]]


def batch(rollout, params=PARAMS, lengths=(3, 9, 1)):
    return rollout.generate(prompts_of(list(lengths), n=params.n), params)


def answer_of(abstract, version):
    named = {"weight_version": version} | abstract
    return {
        "json": wire_answer(
            *(named[key] for key in ("token_ids", "log_probs", "finish_reason", "weight_version"))
        )
    }


def test_h01_proxy_variables_do_not_reach_servers(case, monkeypatch, tmp_path):
    for name in case["given"]["unset"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in case["given"]["env"].items():
        monkeypatch.setenv(name, value)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.connect(("10.255.255.255", 1))  # sends nothing
        own_address = other.getsockname()[0]
    servers = [FakeVLLM(), FakeVLLM(), FakeVLLM(host=own_address)]
    rollout = rollout_on(*servers, open_network=True)
    batch(rollout)
    assert counts(rollout)["rollout/servers_live"] == 3
    assert counts(rollout)["rollout/lost_requests"] == case["right"]["lost_requests"]
    child = start.environment("token", tmp_path, "mark")
    assert not [name for name in child if name.lower().endswith("_proxy")]


def test_h02_a_reset_that_did_not_happen_takes_the_server_out(case, caplog, monkeypatch):
    first, other = FakeVLLM(), FakeVLLM()
    rollout, clock = rollout_on(first, other), Clock(monkeypatch, "strop.rollout.http.wire")
    first.script |= case["given"]["routes"]
    plain = first._next

    def passes(path):
        clock.passed += 30.0 if path == "/reset_prefix_cache" else 0.0
        return plain(path)

    first._next = passes
    before = len(first.bodies())
    rollout.update_weights(tiny_lm("qwen2", 1).named_parameters())
    batch(rollout)
    assert len(first.bodies()) == before == case["right"]["samples_of_the_new_version_from_it"]
    (line,) = [record.getMessage() for record in caplog.records if "leaves" in record.getMessage()]
    assert first.url in line
    assert "/reset_prefix_cache" in line
    assert first.paths().count("/resume") == 1  # after the first transfer


def test_h03_a_server_that_refuses_an_update_leaves_by_name(case, caplog):
    """Broadcast is not offered; the same by a sealed file."""
    servers = [FakeVLLM(), FakeVLLM()]
    rollout = rollout_on(*servers)
    servers[1].script |= case["given"]["server_2"]
    begun = time.monotonic()
    rollout.update_weights(tiny_lm("qwen2", 1).named_parameters())
    assert time.monotonic() - begun < case["right"]["error_within_s"]
    (line,) = [record.getMessage() for record in caplog.records if "leaves" in record.getMessage()]
    assert servers[1].url in line
    assert "no kernel image" in line
    batch(rollout)
    with pytest.raises(TrainingError, match=naming(servers[1].url, "no kernel image", "min_servers=2")):
        rollout_on(*servers, min_servers=2, patience_s=1.0)


def test_h04_an_update_that_a_dead_trainer_left_is_ended(case):
    server = FakeVLLM(case["given"]["routes"])
    rollout = rollout_on(server)
    paths = server.paths()
    first, second = (place for place, path in enumerate(paths) if path == "/start_weight_update")
    assert "/finish_weight_update" in paths[first:second]
    assert server.checksums == rollout.checksums()
    server.script["/start_weight_update"] = case["given"]["routes"]["/start_weight_update"][:1]
    server.seen.clear()
    rollout._pool._settings.patience_s = 0.5
    with pytest.raises(TrainingError, match="an update is in progress"):
        rollout.update_weights(tiny_lm("qwen2", 1).named_parameters())
    assert server.paths().count("/start_weight_update") < 10


def test_h05_answers_of_the_version_before_are_refused(case):
    wire = VLLMWire(FakeConnection(), 100)
    sampling = NEUTRAL | {"max_tokens": 12, "stop_token_ids": [3]}
    answer = answer_of(case["given"]["answer"], "")["json"]
    with pytest.raises(TrainingError, match=naming(*case["right"]["error_names"][:2], FakeConnection.url)):
        wire.parse(answer, sampling, case["given"]["asked_version"])
    asked = wire.parse(answer, sampling, case["given"]["answer"]["weight_version"])
    assert asked[0] == case["given"]["answer"]["token_ids"]


class FakeConnection:
    url = "http://127.0.0.1:9"


def test_h06_an_abort_that_nobody_asked_for_is_a_lost_request(case):
    server = FakeVLLM(vocabulary=100)
    rollout = rollout_on(server)
    version = rollout._pool.sealed.version
    server.script[GENERATE] = [answer_of(answer, version) for answer in case["given"]["answers"]]
    rollout._pool.vocabulary = rollout._pool.live[0].wire._vocabulary = 100
    found = batch(rollout, ONE, [3])
    right = case["right"]
    assert response_ids(found.batch) == [right["row"]["token_ids"]]
    log_probs = found.batch["rollout_log_probs"][found.batch["response_mask"].bool()]
    assert log_probs.tolist() == right["row"]["log_probs"]
    metrics = found.meta_info["rollout_metrics"]
    assert metrics["rollout/lost_requests"] == right["lost_requests"]
    assert metrics["rollout/lost_tokens"] == right["lost_tokens"]


def test_h07_nothing_is_left_to_a_servers_defaults(case):
    server = FakeVLLM()
    batch(rollout_on(server))
    for body in server.bodies():
        assert body["sampling_params"].keys() >= set(case["right"]["every_request_has"])
        neutral = {name: body["sampling_params"][name] for name in NEUTRAL}
        assert neutral == {**NEUTRAL, "temperature": 1.0}
    with pytest.raises(ConfigError, match=naming("generation_config", "auto")):
        rollout_on(FakeVLLM(generation_config="auto"))


def test_h08_requests_do_not_wait_in_the_clients_pool(case):
    """No request is answered before all have come."""
    given = case["given"]
    server = FakeVLLM(max_num_seqs=given["places"])
    rollout = rollout_on(server, patience_s=120.0)
    plain = server._default

    async def answered(path, body):
        while path == GENERATE and server.most_open < given["places"]:
            await asyncio.sleep(0.01)
        return await plain(path, body)

    server._default = answered
    found = rollout.generate(prompts_of([3] * 64, n=4), PARAMS)
    assert len(found) == given["requests"]
    assert counts(rollout)["rollout/lost_requests"] == case["right"]["lost_requests"]
    assert server.most_open == case["right"]["most_open_connections"]


def test_h09_idle_connections_that_the_server_closes_are_no_loss(case):
    """The case's times, half as long: the client would use the connections again."""
    server = FakeVLLM(idle_close=case["given"]["idle_close"] / 2)
    rollout = rollout_on(server)
    for idle in (0.5, case["given"]["client_idle_s"] / 2):  # the first: as the server closes them
        batch(rollout)
        time.sleep(idle)
    batch(rollout)
    assert counts(rollout)["rollout/lost_requests"] == case["right"]["lost_requests"]
    assert len(rollout._pool.out) == case["right"]["failures_of_server"]


def test_h10_a_port_cannot_be_taken(case, tmp_path, monkeypatch):
    """Own servers have a socket in a folder of their own, and no port."""
    started = []
    monkeypatch.setattr(start.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(start.subprocess, "Popen", lambda command, **options: started.append(command))
    for number in range(case["given"]["start"]["n"]):
        start.OwnServer(["server"], "token", tmp_path / f"{number}.log")
    sockets = [command[command.index("--uds") + 1] for command in started]
    assert len(set(sockets)) == len(sockets) == 2
    assert all(Path(path).parent.stat().st_mode & 0o077 == 0 for path in sockets)
    assert not [word for command in started for word in command if word.startswith("--port")]


def test_h11_a_healthy_server_that_never_answers_ends_the_wait(case, caplog):
    server = FakeVLLM(case["given"]["routes"] | {GENERATE: case["given"]["routes"]["generate"]})
    rollout = rollout_on(server, patience_s=1.5)
    begun = time.monotonic()
    with pytest.raises(TrainingError, match=naming(server.url, "no answer since")):
        batch(rollout)
    assert 1.5 <= time.monotonic() - begun < 60  # not for ever, and a busy machine takes a while


def test_h12_a_stripped_stop_token_is_refused(case):
    wire = VLLMWire(FakeConnection(), 100)
    sampling = NEUTRAL | {"max_tokens": 12, "stop_token_ids": case["given"]["stop_token_ids"]}
    answer = answer_of(case["given"]["answer"], "run/1")["json"]
    with pytest.raises(TrainingError, match=naming(case["right"]["error_says"], FakeConnection.url)):
        wire.parse(answer, sampling, "run/1")
    assert wire.parse(answer, sampling | {"stop": ["text"]}, "run/1")[2] == "stop"
    with pytest.raises(Lost):
        wire.parse({"choices": []}, sampling, "run/1")


def test_h13_a_request_that_fails_on_every_server_stops_the_run(case):
    failing = case["given"]["generate"][0]
    servers = [FakeVLLM(max_num_seqs=64) for _ in range(case["given"]["servers"])]
    rollout, prompts = rollout_on(*servers), prompts_of([3, 9, 1], n=4)
    bad = int(prompts.batch["seeds"].flatten()[6])
    for server in servers:
        plain = server._next
        server._next = lambda path, server=server, plain=plain: (
            failing
            if path == GENERATE and server.bodies()[-1]["sampling_params"].get("seed") == bad
            else plain(path)
        )
    with pytest.raises(TrainingError, match=naming("row 6 of the batch", failing["text"])):
        rollout.generate(prompts, PARAMS)
    sent = [body for server in servers for body in server.bodies() if body["sampling_params"]["seed"] == bad]
    assert 2 < len(sent) <= case["right"]["requests_for_this_row_at_most"]
    assert len(rollout._pool.live) == 2 - case["right"]["servers_declared_dead"]


def test_h14_a_late_answer_is_read_nowhere(case):
    """The deadline is of the late server alone, which answers when it has passed."""
    late, other = FakeVLLM(max_num_seqs=1), FakeVLLM(vocabulary=100)
    rollout, released = rollout_on(late, other), threading.Event()
    version = rollout._pool.sealed.version
    for server in rollout._pool.live:
        server.wire._vocabulary = 100
    (wire,) = (server.wire for server in rollout._pool.live if server.url == late.url)
    plain = wire._generate
    wire._generate = lambda request, _, most: plain(request, 0.5, most)
    late.script[GENERATE] = [
        answer_of({"token_ids": [50, 3], "log_probs": [-1, -1], "finish_reason": "stop"}, version)
        | {"until": released}
    ]
    other.script[GENERATE] = [answer_of(case["given"]["server_2"]["json"], version)]
    found = batch(rollout, ONE, [3, 9])
    right = case["right"]["row"]["token_ids"]
    assert response_ids(found.batch) == [right, right]
    assert late.bodies()
    released.set()
    time.sleep(0.3)
    assert response_ids(found.batch) == [right, right]


def test_h15_a_null_for_a_cached_position_is_refused(case):
    """The two orders are those of a real server: test_http_scores.py."""
    wire = VLLMWire(FakeConnection(), 100)
    for ids in case["given"]["score"]:
        cached = [None, None, *({str(token): {"logprob": -1.0}} for token in ids[2:])]
        answer = wire_answer([5], [-1.0], "length", "default") | {"prompt_logprobs": cached}
        with pytest.raises(
            TrainingError, match=naming("no log-prob of each of the 4 ids", FakeConnection.url)
        ):
            wire.scores_of(answer, ids, "default")

"""The HTTP rollout on fake servers: what it sends, what it refuses, and what survives a server's end."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import resource
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import GPT2Config, MistralConfig, Qwen2Config, Qwen2MoeConfig

from strop.connection import Connection
from strop.controller.threads import PoolThread
from strop.errors import ConfigError, LostServersError, ModelError, TrainingError
from strop.rollout.base import SamplingParams
from strop.rollout.http import engine, pool
from strop.rollout.http.clock import due
from strop.rollout.http.engine import HTTPRollout
from strop.rollout.http.wire import Request, differences
from strop.rollout.vllm.arguments import model_facts
from strop.rollout.vllm.checkpoint import CheckpointWeights
from strop.rollout.weights import checksums

from fake_vllm import GENERATE, FakeVLLM, wire_answer
from http_rollouts import EXPECTED, SETTINGS, counts, episodes_of, kill_amid, rollout_on
from messages import naming
from tiny_lms import EOS, PAD, prompts_of, response_ids, tiny_lm

PARAMS = SamplingParams(max_tokens=12, n=4, stop_token_ids=(7,))


def batch(rollout, prompts=6):
    return rollout.generate(prompts_of([3, 9, 1, 6, 5, 2][:prompts], n=PARAMS.n), PARAMS)


def equal(one, other):
    return all(torch.equal(one.batch[name], other.batch[name]) for name in ("responses", "rollout_log_probs"))


@pytest.fixture(scope="module")
def alone():
    """The samples of one server."""
    return batch(rollout_on(FakeVLLM()))


@pytest.fixture
def impatient(monkeypatch):
    """Look for dead servers and probe them at once."""
    monkeypatch.setattr(pool, "_PROBE_S", 0.1)


def test_a_batch_does_not_depend_on_servers_places_or_speed(alone):
    fast, slow = FakeVLLM(max_num_seqs=3), FakeVLLM(max_num_seqs=1)
    fast.delay, slow.delay = 0.01, 0.03
    rollout = rollout_on(slow, fast)
    found = batch(rollout)
    assert equal(found, alone)
    assert slow.bodies()
    assert found.meta_info["rollout_metrics"]["rollout/lost_requests"] == 0
    assert found.meta_info["rollout_metrics"]["rollout/servers_live"] == 2


def test_servers_that_were_started_again_have_not_died_of_a_request():
    servers = [FakeVLLM() for _ in range(4)]
    rollout = rollout_on(*servers)
    first = {one.url for one in rollout._pool.live[:3]}  # in the order in which they joined
    for server in servers:
        server.version = "default" if server.url in first else server.version
    found = rollout.generate(prompts_of([3], n=1), dataclasses.replace(PARAMS, n=1))
    assert found.batch["response_mask"].any()
    assert found.meta_info["rollout_metrics"]["rollout/lost_requests"] == 3


def test_samples_are_the_servers_answers():
    server = FakeVLLM()
    found = batch(rollout_on(server)).batch
    answers = {}
    for body in server.bodies():
        choice = server.sample(body)["choices"][0]
        answers[tuple(body["token_ids"]), body["sampling_params"]["seed"]] = choice
    prompts = prompts_of([3, 9, 1, 6, 5, 2], n=PARAMS.n).batch
    for row, ids in enumerate(response_ids(found)):
        mask = prompts["attention_mask"][row // PARAMS.n].bool()
        prompt = prompts["input_ids"][row // PARAMS.n][mask].tolist()
        choice = answers[tuple(prompt), int(prompts["seeds"].flatten()[row])]
        assert ids == choice["token_ids"]
        expected = torch.tensor([item["logprob"] for item in choice["logprobs"]["content"]])
        assert torch.equal(found["rollout_log_probs"][row, : len(ids)], expected)
        assert bool(found["truncated"][row]) is (choice["finish_reason"] == "length")


def test_samples_of_a_prompt_go_to_one_server_and_the_load_is_even():
    servers = [FakeVLLM(max_num_seqs=64), FakeVLLM(max_num_seqs=64)]
    for server in servers:
        server.delay = 0.1
    batch(rollout_on(*servers))
    prompts = [[tuple(body["token_ids"]) for body in server.bodies()] for server in servers]
    assert [len(found) for found in prompts] == [12, 12]
    assert not set(prompts[0]) & set(prompts[1])


def test_imbalance_is_that_of_the_iteration(impatient):
    first, later = FakeVLLM(max_num_seqs=64), FakeVLLM(max_num_seqs=64)
    rollout = rollout_on(first, later)
    later.kill()
    batch(rollout)
    later.start()
    deadline = time.monotonic() + 60
    while len(rollout._pool.live) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.delay = later.delay = 0.1
    assert batch(rollout).meta_info["rollout_metrics"]["rollout/server_imbalance"] == 1


def test_the_limit_of_open_files_is_raised_by_those_that_are_needed_further(monkeypatch):
    raised = []
    monkeypatch.setattr(pool.resource, "getrlimit", lambda _: (64, 1000))
    monkeypatch.setattr(pool.resource, "setrlimit", lambda _, limits: raised.append(limits))
    pool._allow_files(63, "places")
    assert 63 < raised[0][0] < raised[0][1] == 1000
    with pytest.raises(ConfigError, match=naming("1000", "lower places", "limits.conf")):
        pool._allow_files(999, "places")
    with pytest.raises(ConfigError, match=naming("1000", "the servers' --max-num-seqs")) as refused:
        rollout_on(FakeVLLM(max_num_seqs=999))
    assert "strop docs" not in str(refused.value)  # a server that is started so, too, is refused


def test_finished_and_advanced_are_called_for_every_sample():
    rollout, reported, done = rollout_on(FakeVLLM()), [], []
    rollout.advanced = lambda samples, tokens: done.append((samples, tokens))
    found = rollout.generate(
        prompts_of([3, 9], n=4), PARAMS, lambda prompt, index, ids: reported.append((prompt * 4 + index, ids))
    )
    assert sorted(reported) == list(enumerate(response_ids(found.batch)))
    assert sum(samples for samples, _ in done) == 8
    assert sum(tokens for _, tokens in done) == sum(map(len, response_ids(found.batch)))


def test_batches_in_flight_are_completed_in_order_and_resumed(alone):
    rollout = rollout_on(FakeVLLM())
    prompts = prompts_of([3, 9, 1, 6, 5, 2], n=PARAMS.n)
    rollout.admit(1, prompts, PARAMS)
    state = rollout.in_flight()
    other = rollout_on(FakeVLLM())
    other.admit(1, prompts, PARAMS)
    other.restore(state)
    for one in (rollout, other):
        found = one.finish(1, 5)
        assert equal(found, alone)
        assert found.batch["rollout_versions"].unique().tolist() == [-1, 5]


class Replies:
    """Two answers, late ones in any order."""

    def reset(self, seed):
        self.seed = seed

    def respond(self, response, turn):
        time.sleep(0.05 * random.SystemRandom().random())
        return None if turn == 2 else str(self.seed % 10)


def test_turns_are_answered_as_they_end_whichever_servers_generate_them():
    params = SamplingParams(max_tokens=40, n=4, stop_token_ids=(7,))
    found, episodes = [], episodes_of(Replies, turn_length=12)
    for servers in ([FakeVLLM(vocabulary=19)], [FakeVLLM(vocabulary=19, max_num_seqs=2) for _ in range(2)]):
        rollout = rollout_on(*servers)
        rollout._episodes, done = episodes, []
        rollout.advanced = lambda samples, tokens, done=done: done.append((samples, tokens))
        prompts = prompts_of([3, 9], n=4)
        prompts.batch["input_ids"] %= 19
        prompts.non_tensor_batch["prompt"] = np.array(["1", "2"], object)
        found.append(rollout.generate(prompts, params))
        assert sum(samples for samples, _ in done) == 8
        assert sum(tokens for _, tokens in done) == found[-1].batch["response_mask"].sum()
    one, other = (result.batch for result in found)
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (result.non_tensor_batch["conversation"].tolist() for result in found)
    assert first == second
    assert one["n_turns"].max() == 3
    sent = {len(body["token_ids"]) for server in servers for body in server.bodies()}
    assert len(sent) > 2  # a turn's prompt has the turns before
    episodes._pool.close()


def ahead(rollout, dying=None):
    """The samples of four batches, three of them in flight, over updates, and the states between."""
    found, states = [], []
    prompts = [prompts_of([3, 9, number + 1], n=PARAMS.n) for number in range(4)]
    for number in (0, 1, 2):
        rollout.admit(number, prompts[number], PARAMS)
    for number in range(4):
        if dying and number == 1:
            kill_amid(dying)
        found.append(rollout.finish(number, number + 5))
        states.append(rollout.in_flight())
        rollout.update_weights(tiny_lm("qwen2", number).named_parameters())
        if number == 0:
            rollout.admit(3, prompts[3], PARAMS)
    return found, states


def test_batches_ahead_do_not_depend_on_servers_places_speed_or_a_death(monkeypatch, impatient):
    monkeypatch.setattr(engine, "PIECE", 2)
    rollout = rollout_on(FakeVLLM(max_num_seqs=64))
    expected, states = ahead(rollout)
    assert sum(found.meta_info["rollout_metrics"]["rollout/cut_tokens"] for found in expected) > 0
    versions = expected[2].batch["rollout_versions"]
    assert {5, 6, 7} <= set(versions.unique().tolist())
    slow, dying = FakeVLLM(max_num_seqs=2), FakeVLLM(max_num_seqs=3)
    slow.delay = 0.01
    for servers, killed in (((slow, FakeVLLM()), None), ((dying, FakeVLLM()), dying)):
        again, of_again = ahead(rollout_on(*servers), killed)
        for one, other in zip(expected, again, strict=True):
            assert equal(one, other)
            assert torch.equal(one.batch["rollout_versions"], other.batch["rollout_versions"])
        assert str(of_again) == str(states)


def test_pieces_request_no_more_tokens_at_least_than_at_most(monkeypatch):
    monkeypatch.setattr(engine, "PIECE", 2)
    server = FakeVLLM()
    rollout = rollout_on(server, sampling={"min_tokens": 5})
    for number in range(2):
        rollout.admit(number, prompts_of([3, 9], n=PARAMS.n), PARAMS)
    rollout.finish(0, 1)
    sampling = [body["sampling_params"] for body in server.bodies()]
    sent = {(one["min_tokens"], one["max_tokens"]) for one in sampling}
    assert {(5, 12), (2, 2)} <= sent
    assert all(least <= most for least, most in sent)  # else vLLM refuses the request


@pytest.mark.slow
def test_fewer_slots_begin_later_batches_later(monkeypatch):
    monkeypatch.setattr(engine, "PIECE", 2)
    progress = []
    for slots in (1000, 12, 1):
        _, states = ahead(rollout_on(FakeVLLM(max_num_seqs=64), slots=slots))
        progress.append(int(states[0]["batches"][2]["lengths"].sum()))
    assert progress[0] > progress[1] > progress[2] == 0


def test_slots_of_a_resume_are_those_of_the_run_unless_they_are_set():
    state = {"batches": {}, "slots": 3}
    for is_set, slots in ((False, 3), (True, 8)):
        rollout = rollout_on(FakeVLLM(), slots=8, fixed_slots=is_set)
        rollout.restore(state)
        assert rollout.in_flight()["slots"] == slots


@given(
    oldest=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    later=st.lists(st.integers(1, 12), max_size=6),
    slots=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_the_clock_is_a_schedule_of_slots(oldest, later, slots, seed):
    # step by step: a token a tick for each of the first samples that have not ended, in any slot
    left, got = [*oldest, *later], [0] * len(oldest + later)
    while any(left[: len(oldest)]):
        for place in [place for place, length in enumerate(left) if length][:slots]:
            left[place] -= 1
            got[place] += 1
    expected = got[len(oldest) :]
    draw = random.Random(seed)
    faster = [
        min(length, wanted + draw.randint(0, 3)) for length, wanted in zip(later, expected, strict=True)
    ]
    known = [(length, length == whole) for length, whole in zip(faster, later, strict=True)]
    assert due(oldest, known, slots) == (expected, True)
    for place, (length, wanted) in enumerate(zip(later, expected, strict=True)):
        if wanted:
            short = [*known[:place], (wanted - 1, False), *known[place + 1 :]]
            assert not due(oldest, short, slots)[1], (length, wanted)


@pytest.mark.parametrize("moment", ["before", "amid", "in the transfer"])
def test_a_server_that_dies_changes_no_sample(alone, moment):
    dying, other = FakeVLLM(), FakeVLLM()
    dying.delay = other.delay = 0.1
    rollout = rollout_on(dying, other)
    if moment == "before":
        dying.kill()
    elif moment == "amid":
        kill_amid(dying)
    else:
        dying.script["/update_weights"] = [{"drop": True}]
        rollout.update_weights(tiny_lm("qwen2").named_parameters())
    found = batch(rollout)
    assert equal(found, alone)
    metrics = found.meta_info["rollout_metrics"]
    assert metrics["rollout/servers_live"] == 1
    assert (metrics["rollout/lost_requests"] > 0) is (moment != "in the transfer")


def test_a_server_that_comes_back_gets_the_present_weights_before_it_answers(alone, impatient):
    returning, other = FakeVLLM(), FakeVLLM()
    rollout = rollout_on(returning, other)
    returning.kill()
    assert equal(batch(rollout), alone)
    rollout.update_weights(tiny_lm("qwen2", 1).named_parameters())
    returning.start()
    returning.seen.clear()
    deadline = time.monotonic() + 60
    while len(rollout._pool.live) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert returning.checksums == other.checksums
    assert counts(rollout)["weights/joins"] == 1
    batch(rollout)
    paths = returning.paths()
    assert paths.index(GENERATE) > paths.index("/resume") > paths.index("/update_weights")


def test_a_server_started_again_between_two_batches_is_noticed_by_its_version(alone, impatient):
    server = FakeVLLM()
    rollout = rollout_on(server)
    server.kill()
    server.start()
    found = batch(rollout)
    assert equal(found, alone)
    assert server.checksums


def restarted(server, **facts):
    """Have the server started again, with other facts."""
    server.kill()
    server.facts |= facts
    server.start()
    server.seen.clear()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_started_again_while_nothing_runs_is_compared_and_verified_again(alone, impatient):
    wrong, right, other = (FakeVLLM() for _ in range(3))
    rollout = rollout_on(wrong, right, other)
    restarted(wrong, logprobs_mode="raw_logprobs")
    restarted(right)
    rollout.update_weights(tiny_lm("qwen2").named_parameters())
    assert equal(batch(rollout), alone)
    wait_for(lambda: len(rollout._pool.live) == 2 and "raw_logprobs" in str(rollout._pool.out))
    assert {server.url for server in rollout._pool.live} == {right.url, other.url}
    asked = right.bodies("/collective_rpc")[-1]
    # parts of models with pictures have other names in vLLM: it is told those of the checkpoint
    names = CheckpointWeights(tiny_lm("qwen2")).names
    assert asked == {"method": "strop_checksums", "args": [names]}
    assert right.checksums == other.checksums
    assert not {GENERATE, "/update_weights"} & {*wrong.paths()}
    assert counts(rollout)["weights/joins"] == 1


def test_a_server_started_again_before_the_first_transfer_is_compared_again():
    server = FakeVLLM()
    servers = pool.Pool(SimpleNamespace(**SETTINGS, urls=[server.url]), EXPECTED, 61, None)
    thread = pool.PoolThread(servers)
    (joined,) = servers.live
    thread.run(servers.lose_others())
    assert servers.live == [joined]
    restarted(server)
    thread.run(servers.lose_others())
    assert servers.live == []
    wait_for(lambda: servers.live)
    thread.close()


def test_evaluated_servers_that_were_started_again_are_compared_before_the_next_batch(impatient):
    server = FakeVLLM()
    settings = SimpleNamespace(**SETTINGS | {"patience_s": 1.0}, urls=[server.url])
    servers = pool.Pool(settings, EXPECTED, 61, None, keeps_weights=True)
    rollout = HTTPRollout(None, servers, dtype=torch.float32, slots=8, pad_token_id=PAD, eos_token_ids=[EOS])
    batch(rollout)
    restarted(server, logprobs_mode="raw_logprobs")
    with pytest.raises(LostServersError, match=naming(server.url, "logprobs_mode is 'raw_logprobs'")):
        batch(rollout)
    assert not server.bodies()


def test_a_started_server_that_refuses_weights_is_not_sent_them_again_and_again():
    server, other = FakeVLLM(), FakeVLLM()
    own = SimpleNamespace(
        url=server.url, has_ended=False, last_lines=str, stop=lambda: None, start=lambda: None
    )
    rollout = rollout_on(other, own=[own])
    deadline = time.monotonic() + 60
    while len(rollout._pool.live) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.script["/update_weights"] = [{"status": 500, "text": "no kernel image"}]
    rollout.update_weights(tiny_lm("qwen2", 1).named_parameters())
    while server.paths().count("/update_weights") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.5)
    assert server.paths().count("/update_weights") == 3  # right, refused, and refused after its restart


def test_servers_of_a_run_end_with_it_though_a_traceback_keeps_their_rollout():
    server, ended = FakeVLLM(), []
    own = SimpleNamespace(
        url=server.url, has_ended=False, last_lines=str, stop=lambda: ended.append(1), start=lambda: None
    )
    rollout = rollout_on(own=[own])
    rollout.close()
    assert ended == [1]


def test_all_servers_gone_is_an_error_that_names_them():
    server = FakeVLLM()
    rollout = rollout_on(server, patience_s=0.5)
    server.kill()
    with pytest.raises(LostServersError, match=naming("min_servers=1", server.url)) as raised:
        batch(rollout)
    assert not raised.value.is_final  # on Ray trainer.max_restarts applies


@pytest.mark.parametrize("failing", [GENERATE, "/update_weights"])
def test_servers_that_answer_nothing_but_errors_are_not_waited_for(caplog, impatient, failing):
    text = "Unsupported CPU attention configuration"
    servers = [FakeVLLM(), FakeVLLM()]
    if failing == GENERATE:
        rollout = rollout_on(*servers)
        for server in servers:
            server.script |= {path: [{"status": 500, "text": text}] for path in (GENERATE, "/collective_rpc")}
            server.script["/health"] = [{"status": 503}]
    for server in servers:
        server.script[failing] = [{"status": 500, "text": text}]
    with pytest.raises(
        TrainingError, match=naming("nothing but errors", text, *(one.url for one in servers))
    ):
        batch(rollout if failing == GENERATE else rollout_on(*servers))
    assert any(text in record.getMessage() for record in caplog.records)


def test_an_error_of_a_server_is_shown_at_once(caplog):
    server, other = FakeVLLM(), FakeVLLM()
    server.script[GENERATE] = [{"status": 500, "text": "Out of range float values"}]
    batch(rollout_on(server, other))
    (line,) = [one.getMessage() for one in caplog.records if "Out of range" in one.getMessage()]
    assert server.url in line


def test_servers_that_have_answered_are_waited_for(impatient):
    server = FakeVLLM()
    rollout = rollout_on(server)
    batch(rollout)
    failing = {"status": 503, "text": "busy"}
    server.script |= {path: [*[failing] * 5, None] for path in (GENERATE, "/health", "/collective_rpc")}
    batch(rollout)
    assert rollout._pool._errors[server.url, True] > 3


def test_a_server_that_has_too_much_to_do_is_asked_until_it_has_not(alone, monkeypatch, caplog):
    monkeypatch.setattr(pool, "_AGAIN_S", 0.01)
    server, busy = FakeVLLM(), {"status": 429, "text": "too many requests"}
    rollout = rollout_on(server, patience_s=5.0)
    server.script |= {GENERATE: [*[busy] * 100, None], "/health": [busy]}
    found = batch(rollout)
    assert equal(found, alone)
    assert found.meta_info["rollout_metrics"]["rollout/lost_requests"] == 100
    (line,) = [one.getMessage() for one in caplog.records if "too many" in one.getMessage()]
    assert server.url in line
    rollout._pool._settings.patience_s, server.script[GENERATE] = 0.2, [busy]
    with pytest.raises(TrainingError, match=naming(server.url, "too many requests")):
        batch(rollout)


def test_an_address_of_several_servers_is_named(impatient):
    server = FakeVLLM({GENERATE: [{"json": wire_answer([10, 7], [-0.5, -0.5], "stop", "default")}]})
    rollout = rollout_on(server)  # each transfer reaches another one than the request after it
    with pytest.raises(TrainingError, match=naming(server.url, "default", "behind this address")):
        batch(rollout)


@pytest.mark.parametrize("proxy", ["proxy:3128", "me:hidden@proxy:3128", "ftp://proxy", "http://[::"])
def test_a_proxy_that_is_no_url_is_named_without_its_login(proxy, monkeypatch):
    monkeypatch.setenv("OUR_PROXY", proxy)
    with pytest.raises(ConfigError, match=naming("http://10.0.0.1:1", "http.proxy")) as raised:
        rollout_on(urls=["http://10.0.0.1:1"], open_network=True, proxy="OUR_PROXY")
    assert "hidden" not in str(raised.value)


def test_a_url_that_a_file_may_not_name_changes_nothing(tmp_path, caplog):
    first, names = FakeVLLM(), tmp_path / "servers.txt"
    names.write_text(first.url)
    rollout = rollout_on(urls=[str(names)])
    names.write_text(f"{first.url}\nhttp://10.0.0.1:1\n")
    rollout.update_weights(tiny_lm("qwen2").named_parameters())
    assert [server.url for server in rollout._pool.live] == [first.url]
    assert not rollout._pool.out
    assert "token_env" in caplog.text


def test_a_model_that_vllm_does_not_support_is_refused_by_its_reason():
    with pytest.raises(ConfigError, match=naming("unsupported", "heads of 32")):
        rollout_on(FakeVLLM(unsupported="attention takes heads of 32"))


def test_urls_of_a_file_are_read_again_at_every_transfer(alone, tmp_path, impatient):
    first, second = FakeVLLM(), FakeVLLM()
    names = tmp_path / "servers.txt"
    names.write_text(f"# ours\n{first.url}/\n")
    rollout = rollout_on(urls=[str(names)])
    names.write_text(f"{second.url}\n{first.url}\n")
    rollout.update_weights(tiny_lm("qwen2").named_parameters())
    while len(rollout._pool.live) < 2:
        time.sleep(0.05)
    assert equal(batch(rollout), alone)
    assert second.bodies()
    for unreadable in (names.unlink, partial(names.write_text, "# being written\n")):
        unreadable()
        rollout.update_weights(tiny_lm("qwen2").named_parameters())
        assert len(rollout._pool.live) == 2
    names.write_text(f"{second.url}\n")
    rollout.update_weights(tiny_lm("qwen2").named_parameters())
    first.seen.clear()
    assert equal(batch(rollout), alone)
    assert GENERATE not in first.paths()


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"dtype": "bfloat16"}, ["dtype", "bfloat16", "float32"]),
        ({"logprobs_mode": "raw_logprobs"}, ["logprobs_mode", "raw_logprobs"]),
        ({"max_model_len": 32}, ["max_model_len", "32", "64"]),
        ({"model.hidden_size": 48}, ["hidden_size", "48", "32"]),
    ],
)
def test_a_server_with_other_settings_is_refused_by_name(facts, named):
    with pytest.raises(ConfigError, match=naming("another engine", *named)):
        rollout_on(FakeVLLM(), FakeVLLM(**facts))


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXT = {"model_type": "some_text", "layer_types": ["full_attention", "full_attention"]}
MIXED = {**TEXT, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("name", "found", "expected", "said"),
    [
        (
            *("rope_parameters", {**ROPE, "rope_theta": 5e5}, ROPE),
            "model.rope_parameters.rope_theta is 500000.0, expected 10000.0",
        ),
        (
            *("rope_parameters", {**ROPE, "factor": 4.0}, ROPE),
            "model.rope_parameters.factor is 4.0, expected None",
        ),
        (
            *("text_config", MIXED, TEXT),
            "model.text_config.layer_types.1 is 'sliding_attention', expected 'full_attention'",
        ),
        ("layer_types", None, ["full_attention"], "model.layer_types is None, expected ['full_attention']"),
        ("sliding_window", 128, None, "model.sliding_window is 128, expected None"),
    ],
)
def test_a_difference_anywhere_in_a_model_is_named_with_both_values(name, found, expected, said):
    facts, run = ({"max_model_len": 64, f"model.{name}": value} for value in (found, expected))
    assert differences(facts, run) == [said]


def test_what_says_nothing_of_a_models_numbers_is_not_compared():
    given = {"n_layer": 2, "n_head": 2, "n_embd": 8}
    run = GPT2Config(**given, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, dtype="float32")
    server = GPT2Config(**given, dtype="bfloat16", use_cache=False, id2label={0: "yes"}, unsloth_version="1")
    server.tie_word_embeddings, server.layer_norm_epsilon = False, float("inf")
    # as a server sends them
    facts = json.loads(json.dumps(model_facts(server, is_tied=True), allow_nan=False))
    (found,) = differences({"max_model_len": 64, **facts}, {"max_model_len": 64, **model_facts(run)})
    assert found == "model.layer_norm_epsilon is 'inf', expected 1e-05"


def test_no_window_is_none_as_vllm_writes_it():
    assert Qwen2MoeConfig().sliding_window == 0
    assert model_facts(Qwen2MoeConfig())["model.sliding_window"] is None
    assert model_facts(MistralConfig(sliding_window=7))["model.sliding_window"] == 7


def test_parts_of_a_model_may_have_keys_that_another_version_does_not_know():
    facts = {"max_model_len": 64, "model.text_config": {**TEXT, "new": 1}, "model.newer": 1}
    assert differences(facts, {"max_model_len": 64, "model.text_config": {**TEXT, "old": 2}}) == []


def test_a_server_whose_rotary_base_is_another_is_refused():
    own = model_facts(Qwen2Config(rope_parameters=ROPE))
    assert own["model.rope_parameters"] == ROPE
    other = {"model.rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}
    with pytest.raises(ConfigError, match=naming("rope_parameters.rope_theta is 1.0, expected 1")):
        rollout_on(FakeVLLM(**other))


def test_a_server_of_several_engines_has_the_places_of_all_and_no_broadcast():
    """Started with --data-parallel-size: its facts are those of one engine."""
    server = FakeVLLM()
    server.engines = 4
    (joined,) = rollout_on(server)._pool.live
    assert joined.places == 4 * server.facts["max_num_seqs"]
    with pytest.raises(ConfigError, match=naming("4 engines", "weight_transfer")):
        rollout_on(server, broadcasts=True)


def test_a_server_of_quantized_weights_is_refused():
    server = FakeVLLM(quantization="fp8")
    with pytest.raises(ConfigError, match=naming("quantization is 'fp8', expected None")):
        rollout_on(server)


def test_a_server_that_is_refused_during_a_run_is_named_and_joins_once_it_is_right(
    tmp_path, impatient, caplog
):
    first, other, names = FakeVLLM(), FakeVLLM(dtype="bfloat16"), tmp_path / "servers.txt"
    names.write_text(first.url)
    rollout = rollout_on(urls=[str(names)])
    names.write_text(f"{first.url}\n{other.url}\n")
    rollout.update_weights(tiny_lm("qwen2").named_parameters())
    deadline = time.monotonic() + 60
    while other.paths().count("/collective_rpc") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (line,) = [record.getMessage() for record in caplog.records if "does not join" in record.getMessage()]
    assert other.url in line
    assert "bfloat16" in line
    other.facts["dtype"] = "float32"
    while len(rollout._pool.live) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/weight_info", {"text": "null"}),
        ("/weight_info", {"text": "[" * 200_000}),
        ("/reset_prefix_cache", {"text": "[1]"}),
        ("/collective_rpc", {"json": {"results": []}}),
        ("/collective_rpc", {"json": {"error": "busy"}}),
    ],
)
def test_a_server_whose_answer_has_another_form_leaves(path, answer):
    servers = [FakeVLLM(), FakeVLLM()]
    rollout = rollout_on(*servers)
    servers[0].script[path] = [answer]
    rollout.update_weights(tiny_lm("qwen2", 1).named_parameters())
    assert rollout.checksums() == servers[1].checksums
    assert list(rollout._pool.out) == [servers[0].url]


def test_a_server_of_another_version_of_strop_is_refused():
    server = FakeVLLM({"/collective_rpc": [{"json": {"results": [{"dtype": "float32"}]}}]})
    with pytest.raises(ConfigError, match=naming(server.url, "max_num_seqs", "another version of strop")):
        rollout_on(server)


def test_a_sample_may_take_much_longer_than_those_before():
    rollout = rollout_on(FakeVLLM(), patience_s=600.0)
    assert rollout._pool._deadline_s == 600
    batch(rollout)
    assert rollout._pool._slowest > 0
    assert rollout._pool._deadline_s == 600
    rollout._pool._slowest = 90.0
    assert rollout._pool._deadline_s == 900


def test_servers_that_compute_otherwise_than_each_other_are_refused():
    other = FakeVLLM(kernels={"vllm": "0.32.0", "enforce_eager": False})
    # whichever joins first is the one that the other is compared with
    with pytest.raises(ConfigError, match=r"kernels\.enforce_eager is (True|False), expected (True|False)"):
        rollout_on(FakeVLLM(), other)


def test_another_kind_of_server_is_refused():
    with pytest.raises(ConfigError, match=naming("/collective_rpc", "404", "strop docs http_rollout")):
        rollout_on(FakeVLLM({"/collective_rpc": [{"status": 404, "text": "Not Found"}]}))


def test_a_token_goes_with_every_request_and_its_lack_is_named():
    server = FakeVLLM(token="secret")
    batch(rollout_on(server, token="secret"))
    stranger, *others = server.seen  # what the first one asks is refused
    assert (stranger["path"], stranger["headers"]["authorization"]) == ("/health", "")
    assert all(seen["headers"]["authorization"] == "Bearer secret" for seen in others)
    with pytest.raises(ConfigError, match=naming("without the token", "RequireToken")):
        rollout_on(FakeVLLM(), token="secret")
    with pytest.raises(ConfigError, match=naming(server.url, "401", "strop docs http_rollout")):
        rollout_on(server, token="other")


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (wire_answer([10, 11], [-0.5], "length", "V"), ["2 tokens", "1 log-probs"]),
        (wire_answer([61, 7], [-0.5, -0.5], "stop", "V"), ["vocabulary", "61"]),
        (wire_answer([10, 7], [-0.5, float("nan")], "stop", "V"), ["finite"]),
        (wire_answer([10, 7], [-0.5, None], "stop", "V"), ["finite"]),
        (wire_answer([10, 7], [-0.5, -9999.0], "stop", "V"), ["finite"]),
        (wire_answer([10] * 5, [-0.5] * 5, "length", "V"), ["5 of 12 tokens", "max-model-len"]),
        (wire_answer([10] * 13, [-0.5] * 13, "length", "V"), ["13 tokens", "12"]),
        (wire_answer([], [], "stop", "V"), ["0 tokens"]),
        (wire_answer([10, 7], [-0.5] * 2, "error", "V"), ["'error'"]),
    ],
    ids=["log-probs", "vocabulary", "nan", "null", "nan of vllm", "shortened", "endless", "empty", "reason"],
)
def test_an_answer_that_is_none_is_refused_by_name(answer, named):
    server = FakeVLLM()
    rollout = rollout_on(server)
    answer["choices"][0]["weight_versions"][0]["version"] = rollout._pool.sealed.version
    server.script[GENERATE] = [{"json": answer}]
    with pytest.raises(TrainingError, match=naming(server.url, *named)):
        batch(rollout)


def test_a_response_that_repeats_itself_ends_truncated():
    server = FakeVLLM()
    rollout = rollout_on(server)
    version = rollout._pool.sealed.version
    server.script[GENERATE] = [{"json": wire_answer([10, 10], [-0.5, -0.5], "repetition", version)}]
    found = rollout.generate(prompts_of([3], n=1), dataclasses.replace(PARAMS, n=1)).batch
    assert response_ids(found) == [[10, 10]]
    assert found["truncated"].tolist() == [True]
    assert server.paths().count(GENERATE) == 1


@pytest.mark.parametrize("spans", [None, []])
def test_a_sample_that_names_no_version_of_its_weights_is_refused(spans):
    server = FakeVLLM()
    rollout = rollout_on(server)
    answer = wire_answer([10, 7], [-0.5, -0.5], "stop", "V")
    answer["choices"][0]["weight_versions"] = spans
    server.script[GENERATE] = [{"json": answer}]
    with pytest.raises(TrainingError, match=naming(server.url, "names no version of its weights")):
        batch(rollout)


def test_a_request_is_named_by_its_batch_where_several_are_in_flight():
    server = FakeVLLM()
    rollout, prompts = rollout_on(server), prompts_of([3], n=1)
    prompts.meta_info["batch"] = 4
    server.script[GENERATE] = [{"status": 400, "text": "no"}]
    rollout.admit(4, prompts, dataclasses.replace(PARAMS, n=1))
    with pytest.raises(TrainingError, match="row 0 of batch 4, 3 tokens"):
        rollout.finish(4, 1)


def test_a_token_that_a_server_repeats_is_not_in_the_error():
    server = FakeVLLM(token="hidden")
    rollout = rollout_on(server, token="hidden")
    server.script[GENERATE] = [{"status": 403, "text": "the key hidden is not valid here"}]
    with pytest.raises(TrainingError, match=naming(server.url, "403", "not valid here")) as raised:
        batch(rollout)
    assert "hidden" not in str(raised.value)


def test_a_redirect_is_not_followed():
    other = FakeVLLM()
    server = FakeVLLM({GENERATE: [{"status": 307, "headers": {"location": other.url + GENERATE}}]})
    with pytest.raises(TrainingError, match=naming(server.url, "307")):
        batch(rollout_on(server))
    assert not other.seen


def test_an_endless_error_is_read_to_a_bound(alone):
    server = FakeVLLM({GENERATE: [{"status": 500, "text": "full", "endless": True}, None]})
    assert equal(batch(rollout_on(server)), alone)


def test_a_sample_that_ends_its_servers_is_found_and_named(impatient):
    servers = [FakeVLLM(max_num_seqs=64), FakeVLLM(max_num_seqs=64)]
    rollout, prompts = rollout_on(*servers), prompts_of([3, 9, 1], n=PARAMS.n)
    for server in servers:
        server.poison = int(prompts.batch["seeds"].flatten()[5])
    with pytest.raises(TrainingError, match=naming("row 5 of the batch", "9 tokens", "servers died")):
        rollout.generate(prompts, PARAMS)


@pytest.mark.parametrize(("n", "deaths"), [(1, 3), (2, 3), (2, 6)])
def test_a_server_that_dies_again_and_again_is_not_the_samples_fault_where_there_are_others(
    monkeypatch, impatient, n, deaths
):
    """The other one is down: nothing says that the sample would have ended it, too, before the sixth time."""
    monkeypatch.setattr(pool, "_AGAIN_S", 0.01)
    flaky, other = FakeVLLM(), FakeVLLM()
    rollout = rollout_on(*(flaky, other)[:n])
    other.kill()
    batch(rollout)
    wait_for(lambda: len(rollout._pool.live) == 1)
    flaky.script |= {GENERATE: [*[{"drop": True}] * deaths, None], "/health": [{"status": 500}]}
    prompts, params = prompts_of([3], n=1), dataclasses.replace(PARAMS, n=1)
    if n == 2 and deaths == 3:
        assert rollout.generate(prompts, params).batch["response_mask"].any()
    else:
        with pytest.raises(TrainingError, match=naming(f"{deaths} servers died of it", flaky.url)):
            rollout.generate(prompts, params)


def test_a_sample_goes_to_a_server_that_has_not_died_of_it():
    rollout = rollout_on(FakeVLLM(), FakeVLLM())
    first, other = rollout._pool.live
    for deaths, expected in ((Counter(), first), (Counter([first.url]), other)):
        other.running = 1
        taking = rollout._pool._place(Request(0, [5], {}), 1, Counter(), deaths, "")
        assert rollout._thread.run(taking) is expected
        expected.running -= 1


def test_ids_beyond_the_vocabulary_are_not_sent():
    server = FakeVLLM()
    rollout = rollout_on(server)
    prompts = prompts_of([3, 9], n=4)
    prompts.batch["input_ids"][1, -1] = 61
    with pytest.raises(ModelError, match=naming("row 4", "61")):
        rollout.generate(prompts, PARAMS)
    assert all(max(body["token_ids"]) < 61 for body in server.bodies())


def test_weights_arrive_whole_and_a_wrong_update_reaches_no_server():
    server = FakeVLLM()
    rollout = rollout_on(server)
    model = tiny_lm("qwen2", 1)
    expected = checksums(model.named_parameters(), torch.float32)
    rollout.update_weights(list(model.named_parameters())[:3], last=False)
    rollout.update_weights(list(model.named_parameters())[3:])
    assert server.checksums == expected == rollout.checksums()
    server.seen.clear()
    for wrong in (list(model.named_parameters())[:-1], [("other", torch.zeros(2))]):
        with pytest.raises(ModelError, match="weight transfer"):
            rollout.update_weights(wrong)
        with pytest.raises(ModelError):  # of an update that is not complete
            batch(rollout)
        rollout._weights.ledger.forget()
    assert server.seen == []
    rollout.update_weights(model.named_parameters())
    batch(rollout)


def test_servers_that_hold_different_weights_are_named():
    servers = [FakeVLLM(), FakeVLLM()]
    rollout = rollout_on(*servers)
    servers[1].checksums["model.norm.weight"] += 1
    with pytest.raises(ModelError, match=naming(servers[1].url, "model.norm.weight")):
        rollout.checksums()


def test_a_joiner_that_holds_other_weights_stays_out(impatient):
    first, other = FakeVLLM(), FakeVLLM()
    rollout = rollout_on(first, other)
    other.kill()
    batch(rollout)
    # it tries to join again and again, each time by its facts and its checksums
    other.script["/collective_rpc"] = [None, {"json": {"results": [{"model.norm.weight": 1}]}}] * 1000
    other.start()
    deadline = time.monotonic() + 60
    while "parameters differ" not in str(rollout._pool.out[other.url]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other.seen.clear()
    batch(rollout)
    assert GENERATE not in other.paths()


def test_weights_on_a_disk_are_a_file_of_the_folder_which_goes_with_the_next(tmp_path):
    server = FakeVLLM()
    (tmp_path / "0123abcd-7.safetensors").touch()  # of a run that was killed
    rollout = rollout_on(server, folder=tmp_path)
    (first,) = tmp_path.iterdir()
    rollout.update_weights(tiny_lm("qwen2", 1).named_parameters())
    (second,) = tmp_path.iterdir()
    assert first != second
    assert server.bodies("/update_weights")[-1]["update_info"]["path"] == str(second)
    del rollout
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_rollout_that_is_collected_in_the_thread_of_its_requests_closes(tmp_path):
    rollout = rollout_on(FakeVLLM(), folder=tmp_path)
    rollout._thread._loop.call_soon_threadsafe(rollout._thread.close)
    deadline = time.monotonic() + 60
    while rollout._thread._loop.is_running() or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_thread_that_waits_for_servers_can_be_ended():
    """As Ctrl-C does with the thread of a pool, whose worker is closed after it."""
    rollout, begun = rollout_on(FakeVLLM()), threading.Event()
    thread = PoolThread(SimpleNamespace(all_of_run=[1], name="rollout"))

    async def hanging():
        begun.set()
        await asyncio.sleep(600)

    future = thread.submit(rollout._thread.run, hanging())
    begun.wait(60)
    before = time.monotonic()
    thread.end()
    assert time.monotonic() - before < 300
    assert isinstance(future.exception(), KeyboardInterrupt)


def test_a_proxy_is_not_used_for_a_socket(tmp_path):
    seen = []

    async def answer(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"here": 1}')
        writer.close()

    async def ask():
        path = tmp_path / "socket"
        async with await asyncio.start_unix_server(answer, path):
            return await Connection(f"unix:{path}", "secret", "http://127.0.0.1:9").call("/health", 10)

    assert asyncio.run(ask()) == {"here": 1}
    assert b"secret" in seen[0]


def test_a_disk_that_is_full_is_named_with_the_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # EFBIG stands for ENOSPC
    try:
        with pytest.raises(OSError, match=str(tmp_path)) as raised:
            rollout_on(FakeVLLM(), folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename.endswith("-1.safetensors")


def test_weights_in_memory_have_no_name():
    server = FakeVLLM()
    rollout = rollout_on(server)
    path = Path(server.bodies("/update_weights")[-1]["update_info"]["path"])
    assert path.stat().st_nlink == 0
    with pytest.raises(OSError), path.open("r+b") as file:  # sealed
        file.write(b"0")
    rollout.release()


def test_bfloat16_weights_and_buffers_are_written_as_safetensors_reads_them(tmp_path):
    from strop.rollout.http.sealed import SealedWeights

    weights = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.arange(7),
        "c": torch.tensor(2.5),
        "d": torch.zeros(0, 4),
    }
    for folder in (None, tmp_path):
        file = SealedWeights("run/1", {name: value.to("meta") for name, value in weights.items()}, folder)
        for name in reversed(weights):
            file.write(name, weights[name])
        file.seal()
        with safe_open(file.path, "pt") as read:
            found = {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert {name: value.dtype for name, value in found.items()} == {
            n: v.dtype for n, v in weights.items()
        }
        file.close()


def test_greedy_requests_have_no_seed():
    server = FakeVLLM()
    rollout_on(server).generate(prompts_of([3]), SamplingParams(max_tokens=4, do_sample=False))
    (body,) = server.bodies()
    assert body["sampling_params"]["temperature"] == 0
    assert "seed" not in body["sampling_params"]
    assert body["sampling_params"]["stop_token_ids"] == [EOS]

"""Runs on real servers of vLLM: equal to the engine in the process, whichever servers live."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import pytest
import torch

from strop.config.load import load_config
from strop.models.loader import load_causal_lm, load_tokenizer
from strop.process_tree import descendants
from strop.rollout.base import RolloutSpec, SamplingParams
from strop.rollout.http import start
from strop.rollout.transfer import broadcast
from strop.rollout.transfer.broadcast import Channel
from strop.rollout.weights import checksums

import forked
import tiny_model
from http_rollouts import counts
from outside import require_vllm
from runs import hashes, make_inputs, metrics, overrides, train
from tiny_lms import prompts_of

require_vllm()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("no_vllm_outlives_its_module"),
]

SMALL = (
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.rollout.verify_weights_every=1",
    "data.max_response_length=32",
)
HTTP = ("actor_rollout_ref.rollout.name=http", "actor_rollout_ref.rollout.http.start.n=2")
ONE = "actor_rollout_ref.rollout.http.start.n=1"
PARAMS = {
    "sampled": SamplingParams(max_tokens=32, n=8, ignore_eos=True),
    "filtered": SamplingParams(
        max_tokens=20, n=4, temperature=0.9, top_k=9, top_p=0.8, stop_token_ids=(7, 8)
    ),
    "greedy": SamplingParams(max_tokens=16, n=2, do_sample=False),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    tiny_model.save(folder / "model", hidden=64)
    return folder


@pytest.fixture(scope="module")
def weights(inputs):
    torch.manual_seed(1)
    return [
        (name, torch.randn_like(weight) * 0.2)
        for name, weight in load_causal_lm(inputs / "model").named_parameters()
    ]


def built(kind, inputs, *options):
    config = load_config(overrides(inputs, inputs / "run", *SMALL, *options))
    path = inputs / "model"
    model = {
        "path": str(path),
        "override_config": {},
        "trust_remote_code": False,
        "attn_implementation": None,
    }
    return kind.build(
        RolloutSpec(
            config=config, model=model, tokenizer=load_tokenizer(path), tokenizer_path=path,
            device=torch.device("cpu"),
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(inputs, weights):
    """The batches of the engine in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from strop.rollout.vllm.engine import VLLMRollout

    rollout = built(VLLMRollout, inputs, "actor_rollout_ref.rollout.name=vllm")
    rollout.update_weights(weights)
    found = {name: batch(rollout, name) for name in PARAMS}, rollout.checksums()
    del rollout
    cleanup_dist_env_and_memory()
    return found


@pytest.fixture(scope="module")
def servers(inputs, weights):
    from strop.rollout.http.engine import HTTPRollout

    rollout = built(HTTPRollout, inputs, *HTTP)
    rollout.update_weights(weights)
    yield rollout
    rollout._thread.close()


def batch(rollout, name):
    return rollout.generate(prompts(PARAMS[name].n), PARAMS[name])


def prompts(n):
    found = prompts_of([3, 8, 1, 6, 5], n=n)
    found.batch["input_ids"] %= 19  # the vocabulary
    return found


def require_equal(found, expected):
    for name in ("responses", "rollout_log_probs", "truncated"):
        assert torch.equal(found.batch[name], expected.batch[name]), name


@pytest.mark.parametrize("name", PARAMS)
def test_samples_are_those_of_the_engine_in_the_process(servers, expected, name):
    require_equal(batch(servers, name), expected[0][name])
    assert servers.checksums() == expected[1]
    assert all(server.served for server in servers._pool.live)


def test_no_route_answers_without_the_token(servers):
    own = servers._pool.own[0]
    transport = httpx2.HTTPTransport(uds=own.url.removeprefix("unix:"))
    with httpx2.Client(transport=transport, base_url="http://server", timeout=60) as client:
        token = {"authorization": f"Bearer {own._token}"}
        routes = client.get("/openapi.json", headers=token).json()["paths"]
        assert routes.keys() >= {
            "/pause",
            "/update_weights",
            "/collective_rpc",
            "/inference/v1/generate",
            "/health",
        }
        for path, methods in routes.items():
            for method in methods:
                assert client.request(method, path).status_code == 401, path
                assert client.request(method, path, headers={"authorization": "Bearer x"}).status_code == 401


def test_a_server_without_its_token_answers_nothing(monkeypatch):
    from strop.rollout.vllm.server import RequireToken

    monkeypatch.setenv("STROP_TOKEN", "")  # export STROP_TOKEN=$(cat missing)
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "headers": [(b"authorization", b"Bearer ")]}
    asyncio.run(RequireToken(None)(scope, None, send))
    assert sent[0]["status"] == 401
    assert b"STROP_TOKEN" in sent[1]["body"]


def marked(marker):
    """Return the processes with these bytes in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_killed_server_changes_no_sample_and_comes_back(servers, expected):
    pool = servers._pool
    own = pool.own[0]
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(own._folder.name.encode())}
    (api,) = (pid for pid, line in lines.items() if b"api_server" in line and b"http.start" not in line)

    def kill_amid_requests():
        while not any(server.url == own.url and server.running for server in pool.live):
            time.sleep(0.001)
        os.kill(api, signal.SIGKILL)

    counts(servers)
    params = PARAMS["sampled"]
    killer = threading.Thread(target=kill_amid_requests)
    killer.start()
    found = servers.generate(prompts(params.n), params)
    killer.join()
    require_equal(found, expected[0]["sampled"])
    assert found.meta_info["rollout_metrics"]["rollout/lost_requests"] > 0
    deadline = time.monotonic() + 400
    while len(pool.live) < 2:
        assert time.monotonic() < deadline, pool.out
        time.sleep(1)
    require_equal(batch(servers, "sampled"), expected[0]["sampled"])
    assert {server.url for server in pool.live if server.served} == {one.url for one in pool.own}
    assert servers.checksums() == expected[1]


def test_both_processes_of_a_server_are_sent_the_weights(inputs, weights):
    from strop.rollout.http.engine import HTTPRollout

    options = ("tensor_model_parallel_size=2", "weight_transfer=broadcast", "http.start.n=1")
    rollout = built(HTTPRollout, inputs, HTTP[0], *(f"actor_rollout_ref.rollout.{one}" for one in options))
    rollout.update_weights(weights)
    assert rollout.checksums() == checksums(weights, torch.float32)
    assert counts(rollout)["weights/bytes"] == 2 * os.stat(rollout._pool.sealed.path).st_size
    rollout._thread.close()


def test_a_killed_run_leaves_nothing(inputs, tmp_path):
    temporary = Path(tempfile.gettempdir())
    before = set(temporary.glob("strop-http-*"))
    options = overrides(
        inputs, tmp_path, *SMALL, *HTTP, ONE, "trainer.total_training_steps=50", "trainer.save_freq=-1"
    )
    with forked.start(train, options) as child:
        deadline = time.monotonic() + 400
        while (
            not (tmp_path / "metrics.jsonl").exists()
            or len((tmp_path / "metrics.jsonl").read_text().splitlines()) < 2
        ):
            assert time.monotonic() < deadline, child.stderr[-3000:]
            assert child.poll() is None, child.stderr[-3000:]
            time.sleep(0.5)
        below = {*descendants(child.pid)}  # other runs on this machine have servers, too
        found = set(temporary.glob("strop-http-*")) - before
        own = [folder for folder in found if below & {*marked(f"TMPDIR={folder}".encode())}]
        markers = [f"TMPDIR={folder}".encode() for folder in own]
        assert len(own) == 1
        assert all(len(marked(marker)) >= 3 for marker in markers)  # guard, server, engine
        shared = start.shared_names(pid for marker in markers for pid in marked(marker))
        assert shared
        child.kill()
    deadline = time.monotonic() + 120
    while any(map(marked, markers)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not [folder for folder in own if folder.exists()]
    assert not [name for name in shared if os.path.exists(name)]


PLAN = ("algorithm.adv_estimator=grpo", "trainer.total_training_steps=6", "trainer.test_freq=3")
APART = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.actor.rollout_is=token",
    "trainer.worker_group=local",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
    "trainer.async_steps=1",
)


REPLIES = """
class Replies:
    def reset(self, seed):
        self.seed = seed

    def respond(self, response, turn):
        return None if turn == 2 else str(self.seed % 100)
"""
TURNS = ("actor_rollout_ref.rollout.stop_token_ids=[4,5,6,7,8,9]",)  # a random policy seldom says <end>


def test_a_folder_of_weights_changes_no_run(inputs, tmp_path, runs_in_process):
    if () not in runs_in_process:
        options = (*SMALL, "actor_rollout_ref.rollout.name=vllm")
        runs_in_process[()] = run_of(inputs, tmp_path / "vllm", *options)
    disk = "actor_rollout_ref.rollout.weight_transfer=disk"
    found = run_of(inputs, tmp_path / "http", *SMALL, *HTTP, ONE, disk)
    assert found[0] == runs_in_process[()][0]
    assert not [*(tmp_path / "http" / "weights").glob("*")]


@pytest.mark.parametrize("more", [APART, TURNS], ids=["1", "turns"])
def test_a_run_is_that_of_the_engine_in_the_process(inputs, tmp_path, runs_in_process, more):
    options = (
        *SMALL,
        *more,
        *([f"environment.path={inputs / 'replies.py'}:Replies"] if TURNS[0] in more else []),
    )
    if more not in runs_in_process:
        runs_in_process[more] = run_of(
            inputs, tmp_path / "vllm", *options, "actor_rollout_ref.rollout.name=vllm"
        )
    found = run_of(inputs, tmp_path / "http", *options, *HTTP)
    assert found[0] == runs_in_process[more][0]
    own = ("rollout/", "weights/")
    kept = [{k: v for k, v in line.items() if not k.startswith(own)} for line in found[1]]
    assert kept == runs_in_process[more][1]
    assert sum(line.get("weights/bytes", 0) for line in found[1]) > 0


def test_a_run_by_broadcast_is_that_by_memory_though_its_server_dies_amid_a_transfer(
    inputs, tmp_path, runs_in_process, monkeypatch
):
    if () not in runs_in_process:
        runs_in_process[()] = run_of(inputs, tmp_path / "vllm", *SMALL, "actor_rollout_ref.rollout.name=vllm")
    sent, parts = [], Channel.send

    def send(channel, weights, max_bytes):
        first, *others = weights
        sent.append(first)

        def breaking():
            yield first
            if len(sent) == 3:
                for pid in marked(f"TMPDIR={started[0]._folder}".encode()):
                    if b"http.start" not in Path(f"/proc/{pid}/cmdline").read_bytes():  # the guard
                        os.kill(pid, signal.SIGKILL)
            yield from others

        parts(channel, breaking(), max_bytes)

    monkeypatch.setattr(Channel, "send", send)
    monkeypatch.setattr(broadcast, "PART_BYTES", 20_000)
    started, plain = [], start.OwnServer.start

    def begin(server):
        started.append(server)
        plain(server)

    monkeypatch.setattr(start.OwnServer, "start", begin)
    broadcasts = "actor_rollout_ref.rollout.weight_transfer=broadcast"
    found = run_of(inputs, tmp_path / "http", *SMALL, *HTTP, ONE, broadcasts)
    assert found[0] == runs_in_process[()][0]
    assert sum(line.get("weights/joins", 0) for line in found[1]) >= 1


AHEAD = (*SMALL, *APART[:-1], "trainer.async_steps=4", *HTTP, "actor_rollout_ref.rollout.http.slots=16")


@pytest.fixture(scope="module")
def run_ahead(inputs, tmp_path_factory):
    """A run with four batches in flight on one server."""
    return run_of(inputs, tmp_path_factory.mktemp("ahead"), *AHEAD, ONE)


def test_a_killed_run_goes_on_with_other_servers(inputs, tmp_path, run_ahead):
    assert hashes_after_a_kill(inputs, tmp_path, *AHEAD) == run_ahead[0]


def test_a_killed_run_with_turns_goes_on_with_other_servers(inputs, tmp_path):
    options = (*SMALL, *APART, *TURNS, f"environment.path={inputs / 'replies.py'}:Replies")
    expected, _ = run_of(inputs, tmp_path / "vllm", *options, "actor_rollout_ref.rollout.name=vllm")
    assert hashes_after_a_kill(inputs, tmp_path / "http", *options, *HTTP) == expected


def test_weights_are_broadcast_from_a_pool_of_its_own(inputs, tmp_path, runs_in_process, ray_session):
    options = (*SMALL, *APART, "trainer.worker_group=ray")
    if APART not in runs_in_process:
        vllm = "actor_rollout_ref.rollout.name=vllm"
        runs_in_process[APART] = run_of(inputs, tmp_path / "vllm", *SMALL, *APART, vllm)
    broadcast = "actor_rollout_ref.rollout.weight_transfer=broadcast"
    assert run_of(inputs, tmp_path / "http", *options, *HTTP, broadcast)[0] == runs_in_process[APART][0]


def hashes_after_a_kill(inputs, tmp_path, *options):
    """Kill a run on one server after its first checkpoint, and return the hashes of its resume on two."""
    options = (*options, *PLAN, "trainer.save_freq=2")
    with forked.start(train, overrides(inputs, tmp_path, *options, ONE)) as child:
        deadline = time.monotonic() + 400
        while not (tmp_path / "latest_checkpointed_iteration.txt").exists():
            assert time.monotonic() < deadline, child.stderr[-3000:]
            assert child.poll() is None, child.stderr[-3000:]
            time.sleep(0.1)
        child.kill()
    trainer = train(overrides(inputs, tmp_path, *options))
    found = hashes(trainer)
    trainer.shutdown()
    return found


@pytest.fixture(scope="module")
def runs_in_process():
    """Hashes and metrics of runs with vLLM in the process, by their options."""
    return {}


def run_of(inputs, folder, *options):
    """Return the hashes of the parameters of a run, and its metrics."""
    if any("environment.path" in option for option in options):
        (inputs / "replies.py").write_text(REPLIES)
    trainer = train(overrides(inputs, folder, *options, *PLAN))
    found = hashes(trainer), metrics(folder)
    trainer.shutdown()
    return found

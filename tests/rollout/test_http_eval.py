"""``strop eval --server``: the servers' own weights are evaluated, and none are loaded here."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch

from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.errors import ConfigError
from strop.models.loader import load_causal_lm, load_tokenizer
from strop.rollout.http.wire import facts_of
from strop.rollout.vllm.arguments import vocabulary_digest

import tiny_model
from fake_vllm import GENERATE, FakeVLLM, wire_answer
from http_rollouts import real_server
from messages import mentions, naming
from outside import require_vllm
from runs import make_inputs, overrides, train

SIZE = 19


class Greedy(FakeVLLM):
    """Answers with the likeliest tokens of a model."""

    def __init__(self, folder, **options):
        self.model = load_causal_lm(folder)
        vocabulary = vocabulary_digest(load_tokenizer(folder))
        super().__init__(vocabulary=SIZE, **options)
        self.facts["vocabulary"] = vocabulary

    def sample(self, body):
        ids, sampling, log_probs = list(body["token_ids"]), body["sampling_params"], []
        assert sampling["temperature"] == 0
        while len(log_probs) < sampling["max_tokens"]:
            with torch.no_grad():
                scores = self.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            log_probs.append(float(scores.max()))
            if ids[-1] in sampling["stop_token_ids"]:
                break
        new = ids[len(body["token_ids"]) :]
        ended = new[-1] in sampling["stop_token_ids"]
        return wire_answer(new, log_probs, "stop" if ended else "length", self.version)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    bare = folder / "bare"  # as a server's clients have it
    shutil.copytree(folder / "model", bare, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def line(inputs, model, out):
    return [
        "eval", str(inputs / model), "--data", str(inputs / "val.parquet"), "--max-prompt-length", "8",
        "--max-response-length", "4", "--out", str(out), "trainer.device=cpu",
    ]  # fmt: skip


def evaluate(inputs, model, out, *arguments):
    return main([*line(inputs, model, out), *arguments])


def results(out):
    found = json.loads((out / "results.json").read_text())
    return found, pq.read_table(out / "samples.parquet")


def test_greedy_answers_and_figures_are_those_of_the_engine_here(inputs, tmp_path, caplog):
    assert evaluate(inputs, "model", tmp_path / "here") == 0
    servers = [Greedy(inputs / "model", max_num_seqs=2) for _ in range(2)]
    urls = [word for server in servers for word in ("--server", server.url)]
    assert evaluate(inputs, "bare", tmp_path / "there", *urls) == 0
    here, own = results(tmp_path / "here")
    there, found = results(tmp_path / "there")
    columns = ["prompt_ids", "response_ids", "response", "score", "truncated"]
    assert found.select(columns) == own.select(columns)
    assert there["sources"] == here["sources"]
    assert there["servers"] == [server.url for server in servers]
    assert all(server.bodies() for server in servers)
    paths = {path for server in servers for path in server.paths()}
    assert not {"/pause", "/update_weights"} & paths


def test_sampled_answers_are_requested_by_the_seeds_of_any_engine(inputs, tmp_path):
    sent = []
    for name, model, more in (("kept", "bare", ["keep"]), ("sent", "model", [])):
        server = FakeVLLM(vocabulary=SIZE)
        where = ["--server", server.url] if more else [
            "--rollout", "http", f"actor_rollout_ref.rollout.http.urls=[{server.url}]",
        ]  # fmt: skip
        sampling = ["--n", "4", "--temperature", "0.7", "--top-p", "0.9", "--limit", "3"]
        assert evaluate(inputs, model, tmp_path / name, *where, *sampling) == 0
        assert ("/update_weights" in server.paths()) is (not more)
        sent.append(sorted(json.dumps(body, sort_keys=True) for body in server.bodies()))
        sampled = server.bodies()[0]["sampling_params"]
        assert (sampled["temperature"], sampled["top_p"]) == (0.7, 0.9)
    assert sent[0] == sent[1]
    assert len(sent[0]) == 12
    found, _ = results(tmp_path / "kept")
    assert "best@4" in found["sources"]["strop/arithmetic"]["scores"]


def test_the_weights_that_another_run_has_sent_are_evaluated_and_named(inputs, tmp_path, caplog):
    server = Greedy(inputs / "model")
    server.version = "run/3"
    with caplog.at_level("INFO", "strop"):
        assert evaluate(inputs, "bare", tmp_path, "--server", server.url) == 0
    assert "version run/3" in caplog.text


def test_weights_that_change_meanwhile_are_an_error(inputs, tmp_path, capsys):
    server = FakeVLLM(vocabulary=SIZE)
    changed = wire_answer([5], [-1.0], "length", "run/4")
    server.script[GENERATE] = [{"json": changed}]
    assert evaluate(inputs, "bare", tmp_path, "--server", server.url) != 0
    assert mentions(capsys.readouterr().err, server.url, "run/4", "default")
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"vocabulary": "0123"}, ["vocabulary", "'0123'"]),
        ({"max_model_len": 11}, ["max_model_len", "11", "12"]),
        ({"logprobs_mode": "raw_logprobs"}, ["logprobs_mode", "raw_logprobs"]),
    ],
)
def test_a_server_that_cannot_answer_is_refused_before_it_is_asked(inputs, tmp_path, capsys, facts, named):
    server = FakeVLLM()
    server.facts |= facts
    assert evaluate(inputs, "bare", tmp_path, "--server", server.url) == 2
    assert mentions(capsys.readouterr().err, server.url, *named)
    assert not server.bodies()


def test_servers_of_other_weights_are_refused_by_name(inputs, tmp_path, capsys):
    servers = [FakeVLLM(vocabulary=SIZE, **{"model.hidden_size": 16}) for _ in range(2)]
    urls = [word for server in servers for word in ("--server", server.url)]
    servers[1].checksums = {"lm_head.weight": "5"}
    assert evaluate(inputs, "bare", tmp_path, *urls) == 2
    assert mentions(capsys.readouterr().err, "weights is", "http://127.0.0.1")
    servers[1].checksums = {}
    servers[1].facts["model.hidden_size"] = 32
    assert evaluate(inputs, "bare", tmp_path, *urls) == 2
    assert mentions(capsys.readouterr().err, "model.hidden_size is")
    assert not servers[0].bodies()
    assert not servers[1].bodies()


def test_servers_that_do_not_answer_are_errors_at_once(inputs, tmp_path, capsys, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model is read")

    monkeypatch.setattr("strop.trainer.build.fetch_tokenizer", load)
    monkeypatch.setenv("TOKEN", "secret")
    live, down, plain = FakeVLLM(), FakeVLLM(), FakeVLLM({"/collective_rpc": [{"status": 404}]})
    guarded = FakeVLLM(token="another")
    down.kill()
    for url, more, named in (
        (down.url, [], [down.url, "ConnectError"]),
        (plain.url, [], [plain.url, "404", "strop docs http_rollout"]),
        (guarded.url, [], [guarded.url, "401"]),
        (guarded.url, ["--token-env", "TOKEN"], [guarded.url, "401"]),
        (live.url, ["--token-env", "TOKEN"], [live.url, "without the token"]),
        (live.url, ["--token-env", "NOTHING"], ["--token-env=NOTHING"]),
        ("http://10.1.2.3:8000", [], ["10.1.2.3", "--token-env", "open_network"]),
        ("host:8000", [], ["'host:8000'", "http://HOST:PORT"]),
    ):
        assert evaluate(inputs, "bare", tmp_path, "--server", live.url, "--server", url, *more) == 2
        assert mentions(capsys.readouterr().err, *named), url
    assert not live.bodies()


def test_an_adapter_is_not_what_servers_have(inputs, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"task_type": "CAUSAL_LM", "base_model_name_or_path": str(inputs / "model")})
    )
    data = ["--data", str(inputs / "val.parquet")]
    assert main(["eval", str(tmp_path), *data, "--server", "http://127.0.0.1:9"]) == 2
    assert mentions(capsys.readouterr().err, "is an adapter", str(inputs / "model"))
    assert main(["eval", str(inputs / "model"), *data, "--token-env", "KEY"]) == 2
    assert mentions(capsys.readouterr().err, "--token-env=KEY", "--server")


def test_a_server_with_its_token_is_evaluated(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    server = FakeVLLM(vocabulary=SIZE, token="secret")
    assert evaluate(inputs, "bare", tmp_path, "--server", server.url, "--token-env", "TOKEN") == 0
    assert "secret" not in (tmp_path / "config.yaml").read_text()


def test_a_run_that_trains_keeps_no_weights_of_servers(inputs, tmp_path):
    config = load_config(
        overrides(inputs, tmp_path, "actor_rollout_ref.rollout.name=http",
                  "actor_rollout_ref.rollout.http.urls=[http://127.0.0.1:1]",
                  "actor_rollout_ref.rollout.http.keep_weights=True")
    )  # fmt: skip
    with pytest.raises(ConfigError, match=naming("keep_weights=True", "trainer.val_only=True")):
        check(config).raise_errors()


@pytest.mark.slow
def test_answers_of_vllms_server_are_those_of_the_engine_in_the_process(
    inputs, tmp_path, monkeypatch, caplog
):
    require_vllm()
    monkeypatch.setenv("TOKEN", "secret")
    tiny_model.save(tmp_path / "model", hidden=64)
    ways = {"greedy": [], "sampled": ["--n", "4", "--temperature", "0.9", "--top-p", "0.8"]}
    small = [
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    ]
    for way, more in ways.items():  # each in a process, whose memory is then free
        command = line(inputs, tmp_path / "model", tmp_path / f"{way}_here")
        command += ["--rollout", "vllm", *more, *small]
        subprocess.run([sys.executable, "-m", "strop", *command], check=True)
    with real_server(tmp_path, "--no-enable-chunked-prefill") as url:
        for way, more in ways.items():
            there = tmp_path / f"{way}_there"
            given = ["--server", url, "--token-env", "TOKEN", *more]
            assert evaluate(inputs, tmp_path / "model", there, *given) == 0
            (_, found), (_, expected) = results(there), results(tmp_path / f"{way}_here")
            columns = ["prompt_ids", "response_ids", "rollout_log_probs", "response", "score"]
            assert found.select(columns) == expected.select(columns)

        of_run = [f"actor_rollout_ref.rollout.http.{one}" for one in (f"urls=[{url}]", "token_env=TOKEN")]
        run, own = tmp_path / "run", f"actor_rollout_ref.model.path={tmp_path / 'model'}"
        # validated at the end: the server has the last weights
        train(overrides(inputs, run, own, "actor_rollout_ref.rollout.name=http", *of_run))
        given = ["--server", url, "--token-env", "TOKEN"]
        caplog.clear()
        with caplog.at_level("INFO", "strop"):
            assert evaluate(inputs, run, tmp_path / "trained_there", *given) == 0
        assert "of their start" not in caplog.text
        assert evaluate(inputs, run, tmp_path / "trained_here") == 0
        (_, found), (_, expected) = results(tmp_path / "trained_there"), results(tmp_path / "trained_here")
        assert found.select(["response_ids", "score"]) == expected.select(["response_ids", "score"])


def test_facts_are_read_in_a_notebook_whose_thread_has_an_event_loop():
    async def cell(server):
        return facts_of([server.url], None, None)[server.url]

    assert asyncio.run(cell(FakeVLLM()))["ranks"] == 1

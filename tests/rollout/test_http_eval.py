"""``strop eval --server``: the servers' own weights are evaluated, and none are loaded here."""

from __future__ import annotations

import json
import shutil
import threading

import pyarrow.parquet as pq
import pytest
import torch

from strop.cli.main import main
from strop.models.loader import load_causal_lm, load_tokenizer
from strop.rollout.vllm.arguments import vocabulary_digest

import tiny_model
from fake_vllm import GENERATE, FakeVLLM, wire_answer
from messages import mentions
from runs import make_inputs

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


def evaluate(inputs, model, out, *arguments):
    return main(
        [
            "eval", str(inputs / model), "--data", str(inputs / "val.parquet"), "--max-prompt-length", "8",
            "--max-response-length", "4", "--out", str(out), *map(str, arguments), "trainer.device=cpu",
        ]
    )  # fmt: skip


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

"""Log-probs of given ids by servers: what is refused, what survives a death, and those of transformers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from strop.errors import ConfigError, ModelError, TrainingError
from strop.models.loader import load_causal_lm
from strop.rollout.http import pool
from strop.rollout.http.scorer import Scorer

import tiny_model
from fake_vllm import GENERATE, FakeVLLM, wire_answer
from http_rollouts import SETTINGS, kill_amid, real_server
from messages import mentions, naming
from outside import require_vllm

ROWS = [[5, 6, 7, 8], [5, 6, 7, 9, 4], [4, 4], [11], [5, 6, 7, 8]]


def scorer_on(*servers, longest=20, **given):
    settings = {**SETTINGS, "urls": [server.url for server in servers], **given}
    return Scorer(SimpleNamespace(**settings), tiny_model.build_tokenizer(), longest)


def answer(server, *items):
    """An answer with these log-probs of a prompt."""
    return {"json": wire_answer([5], [-1.0], "length", "default") | {"prompt_logprobs": [None, *items]}}


def test_scores_are_the_servers_answers_by_row_without_a_transfer():
    servers = [FakeVLLM(max_num_seqs=1, vocabulary=19), FakeVLLM(vocabulary=19)]
    scorer = scorer_on(*servers)
    for ids, found in zip(ROWS, scorer.score(ROWS), strict=True):
        told = [
            item[str(token)]["logprob"]
            for item, token in zip(servers[0].scores(ids)[1:], ids[1:], strict=True)
        ]
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.tensor(told, dtype=torch.float32))
    bodies = [body for server in servers for body in server.bodies()]
    assert len(bodies) == len({body["cache_salt"] for body in bodies}) == len(ROWS)
    assert not {"/pause", "/update_weights"} & {*servers[0].paths(), *servers[1].paths()}
    scorer.close()


def test_a_server_that_dies_changes_no_score(monkeypatch):
    monkeypatch.setattr(pool, "_PROBE_S", 0.1)
    dying, other = FakeVLLM(vocabulary=19), FakeVLLM(vocabulary=19)
    expected = scorer_on(other).score(ROWS)
    dying.delay = other.delay = 0.1
    scorer = scorer_on(dying, other)
    kill_amid(dying)
    assert all(map(torch.equal, scorer.score(ROWS), expected))
    assert scorer._pool.counts["rollout/lost_requests"] > 0
    dying.start()
    deadline = time.monotonic() + 60
    while len(scorer._pool.live) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other.kill()
    assert all(map(torch.equal, scorer.score(ROWS), expected))


def test_a_server_that_was_started_again_is_compared_with_the_others_before_it_scores(monkeypatch):
    monkeypatch.setattr(pool, "_PROBE_S", 0.1)
    servers = [FakeVLLM(vocabulary=19), FakeVLLM(vocabulary=19)]
    scorer = scorer_on(*servers)
    servers[0].kill()
    servers[0].start()
    servers[0].checksums = {"model.norm.weight": 5}  # of another model
    servers[0].seen.clear()
    scorer.score(ROWS)
    deadline = time.monotonic() + 60
    while "weights is" not in str(scorer._pool.out.get(servers[0].url)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not servers[0].bodies()
    assert len(servers[1].bodies()) == len(ROWS)


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([{"6": {"logprob": -1.0}}], ["each of the 3 ids"]),
        ([{"6": {"logprob": -1.0}}] * 3, ["each of the 3 ids"]),
        ([{"6": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}], ["each of the 3 ids", "'8'"]),
        ([{"6": {"logprob": -1.0}}, None], ["each of the 3 ids"]),
        ([{"6": {"logprob": -1.0}}, {"7": {"logprob": 0.1}}], ["0.1"]),
        ([{"6": {"logprob": -1.0}}, {"7": {"logprob": None}}], ["None"]),
        ([{"6": {"logprob": -1.0}}, {"7": {"logprob": float("nan")}}], ["nan"]),
        ([{"6": {"logprob": -1.0}}, {"7": {"logprob": -9999.0}}], ["-9999"]),
        ([{"6": {"logprob": -1.0}}, {"7": {"logprob": float("-inf")}}], ["-inf"]),
    ],
    ids=["fewer", "more", "other", "cached", "positive", "null", "nan", "clamped", "infinite"],
)
def test_an_answer_that_is_none_is_refused_by_name(items, named):
    server = FakeVLLM(vocabulary=19)
    scorer = scorer_on(server)
    server.script[GENERATE] = [answer(server, *items)]
    with pytest.raises(TrainingError, match=naming(server.url, *named)):
        scorer.score([[5, 6, 7]])


def test_scores_of_weights_that_another_run_gave_are_refused():
    server = FakeVLLM(vocabulary=19)
    scorer = scorer_on(server)
    server.version = "run/3"
    with pytest.raises(TrainingError, match=naming(server.url, "run/3", "another run")):
        scorer.score(ROWS)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"ordinary_tokens": "0123"}, ["ordinary_tokens", "'0123'"]),
        ({"ordinary_tokens": None}, ["ordinary_tokens", "None"]),
        ({"max_model_len": 20}, ["max_model_len", "20", "21"]),
        ({"logprobs_mode": "processed_logits"}, ["processed_logits"]),
    ],
)
def test_a_server_that_cannot_score_the_rows_is_refused_by_name(facts, named):
    server = FakeVLLM()
    server.facts |= facts
    with pytest.raises(ConfigError, match=naming(server.url, *named)):
        scorer_on(server)


def test_a_server_that_a_killed_run_has_left_paused_is_named(caplog):
    server, other = FakeVLLM(vocabulary=19), FakeVLLM(vocabulary=19)
    server.paused = True
    scorer = scorer_on(server, other)
    assert len(scorer.score(ROWS)) == len(ROWS)
    assert not server.bodies()
    assert any(mentions(one.getMessage(), server.url, "paused") for one in caplog.records)
    other.paused = True
    with pytest.raises(TrainingError, match=naming(server.url, "it is paused", other.url)):
        scorer_on(server, other, patience_s=1.0)


def test_servers_of_different_teachers_are_refused_by_name():
    servers = [FakeVLLM(vocabulary=19) for _ in range(2)]
    servers[1].checksums = {"model.norm.weight": 1}
    with pytest.raises(ConfigError, match=naming("http://127.0.0.1", "weights is")):
        scorer_on(*servers)
    other = FakeVLLM(vocabulary=19, **{"model.hidden_size": 16})
    servers[0].facts["model.hidden_size"] = 8
    with pytest.raises(ConfigError, match=naming("model.hidden_size", "16", "8")):
        scorer_on(servers[0], other)


def test_servers_whose_weights_cannot_be_read_are_not_compared_by_them(caplog):
    facts = {"json": {"results": [FakeVLLM(vocabulary=19).facts]}}
    unread = {"status": 500, "text": "no attribute 'weight'"}  # quantized
    script = {"/collective_rpc": [facts, unread, facts]}
    servers = [FakeVLLM(script, vocabulary=19) for _ in range(2)]
    assert len(scorer_on(*servers).score(ROWS)) == len(ROWS)
    assert sum("not compared" in one.getMessage() for one in caplog.records) == 2


def test_ids_beyond_the_vocabulary_are_not_sent():
    server = FakeVLLM(vocabulary=19)
    with pytest.raises(ModelError, match=naming("row 1", "vocabulary of 19")):
        scorer_on(server).score([[5, 6], [5, 19]])
    assert [5, 19] not in [body["token_ids"] for body in server.bodies()]


@pytest.mark.slow
def test_scores_of_vllms_server_are_those_of_transformers_whatever_runs_beside(tmp_path, monkeypatch):
    require_vllm()
    monkeypatch.setenv("TOKEN", "secret")
    tiny_model.save(tmp_path / "model", hidden=64)
    model = load_causal_lm(tmp_path / "model")
    draw = torch.Generator().manual_seed(0)
    beginning = torch.randint(19, (40,), generator=draw).tolist()
    rows = [beginning + torch.randint(19, (n,), generator=draw).tolist() for n in (1, 2, 9, 17, 23)]
    rows += [[3, 4], [7], beginning]
    with real_server(tmp_path) as url:
        settings = {**SETTINGS, "urls": [url], "token_env": "TOKEN", "patience_s": 300.0}
        scorer, other = (
            Scorer(SimpleNamespace(**settings), tiny_model.build_tokenizer(), 63) for _ in range(2)
        )
        found = scorer.score(rows)
        for row, scores in zip(rows, found, strict=True):
            ids = torch.tensor([row])
            with torch.no_grad():
                whole = model(input_ids=ids).logits.log_softmax(-1)
            expected = whole[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(scores, expected, rtol=0, atol=2e-6)
        # in another order, beside another client, with the cache of the first requests
        beside = [scorer._thread.start(scorer._pool.score(rows * 3)) for _ in range(2)]
        again = other.score(rows[::-1])
        assert all(map(torch.equal, again[::-1], found))
        for future in beside:
            assert all(map(torch.equal, map(torch.tensor, future.result()), found * 3))
        with pytest.raises(TrainingError, match=naming(url, "400")):
            scorer.score([beginning * 2])

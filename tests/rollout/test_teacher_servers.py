"""Servers as teachers of a run."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.config.checks.check import check
from strop.config.load import load_config
from strop.config.schema.teacher import teachers_of
from strop.errors import TrainingError

import runs
import tiny_model
from fake_vllm import FakeVLLM

ALONE = (
    *("teacher.kl=sampled", "trainer.total_training_steps=1"),
    *("reward_model.reward_manager=none", "algorithm.adv_estimator=grpo", "trainer.val_before_train=False"),
    "algorithm.kl_ctrl.kl_coef=0",
    *("trainer.test_freq=-1", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.logger=[jsonl]"),
)


def told(server, row):
    """The log-probs of a row's response by a server."""
    scores = server.scores([*row["prompt_ids"], *row["response_ids"]])[len(row["prompt_ids"]) :]
    return [item[str(token)]["logprob"] for item, token in zip(scores, row["response_ids"], strict=True)]


def rows_of(run):
    return pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()


def test_servers_judge_by_the_log_prob_of_each_token(tmp_path, monkeypatch):
    inputs, server = runs.make_inputs(tmp_path), FakeVLLM(vocabulary=19, token="of the teacher")
    monkeypatch.setenv("OF_THE_TEACHER", "of the teacher")
    keys = (*ALONE, f"teacher.servers=[{server.url}]", "teacher.token_env=OF_THE_TEACHER")
    of_the_rollout = [f"actor_rollout_ref.rollout.http.{one}" for one in ("min_servers=2", "patience_s=120")]
    runs.train(runs.overrides(inputs, tmp_path / "run", *keys, *of_the_rollout)).shutdown()
    table = rows_of(tmp_path / "run")
    assert len(table) == 16
    for row in table:
        assert row["teacher_log_prob"] == pytest.approx(told(server, row), abs=1e-3)


def test_a_worker_that_started_without_the_variable_of_a_token_gets_it(tmp_path, monkeypatch, ray_session):
    inputs, server = runs.make_inputs(tmp_path), FakeVLLM(vocabulary=19, token="secret-4711")
    monkeypatch.setenv("OF_THE_TEACHER", "secret-4711")  # after Ray, whose workers do not have it
    keys = (*ALONE, f"teacher.servers=[{server.url}]", "teacher.token_env=OF_THE_TEACHER")
    options = runs.overrides(inputs, tmp_path / "run", *keys, "trainer.worker_group=ray")
    runs.train([*options, "actor_rollout_ref.rollout.http.patience_s=120"]).shutdown()
    assert all("teacher_log_prob" in row for row in rows_of(tmp_path / "run"))
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [content for content in written if b"secret-4711" in content]


def test_of_two_data_sources_a_server_judges_one_and_a_model_the_other(tmp_path):
    inputs, server = runs.make_inputs(tmp_path), FakeVLLM(vocabulary=19)
    tiny_model.save(inputs / "teacher", hidden=48, seed=5)
    table = pq.read_table(inputs / "train.parquet")
    sources = pa.array(["served" if row % 2 else "here" for row in range(len(table))])
    place = table.schema.names.index("data_source")
    pq.write_table(table.set_column(place, "data_source", sources), inputs / "train.parquet")
    model = f"{{model: {{path: {inputs / 'teacher'}}}}}"
    by_source = f"teacher.by_source={{here: {model}, served: {{servers: ['{server.url}']}}}}"
    runs.train(runs.overrides(inputs, tmp_path / "run", *ALONE, by_source)).shutdown()
    found = {"here": [], "served": []}
    for row in rows_of(tmp_path / "run"):
        is_servers = row["teacher_log_prob"] == pytest.approx(told(server, row), abs=1e-3)
        found[row["data_source"]].append(is_servers)
    assert set(found["here"]) == {False}
    assert set(found["served"]) == {True}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["teacher.servers=[somewhere]"], "teacher.servers: 'somewhere' is no URL"),
        (["teacher.servers=[http://host:1]"], "teacher.servers: http://host:1 is another machine"),
        (["teacher.servers=['http://me:secret@host:1']"], "teacher.servers: host has a login"),
        (
            ["teacher.by_source={a: {servers: ['http://host:1?x=1']}}"],
            "teacher.by_source.a.servers: host has a query",
        ),
        (
            ["teacher.by_source={a: {servers: [http://host:1]}}"],
            "in teacher.token_env, or set actor_rollout_ref.rollout.http.open_network=True",
        ),
        (
            ["teacher.servers=[http://host:1]", "teacher.token_env=NO_SUCH"],
            "teacher.token_env=NO_SUCH: this variable is not set",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_a_model_loads(keys, words):
    config = load_config(["actor_rollout_ref.model.path=m", "data.train_files=f", *ALONE, *keys])
    assert any(words in line for line in check(config).errors), check(config).errors


def test_a_server_that_is_named_twice_is_one():
    """``min_servers`` of the rollout is for it, too: the run would wait for the second one."""
    twice = "['http://127.0.0.1:1','http://127.0.0.1:1/']"
    for key in (f"teacher.servers={twice}", f"teacher.by_source={{a: {{servers: {twice}}}}}"):
        (one,) = teachers_of(load_config([key]).teacher)
        assert one.servers == ["http://127.0.0.1:1"]


def test_a_server_that_does_not_answer_is_named_while_the_run_waits(tmp_path, caplog):
    inputs, url = runs.make_inputs(tmp_path), "http://127.0.0.1:9"
    keys = (*ALONE, f"teacher.servers=[{url}]", "actor_rollout_ref.rollout.http.patience_s=1")
    with pytest.raises(TrainingError, match=r"teacher\.servers: 0 servers answer, 1 are needed"):
        runs.train(runs.overrides(inputs, tmp_path / "run", *keys))
    (line,) = [record.getMessage() for record in caplog.records if url in record.getMessage()]
    assert line.startswith(f"{url} does not join: ")

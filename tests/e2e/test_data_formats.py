"""Runs on other formats and on rows in memory end with the weights of the run on parquet."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq

from strop.config.load import load_config
from strop.data.sources import Rows
from strop.trainer.build import build_trainer

import runs


def test_formats_and_rows_in_memory_train_to_the_same_weights(tmp_path):
    inputs = runs.make_inputs(tmp_path)
    rows = [{"question": f"{i % 10}+{i // 10}=", "answer": i % 10 + i // 10} for i in range(24)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def weights(trained: str, validated: str) -> dict[str, str]:
        options = runs.overrides(
            inputs, tmp_path / f"run-{trained[-4:]}",
            f"data.train_files={trained}", f"data.val_files={validated}", "data.val_max_samples=2",
            "data.prompt_key=question", "data.answer_key=answer", "data.data_source=strop/arithmetic",
            "trainer.total_training_steps=1", "algorithm.adv_estimator=grpo",
        )  # fmt: skip
        trainer = build_trainer(load_config(options), rows=[Rows("ours", rows)])
        trainer.init_workers()
        runs.fit(trainer)
        return runs.hashes(trainer)

    parquet, lines = str(tmp_path / "t.parquet"), str(tmp_path / "t.jsonl")
    assert weights(parquet, parquet) == weights("rows:ours", lines)


def test_columns_of_the_data_may_have_the_names_of_those_of_a_batch(tmp_path):
    inputs = runs.make_inputs(tmp_path)
    others = {"values": [1], "kl": 0.5, "image_files": ["a.png"], "responses": ["a"], "teacher": "b"}
    chats = [[{"role": "user", "content": f"{i % 10}+{i // 10}="}] for i in range(24)]

    def weights(prompt_key: str, further: dict[str, object]) -> dict[str, str]:
        rows = [{prompt_key: chats[i], "answer": i % 10 + i // 10, **further} for i in range(24)]
        options = runs.overrides(
            inputs, tmp_path / prompt_key, "data.train_files=rows:ours", "data.val_files=rows:ours",
            f"data.prompt_key={prompt_key}", "data.answer_key=answer", "data.data_source=strop/arithmetic",
            "data.val_max_samples=2", "algorithm.adv_estimator=grpo", "trainer.save_freq=1",
            "actor_rollout_ref.actor.use_kl_loss=True", "trainer.async_steps=1",
            "actor_rollout_ref.actor.rollout_is=token", "actor_rollout_ref.hybrid_engine=False",
            "trainer.worker_group=local", "trainer.placement={Rollout: rollout}",
            "trainer.resource_pools={learner: [1], rollout: [1]}",
        )  # fmt: skip
        trainer = build_trainer(load_config(options), rows=[Rows("ours", rows)])
        try:
            trainer.init_workers()
            runs.fit(trainer)
            return runs.hashes(trainer)
        finally:
            trainer.shutdown()

    assert weights("conversation", others) == weights("chat", {})
    lines = [runs.metrics(tmp_path / name) for name in ("conversation", "chat")]
    assert [line.keys() for line in lines[0]] == [line.keys() for line in lines[1]]

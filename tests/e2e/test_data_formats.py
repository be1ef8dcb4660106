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

"""The example of the whole path: its truth by hand, a short run of every stage, and the figures it is for."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForSequenceClassification

import preferences
import preferences_report as report
import preferences_task as task


@pytest.mark.parametrize(
    ("answer", "quality"),
    [
        ("abcde", 10),
        ("edcba", 0),
        ("bacde", 9),
        ("abced", 9),
        ("abc", 3),  # three pairs of the letters that are there
        ("", 0),
        ("abcdee", 6),  # a letter too many
        ("abcdex", 6),
        ("abcdj", 2),  # six pairs less four
        ("xyz", -12),
    ],
)
def test_quality_counts_pairs_in_order(answer, quality):
    assert task.quality("cabed", answer) == quality


def test_pairs_differ_and_some_verdicts_are_wrong():
    prompts = ["cab"] * 1000
    groups = [["abc", "cba", "cba"]] * 999 + [["abc", "abc", "abc"]]
    rows = list(task.compare(prompts, groups, wrong=0.1, generator=random.Random(0)))
    assert len(rows) == 999
    assert {(row["chosen"], row["rejected"]) for row in rows} == {("abc", "cba"), ("cba", "abc")}
    assert 70 < sum(row["chosen"] == "cba" for row in rows) < 130


def test_a_run_is_judged_by_comparison_with_its_own_answers_before(tmp_path):
    (tmp_path / "validation").mkdir()
    for step, answers in ((0, ["abc", "cba", "bca"]), (2, ["abc", "abc", "cba"])):
        rows = [
            {"prompt": f"<user>{letters}<assistant>", "response": answer, "score": step + number}
            for number, (letters, answer) in enumerate(zip(["cab", "cab", "bca"], answers, strict=True))
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "validation" / f"step_{step:06}.parquet")
    lines = [{"step": 0}, {"step": 1, "objective/kl": 0.5}, {"step": 2, "objective/kl": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    before, after = report.judge(tmp_path)
    # cab: abc and cba against themselves; bca: bca (one pair in order of three) against itself
    assert before == (0, pytest.approx((0.5 + 1 + 0 + 0.5 + 0.5) / 5), pytest.approx(1.0), 0.0)
    # cab: abc and abc against abc and cba; bca: cba (no pair) against bca
    assert after == (2, pytest.approx((0.5 + 1 + 0.5 + 1 + 0) / 5), pytest.approx(3.0), pytest.approx(1.0))
    assert report.draw([before, after], tmp_path / "picture.png").stat().st_size > 1000


def _run(monkeypatch, out, *arguments):
    monkeypatch.setattr("sys.argv", ["preferences.py", "--out", str(out), *arguments])
    preferences.main()


def test_every_stage_takes_what_the_one_before_made(monkeypatch, tmp_path, capsys):
    few = task.all_prompts(random.Random(0))[:120]
    monkeypatch.setattr(task, "all_prompts", lambda generator: few)
    monkeypatch.setattr(preferences, "HELD_OUT", 20)
    monkeypatch.setattr(preferences, "PAIRS", 64)
    monkeypatch.setattr(preferences, "SFT", ("data.train_batch_size=16", "trainer.total_epochs=1"))
    monkeypatch.setattr(preferences, "DPO", ("data.train_batch_size=8", "trainer.total_epochs=1"))
    monkeypatch.setattr(preferences, "REWARD_MODEL", ("data.train_batch_size=8", "trainer.total_epochs=1"))
    monkeypatch.setattr("strop.trainer.loop.draw_curves", lambda folder: folder)
    monkeypatch.setattr("strop.trainer.loop.draw_lengths", lambda columns, folder: folder)
    steps = ("data.train_batch_size=16", "trainer.total_training_steps=2", "trainer.test_freq=1")
    _run(monkeypatch, tmp_path, *steps)
    shown = capsys.readouterr().out
    commands = [line.split()[2] for line in shown.splitlines() if line.startswith("$ strop")]
    assert commands == ["sft", "dpo", "train-rm", "train"]
    assert "of held-out pairs" in shown
    assert "true win rate of DPO" in shown
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model" / "final_model")
    assert model.score.weight.shape == (1, 64)
    assert [judgement.step for judgement in report.judge(tmp_path / "ppo")] == [0, 1, 2]
    assert (tmp_path / "ppo" / "preferences.png").exists()


@pytest.mark.slow
def test_ppo_against_a_learned_reward_raises_the_true_preference(monkeypatch, tmp_path):
    _run(monkeypatch, tmp_path, "--seed", "1")
    validations = [json.loads(line) for line in (tmp_path / "reward_model" / "metrics.jsonl").open()]
    accuracy = [line["val/accuracy"] for line in validations if "val/accuracy" in line]
    assert accuracy[-1] >= 0.9
    before, *_, after = report.judge(tmp_path / "ppo")
    assert before.preference_rate == 0.5
    assert after.preference_rate >= 0.75
    assert after.score > before.score + 1
    assert 0.5 < after.kl < 4

"""Determinism, and resuming after kill -9 at any point."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest

from strop.errors import ConfigError

from killing import SETTINGS, copy_until, kill
from messages import naming
from runs import hashes, make_inputs, metrics, overrides, train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(inputs):
    run = inputs / "undisturbed"
    return run, hashes(train(overrides(inputs, run, *SETTINGS)))


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    assert hashes(train(overrides(inputs, tmp_path / "again", *SETTINGS))) == expected
    assert metrics(tmp_path / "again") == metrics(run)
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4, 5, 6]
    again, first = (
        pq.read_table(folder / "rollouts" / "step_000006.parquet") for folder in (tmp_path / "again", run)
    )
    assert again.equals(first)
    other = train(overrides(inputs, tmp_path / "other", *SETTINGS, "trainer.seed=2"))
    assert hashes(other) != expected


# Iteration 3 ends the first epoch: a checkpoint there stands exactly on the boundary.
@pytest.mark.parametrize(
    ("point", "iteration"),
    [("update", 4), ("log", 3), ("save critic", 4), ("seal", 3), ("rename", 4), ("latest", 4)],
)
def test_a_killed_run_continues_to_the_same_numbers(inputs, undisturbed, tmp_path, point, iteration):
    run, expected = undisturbed
    copy_until(run, iteration - 1, tmp_path / "run")
    options = overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.max_ckpt_to_keep=2")
    kill(point, iteration, options)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == f"{iteration - 1}\n"
    assert hashes(train(options)) == expected
    assert metrics(tmp_path / "run") == metrics(run)
    kept = sorted(path.name for path in (tmp_path / "run").glob("global_step_*"))
    assert kept == ["global_step_5", "global_step_6"]


def test_a_run_resumes_from_a_named_checkpoint(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    options = overrides(inputs, tmp_path / "run", *SETTINGS, f"trainer.resume_mode={run / 'global_step_5'}")
    assert hashes(train(options)) == expected


def test_a_run_that_goes_back_and_is_killed_before_its_next_save_has_gone_back(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    shutil.copytree(run, tmp_path / "run")
    options = overrides(inputs, tmp_path / "run", *SETTINGS)
    kill("update", 6, [*options, f"trainer.resume_mode={tmp_path / 'run' / 'global_step_5'}"])
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "5\n"
    assert hashes(train(options)) == expected
    assert metrics(tmp_path / "run") == metrics(run)


def test_a_resume_from_another_runs_checkpoint_does_not_mix_the_two(inputs, undisturbed, tmp_path):
    other, _ = undisturbed
    options = overrides(inputs, tmp_path, *SETTINGS, "trainer.total_training_steps=2", "trainer.seed=1")
    train(options)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    resumed = overrides(inputs, tmp_path, *SETTINGS, f"trainer.resume_mode={other / 'global_step_5'}")
    train(resumed)
    assert (tmp_path / "previous_1" / "metrics.jsonl").read_bytes() == before
    assert [line["step"] for line in metrics(tmp_path)] == [6]


def test_a_resume_with_nothing_left_to_train_is_an_error(inputs, undisturbed):
    run, _ = undisturbed
    with pytest.raises(ConfigError, match=naming("6 of 6")):
        train(overrides(inputs, run, *SETTINGS))


def test_a_fresh_start_moves_the_earlier_run_aside(inputs, tmp_path):
    options = overrides(inputs, tmp_path, "trainer.save_freq=1", "trainer.resume_mode=disable")
    train(options)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    train(options)
    assert (tmp_path / "previous_1" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "previous_1" / "global_step_2" / "manifest.json").is_file()
    assert len(metrics(tmp_path)) == 3

"""Determinism, and resuming after kill -9 at any point."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest

from strop.checkpoint.folder import verify
from strop.checkpoint.remote import RemoteCheckpoints
from strop.checkpoint.store import Checkpoints
from strop.cli.main import main
from strop.config.load import load_config, load_tree
from strop.config.trees import SFT
from strop.errors import CheckpointError, ConfigError
from strop.trainer.build import build_trainer
from strop.trainer.supervised import SftTrainer, build

import forked
from builders import write_prompts
from killing import ROWS, SETTINGS, copy_until, kill
from messages import mentions, naming
from runs import hashes, make_inputs, metrics, overrides, train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"), rows=ROWS)


@pytest.fixture(scope="module")
def undisturbed(inputs):
    run = inputs / "undisturbed"
    return run, hashes(train(overrides(inputs, run, *SETTINGS)))


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    assert hashes(train(overrides(inputs, tmp_path / "again", *SETTINGS))) == expected
    assert metrics(tmp_path / "again") == metrics(run)
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4]
    train(overrides(inputs, tmp_path / "other", "trainer.seed=2", "trainer.total_training_steps=1"))
    first, again, other = (
        pq.read_table(folder / "rollouts" / "step_000001.parquet")
        for folder in (run, tmp_path / "again", tmp_path / "other")
    )
    assert again.equals(first)
    assert not other["response_ids"].equals(first["response_ids"])


# Iteration 2 ends the first epoch: a checkpoint there is exactly on the boundary.
@pytest.mark.fast("update-3", "seal-2")
@pytest.mark.parametrize(
    ("point", "iteration"),
    [("update", 3), ("log", 2), ("save critic", 3), ("seal", 2), ("rename", 3), ("latest", 3)],
)
def test_a_killed_run_continues_to_the_same_numbers(inputs, undisturbed, tmp_path, point, iteration):
    run, expected = undisturbed
    copy_until(run, iteration - 1, tmp_path / "run")
    keep = ("trainer.max_ckpt_to_keep=2", "trainer.rollouts_to_keep=2")
    options = overrides(inputs, tmp_path / "run", *SETTINGS, *keep)
    kill(point, iteration, options)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == f"{iteration - 1}\n"
    assert hashes(train(options)) == expected
    assert metrics(tmp_path / "run") == metrics(run)
    kept = sorted(path.name for path in (tmp_path / "run").glob("global_step_*"))
    assert kept == ["global_step_3", "global_step_4"]
    samples = sorted((tmp_path / "run" / "rollouts").iterdir())
    assert [path.name for path in samples] == ["step_000003.parquet", "step_000004.parquet"]
    assert all(path.read_bytes() == (run / "rollouts" / path.name).read_bytes() for path in samples)
    for path in samples:  # in turn: each batch is sampled by the policy that learns from it
        versions = {version for row in pq.read_table(path)["rollout_versions"].to_pylist() for version in row}
        assert versions == {int(path.stem.removeprefix("step_")) - 1}


def test_a_checkpoint_that_was_moved_to_another_disk_is_of_its_run(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    copy_until(run, 2, tmp_path / "run")
    shutil.move(tmp_path / "run" / "global_step_2", tmp_path / "large" / "global_step_2")
    (tmp_path / "run" / "global_step_2").symlink_to(tmp_path / "large" / "global_step_2")
    assert hashes(train(overrides(inputs, tmp_path / "run", *SETTINGS))) == expected
    assert metrics(tmp_path / "run") == metrics(run)  # and not only those since the resume


@pytest.mark.slow
def test_a_run_killed_after_going_back_resumes_from_where_it_went_back_to(inputs, undisturbed, tmp_path):
    run, expected = undisturbed
    shutil.copytree(run, tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    options = overrides(inputs, tmp_path / "run", *SETTINGS)
    kill("update", 4, [*options, f"trainer.resume_mode={tmp_path / 'run' / 'global_step_3'}"])
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    # what it went back over; --step and --best choose among checkpoints of this continuation
    assert not (tmp_path / "run" / "global_step_4").exists()
    assert (tmp_path / "run" / "previous_1" / "global_step_4" / "manifest.json").is_file()
    assert (tmp_path / "run" / "previous_1" / "metrics.jsonl").read_bytes() == before
    later = {path.name for path in (run / "validation").glob("step_000004.*")}
    assert {path.name for path in (tmp_path / "run" / "previous_1" / "validation").iterdir()} == later
    assert not later & {path.name for path in (tmp_path / "run" / "validation").iterdir()}
    assert hashes(train(options)) == expected
    assert metrics(tmp_path / "run") == metrics(run)


@pytest.mark.slow
def test_a_resume_from_another_runs_checkpoint_does_not_mix_the_two(inputs, undisturbed, tmp_path):
    other, expected = undisturbed
    train(overrides(inputs, tmp_path, *SETTINGS, "trainer.total_training_steps=1", "trainer.seed=2"))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    options = overrides(inputs, tmp_path, *SETTINGS, f"trainer.resume_mode={other / 'global_step_3'}")
    assert hashes(train(options)) == expected
    assert (tmp_path / "previous_1" / "metrics.jsonl").read_bytes() == before
    assert [line["step"] for line in metrics(tmp_path)] == [4]


@pytest.mark.slow
def test_another_runs_checkpoint_with_nothing_left_to_train_is_an_error(inputs, undisturbed, tmp_path):
    run, _ = undisturbed
    with pytest.raises(ConfigError, match=naming("4 of 4")):
        train(overrides(inputs, tmp_path, *SETTINGS, f"trainer.resume_mode={run / 'global_step_4'}"))
    with pytest.raises(ConfigError, match=naming("4 of 3")):
        train(overrides(inputs, run, *SETTINGS, "trainer.total_training_steps=3"))


def train_until_the_uploads(options: list[str]) -> None:
    """Train, upload nothing, and die where the run waits for the uploads."""

    def die(*arguments) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(*arguments, **options) -> None:
        time.sleep(1000)

    with (
        mock.patch.object(RemoteCheckpoints, "upload", hang),
        mock.patch.object(Checkpoints, "_finish_uploads", die),
    ):
        main(["train", *options])


@pytest.mark.slow
def test_a_run_killed_after_its_last_save_is_completed_by_the_same_command(inputs, undisturbed, tmp_path):
    run, remote = tmp_path / "run", tmp_path / "remote"
    copy_until(undisturbed[0], 3, run)
    (run / "curves.png").unlink(missing_ok=True)
    options = overrides(inputs, run, *SETTINGS, f"trainer.default_hdfs_dir={remote}")
    assert forked.run(train_until_the_uploads, options).returncode == -signal.SIGKILL
    assert not (run / "curves.png").exists()
    assert not remote.exists()
    before = {path: path.read_bytes() for path in run.rglob("step_*")} | {run: metrics(run)}

    done = forked.run(["-m", "strop", "train", *options])
    assert done.returncode == 0, done.stderr[-2000:]
    assert mentions(done.stderr, "4 of 4", "curves", "uploads")
    assert (run / "curves.png").exists()
    assert (remote / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    for step in (1, 2, 3, 4):
        verify(remote / f"global_step_{step}")
    assert {path: path.read_bytes() for path in run.rglob("step_*")} | {run: metrics(run)} == before


@pytest.mark.parametrize("file", ["actor/__0_0.distcp", "actor/.metadata", "trainer.pt"])
def test_a_flipped_bit_of_a_checkpoint_is_named(inputs, undisturbed, tmp_path, file):
    copy_until(undisturbed[0], 3, tmp_path)
    path = tmp_path / "global_step_3" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=naming("global_step_3", Path(file).name)):
        train(overrides(inputs, tmp_path, *SETTINGS))


def test_a_fresh_start_moves_the_earlier_run_aside(inputs, undisturbed, tmp_path):
    shutil.copytree(undisturbed[0], tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "global_step_5.tmp").mkdir()  # of a run killed while saving
    fresh = ("trainer.resume_mode=disable", "trainer.total_training_steps=1")
    train(overrides(inputs, tmp_path / "run", *fresh))
    assert (tmp_path / "run" / "previous_1" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "run" / "previous_1" / "global_step_4" / "manifest.json").is_file()
    assert not list(tmp_path.rglob("global_step_5.tmp"))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1]


def test_a_repeated_command_says_what_it_resumes_and_what_differs(inputs, undisturbed, tmp_path, caplog):
    caplog.set_level("INFO", logger="strop")
    copy_until(undisturbed[0], 3, tmp_path / "run")
    shutil.copytree(inputs / "model", tmp_path / "moved")  # the same model elsewhere
    moved = f"actor_rollout_ref.model.path={tmp_path / 'moved'}"
    trainer = build_trainer(load_config(overrides(inputs, tmp_path / "run", *SETTINGS)))
    trainer.shutdown()
    assert mentions(caplog.text, str(tmp_path / "run" / "global_step_3"), "configuration as before")
    caplog.clear()
    changed = overrides(inputs, tmp_path / "run", *SETTINGS, moved, "actor_rollout_ref.actor.optim.lr=3e-2")
    build_trainer(load_config(changed)).shutdown()
    assert mentions(
        caplog.text, "actor_rollout_ref.actor.optim.lr: 0.01 -> 0.03", "actor_rollout_ref.model.path"
    )
    assert "critic.model.path" not in caplog.text  # it follows the actor's


def test_a_new_default_folder_names_the_run_that_it_may_replace(inputs, undisturbed, tmp_path, caplog):
    # as after a change of the reward, or an update of strop that knows more keys
    caplog.set_level("INFO", logger="strop")
    shutil.copytree(undisturbed[0], tmp_path / "ppo-a-gsm8k-0123abcd")
    (tmp_path / "ppo-a-gsm8k-89abcdef").mkdir()  # has no checkpoint
    train(overrides(inputs, tmp_path / "ppo-a-gsm8k-01234567", *SETTINGS, "trainer.total_training_steps=1"))
    assert f"set trainer.default_local_dir={tmp_path / 'ppo-a-gsm8k-0123abcd'}" in caplog.text


@pytest.mark.fast("contents", "command")
@pytest.mark.parametrize("what", ["model", "data", "reward", "contents", "command"])
def test_a_checkpoint_of_another_run_is_not_continued_by_chance(inputs, undisturbed, tmp_path, what):
    """Before a model loads; with the path of the checkpoint it is continued."""
    run = tmp_path / "run"
    copy_until(undisturbed[0], 3, run)
    rows = shutil.copy(inputs / "train.parquet", tmp_path / "other.parquet")
    if what == "data":
        write_prompts(Path(rows), ROWS - 1)
    model = shutil.copytree(inputs / "model", tmp_path / "model")
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(-5, os.SEEK_END)
        weights.write(b"\x01")
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1.0\n")
    options, named = {
        "model": ([f"actor_rollout_ref.model.path={model}"], "actor_rollout_ref.model.path"),
        "data": ([f"data.train_files={rows}"], "data.train_files"),
        "reward": ([f"custom_reward_function.path={tmp_path / 'reward.py'}"], "custom_reward_function.path"),
        "contents": ([], "actor_rollout_ref.model.path"),
        "command": ([], "another command"),
    }[what]
    given = overrides(inputs, run, *SETTINGS, *options)
    if what == "contents":  # other weights in the same folder
        original = (inputs / "model" / "model.safetensors").read_bytes()
        shutil.copy(model / "model.safetensors", inputs / "model" / "model.safetensors")
    try:
        if what == "command":
            sft = [f"model.path={inputs / 'model'}", f"data.train_files={rows}", "trainer.device=cpu"]
            with pytest.raises(ConfigError, match=naming(named, "another folder")):
                build(SftTrainer, load_tree(SFT, [*sft, f"trainer.default_local_dir={run}"]))
            return
        with pytest.raises(ConfigError, match=naming(named, "trainer.resume_mode=", "global_step_3")):
            build_trainer(load_config(given))
        assert main(["train", *given]) == 2
        on_purpose = [*given, f"trainer.resume_mode={run / 'global_step_3'}"]
        build_trainer(load_config(on_purpose)).shutdown()
        validates = build_trainer(load_config([*given, "trainer.val_only=True"])) if what == "data" else None
        assert validates is None or validates.shutdown() is None
    finally:
        if what == "contents":
            (inputs / "model" / "model.safetensors").write_bytes(original)

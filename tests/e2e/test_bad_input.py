"""Each mistake is one clear line on standard error, without a traceback, and exit status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lock_holder import holding
from small_disk import no_room, small_disk

from strop.checkpoint import store as checkpoint
from strop.cli.main import main
from strop.errors import TrainingError
from strop.tracking.jsonl import JsonlTracker, read_metrics
from strop.trainer import loop as run

import supervised_runs
from messages import mentions
from runs import make_inputs, metrics, overrides


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    unanswered = {"style": "rule", "ground_truth": None}
    for name, changed in {
        "columns": [{"question": row["prompt"]} for row in rows],
        "long": [*rows[:3], {**rows[3], "prompt": [{"role": "user", "content": "1+" * 20}]}],
        "source": [{**row, "data_source": "someone/elses"} for row in rows],
        "unnamed": [{"prompt": row["prompt"]} for row in rows],
        "no_answer": [*rows[:5], {**rows[5], "reward_model": unanswered}],
    }.items():
        pq.write_table(pa.Table.from_pylist(changed), folder / f"{name}.parquet")
    pq.write_table(pq.read_table(folder / "train.parquet").slice(0, 0), folder / "empty.parquet")
    (folder / "reward.py").write_text("def other(solution_str): return 1\ndef third(response): return 1\n")
    (folder / "torn" / "actor").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("data.train_files={}/empty.parquet", ["empty.parquet"]),
        ("data.train_files={}/columns.parquet", ["columns.parquet", "prompt"]),
        (
            "data.train_files={}/long.parquet data.train_batch_size=4",
            ["long.parquet, row 3", "max_prompt_length", "8"],
        ),
        ("data.train_files={}/source.parquet", ["someone/elses", "openai/gsm8k", "custom_reward_function"]),
        (
            "data.train_files={}/unnamed.parquet",
            ["unnamed.parquet", "'data_source' (data.reward_fn_key)", "custom_reward_function"],
        ),
        ("data.train_files=[{}/train.parquet,{}/unnamed.parquet]", ["unnamed.parquet", "field data_source"]),
        (
            "data.val_files={}/no_answer.parquet data.val_max_samples=2",
            ["no_answer.parquet, row 5, field reward_model.ground_truth", "null", "strop/arithmetic"],
        ),
        ("data.train_batch_size=100", ["24", "100"]),
        ("trainer.device=cuda", ["trainer.device=cuda", "GPU"]),
        ("custom_reward_function.path={}/reward.py", ["compute_score", "custom_reward_function.name=other"]),
        ("custom_reward_function.path={}/nothing.py", ["nothing.py"]),
        ("trainer.resume_mode={}/torn", ["torn", "checkpoint"]),
        ("actor_rollout_ref.model.path=no-such-owner/no-such-model", ["no-such-owner/no-such-model"]),
        ("critic.model.path=no-such-owner/critic", ["no-such-owner/critic"]),
        ("reward_model.enable=true reward_model.model.path=no-such-owner/scorer", ["no-such-owner/scorer"]),
        ("data.tokenizer=no-such-owner/tokenizer", ["no-such-owner/tokenizer"]),
        (
            "trainer.total_training_steps=null trainer.total_epochs=1 trainer.critic_warmup=9",
            ["critic_warmup=9", "3 iterations"],
        ),
        ("algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=2", ["horizon=2", "16 samples"]),
    ],
)
def test_a_mistake_is_named_with_status_2_and_leaves_the_run_folder_alone(
    inputs, tmp_path, capsys, change, parts
):
    record = tmp_path / "run" / "metrics.jsonl"
    record.parent.mkdir()
    record.write_text(json.dumps({"step": 1}) + "\n")
    options = overrides(inputs, record.parent, *change.replace("{}", str(inputs)).split())
    assert main(["train", *options]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert mentions(printed, *parts)
    assert {path.name for path in record.parent.iterdir()} <= {".lock", "metrics.jsonl"}
    assert metrics(record.parent) == [{"step": 1}]


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("export torm --out x", "torn"),
        ("export torm --push a/b", "torn"),
        ("score trian.parquet", "train.parquet"),
        ("score train.parquet --custom rewrd.py", "reward.py"),
        ("prepare table --source trian.parquet --out x", "train.parquet"),
        ("prepare table --source trn/actor --out x", "torn/actor"),  # as a data set on the hub is written
    ],
)
def test_a_misspelt_path_of_a_command_is_answered_by_the_one_that_is_there(
    inputs, capsys, monkeypatch, command, meant
):
    monkeypatch.chdir(inputs)
    assert main(command.split()) == 2
    assert meant in capsys.readouterr().err.partition("; did you mean ")[2]


def test_all_mistakes_of_a_stage_are_reported_at_once(inputs, tmp_path, capsys):
    """First values that cannot be loaded, then values that do not fit one another."""
    unreadable = {"trainer.totl_epochs=3": "trainer.total_epochs", "data.max_prompt_length=long": "'long'"}
    unfit = {
        f"data.train_files={inputs}/nothing.parquet": "nothing.parquet",
        f"actor_rollout_ref.model.path={inputs}/nothing": f"{inputs}/nothing",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4096": "ppo_mini_batch_size=4096",
        "actor_rollout_ref.actor.clip_ratio_c=3": "clip_ratio_c",
        "actor_rollout_ref.actor.policy_loss=cispo": "cispo",
        "algorithm.adv_estimator=gea": "gea",
        "trainer.resume_mode=/nothing/here": "/nothing/here",
        "trainer.logger=[console,tensorbord]": "tensorbord",
        f"trainer.default_local_dir={inputs}/reward.py/run": "default_local_dir",
    }
    for stage in (unreadable, unfit):
        assert main(["train", *overrides(inputs, tmp_path / "run", *stage)]) == 2
        assert mentions(capsys.readouterr().err, *stage.values())


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and inode of every file."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_second_start_in_the_folder_of_a_run_touches_nothing(inputs, tmp_path, capsys):
    run_dir = tmp_path / "run"
    (run_dir / "global_step_5.tmp").mkdir(parents=True)  # in flight in the other process
    (run_dir / "global_step_5.tmp" / "trainer.pt").write_text("half")
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    supervised = supervised_runs.make_inputs(tmp_path)
    with holding(run_dir):
        before = files_of(run_dir)
        for command in (
            ["train", *overrides(inputs, run_dir, "trainer.resume_mode=auto")],
            ["train", *overrides(inputs, run_dir, "trainer.resume_mode=disable")],
            ["sft", *supervised_runs.overrides(supervised, run_dir)],
        ):
            assert main(command) == 2
            assert files_of(run_dir) == before
            assert not list(run_dir.glob("previous_*"))
            (line,) = [line for line in capsys.readouterr().err.splitlines() if "Error" in line]
            assert line.startswith(f"ConfigError: trainer.default_local_dir={run_dir}: ")


def test_a_disk_that_is_full_when_a_checkpoint_is_saved_is_one_line(inputs, tmp_path, capsys):
    with small_disk(tmp_path / "disk", "100k") as disk:  # room for the record, not for the weights
        assert main(["train", *overrides(inputs, disk / "run", "trainer.save_freq=1")]) == 2
        assert [line["step"] for line in read_metrics(disk / "run" / "metrics.jsonl")][-1] == 1
        assert not list((disk / "run").glob("global_step_*"))
    the_line_of_the_checkpoint(capsys)


def test_nothing_that_fails_at_the_end_hides_why_the_run_ended(inputs, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr(checkpoint.torch, "save", no_room)
    monkeypatch.setattr(run, "draw_curves", no_room)
    close = JsonlTracker.close

    def does_not_close(tracker):
        close(tracker)
        raise TrainingError("the last steps may be missing")

    monkeypatch.setattr(JsonlTracker, "close", does_not_close)
    assert main(["train", *overrides(inputs, tmp_path / "run", "trainer.save_freq=1")]) == 2
    the_line_of_the_checkpoint(capsys)
    assert "the last steps may be missing" in caplog.text  # the tracker's own words, above
    assert "curves" in caplog.text


def the_line_of_the_checkpoint(capsys) -> None:
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if "Error: " in line and "warning" not in line]
    assert mentions(line, "CheckpointError", "iteration 1", "no complete checkpoint")


@pytest.mark.slow
def test_a_full_disk_costs_a_run_its_picture_and_a_resume_nothing(
    inputs, tmp_path, capsys, caplog, monkeypatch
):
    run_dir = tmp_path / "run"
    options = overrides(inputs, run_dir, "trainer.save_freq=1", "trainer.total_training_steps=1")
    with monkeypatch.context() as full:
        full.setattr("matplotlib.figure.Figure.savefig", no_room)
        assert main(["train", *options]) == 0
    assert (run_dir / "global_step_1").is_dir()
    assert not (run_dir / "curves.png").exists()
    assert "curves.png" in caplog.text
    record = (run_dir / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as full:
        full.setattr("pathlib.Path.write_bytes", no_room)
        assert main(["train", *options, "trainer.total_training_steps=2"]) == 2
    printed = capsys.readouterr().err
    assert mentions(printed, "OSError", "No space left on device", str(run_dir / "metrics.jsonl"))
    assert "Traceback" not in printed
    assert (run_dir / "metrics.jsonl").read_bytes() == record
    assert main(["train", *options, "trainer.total_training_steps=2"]) == 0  # the folder's lock was released
    assert (run_dir / "curves.png").is_file()


def test_debug_shows_the_traceback(inputs, tmp_path):
    with pytest.raises(Exception, match="gea"):
        main(["train", *overrides(inputs, tmp_path, "algorithm.adv_estimator=gea"), "--debug"])

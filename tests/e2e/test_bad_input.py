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
from strop.cli import main as cli
from strop.errors import TrainingError
from strop.models.loader import load_scorer
from strop.tracking.jsonl import JsonlTracker, read_metrics
from strop.trainer import loop as run

import supervised_runs
import tiny_model
from messages import mentions
from runs import make_inputs, overrides


def main(arguments):
    return cli.main(["train", *arguments])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    empty = pq.read_table(folder / "train.parquet").slice(0, 0)
    pq.write_table(empty, folder / "empty.parquet")
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    pq.write_table(
        pa.Table.from_pylist(rows).rename_columns(["s", "question", "a", "r", "e"]), folder / "no.parquet"
    )
    rows[3]["prompt"][0]["content"] = "1+" * 20
    pq.write_table(pa.Table.from_pylist(rows), folder / "long.parquet")
    pq.write_table(
        pa.Table.from_pylist([{**row, "data_source": "someone/elses"} for row in rows]),
        folder / "source.parquet",
    )
    pq.write_table(
        pa.Table.from_pylist([{"prompt": row["prompt"]} for row in rows]), folder / "unnamed.parquet"
    )
    pq.write_table(pa.Table.from_pylist(rows).drop_columns(["reward_model"]), folder / "no_target.parquet")
    no_answer = [dict(row) for row in rows]
    no_answer[5]["reward_model"] = {"style": "rule", "ground_truth": None}
    pq.write_table(pa.Table.from_pylist(no_answer), folder / "no_answer.parquet")
    (folder / "reward.py").write_text(
        "def other(data_source, solution_str, ground_truth, extra_info=None): return 1\n"
    )
    (folder / "nan.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return float('nan')\n"
    )
    (folder / "torn" / "actor").mkdir(parents=True)
    # a reward model over another vocabulary
    tokenizer = tiny_model.build_tokenizer("0123456789")
    tiny_model.build_model(tokenizer, hidden=32).save_pretrained(folder / "small")
    load_scorer(folder / "small", fresh_head_seed=1).save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")
    return folder


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (["data.train_files={}/nothing.parquet"], ["nothing.parquet"]),
        (["data.train_files={}/empty.parquet"], ["empty.parquet"]),
        (["data.train_files={}/no.parquet"], ["no.parquet", "prompt"]),
        (
            ["data.train_files={}/long.parquet", "data.filter_overlong_prompts=false"],
            ["long.parquet, row 3", "max_prompt_length", "8"],
        ),
        (["data.train_files={}/source.parquet"], ["someone/elses", "openai/gsm8k", "custom_reward_function"]),
        (["data.train_batch_size=100"], ["24", "100"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=3"], ["3", "8"]),
        (["algorithm.adv_estimator=gea"], ["gea", "gae", "grpo"]),
        (["trainer.totl_epochs=3"], ["trainer.totl_epochs", "trainer.total_epochs"]),
        (["custom_reward_function.path={}/reward.py"], ["compute_score", "other"]),
        (["custom_reward_function.path={}/nothing.py"], ["nothing.py"]),
        (["custom_reward_function.path={}/nan.py"], ["score=nan"]),
        (["trainer.resume_mode={}/nothing"], ["nothing"]),
        (["trainer.resume_mode={}/torn"], ["torn", "checkpoint"]),
        (
            [
                "reward_model.enable=true",
                "reward_model.model.path={}/reward_model",
                "reward_model.model.input_tokenizer=null",
            ],
            ["19 ", "/model", "14 ", "/reward_model", "input_tokenizer"],
        ),
        (["actor_rollout_ref.model.path={}/nothing"], ["nothing"]),
        (["actor_rollout_ref.model.path=no-such-owner/no-such-model"], ["no-such-owner/no-such-model"]),
        (["trainer.device=cuda"], ["trainer.device=cuda", "GPU"]),
        (["trainer.critic_warmup=2"], ["critic_warmup=2", "2 iterations"]),
        (
            ["trainer.total_training_steps=null", "trainer.total_epochs=1", "trainer.critic_warmup=9"],
            ["critic_warmup=9", "3 iterations"],
        ),
        (
            ["actor_rollout_ref.actor.policy_loss=cispo", "actor_rollout_ref.actor.clip_ratio_c=3"],
            ["clip_ratio_c"],
        ),
        (["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=2"], ["horizon=2", "16 samples"]),
        (
            ["data.train_files={}/unnamed.parquet"],
            ["unnamed.parquet", "'data_source' (data.reward_fn_key)", "custom_reward_function"],
        ),
        (["data.train_files={}/no_target.parquet"], ["no_target.parquet", "'reward_model'"]),
        (
            ["data.val_files={}/no_answer.parquet", "data.val_max_samples=2"],
            ["no_answer.parquet, row 5, field reward_model.ground_truth", "null", "strop/arithmetic"],
        ),
        (
            ["data.train_files=[{0}/train.parquet,{0}/unnamed.parquet]"],
            ["unnamed.parquet", "'data_source'"],
        ),
        (["actor_rollout_ref.rollout.name=vllm"], ["vllm", "hf"]),
        (["trainer.logger=[console,tensorbord]"], ["tensorbord", "tensorboard"]),
        (["trainer.default_local_dir={}/reward.py"], ["default_local_dir", "/reward.py"]),
        (["trainer.default_local_dir={}/reward.py/run"], ["default_local_dir", "/reward.py"]),
    ],
    ids=lambda value: value[0].replace("{}/", "") if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_mistake_is_named_and_ends_with_status_2(inputs, tmp_path, capsys, change, messages):
    options = overrides(inputs, tmp_path / "run", *[text.format(inputs) for text in change])
    assert main(options) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    for message in messages:
        assert message in printed, printed


def test_all_mistakes_are_told_at_once(inputs, tmp_path, capsys):
    """All of a stage: first what cannot be loaded, then values that do not fit one another."""
    values = {
        "actor_rollout_ref.actor.ppo_mini_batch_size=3": "ppo_mini_batch_size=3",
        "algorithm.adv_estimator=gea": "gea",
        "trainer.resume_mode=/nothing/here": "/nothing/here",
    }
    unreadable = {"trainer.totl_epochs=3": "totl_epochs", "data.max_prompt_length=long": "found 'long'"}
    for stage in (values, unreadable):
        assert main(overrides(inputs, tmp_path / "run", *stage)) == 2
        printed = capsys.readouterr().err
        assert all(message in printed for message in stage.values())


def test_nothing_of_an_earlier_run_is_touched_by_a_run_that_cannot_start(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert main(overrides(inputs, run, "data.train_files=/nothing.parquet")) == 2
    capsys.readouterr()
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_a_run_folder_that_becomes_a_file_is_one_line(inputs, tmp_path, capsys, monkeypatch):
    """What the check of the configuration cannot see any more is told at the end of the command."""
    monkeypatch.setattr("strop.cli.train.require_valid", lambda config: None)
    (tmp_path / "run").write_text("")
    assert main(overrides(inputs, tmp_path / "run")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, "FileExistsError", str(tmp_path / "run"))


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and inode of every file."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_second_start_in_the_folder_of_a_run_touches_nothing(inputs, tmp_path, capsys, mode):
    run_dir = tmp_path / "run"
    (run_dir / "global_step_5.tmp").mkdir(parents=True)  # that the other is writing
    (run_dir / "global_step_5.tmp" / "trainer.pt").write_text("half")
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with holding(run_dir):
        before = files_of(run_dir)
        assert main(overrides(inputs, run_dir, f"trainer.resume_mode={mode}")) == 2
        assert files_of(run_dir) == before
        assert not list(run_dir.glob("previous_*"))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Error" in line]
    assert line.startswith(f"ConfigError: trainer.default_local_dir={run_dir}: ")


def test_a_second_fine_tuning_in_a_folder_is_refused(tmp_path, capsys):
    inputs, run_dir = supervised_runs.make_inputs(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    with holding(run_dir):
        assert cli.main(["sft", *supervised_runs.overrides(inputs, run_dir)]) == 2
    printed = capsys.readouterr().err
    assert f"trainer.default_local_dir={run_dir}: " in printed
    assert "Traceback" not in printed


def test_a_disk_that_is_full_when_a_checkpoint_is_saved_is_one_line(inputs, tmp_path, capsys):
    with small_disk(tmp_path / "disk", "100k") as disk:  # room for the record, not for the weights
        assert main(overrides(inputs, disk / "run", "trainer.save_freq=1")) == 2
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
    assert main(overrides(inputs, tmp_path / "run", "trainer.save_freq=1")) == 2
    the_line_of_the_checkpoint(capsys)
    assert "the last steps may be missing" in caplog.text  # the tracker's own words, above
    assert "curves" in caplog.text


def the_line_of_the_checkpoint(capsys) -> None:
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if "Error: " in line and "warning" not in line]
    assert mentions(line, "CheckpointError", "iteration 1")
    assert line.endswith("none")


def test_a_run_that_trained_and_saved_ends_well_without_its_picture(
    inputs, tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", no_room)
    options = overrides(inputs, tmp_path / "run", "trainer.save_freq=1", "trainer.total_training_steps=1")
    assert main(options) == 0
    assert (tmp_path / "run" / "global_step_1").is_dir()
    assert not (tmp_path / "run" / "curves.png").exists()
    assert "curves.png" in caplog.text
    assert "Traceback" not in capsys.readouterr().err
    assert main([*options, "trainer.total_training_steps=2"]) == 0  # free again, in the same process


def test_a_disk_that_is_full_at_a_resume_is_one_line(inputs, tmp_path, capsys, monkeypatch):
    options = overrides(inputs, tmp_path / "run", "trainer.save_freq=1", "trainer.total_training_steps=1")
    assert main(options) == 0
    record = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    monkeypatch.setattr("pathlib.Path.write_bytes", no_room)
    assert main([*options, "trainer.total_training_steps=2"]) == 2
    printed = capsys.readouterr().err
    assert mentions(printed, "OSError", "No space left on device", str(tmp_path / "run" / "metrics.jsonl"))
    assert "Traceback" not in printed
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == record


def test_debug_shows_the_traceback(inputs, tmp_path):
    with pytest.raises(Exception, match="gea"):
        main([*overrides(inputs, tmp_path, "algorithm.adv_estimator=gea"), "--debug"])

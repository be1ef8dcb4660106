"""``strop view``, through the command line."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_tracking_samples import Letters, two_samples, with_hidden_tokens

from strop.cli.main import main
from strop.errors import ConfigError
from strop.terminal import printable
from strop.tracking.samples import samples_table, write_table
from strop.trainer.evaluation import settings

from messages import mentions


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def run_dir(track, tmp_path):
    folder = tmp_path / "run"
    with track(folder) as tracking:
        tracking.log(0, {"val/test_score/gsm8k": 0.1})
        for step, (reward, score) in enumerate(
            [(0.25, None), (0.75, 0.6), (0.5, None), (0.625, 0.4)], start=1
        ):
            validation = {} if score is None else {"val/test_score/gsm8k": score}
            metrics = {
                "critic/score/mean": reward,
                "actor/lr": step * 1e-6,
                "lr": step * 1e-6,
                "timing_s/gen": step * 1.5,
            }
            tracking.log(step, {**metrics, **validation})
    batch = two_samples()
    write_table(folder / "rollouts" / "step_000001.parquet", samples_table(batch, Letters()))
    batch.batch["response_mask"] = torch.ones(2, 4)
    batch.batch["token_level_scores"] = torch.tensor([[9.0, 0, 0, 0], [0, 0, 0, -8.0]])
    write_table(folder / "rollouts" / "step_000003.parquet", samples_table(batch, Letters()))
    write_table(folder / "validation" / "step_000004.parquet", samples_table(batch[:1], Letters()))
    return folder


def view(capsys, *arguments: object, status: int = 0) -> str:
    assert main(["view", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


def test_samples_of_an_earlier_version_are_shown_alike(run_dir, capsys):
    """Token ids were int64, numbers had all their bits, and no column was split into streams of bytes."""
    expected = view(capsys, run_dir, "--step", 3)
    path = run_dir / "rollouts" / "step_000003.parquet"
    table = pq.read_table(path)
    ids = pa.list_(pa.int64())
    for name in ("prompt_ids", "response_ids"):
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(ids))
    pq.write_table(table, path, compression="zstd")
    assert view(capsys, run_dir, "--step", 3) == expected


def test_the_summary_shows_first_best_and_last_step(run_dir, capsys):
    text = view(capsys, run_dir)
    assert re.search(r"first +best reward +last", text)
    assert re.search(r"step 1 +step 2 +step 4", text)
    assert re.search(r"critic/score/mean +0\.250 +0\.750 +0\.625 +▁█▅▆", text)
    assert re.search(r"lr +1\.00e-06 +2\.00e-06 +4\.00e-06", text)
    assert "timing_s/gen" not in text
    # first, best, at step, last
    assert re.search(r"gsm8k +0\.100 +0\.600 +2 +0\.400 +▁█▅", text)


def test_names_of_one_number_are_shown_once(track, tmp_path, capsys):
    with track(tmp_path) as tracking:
        for step, score in enumerate((0.25, 0.5, 0.25), start=1):
            names = ("objective/scores", "critic/score/mean", "reward/rule/mean")
            apart = {"reward/errors": 0.0, "reward/timeouts": 0.0, "objective/kl": score * (step != 2)}
            tracking.log(step, dict.fromkeys(names, score) | apart)
    assert "reward/rule/mean" not in view(capsys, tmp_path, "--metrics", "*")
    rows = re.findall(r"^ ?(\S+/\S+) ", view(capsys, tmp_path, "--metrics", "obj*,*re*"), re.MULTILINE)
    assert rows == ["objective/scores", "objective/kl", "reward/errors", "reward/timeouts"]
    text = view(capsys, tmp_path, "--metrics", "reward/rule/mean,critic/score/mean")  # as named
    assert "reward/rule/mean" in text
    assert "critic/score/mean" in text


def test_a_chosen_step_shows_its_metrics_and_samples(run_dir, capsys):
    text = view(capsys, run_dir, "--step", 3)
    assert re.search(r"first +chosen +last *\n.*step 1 +step 3 +step 4", text)
    assert "Samples of step 3" in text
    write_table(run_dir / "validation" / "step_000002.parquet", samples_table(two_samples(), Letters()))
    text = view(capsys, run_dir, "--best")  # by validation: 0.6 at step 2
    assert re.search(r"first +chosen +last *\n.*step 1 +step 2 +step 4", text)
    assert "Samples of step 2" in text
    assert f"({run_dir / 'validation'}" in text.replace("\n", "")
    assert mentions(view(capsys, run_dir, "--step", 2, status=2), "no samples of step 2")
    assert mentions(view(capsys, run_dir, "--step", 999, "--samples", 0, status=2), "no samples of step 999")


def test_a_run_without_samples_shows_the_metrics_of_a_chosen_step(track, tmp_path, capsys):
    with track(tmp_path) as tracking:
        for step, loss in ((1, 0.75), (2, 0.25), (3, 0.5)):
            tracking.log(step, {"train/loss": loss, **({} if step == 2 else {"val/loss": loss})})
    for option in (["--step", 2], ["--best"]):
        step = 2 if "--step" in option else 3
        assert re.search(
            rf"first +chosen +last *\n.*step 1 +step {step} +step 3", view(capsys, tmp_path, *option)
        )
    assert mentions(view(capsys, tmp_path, "--step", 7, status=2), "no samples")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    assert mentions(view(capsys, tmp_path, "--best", status=2), "no iteration", "trainer.test_freq")


def test_a_missing_run_names_those_near_it(track, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "runs near" not in view(capsys, "nothing", status=2)
    for name in ("runs/first", "checkpoints/strop/second", "third", "third/previous_1"):
        with track(tmp_path / name) as tracking:
            tracking.log(1, {"train/loss": 1.0})
    message = view(capsys, "nothing", status=2)
    assert all(name in message for name in ("runs/first", "checkpoints/strop/second", "third"))
    assert "previous" not in message
    assert mentions(view(capsys, "runs/frist", status=2), "did you mean runs/first")
    with pytest.raises(ConfigError, match="runs/first"):
        settings("nothing", [])  # of strop eval
    assert main(["export", "nothing", "--out", "model"]) == 2
    assert "runs/first" in capsys.readouterr().err
    message = view(capsys, "runs", status=2)  # those below the folder come alone
    assert "runs/first" in message
    assert "second" not in message


def test_the_summary_fits_80_columns(run_dir, track, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with track(tmp_path / "wide") as tracking:
        for step in range(1, 30):
            metrics = {"critic/score/mean": step * 1e-3, "response_length/clip_ratio": 3e-5 * step}
            tracking.log(step, {**metrics, "actor/pg_loss": -1e-5 * step})
    text = view(capsys, tmp_path / "wide")
    assert "…" not in text
    assert re.search(r"actor/pg_loss +-1.00e-05 .*█[▁-█]{8}▁", text)


def test_a_folder_inside_a_run_is_told_from_the_run(run_dir, capsys):
    (run_dir / "final_model").mkdir()
    error = view(capsys, run_dir / "final_model", status=2)
    assert mentions(error, "final_model/metrics.jsonl", f"a run, which is {run_dir}")


def test_the_samples_of_the_last_step_are_shown_unless_another_is_chosen(run_dir, capsys):
    text = view(capsys, run_dir)
    assert "Samples of step 3: 2 of 2" in text
    assert "1-0  score 9  (3 tokens, rule 1)" in text
    assert "1-1  score -8  (4 tokens, cut at the limit)" in text
    assert "ground truth: 7" in text
    assert "score 1.500" in view(capsys, run_dir, "--step", 1)
    assert "Samples of step 4: 1 of 1" in view(capsys, run_dir, "--validation")
    assert "Samples" not in view(capsys, run_dir, "--samples", 0)


def test_special_tokens_that_the_reward_does_not_see_are_shown(run_dir, capsys):
    write_table(run_dir / "rollouts" / "step_000004.parquet", samples_table(with_hidden_tokens(), Letters()))
    text = view(capsys, run_dir)
    assert "1-1  score 0.250  (4 tokens, cut at the limit, 2 hidden from the reward)" in text
    assert "a..b" in text
    assert "1-0  score 1.500  (2 tokens, rule 1)" in text  # without the tool's


def test_samples_are_sorted_and_metrics_chosen_by_options(run_dir, capsys):
    assert "1-0" in view(capsys, run_dir, "--samples", 1)
    for order in ("score", "length"):
        text = view(capsys, run_dir, "--samples", 1, "--sort", order)
        assert "1-1" in text
        assert "1-0" not in text
    text = view(capsys, "--metrics", "timing_s/*,actor/lr", run_dir, "--samples", 0)
    assert re.search(r"timing_s/gen +1\.500 +3 +6", text)
    assert "critic/score/mean" not in text


def test_a_broken_file_of_samples_is_an_error_and_none_is_not(run_dir, capsys):
    (run_dir / "rollouts" / "step_000003.parquet").write_bytes(b"PAR1")
    assert "step_000003.parquet: not a file of samples" in view(capsys, run_dir, status=2).replace("\n", "")
    for path in (run_dir / "rollouts").iterdir():
        path.unlink()
    assert "Samples" not in view(capsys, run_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/nowhere"], r"nowhere"),
        (["{run}/rollouts"], r"metrics\.jsonl"),
        (["{run}", "--step", "7"], r"step 7.*1 to 3.* 3"),
        (["{run}", "--metrics", "loss"], r"--metrics loss.*actor/lr"),
    ],
)
def test_mistakes_end_with_status_2_and_one_message(run_dir, capsys, arguments, message):
    text = view(capsys, *(argument.format(run=run_dir) for argument in arguments), status=2)
    assert re.search(message, text.replace("\n", " "))
    assert "Traceback" not in text


def test_an_answer_cannot_steer_the_terminal_or_the_markup(track, tmp_path, capsys):
    class Hostile(Letters):
        def batch_decode(self, sequences, *, skip_special_tokens):
            return ["\x1b[2J[bold]\x07 [/] ü\nend" for _ in sequences]

    with track(tmp_path) as tracking:
        tracking.log(1, {"critic/score/mean": 1.0, "val/test_score/[red]x": 1.0})
    write_table(tmp_path / "rollouts" / "step_000001.parquet", samples_table(two_samples(), Hostile()))
    text = view(capsys, tmp_path)
    assert "\x1b" not in text
    assert r"\x1b[2J[bold]\x07 [/] ü" in text
    assert "[red]x" in text
    assert printable("a\tb\nc\r\x9b") == "a\tb\nc\\r\\x9b"


def test_one_sample_of_each_prompt_is_shown_and_others_are_found(track, tmp_path, capsys):
    folder = tmp_path / "run"
    with track(folder) as tracking:
        tracking.log(1, {"critic/score/mean": 0.5})
    path = folder / "rollouts" / "step_000001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"uid": f"1-{i // 4}", "prompt": f"question {i // 4}", "response": f"answer {i}", "score": float(-i),
         "response_ids": [1] * (i + 1)}
        for i in range(12)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path)

    def answers(*arguments):
        return [int(number) for number in re.findall(r"│ answer (\d+)", view(capsys, folder, *arguments))]

    assert answers() == [0, 4, 8]
    assert answers("--sort", "score") == [11, 7, 3]
    assert answers("--uid", "1-1") == [4, 5, 6, 7]
    assert answers("--prompt", "question 2") == [8]
    assert answers("--text", "answer 1") == [1, 10]
    assert answers("--text", "answer 1", "--uid", "1-2") == [10, 11]
    assert "3 of 12, one of each prompt" in view(capsys, folder)
    assert mentions(view(capsys, folder, "--uid", "9-9", status=2), "--uid 9-9", "1-0, 1-1, 1-2")
    assert mentions(view(capsys, folder, "--text", "no", status=2), "--text no", "12 samples")

"""Trackers' output for a validation."""

from __future__ import annotations

import dataclasses
import io
import json
import os

import pytest
from rich.console import Console

from strop.tracking.jsonl import read_metrics
from strop.tracking.report import (
    Estimate,
    ShownSample,
    SourceReport,
    ValidationReport,
    report_table,
    shown_table,
)

GSM8K = SourceReport(
    prompts=1319,
    samples=5276,
    scores={
        "mean@4": Estimate(0.5, 0.4, 0.6),
        "best@2": Estimate(0.6, 0.5, 0.7),
        "best@4": Estimate(0.75, 0.7, 0.8),
        "maj@4": Estimate(0.625, 0.5, 0.7),
    },
    mean_length=123.4,
    truncated=0.012,
    error_rate=0.001,
)
CODE = SourceReport(
    prompts=3,
    samples=12,
    scores={"mean@4": Estimate(0.25, 0.0, 1.0), "best@4": Estimate(1.0, 1.0, 1.0)},
    mean_length=7.0,
    truncated=0.0,
    error_rate=None,
)
SAMPLE = ShownSample("openai/gsm8k", "What is [b]3+4[/b]?", "It is \x1b[31m 7", "7", 1.0)
REPORT = ValidationReport(4, {"my/code": CODE, "openai/gsm8k": GSM8K}, [SAMPLE])


def shown(what, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()


def test_the_metrics_and_the_file_hold_every_figure():
    assert REPORT.metrics() == {
        "val/test_score/my/code": 0.25,
        "val/test_score/openai/gsm8k": 0.5,
        "val/my/code/mean@4": 0.25,
        "val/my/code/best@4": 1.0,
        "val/openai/gsm8k/mean@4": 0.5,
        "val/openai/gsm8k/best@2": 0.6,
        "val/openai/gsm8k/best@4": 0.75,
        "val/openai/gsm8k/maj@4": 0.625,
    }
    written = json.loads(json.dumps(REPORT.as_json(), allow_nan=False))
    assert written["n"] == 4
    assert written["sources"]["openai/gsm8k"]["scores"]["best@2"] == {"value": 0.6, "low": 0.5, "high": 0.7}
    assert written["sources"]["my/code"]["error_rate"] is None
    one = SourceReport(5, 5, {"mean@1": Estimate(0.2, 0.0, 0.6)}, 3.0, 0.0, 0.0)
    assert ValidationReport(1, {"a": one}).metrics() == {"val/test_score/a": 0.2}


def test_the_table_has_a_row_for_each_source_with_intervals():
    lines = [line.split() for line in shown(report_table(REPORT, title="Validation")).splitlines()]
    assert ["openai/gsm8k", "1,319", "5,276", "0.500", "0.750", "0.625", "123.4", "1.2%", "0.1%"] in lines
    assert ["0.400", "to", "0.600", "0.700", "to", "0.800", "0.500", "to", "0.700"] in lines
    assert ["my/code", "3", "12", "0.250", "1.000", "-", "7", "0.0%", "-"] in lines


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_loses_no_digit(width):
    letters = [line.replace(" ", "") for line in shown(report_table(REPORT, title=""), width).splitlines()]
    assert "…" not in "".join(letters)


def test_samples_are_shown_as_they_are_and_do_not_steer_the_terminal():
    table = shown(shown_table([SAMPLE], title="Samples"))
    assert "What is [b]3+4[/b]?" in table
    assert "\x1b" not in table
    assert "\\x1b[31m 7" in table
    long = shown_table([ShownSample("a", "p" * 999 + "the question", "r", None, 0.0)], title="")
    assert "thequestion" in "".join(shown(long).split())
    assert shown(long).count("p") < 200


def test_the_console_shows_both_and_a_tracker_without_the_method_is_left_alone(track, tmp_path, capsys):
    with track(tmp_path, ["console", "jsonl", f"{__name__}:Plain", f"{__name__}:Picky"]) as run:
        run.log_validation(3, REPORT)
        run.log(3, {"val/test_score/a": 0.5})
        assert Picky.seen == [3]
    printed = capsys.readouterr().out
    assert "Validation at step 3" in printed
    assert "openai/gsm8k" in printed
    assert "What is [b]3+4[/b]?" in printed


class Plain:
    """A tracker of a user's own as it was before there was ``log_validation``."""

    def __init__(self, run):
        pass

    def log(self, step, metrics):
        pass

    def close(self):
        pass


class Picky(Plain):
    """One that fails: a run goes on."""

    seen: list[int] = []  # noqa: RUF012 - a note for the test

    def log_validation(self, step, report):
        Picky.seen.append(step)
        raise OSError("no room")


def test_tensorboard_has_the_samples_as_text(track, tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs strop[tensorboard]"
    )
    with track(tmp_path, ["tensorboard"]) as run:
        run.log_validation(2, REPORT)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("val/generations/text_summary")
    assert event.step == 2
    assert b"    What is [b]3+4[/b]?" in event.tensor_proto.string_val[0]
    assert b"score 1" in event.tensor_proto.string_val[0]


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_has_the_samples_as_a_table(track, tmp_path):
    pytest.importorskip("wandb", reason="needs strop[wandb]")
    with track(tmp_path, ["wandb"]) as run:
        run.log_validation(2, REPORT)
        run.log(2, {"val/test_score/a": 0.5})
    (path,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/val/*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["data_source", "prompt", "response", "ground_truth", "score"]
    assert table["data"] == [["openai/gsm8k", SAMPLE.prompt, SAMPLE.response, "7", 1.0]]


def test_hidden_tokens_are_a_metric_and_a_figure_of_the_file():
    report = ValidationReport(4, {"my/code": dataclasses.replace(CODE, hidden_tokens=1.5)})
    assert report.metrics()["val/hidden_tokens/my/code"] == 1.5
    assert report.as_json()["sources"]["my/code"]["hidden_tokens"] == 1.5
    assert not any("hidden" in name for name in REPORT.metrics())


def test_a_reader_that_is_gone_ends_no_run(tmp_path, track, monkeypatch):
    """rich exits the process where the pipe is closed, as for ``| head``."""
    read, write = os.pipe()
    os.close(read)
    with track(tmp_path, ["console"]) as tracking, open(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        tracking.log_validation(1, REPORT)
        tracking.log(1, {"critic/score/mean": 0.5})
        monkeypatch.undo()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["critic/score/mean"] == 0.5

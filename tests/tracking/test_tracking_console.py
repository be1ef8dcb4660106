"""The console: plain lines, and the live table on a real (pseudo) terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from strop.terminal import is_terminal
from strop.tracking.base import RunInfo
from strop.tracking.console import FigureTable, PlainLines
from strop.tracking.text import format_number, sparkline

METRICS = {
    "critic/score/mean": 0.53,
    "critic/kl": 0.0123,
    "response_length/mean": 6.125,
    "perf/throughput": 2004.4,
    "timing_s/gen": 1.0,
}


def run_info(total_steps=400, start_step=0):
    return RunInfo(Path("."), "project", "experiment", {}, total_steps, start_step)


def test_every_step_is_a_line_with_the_main_figures_and_the_time_left(capsys):
    lines = PlainLines(run_info())
    now = 100.0
    lines._progress.get_time = lambda: now
    for step in (1, 2, 3):
        now += 0.5
        lines.log(step, {**METRICS, "val/test_score/openai/gsm8k": 0.25})
    figures = "reward 0.530  kl 0.012  len 6.125  tok/s 2,004  val openai/gsm8k 0.250"
    assert capsys.readouterr().out.splitlines() == [
        f"step 1/400  {figures}",
        f"step 2/400  {figures}  eta 0:03:19",
        f"step 3/400  {figures}  eta 0:03:19",
    ]


def test_a_kl_that_is_not_measured_is_not_shown(capsys):
    lines = PlainLines(run_info())
    without = {name: value for name, value in METRICS.items() if name != "critic/kl"}
    for kl in (0.0, 0.25):  # of an update in one on-policy step, whose ratios are 1, and in several
        lines.log(1, {**without, "policy/approxkl_avg": kl, "actor/pg_clipfrac": 0.0})
    first, second = capsys.readouterr().out.splitlines()
    assert "kl" not in first
    assert "update kl 0.250" in second


def test_the_time_left_leaves_out_a_validation_before_training(capsys):
    lines = PlainLines(run_info(total_steps=300, start_step=100))
    now = 0.0
    lines._progress.get_time = lambda: now
    for step, took in ((100, 1000.0), (101, 10.0), (102, 10.0), (103, 10.0)):
        now += took
        lines.log(step, {})
    assert capsys.readouterr().out.splitlines()[-1] == "step 103/300  eta 0:32:50"


def test_progress_is_a_line_after_ever_longer_silences(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = PlainLines(run_info())
    written = []
    for second in range(1, 200):
        now = float(second)
        lines.log_progress(f"generate {second}")
        if second == 40:
            lines.log(1, {})
        written += [second] * len(capsys.readouterr().out.splitlines())
    assert written == [10, 30, 40, 80, 160]  # the line of a step ends a silence, too


def test_progress_is_shown_below_the_bar_of_a_live_table():
    live = FigureTable(run_info())
    console = Console(width=100, record=True, file=io.StringIO())
    live.log_progress("generate [12] of 64")
    console.print(live.render())
    live.log_progress("")
    console.print(live.render())
    bar, doing, later = console.export_text().splitlines()
    assert doing == "generate [12] of 64"
    assert bar.startswith("project / experiment")
    assert later.startswith("project / experiment")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (64, "64"),
        (0.12345, "0.123"),
        (-12.34, "-12.3"),
        (2004.4, "2,004"),
        (5e-6, "5.00e-06"),
        (-6.1e7, "-6.10e+07"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "-"),
    ],
)
def test_numbers_are_written_with_three_or_four_figures(value, text):
    assert format_number(value) == text


def test_a_sparkline_shows_the_course_in_means():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, float("nan"), 1, 1], width=2) == "▁█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


LIVE_RUN = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
before = sys.stderr
from strop.tracking import Tracking
with Tracking(["console"], run_dir=Path(sys.argv[1]), project_name="project", experiment_name="my run",
              config={}, total_steps=4) as run:
    for step in range(1, 5):
        run.log(step, {"critic/score/mean": step / 8, "val/test_score/gsm8k": step / 16})
        print("printed at", step)
        logging.getLogger("other").warning("logged [at] %d", step)
assert sys.stderr is before and logging.getLogger().handlers[0].stream is before
print("after the run")
"""


def run_on_terminal(folder: Path, **environment: str) -> str:
    """Return the output of LIVE_RUN on a terminal of 100 columns."""
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50", **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE_RUN, str(folder)], stdout=writer, stderr=writer, env=environment
    )
    os.close(writer)
    chunks = []
    try:
        while chunk := os.read(reader, 65536):
            chunks.append(chunk)
    except OSError:  # how Linux reports that the other end is closed
        pass
    os.close(reader)
    assert process.wait() == 0, b"".join(chunks).decode()
    return b"".join(chunks).decode()


def test_the_live_table_leaves_whole_what_others_print_and_log(tmp_path):
    raw = run_on_terminal(tmp_path)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", raw).splitlines()]
    for step in range(1, 5):
        assert f"printed at {step}" in lines
        assert f"WARNING:other:logged [at] {step}" in lines
    assert lines[-1] == "after the run"
    screen = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).splitlines()]
    last_table = "\n".join(screen[-12:])
    assert re.search(r"project / my run +━+ +step 4/4 +elapsed +0:00:\d\d +left 0:00:00", last_table)
    assert re.search(r"reward +0\.500 +0\.125 +▁▃▆█", last_table)
    assert re.search(r"validation gsm8k +0\.250 +0\.062 +▁▃▆█", last_table)
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")  # the cursor is shown again


def test_a_stream_of_the_programs_own_gets_plain_lines(track, tmp_path, monkeypatch):
    class Tee:  # as of many scripts: it has no isatty
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    tee = Tee()
    monkeypatch.setattr(sys, "stdout", tee)
    with track(tmp_path, ["console"]) as tracking:
        tracking.log(1, {"critic/score/mean": 0.5})
    assert "step 1" in tee.text
    monkeypatch.setattr(sys, "stdout", None)
    assert not is_terminal(sys.stdout)


def test_a_dumb_terminal_gets_plain_lines(tmp_path):
    raw = run_on_terminal(tmp_path, TERM="dumb")
    assert "\x1b" not in raw
    assert "step 4/4  reward 0.500  val gsm8k 0.250" in raw

"""No text of a model, a data set or a user reaches the terminal as control characters or as markup."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.console import Console

from strop.cli.main import main
from strop.rewards.arguments import Sample
from strop.rewards.reward_output import describe_sample
from strop.terminal import printable
from strop.tracking.base import RunInfo
from strop.tracking.console import PlainLines, step_progress
from strop.tracking.report import Estimate, ShownSample, SourceReport, ValidationReport, report_table

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\ud800"
NAMES = ["lighteval[math]/x", "[/red]", "[bold]b", ":smile:", HOSTILE]


def _report(source: str) -> ValidationReport:
    found = SourceReport(1, 1, {"mean@1": Estimate(1.0, 0.0, 1.0)}, 1.0, 0.0, 0.0)
    return ValidationReport(1, {source: found}, [ShownSample(source, source, source, source, 1.0)])


@pytest.mark.parametrize("name", NAMES)
def test_a_data_source_is_shown_as_it_is(name, tmp_path, capsys):
    console = Console(width=200, force_terminal=False)
    console.print(report_table(_report(name), title=f"Evaluation of {name}"))
    run = RunInfo(tmp_path, name, name, {}, total_steps=2)
    console.print(step_progress(run))
    PlainLines(run).log(1, {f"val/test_score/{name}": 1.0})
    shown = capsys.readouterr().out
    assert shown.count(printable(name)) == 5
    assert "\x1b" not in shown


def test_printed_samples_and_errors_cannot_control_the_terminal():
    sample = Sample(HOSTILE, HOSTILE, HOSTILE, None, None)
    text = describe_sample(sample, prompt=HOSTILE, score=1.0, parts={}, error=f"Traceback\n{HOSTILE}")
    assert printable(text) == text
    assert text.count(r"\x1b[31mred\x1b]0;title\x07\x9b2J\ud800") == 5


@pytest.mark.parametrize("raised", ["RuntimeError", "__import__('strop').errors.DataError"])
def test_messages_of_errors_are_escaped(raised):
    """``raised``: an error that nothing handles is a traceback, one of strop's a line."""
    code = f"""
import sys, strop.errors
from strop.cli import main, score
def fail(arguments): raise {raised}("\\x1b[31mred")
score.run = fail
sys.argv = ["strop", "score", "file.parquet"]
sys.exit(main.main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == (1 if raised == "RuntimeError" else 2)
    assert r"Error: \x1b[31mred" in run.stderr
    assert "\x1b" not in run.stderr


def test_score_shows_sources_and_errors_as_they_are(tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "def compute_score(**sample):\n    raise ValueError(sample['solution_str'])\n"
    )
    (tmp_path / "answers.jsonl").write_text(
        '{"data_source": "[/red]", "response": "\\u001b[31mred", "ground_truth": "1"}\n'
    )
    assert main(["score", str(tmp_path / "answers.jsonl"), "--custom", str(tmp_path / "reward.py")]) == 1
    shown = capsys.readouterr().out
    assert "[/red]" in shown
    assert r"\x1b[31mred" in shown
    assert "\x1b" not in shown

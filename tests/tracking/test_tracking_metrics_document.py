"""docs/metrics.md against a real run: whatever is logged or drawn is documented, one line each."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from strop.tracking.curves import PANELS
from strop.tracking.jsonl import read_metrics
from strop.tracking.samples import TOKEN_COLUMNS
from strop.tracking.text import HEADLINES, names_in_order

from runs import make_inputs, overrides, train

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def documented() -> list[str]:
    """The names in the first column of the tables, ``/mean`` and its like joined to their family."""
    names = []
    for row, definition in re.findall(r"^\| (`.*?) \| (.*) \|", DOCUMENT.read_text(), re.MULTILINE):
        if row == "`timing_s/<phase>`":  # the definition lists the phases
            names += [f"timing_s/{phase}" for phase in set(re.findall(r"`(\w+)`", definition))]
            continue
        found = re.findall(r"`([^`]+)`", row)
        family = found[0].rpartition("/")[0]
        names += [found[0], *(family + name if name.startswith("/") else name for name in found[1:])]
    return names


def is_documented(name: str, documented: list[str]) -> bool:
    patterns = (re.sub(r"<\w+>", ".+", re.escape(entry)) for entry in documented)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("documented")
    several = [
        f"actor_rollout_ref.rollout.val_kwargs.{name}" for name in ("n=4", "do_sample=True", "temperature=1")
    ]
    options = [
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"teacher.model.path={folder / 'model'}",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        *several,
    ]
    train(overrides(make_inputs(folder), folder / "run", *options))
    return folder / "run"


def test_every_metric_of_a_run_has_a_line(run_dir, documented):
    logged = names_in_order(read_metrics(run_dir / "metrics.jsonl"))
    assert "critic/kl" in logged
    assert "critic/vf_explained_var" in logged
    assert "val/strop/arithmetic/maj@4" in logged
    assert [name for name in logged if not is_documented(name, documented)] == []


def test_every_column_of_the_samples_has_a_line(run_dir, documented):
    for path in (
        run_dir / "rollouts" / "step_000001.parquet",
        run_dir / "validation" / "step_000002.parquet",
    ):
        columns = pq.read_schema(path).names
        assert "response_ids" in columns
        assert [name for name in columns if not is_documented(name, documented)] == []
    trained = pq.read_schema(run_dir / "rollouts" / "step_000001.parquet").names
    assert [name for name in TOKEN_COLUMNS if name not in trained] == []


def test_what_is_drawn_and_shown_is_what_runs_log(run_dir):
    logged = names_in_order(read_metrics(run_dir / "metrics.jsonl"))
    drawn = [name for panel in PANELS for name in panel.curves.values()]
    supervised = ("train/", "val/", "final/", "grad_norm")
    shown = [line.metric for line in HEADLINES if not line.metric.startswith(supervised)]
    assert [name for name in drawn + shown if name not in logged] == []


def test_no_metric_has_two_lines(documented):
    assert sorted(set(documented)) == sorted(documented)

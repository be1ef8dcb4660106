"""Token lengths at the start of a run: figures by hand, the artists of the picture, and whole runs."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from strop.cli.main import main
from strop.tracking.lengths import (
    ColumnLengths,
    bin_edges,
    binned,
    draw_lengths,
    lengths_figure,
    lengths_table,
)
from strop.trainer import loop
from strop.trainer.loop import token_lengths

import supervised_runs
from messages import mentions
from runs import make_inputs, overrides

PROMPTS, ANSWERS = "data.max_prompt_length", "data.max_response_length"


def column(
    split: str, name: str, lengths: list[int], limit: int, key: str, dropped: int = 0
) -> ColumnLengths:
    return ColumnLengths(split, name, np.bincount(lengths), limit, key, dropped)


def test_figures_of_a_column_by_hand():
    found = column("train", "prompt", [3, 9, 4, 4, 12], 8, PROMPTS, dropped=2)
    assert (found.rows, found.longest, found.over) == (5, 12, 2)
    assert [found.quantile(share) for share in (0.2, 0.5, 0.6, 0.8, 0.95)] == [3, 4, 4, 9, 12]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(lengths_table([found]))
    (line,) = [line for line in capture.get().splitlines() if "train prompt" in line]
    assert line.split() == ["train", "prompt", "5", "4", "12", "12", "8", "2", "2"]


def test_tokens_of_pictures_are_shown_apart():
    found = ColumnLengths("train", "prompt", np.bincount([90, 1400]), 2000, PROMPTS, 0, (64, 1296))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(lengths_table([found]))
    (line,) = [line for line in capture.get().splitlines() if "for pictures" in line]
    assert line.split() == ["for", "pictures", "64", "to", "1,296"]
    (ax,) = lengths_figure([found]).axes
    assert "of these 64 to 1,296 for pictures" in ax.get_legend().get_texts()[0].get_text()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=50), st.booleans())
def test_every_row_is_in_one_bin(lengths, is_log):
    edges = bin_edges(max(lengths), is_log=is_log)
    assert (np.diff(edges) >= 1).all()
    clipped = np.maximum(lengths, 1) if is_log else lengths
    assert binned(np.bincount(lengths), edges).tolist() == np.histogram(clipped, edges)[0].tolist()
    assert binned(np.bincount(lengths), edges).sum() == len(lengths)


def test_the_picture_has_a_panel_per_limit_with_a_line_and_a_curve_per_column():
    names = ("chosen", "rejected")
    columns = [
        column(split, name, [2, 3, 3, 40 if split == "train" else 5], 8 if name == "prompt" else 6, key, 1)
        for split in ("train", "val")
        for name, key in (("prompt", PROMPTS), *((name, ANSWERS) for name in names))
    ]
    figure = lengths_figure(columns)
    prompts, answers = figure.axes
    assert [line.get_xdata()[0] for ax in figure.axes for line in ax.lines] == [8, 6]
    labels = [text.get_text() for text in answers.get_legend().get_texts()]
    assert labels == [
        "train chosen: median 3, 1 (25.0%) over the limit",
        "train rejected: median 3, 1 (25.0%) over the limit",
        "val chosen: median 3",
        "val rejected: median 3",
        "data.max_response_length=6",
    ]
    assert prompts.get_xlim()[1] > 40
    assert figure.get_suptitle() == "Token lengths: dropped 1 of 4 train rows, 1 of 4 val rows"


@pytest.mark.parametrize(("lengths", "limit"), [([7], 1000), ([7], 7), ([0, 0], 4), ([50_000, 1], 8)])
def test_unusual_lengths_are_drawn_with_their_limit_in_sight(tmp_path, lengths, limit):
    columns = [column("train", "prompt", lengths, limit, PROMPTS)]
    (ax,) = lengths_figure(columns).axes
    low, high = ax.get_xlim()
    assert low <= min(limit, *(length or 1 for length in lengths)) <= max(limit, *lengths) <= high
    assert len(np.unique(imread(draw_lengths(columns, tmp_path)))) > 20


def test_lengths_of_answers_are_those_of_the_files(tmp_path):
    inputs = supervised_runs.make_inputs(tmp_path)
    limits = ("data.max_response_length=4", "data.filter_overlong=True")
    options = supervised_runs.overrides(inputs, tmp_path / "run", *limits)
    tree, trainer_cls = supervised_runs.KINDS["train-rm"]
    trainer = supervised_runs.build(trainer_cls, supervised_runs.load_tree(tree, options))
    found = token_lengths({"train": trainer.train_loader, "val": trainer.val_loader, "none": None})
    assert [(entry.split, entry.column) for entry in found] == [
        (split, name) for split in ("train", "val") for name in ("prompt", "chosen", "rejected")
    ]
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    by_name = {entry.column: entry for entry in found if entry.split == "train"}
    for name in ("chosen", "rejected"):  # a token per character, and the end token
        assert by_name[name].counts.tolist() == np.bincount([len(row[name]) + 1 for row in rows]).tolist()
        assert (by_name[name].limit, by_name[name].key) == (4, ANSWERS)
    too_long = sum(max(len(row["chosen"]), len(row["rejected"])) > 3 for row in rows)
    assert {entry.dropped for entry in by_name.values()} == {too_long}
    assert 0 < too_long < len(rows)


def test_a_run_shows_the_lengths_and_survives_a_picture_that_fails(tmp_path, capsys, caplog, monkeypatch):
    inputs = make_inputs(tmp_path)
    monkeypatch.setattr(loop, "draw_curves", lambda folder: folder)
    options = ["trainer.total_training_steps=1", "trainer.test_freq=-1"]
    run = overrides(inputs, tmp_path / "run", *options, "trainer.logger=[console,tensorboard]")
    assert main(["train", *run]) == 0
    assert mentions(capsys.readouterr().out, "Token lengths", "train prompt", "val prompt", "over the limit")
    picture = imread(tmp_path / "run" / "token_lengths.png")

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (image,) = events.Images("data/token_lengths")
    assert (image.height, image.width) == picture.shape[:2]
    assert image.step == 1

    def no_font(columns, folder):
        raise OSError("no font")

    monkeypatch.setattr(loop, "draw_lengths", no_font)
    second = overrides(inputs, tmp_path / "second", *options)
    assert main(["train", *second]) == 0
    assert "the token lengths could not be drawn (no font)" in caplog.text
    assert json.loads((tmp_path / "second" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
    assert not (tmp_path / "second" / "token_lengths.png").exists()

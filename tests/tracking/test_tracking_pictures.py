"""Pictures of samples: in the files, on the page, in the terminal, and where they may not be."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from pathlib import Path

import picture_rows
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strop import pictures
from strop.cli.main import main
from strop.listening import Address
from strop.models import vision
from strop.page.files import RunFiles
from strop.page.server import PageServer
from strop.tracking import thumbnails
from strop.tracking.report import ValidationReport

import runs
from browser import CHROMIUM, DRIVER, Browser, url_of

RECEIVED: list[object] = []
WORDS = re.compile(r"\[picture (\d): ([\w.-]+, )?(56|84) x 56, (\d+) tokens\]")


class Recorder:
    """A tracker that keeps what it gets."""

    def __init__(self, run: object) -> None:
        RECEIVED.append(run)

    def log(self, step: int, metrics: object) -> None:
        RECEIVED.append(metrics)

    def log_validation(self, step: int, report: object) -> None:
        RECEIVED.append(report)

    def log_image(self, step: int, name: str, path: Path) -> None:
        RECEIVED.append((step, name, path))

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one and two pictures a row, some of them data URLs; its log is ``log`` beside it."""
    folder = tmp_path_factory.mktemp("pictures")
    handler = logging.FileHandler(folder / "log")
    logging.getLogger("strop").addHandler(handler)
    keys = ("trainer.test_freq=1", "trainer.log_val_generations=4", "reward_model.val_num_examine=2")
    vision._recent.clear()
    vision.take_work()  # of other runs in this process
    logger = "trainer.logger=[console, tensorboard, test_tracking_pictures:Recorder]"
    try:
        runs.train(picture_rows.options(picture_rows.inputs(folder), folder / "run", logger, *keys))
    finally:
        logging.getLogger("strop").removeHandler(handler)
    return folder / "run"


@pytest.mark.parametrize("kind", ["rollouts", "validation"])
def test_samples_name_their_pictures_in_the_order_of_the_prompt(run, kind):
    rows = pq.read_table(run / kind / "step_000002.parquet").to_pylist()
    for row in rows:
        found = WORDS.findall(row["prompt"])
        assert [int(number) for number, *_ in found] == list(range(1, len(row["images"]) + 1))
        assert [f"{pictures.size(int(name, 16))[0]}" for name in row["images"]] == [
            width for _, _, width, _ in found
        ]
        placeholders = sum(int(tokens) for *_, tokens in found)
        assert placeholders == sum(row["prompt_ids"].count(token) for token in most_common(row["prompt_ids"]))
        assert "<image>" not in row["prompt"]
    named = {name for row in rows for _, name, *_ in WORDS.findall(row["prompt"])}
    assert "" in named  # of data URLs
    assert any(name.endswith(".png, ") for name in named)


def most_common(ids: list[int]) -> list[int]:
    return [max(set(ids), key=ids.count)]


def test_each_picture_of_samples_has_one_thumbnail(run):
    files = [*run.glob("rollouts/*.parquet"), *run.glob("validation/*.parquet")]
    named = {name for file in files for row in pq.read_table(file)["images"].to_pylist() for name in row}
    found = {path.stem: Image.open(path) for path in (run / "pictures").iterdir()}
    assert found.keys() == named
    assert all(
        (image.format, image.size) == ("JPEG", pictures.size(int(name, 16))) for name, image in found.items()
    )


def test_a_thumbnail_is_small_upright_and_in_colour():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGBA", (1200, 600), (250, 10, 10, 255))
    image.save(file := io.BytesIO(), "PNG", exif=exif)
    found = Image.open(io.BytesIO(pictures.thumbnail(pictures.hold(file.getvalue()))))
    assert (found.size, found.mode) == ((128, 256), "RGB")
    assert found.getpixel((5, 5))[0] > 200


def test_samples_trackers_and_logs_hold_no_pixels(run):
    """Peers wrote pixels, or base64 of them, into sample files and trackers."""
    signs = (b"iVBORw0KGgo", b"data:image", b"base64,")
    texts = {path: path.read_bytes() for path in (run / "tensorboard").iterdir()}
    texts |= {path: path.read_bytes() for path in (run / "metrics.jsonl", run / "config.yaml")}
    texts |= {"log": (run.parent / "log").read_bytes(), "tracker": repr(RECEIVED).encode()}
    for path in (*run.glob("rollouts/*.parquet"), *run.glob("validation/*.parquet")):
        texts[path] = json.dumps(pq.read_table(path).to_pylist()).encode()
    assert {name for name, text in texts.items() if any(sign in text for sign in signs)} == set()
    assert b"[picture 1: " in texts["tracker"]
    assert b"[picture 1: " in b"".join(text for name, text in texts.items() if "tensorboard" in str(name))
    reports = [found for found in RECEIVED if isinstance(found, ValidationReport)]
    assert not any("<image>" in sample.prompt for report in reports for sample in report.shown)


def test_trackers_get_the_thumbnails_of_shown_samples_once(run):
    reports = [found for found in RECEIVED if isinstance(found, ValidationReport)]
    images = [found for found in RECEIVED if isinstance(found, tuple) and "token_lengths" not in found[1]]
    assert [len(report.shown) for report in reports] == [4, 4]
    expected = [
        (1, f"val/generations/pictures/{row}_{place}", run / "pictures" / f"{name}.jpg")
        for row, names in enumerate(reports[0].pictures, start=1)
        for place, name in enumerate(names, start=1)
    ]
    assert images == expected != []
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert events.Tags()["images"] == [name for _, name, _ in expected]


def test_metrics_of_pictures_by_the_files_of_samples(run):
    def held(kind: str, step: int) -> list[list[str]]:
        return pq.read_table(run / kind / f"step_{step:06d}.parquet")["images"].to_pylist()

    seen: set[str] = set()
    for step, line in enumerate(map(json.loads, (run / "metrics.jsonl").open()), start=1):
        rows = pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        counts = [sum(int(tokens) for *_, tokens in WORDS.findall(row["prompt"])) for row in rows]
        size = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
        assert line["images/per_prompt"] == sum(len(row["images"]) for row in rows) / len(rows)
        assert line["images/tokens_share"] == pytest.approx(sum(counts) / size)
        new = {
            name for names in (*held("rollouts", step), *held("validation", step)) for name in names
        } - seen
        # three of trial rows, when models are loaded
        assert line["images/processed"] == len(new) + (3 if step == 1 else 0)
        assert 0 < line["timing_s/pictures"] < line["timing_s/step"] + line["timing_s/testing"]
        seen |= new


def test_the_terminal_shows_pictures_in_words(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["view", str(run), "--samples", "4"]) == 0
    found = WORDS.findall(capsys.readouterr().out)
    assert len(found) >= 4


def test_thumbnails_that_no_sample_names_are_deleted_in_time(run, tmp_path, monkeypatch):
    (tmp_path / "rollouts").symlink_to(run / "rollouts")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / f"{1:016x}.jpg").touch()
    table = pq.read_table(run / "rollouts" / "step_000001.parquet")
    for most, is_left in ((1000, True), (3, False)):
        writer = thumbnails.Thumbnails(tmp_path)
        writer._clean_from = most
        writer.add(table)
        writer.close()
        assert (tmp_path / "pictures" / f"{1:016x}.jpg").exists() == is_left
    left = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert left == {name for row in table["images"].to_pylist() for name in row}


def test_a_picture_that_cannot_be_read_any_more_is_a_warning(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pictures, "thumbnail", lambda digest: (_ for _ in ()).throw(OSError("gone")))
    writer = thumbnails.Thumbnails(tmp_path)
    for _ in range(2):
        writer.add(pq.read_table(run / "rollouts" / "step_000001.parquet"))
    writer.close()
    assert caplog.text.count("the page will lack pictures of samples (gone)") == 1


def test_one_picture_that_cannot_be_read_costs_no_other(run, tmp_path, monkeypatch, caplog):
    failures = iter([OSError("gone")])
    own = pictures.thumbnail

    def thumbnail(digest):
        if (error := next(failures, None)) is not None:
            raise error
        return own(digest)

    monkeypatch.setattr(pictures, "thumbnail", thumbnail)
    table = pq.read_table(run / "rollouts" / "step_000001.parquet")
    writer = thumbnails.Thumbnails(tmp_path)
    writer.add(table)
    writer.close()
    named = {name for row in table["images"].to_pylist() for name in row}
    assert len(list((tmp_path / "pictures").glob("*.jpg"))) == len(named) - 1 > 1
    assert caplog.text.count("(gone)") == 1


def test_the_page_has_no_other_file_than_thumbnails(run):
    page = RunFiles(run)
    assert page.pictures(["../config.yaml", "../../etc/passwd", "", "0" * 16]) == {}
    (name,) = page.rows("rollouts", 1, [0])[0]["images"][:1]
    assert page.pictures([name])[name].startswith("data:image/jpeg;base64,")


def test_a_prompt_is_followed_by_its_text_and_its_pictures(run):
    page = RunFiles(run)
    [sample] = page.rows("rollouts", 2, [0])
    rows = [row for step in (1, 2) for row in page.rows("rollouts", step, range(16))]
    same_text = [row for row in rows if row["prompt"] == sample["prompt"]]
    same = [row for row in same_text if row["images"] == sample["images"]]
    assert len(page.history("rollouts", sample["prompt"], sample["images"])) == len(same)


@pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="NOT TESTED IN A BROWSER: chromium, chromedriver missing"
)
def test_a_browser_shows_pictures_above_the_prompt(run, tmp_path):
    main(["report", str(run), "-o", str(tmp_path / "run.html")])
    rows = pq.read_table(run / "rollouts" / "step_000002.parquet").to_pylist()
    listed = sum({row["uid"]: len(row["images"]) for row in rows}.values())
    row = next(number for number, row in enumerate(rows) if len(row["images"]) == 2)
    with PageServer([RunFiles(run)], Address("127.0.0.1", 0, "0123456789abcdef")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Browser(width=390, height=800) as browser:
                for url in (url_of(server), (tmp_path / "run.html").as_uri()):
                    browser.open(f"{url}#samples?run=0&kind=rollouts&step=2")
                    browser.until(f"document.querySelectorAll('.list .pictures img').length === {listed}")
                    browser.open(f"{url}#samples?run=0&kind=rollouts&step=2&row={row}")
                    browser.until("document.querySelectorAll('.detail .pictures img').length === 2")
                    browser.until("[...document.images].every((image) => image.naturalWidth === 84)")
                    blocks = "[...document.querySelectorAll('pre .picture')].map((block) => block.innerText)"
                    found = WORDS.findall(rows[row]["prompt"])
                    assert browser.run(f"return {blocks}") == [
                        f"picture {number}, {tokens} tokens" for number, *_, tokens in found
                    ]
                    assert browser.run("return document.documentElement.scrollWidth <= 390")
                    assert browser.errors() == []
        finally:
            server.shutdown()
            thread.join()

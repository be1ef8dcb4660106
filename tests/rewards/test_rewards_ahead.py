"""Many samples on their way to the process at once: whatever one of them does costs only itself."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rewards_support import none_within

from strop.rewards.worker.feed import Cancelled, Feed
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Outcome, Sample

TIMEOUT_S = 0.4
HANG = "while True: pass"
BEHAVIOURS = {
    "scored": "result = NUMBER",
    "raised": "raise ValueError(NUMBER)",
    "timeout": HANG,
    "crashed": "import os\nos._exit(NUMBER % 100 + 1)",
}


@pytest.fixture
def process(running: Callable[[], list[int]], run_response: Callable[..., Any]) -> Iterator[RewardProcess]:
    with RewardProcess(run_response, timeout_s=30.0) as process:
        process.start()
        yield process


def samples(codes: list[str], log: Path | None = None, more: Any = None) -> Feed:
    """Responses that run their code, with their number for NUMBER, and note it in ``log`` before."""
    note = "" if log is None else f"open({str(log)!r}, 'a').write('NUMBER ')\n"
    texts = [(note + code).replace("NUMBER", str(number)) for number, code in enumerate(codes)]
    return Feed.of([Sample("d", text, None, more) for text in texts])


def noted(log: Path) -> list[int]:
    return [int(number) for number in log.read_text().split()]


@pytest.mark.parametrize("padding", ["", "x" * 70_000])  # hundreds fit into the pipe, or not even one
@pytest.mark.parametrize("seed", range(2))
def test_each_sample_has_its_own_outcome_and_is_scored_once(
    process: RewardProcess, tmp_path: Path, seed: int, padding: str
):
    generator, log = random.Random(seed), tmp_path / "log"
    kinds = generator.choices(list(BEHAVIOURS), [20, 3, 1, 1], k=40)
    kinds[generator.randrange(40)] = "timeout"
    process.timeout_s = TIMEOUT_S
    found = list(process.evaluate_all(samples([BEHAVIOURS[kind] for kind in kinds], log, padding)))
    assert [outcome.status for outcome in found] == kinds
    for number, outcome in enumerate(found):
        if outcome.status == "scored":
            assert outcome == Outcome("scored", float(number))
        elif outcome.status == "raised":
            assert f"ValueError: {number}" in outcome.error
        elif outcome.status == "crashed":
            assert f"exit status {number % 100 + 1}" in outcome.error
    assert noted(log) == list(range(40))


def test_a_deadline_is_each_samples_own(process: RewardProcess):
    process.timeout_s = 0.5
    codes = ["import time\ntime.sleep(0.15)\nresult = 1.0"] * 8
    started = time.monotonic()
    assert [outcome.score for outcome in process.evaluate_all(samples(codes))] == [1.0] * 8
    assert time.monotonic() - started > 2 * process.timeout_s


def test_answers_written_before_a_crash_count(process: RewardProcess, tmp_path: Path):
    """The process is gone, and its pipe closed, before the first answer is read."""
    log = tmp_path / "log"
    slow = "import time\ntime.sleep(0.5)\nresult = NUMBER"  # meanwhile the others fill the pipe
    codes = [slow, *["result = NUMBER"] * 4, "import os\nos._exit(3)", *["result = NUMBER"] * 4000]
    outcomes = process.evaluate_all(samples(codes, log))
    first, child = next(outcomes), process._child
    assert child is not None
    assert none_within(lambda: [child.process.pid] if child.is_alive() else [], 20.0)
    found = [first, *outcomes]
    assert [outcome.score for outcome in found[:5]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert "exit status 3" in found[5].error
    assert [outcome.score for outcome in found[6:]] == [float(number) for number in range(6, 4006)]
    assert noted(log) == list(range(4006))


def test_a_sample_that_cannot_be_sent_keeps_its_place(process: RewardProcess):
    feed = Feed()
    for number in range(4):
        extra = threading.Lock() if number == 2 else None
        feed.add(lambda number=number, extra=extra: Sample("d", f"result = {number}", None, extra))
    feed.end()
    found = list(process.evaluate_all(feed))
    assert [outcome.status for outcome in found] == ["scored", "scored", "raised", "scored"]
    assert "cannot be sent" in found[2].error
    assert found[3].score == 3.0


def test_samples_are_scored_while_others_are_still_to_come(process: RewardProcess):
    feed, found = Feed(), queue.SimpleQueue()

    def collect() -> None:
        for outcome in process.evaluate_all(feed):
            found.put(outcome.score)

    thread = threading.Thread(target=collect)
    thread.start()
    for number in range(3):
        feed.add(lambda number=number: Sample("d", f"result = {number}"))
        assert found.get(timeout=20) == number  # before the next one is there
    feed.end()
    thread.join()


def test_leaving_early_ends_the_process_with_the_samples_it_has(
    process: RewardProcess, running: Callable[[], list[int]]
):
    before = running()
    outcomes = process.evaluate_all(samples(["result = NUMBER"] * 50))
    assert next(outcomes).score == 0.0
    outcomes.close()
    assert none_within(lambda: [one for one in running() if one in before], 2.0)
    assert process.evaluate(Sample("d", "result = 7.0")).score == 7.0


@pytest.mark.parametrize("code", [HANG, "result = 1.0"])
def test_cancelling_does_not_wait_for_the_samples(
    process: RewardProcess, running: Callable[[], list[int]], code: str
):
    before, feed = running(), samples([code] * 100_000)
    threading.Timer(0.3, feed.cancel).start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        list(process.evaluate_all(feed))
    assert time.monotonic() - started < 5
    assert none_within(lambda: [one for one in running() if one in before], 2.0)


def test_ctrl_c_while_samples_are_under_way_mixes_nothing_up(
    process: RewardProcess, monkeypatch: pytest.MonkeyPatch
):
    outcomes = process.evaluate_all(samples(["result = NUMBER"] * 20))
    assert next(outcomes).score == 0.0
    with monkeypatch.context() as patch:

        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("strop.rewards.worker.process.wire.Lane.exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(outcomes)
    assert process.evaluate(Sample("d", "result = 40.0")).score == 40.0

"""Streams of samples through one scoring process and through a pool: a bad sample costs only itself."""

from __future__ import annotations

import logging
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import WORKERS as MODULES
from clocks import Clock
from rewards_support import cut_off_once, none_within

from strop.errors import RewardError
from strop.rewards import batch as scoring
from strop.rewards.arguments import Sample
from strop.rewards.custom import load_custom_reward
from strop.rewards.reward_output import ErrorBudget
from strop.rewards.scorer import Outcome
from strop.rewards.worker.pool import Cancelled, Feed, RewardPool, RewardProcess

from messages import naming
from runs import hashes, make_inputs, metrics, overrides, train

Running = Callable[[], list[int]]
Make = Callable[..., Any]
HANG = "while True: pass"
ASLEEP = "import time\ntime.sleep(600)"  # hangs, and leaves the cores to others
WORKERS = 4
BEHAVIOURS = {
    "scored": "result = NUMBER",
    "raised": "raise ValueError(NUMBER)",
    "timeout": ASLEEP,
    "crashed": "import os\nos._exit(NUMBER % 100 + 1)",
}


@pytest.fixture
def make(running: Running, run_response: Callable[..., Any]) -> Iterator[Make]:
    """Makes a process, or a pool of several, that runs responses; closes them."""
    made = []

    def build(workers: int = WORKERS, function: Any = run_response, timeout_s: float = 60.0) -> Any:
        if workers == 1:
            made.append(RewardProcess(function, timeout_s=timeout_s))
        else:
            made.append(RewardPool(function, num_workers=workers, timeout_s=timeout_s))
        return made[-1]

    yield build
    for scorers in made:
        scorers.close()


@pytest.fixture(params=[1, WORKERS], ids=["process", "pool"])
def workers(request: pytest.FixtureRequest) -> int:
    return request.param


def samples(codes: list[str], log: Path | None = None, extra: Any = None) -> Feed:
    """Responses that run their code, with their number for NUMBER, and append it to ``log`` before."""
    note = "" if log is None else f"open({str(log)!r}, 'a').write('NUMBER ')\n"
    texts = [(note + code).replace("NUMBER", str(number)) for number, code in enumerate(codes)]
    return Feed.of([Sample("d", text, None, extra) for text in texts])


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of the samples that have begun; one that sleeps then is past its deadline."""
    path = tmp_path / "log"

    def sleeps(sample: Sample) -> bool:
        noted = path.read_text().split() if path.exists() else []
        return ASLEEP in sample.solution_str and sample.solution_str.split("'")[5].strip() in noted

    cut_off_once(monkeypatch, sleeps)
    return path


def scores(scorers: Any, codes: list[str]) -> list[float]:
    return [outcome.score for outcome in scorers.evaluate_all(samples(codes))]


def meeting(folder: Path, count: int) -> str:
    """Code that goes on only when ``count`` samples are being scored together."""
    return (
        "import os, time\n"
        f"open(os.path.join({str(folder)!r}, 'NUMBER'), 'w').close()\n"
        f"while len(os.listdir({str(folder)!r})) < {count}: time.sleep(0.01)\n"
        "result = NUMBER"
    )


# 70,000 characters: not even one sample fits into the pipe.
@pytest.mark.fast("1-4-", "0-1-padding1")
@pytest.mark.parametrize(("workers", "padding"), [(1, ""), (1, "x" * 70_000), (WORKERS, "")])
@pytest.mark.parametrize("seed", range(2))
def test_each_sample_has_its_own_outcome_and_is_scored_once(
    make: Make, log: Path, workers: int, padding: str, seed: int
):
    generator = random.Random(seed)
    kinds = generator.choices(list(BEHAVIOURS), [20, 3, 1, 1], k=60)
    kinds[generator.randrange(60)] = "timeout"
    feed = samples([BEHAVIOURS[kind] for kind in kinds], log, padding)
    found = list(make(workers).evaluate_all(feed))
    assert [outcome.status for outcome in found] == kinds
    for number, outcome in enumerate(found):
        if outcome.status == "scored":
            assert outcome == Outcome("scored", float(number))
        elif outcome.status == "raised":
            assert f"ValueError: {number}" in outcome.error
        elif outcome.status == "crashed":
            assert f"exit status {number % 100 + 1}" in outcome.error
    assert sorted(map(int, log.read_text().split())) == list(range(60))


def test_samples_are_scored_while_others_are_still_to_come(make: Make, workers: int):
    feed, found, scorers = Feed(), queue.SimpleQueue(), make(workers)

    def collect() -> None:
        for outcome in scorers.evaluate_all(feed):
            found.put(outcome.score)

    thread = threading.Thread(target=collect)
    thread.start()
    for number in range(6):
        feed.add(lambda number=number: Sample("d", f"result = {number}"))
        assert found.get(timeout=60) == number  # before the next one is there
    feed.end()
    thread.join()


def test_a_sample_that_cannot_be_sent_keeps_its_place(make: Make, workers: int):
    feed = Feed.of(
        [
            Sample("d", f"result = {number}", None, threading.Lock() if number == 2 else None)
            for number in range(4)
        ]
    )
    found = list(make(workers).evaluate_all(feed))
    assert [outcome.status for outcome in found] == ["scored", "scored", "raised", "scored"]
    assert "cannot be sent" in found[2].error
    assert found[3].score == 3.0


def test_a_sample_that_cannot_be_made_stops_the_scoring(make: Make, running: Running, workers: int):
    def fail() -> Sample:
        raise LookupError("no such token")

    feed = Feed()
    for _ in range(max(1, workers - 1)):
        feed.add(lambda: Sample("d", HANG))
    feed.add(fail)
    feed.end()
    with pytest.raises(LookupError, match=naming("no such token")):
        list(make(workers).evaluate_all(feed))
    assert none_within(running, 60.0)


@pytest.mark.parametrize(("workers", "code"), [(1, HANG), (1, "result = 1.0"), (WORKERS, HANG)])
def test_cancelling_does_not_wait_for_the_samples(make: Make, running: Running, workers: int, code: str):
    scorers, feed = make(workers, timeout_s=600.0), samples([code] * 100_000)
    scorers.start()
    threading.Timer(0.3, feed.cancel).start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        list(scorers.evaluate_all(feed))
    assert time.monotonic() - started < 300
    assert none_within(running, 60.0)  # each had a sample
    assert scores(scorers, ["result = 7.0"]) == [7.0]


def test_leaving_early_ends_the_processes_that_have_samples(make: Make, running: Running, workers: int):
    scorers = make(workers)
    outcomes = scorers.evaluate_all(samples(["result = 3.0", *[HANG] * 20]))
    assert next(outcomes).score == 3.0
    outcomes.close()
    assert none_within(running, 60.0)
    assert scores(scorers, ["result = 7.0"]) == [7.0]


def test_ctrl_c_while_samples_are_scored_mixes_nothing_up(make: Make, running: Running, workers: int):
    scorers, before = make(workers), signal.signal(signal.SIGINT, signal.default_int_handler)
    outcomes = scorers.evaluate_all(samples(["result = NUMBER", *[HANG] * 20]))
    try:
        assert next(outcomes).score == 0.0
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(outcomes)
    finally:
        signal.signal(signal.SIGINT, before)
    assert none_within(running, 60.0)
    assert scores(scorers, ["result = 100 + NUMBER"] * 20) == [*range(100, 120)]


def test_a_function_that_cannot_be_loaded_in_the_process_stops_the_run(
    make: Make, tmp_path: Path, workers: int
):
    path = tmp_path / "module_of_a_test.py"
    path.write_text("def compute_score(**sample):\n    return 1.0\n")
    scorers = make(workers, load_custom_reward(str(path)))
    path.unlink()
    with pytest.raises(RewardError, match=naming("no such file")):
        scorers.start()
    with pytest.raises(RewardError, match=naming("no such file")):
        list(scorers.evaluate_all(samples([""])))


# ------------------------------------------------------------------------------------------------ one process


def test_each_sample_has_a_separate_deadline(make: Make, monkeypatch: pytest.MonkeyPatch):
    process, clock = make(1, timeout_s=60.0), Clock(monkeypatch, *MODULES)
    for outcome in process.evaluate_all(samples(["import time\ntime.sleep(0.3)\nresult = 1.0"] * 5)):
        assert outcome.score == 1.0
        clock.passed += 40.0
    assert clock.passed > 2 * process.timeout_s


def test_answers_written_before_a_crash_count(make: Make, tmp_path: Path):
    """The process is gone, and its pipe closed, before the first answer is read."""
    process, log = make(1), tmp_path / "log"
    slow = "import time\ntime.sleep(0.5)\nresult = NUMBER"  # meanwhile the others fill the pipe
    codes = [slow, *["result = NUMBER"] * 4, "import os\nos._exit(3)", *["result = NUMBER"] * 4000]
    outcomes = process.evaluate_all(samples(codes, log))
    first, child = next(outcomes), process._child
    assert none_within(lambda: [child.process.pid] if child.is_alive() else [], 60.0)
    found = [first, *outcomes]
    assert "exit status 3" in found.pop(5).error
    assert [outcome.score for outcome in found] == [number for number in range(4006) if number != 5]
    assert log.read_text().split() == [str(number) for number in range(4006)]


# ----------------------------------------------------------------------------------------------------- a pool


def test_a_slow_first_sample_stops_none_of_the_others(make: Make, tmp_path: Path):
    """The first sample waits until all others are scored, 30 by each of the other processes."""
    others = 30 * (WORKERS - 1)
    waits = (
        f"import os, time\nwhile len(os.listdir({str(tmp_path)!r})) < {others}: time.sleep(0.01)\nresult = -1"
    )
    note = f"open({str(tmp_path)!r} + '/NUMBER', 'w').close()\nresult = NUMBER"
    assert scores(make(), [waits, *[note] * others]) == [-1.0, *range(1, others + 1)]


def test_no_sample_waits_behind_one_that_hangs(make: Make, tmp_path: Path):
    """All but one process hang for ever; that one scores all the rest."""
    hangs, rest = WORKERS - 1, 40
    note = f"open({str(tmp_path)!r} + '/NUMBER', 'w').close()"
    feed = samples([ASLEEP] * hangs + [note] * rest)

    def cancel_when_the_rest_is_scored() -> None:
        none_within(lambda: [] if len(os.listdir(tmp_path)) == rest else [1], 60)
        feed.cancel()

    threading.Thread(target=cancel_when_the_rest_is_scored).start()
    with pytest.raises(Cancelled):
        list(make().evaluate_all(feed))
    assert len(os.listdir(tmp_path)) == rest


def test_when_all_hang_all_are_cut_off_and_the_next_ones_are_scored(make: Make, log: Path):
    codes = [ASLEEP] * (WORKERS + 1) + ["result = NUMBER"] * 3
    found = list(make().evaluate_all(samples(codes, log)))
    assert [outcome.status for outcome in found] == ["timeout"] * (WORKERS + 1) + ["scored"] * 3


def test_processes_start_when_samples_wait_are_kept_and_end_at_close_with_their_children(
    make: Make, running: Running, tmp_path: Path
):
    pool = make()
    pool.start()
    assert len(running()) == 1
    together = meeting(tmp_path, WORKERS)
    assert scores(pool, [together] * WORKERS) == [0.0, 1.0, 2.0, 3.0]
    started = set(running())
    assert len(started) == WORKERS
    assert scores(pool, ["result = 1.0"] * 40) == [1.0] * 40
    assert set(running()) == started
    for path in tmp_path.iterdir():
        path.unlink()
    stray = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    scores(pool, [stray + together] * WORKERS)
    assert len(running()) == 2 * WORKERS
    pool.close()
    assert running() == []
    assert scores(pool, ["result = 7.0"]) == [7.0]


def test_a_long_wait_for_scores_is_logged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The last sample ends only when a line of the log has counted the other two."""
    monkeypatch.setattr(scoring, "_LOG_EVERY_S", 0.05)
    caplog.set_level(logging.INFO, logger="strop")
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    job = scoring.ScoringJob(make(), ErrorBudget(0.0), n_rows=4, n_scored=3)
    for row, code in enumerate(["result = 1.0", "result = 2.0", waits]):
        job.add(row, lambda code=code: Sample("d", code))
    job.end()

    def watch() -> None:
        none_within(lambda: [] if "2 of 3" in caplog.text else [1], 60)
        (tmp_path / "go").touch()

    threading.Thread(target=watch).start()
    found = [None if outcome is None else outcome.score for outcome in job.outcomes()]
    assert found == [1.0, 2.0, 1.0, None]
    assert "2 of 3" in caplog.text


AT_TIMES_CRASHES = """
import os, time, zlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = zlib.crc32(solution_str.encode())
    if extra_info["index"] == 3:
        os._exit(3)
    time.sleep(number % 7 / 100)  # they end in another order than they began
    return {"score": number % 100 / 100, "length": len(solution_str)}
"""


@pytest.mark.slow
def test_a_run_is_equal_with_many_processes_and_with_one(tmp_path: Path):
    inputs = make_inputs(tmp_path / "inputs", rows=8)
    (tmp_path / "reward.py").write_text(AT_TIMES_CRASHES)
    keys = [
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "reward_model.max_error_rate=1",
        "reward_model.num_workers=3",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    found = {}
    for name in ("naive", "prime"):
        options = overrides(inputs, tmp_path / name, *keys, f"reward_model.reward_manager={name}")
        trainer = train(options)
        found[name] = hashes(trainer), metrics(tmp_path / name)
    assert found["prime"] == found["naive"]
    (line,) = found["prime"][1]
    assert line["reward/errors"] == 2  # one prompt of eight, with two samples


HOSTILE = """
import os, sys

def forge():
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b'{"status": "scored", "score": 100.0, "parts": {}, "error": ""}\\n')
        except OSError:
            pass
    return 1.0

BEHAVIOURS = [
    lambda: float("nan"),
    lambda: {"score": 1.0, "part": -float("inf")},
    forge,
    lambda: {"score": 1.0, "a" + chr(0xd800): 1.0},
    lambda: sys.modules.clear(),
    lambda: os.closerange(3, 4096),
    lambda: float(len(bytes(400_000_000))),
]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    import decimal, html
    if extra_info["index"] < len(BEHAVIOURS):
        if CALM:
            raise ValueError("calm")
        return BEHAVIOURS[extra_info["index"]]()
    return float(len(solution_str))
"""


@pytest.mark.parametrize("manager", ["naive", pytest.param("prime", marks=pytest.mark.slow)])
def test_a_run_with_hostile_scorers_is_that_in_which_these_samples_raise(tmp_path: Path, manager: str):
    inputs = make_inputs(tmp_path / "inputs", rows=8)
    found = {}
    for name in ("hostile", "calm"):
        (tmp_path / f"{name}.py").write_text(HOSTILE.replace("CALM", str(name == "calm")))
        options = overrides(
            inputs,
            tmp_path / name,
            f"custom_reward_function.path={tmp_path / name}.py",
            f"reward_model.reward_manager={manager}",
            "reward_model.max_error_rate=1",
            "reward_model.num_workers=2",
            "reward_model.memory_limit_mb=300",
            "reward_model.timeout_s=60",
            "trainer.total_training_steps=1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
        )
        trainer = train(options)
        found[name] = hashes(trainer), metrics(tmp_path / name)
    assert found["hostile"] == found["calm"]
    (line,) = found["hostile"][1]
    assert line["reward/errors"] == 14  # seven prompts of eight, with two samples

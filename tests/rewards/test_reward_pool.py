"""Several processes share the samples: whatever one of them does costs only its own sample."""

from __future__ import annotations

import logging
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rewards_support import none_within

from strop.config.load import load_config
from strop.errors import ConfigError, RewardError
from strop.rewards import batch as scoring
from strop.rewards.batch import ErrorBudget
from strop.rewards.custom import load_custom_reward
from strop.rewards.manager import RewardManager, load_reward_manager
from strop.rewards.router import BuiltInScorer
from strop.rewards.worker.feed import Cancelled, Feed
from strop.rewards.worker.pool import RewardPool, default_num_workers
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Outcome, Sample

from messages import mentions, naming
from runs import hashes, make_inputs, metrics, overrides, train

Running = Callable[[], list[int]]
HANG = "while True: pass"
ASLEEP = (
    "import time\ntime.sleep(600)"  # a deadline is of wall-clock time: this one leaves the cores to others
)
WORKERS = 4
BEHAVIOURS = {
    "scored": "result = NUMBER",
    "raised": "raise ValueError(NUMBER)",
    "timeout": ASLEEP,
    "crashed": "import os\nos._exit(NUMBER % 100 + 1)",
}


@pytest.fixture
def make(running: Running, run_response: Callable[..., Any]) -> Iterator[Callable[..., RewardPool]]:
    """Makes pools that run responses, and closes them."""
    made = []

    def build(num_workers: int = WORKERS, timeout_s: float = 60.0) -> RewardPool:
        made.append(RewardPool(run_response, num_workers=num_workers, timeout_s=timeout_s))
        return made[-1]

    yield build
    for pool in made:
        pool.close()


def samples(codes: list[str]) -> Feed:
    """Responses that run their code, with their number for NUMBER."""
    return Feed.of([Sample("d", code.replace("NUMBER", str(number))) for number, code in enumerate(codes)])


def meeting(folder: Path, count: int) -> str:
    """Code that goes on only when ``count`` samples are under way together."""
    return (
        "import os, time\n"
        f"open(os.path.join({str(folder)!r}, 'NUMBER'), 'w').close()\n"
        f"while len(os.listdir({str(folder)!r})) < {count}: time.sleep(0.01)\n"
        "result = NUMBER"
    )


@pytest.mark.parametrize("seed", range(2))
def test_each_sample_has_its_own_outcome_in_its_own_place(make: Callable[..., RewardPool], seed: int):
    generator = random.Random(seed)
    kinds = generator.choices(list(BEHAVIOURS), [20, 3, 1, 1], k=80)
    kinds[generator.randrange(80)] = "timeout"
    found = list(make(timeout_s=1.0).evaluate_all(samples([BEHAVIOURS[kind] for kind in kinds])))
    assert [outcome.status for outcome in found] == kinds
    for number, outcome in enumerate(found):
        if outcome.status == "scored":
            assert outcome == Outcome("scored", float(number))
        elif outcome.status == "raised":
            assert f"ValueError: {number}" in outcome.error
        elif outcome.status == "crashed":
            assert f"exit status {number % 100 + 1}" in outcome.error


def test_as_many_samples_are_under_way_as_there_are_workers(make: Callable[..., RewardPool], tmp_path: Path):
    found = list(make().evaluate_all(samples([meeting(tmp_path, WORKERS)] * WORKERS)))
    assert [outcome.score for outcome in found] == [0.0, 1.0, 2.0, 3.0]


def test_a_slow_first_sample_stops_none_of_the_others(make: Callable[..., RewardPool], tmp_path: Path):
    """It waits until all others are scored, 30 of them to each of the other processes."""
    others = 30 * (WORKERS - 1)
    waits = (
        f"import os, time\nwhile len(os.listdir({str(tmp_path)!r})) < {others}: time.sleep(0.01)\nresult = -1"
    )
    note = f"open({str(tmp_path)!r} + '/NUMBER', 'w').close()\nresult = NUMBER"
    found = list(make().evaluate_all(samples([waits, *[note] * others])))
    assert [outcome.score for outcome in found] == [-1.0, *range(1, others + 1)]


def test_no_sample_waits_behind_one_that_hangs(make: Callable[..., RewardPool], tmp_path: Path):
    """All but one process hang for ever; that one scores all the rest."""
    hangs, rest = WORKERS - 1, 40
    note = f"open({str(tmp_path)!r} + '/NUMBER', 'w').close()"
    feed = samples([ASLEEP] * hangs + [note] * rest)
    threading.Thread(target=_cancel_when, args=(feed, lambda: len(os.listdir(tmp_path)) == rest)).start()
    with pytest.raises(Cancelled):
        list(make().evaluate_all(feed))
    assert len(os.listdir(tmp_path)) == rest


def _cancel_when(feed: Feed, is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_reached() and time.monotonic() < deadline:
        time.sleep(0.02)
    feed.cancel()


def test_when_all_hang_all_are_cut_off_and_the_next_ones_are_scored(make: Callable[..., RewardPool]):
    codes = [HANG] * (WORKERS + 1) + ["result = NUMBER"] * 3
    found = list(make(timeout_s=1.0).evaluate_all(samples(codes)))
    assert [outcome.status for outcome in found] == ["timeout"] * (WORKERS + 1) + ["scored"] * 3


def test_samples_are_scored_while_others_are_still_to_come(make: Callable[..., RewardPool]):
    feed, found, pool = Feed(), queue.SimpleQueue(), make()

    def collect() -> None:
        for outcome in pool.evaluate_all(feed):
            found.put(outcome.score)

    thread = threading.Thread(target=collect)
    thread.start()
    for number in range(6):
        feed.add(lambda number=number: Sample("d", f"result = {number}"))
        assert found.get(timeout=60) == number  # before the next one is there
    feed.end()
    thread.join()


def test_processes_are_kept_and_start_when_samples_wait_for_them(
    make: Callable[..., RewardPool], running: Running, tmp_path: Path
):
    pool = make()
    pool.start()
    assert len(running()) == 1
    list(pool.evaluate_all(samples([meeting(tmp_path, WORKERS)] * WORKERS)))
    started = set(running())
    assert len(started) == WORKERS
    list(pool.evaluate_all(samples(["result = 1.0"] * 40)))
    assert set(running()) == started


def test_cancelling_does_not_wait_for_the_samples(make: Callable[..., RewardPool], running: Running):
    pool, feed = make(), samples([HANG] * 100)
    threading.Thread(target=_cancel_when, args=(feed, lambda: len(running()) == WORKERS)).start()
    with pytest.raises(Cancelled):
        list(pool.evaluate_all(feed))
    assert none_within(running, 2.0)  # each had a sample
    assert [outcome.score for outcome in pool.evaluate_all(samples(["result = 7.0"]))] == [7.0]


def test_leaving_early_ends_what_is_under_way(make: Callable[..., RewardPool], running: Running):
    pool = make()
    outcomes = pool.evaluate_all(samples(["result = 3.0", *[HANG] * 20]))
    assert next(outcomes).score == 3.0
    outcomes.close()
    assert none_within(running, 2.0)
    assert [outcome.score for outcome in pool.evaluate_all(samples(["result = 7.0"]))] == [7.0]


def test_ctrl_c_while_samples_are_under_way_mixes_nothing_up(
    make: Callable[..., RewardPool], running: Running
):
    def press() -> None:
        none_within(lambda: [] if len(running()) == WORKERS else [1], 60)
        os.kill(os.getpid(), signal.SIGINT)

    pool, before = make(), signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(pool.evaluate_all(samples(["result = NUMBER", *[HANG] * 20])))
    finally:
        signal.signal(signal.SIGINT, before)
    assert none_within(running, 2.0)
    codes = ["result = 100 + NUMBER"] * 20
    assert [outcome.score for outcome in pool.evaluate_all(samples(codes))] == [*range(100, 120)]


def test_a_sample_that_cannot_be_made_stops_the_scoring(make: Callable[..., RewardPool], running: Running):
    feed = Feed()
    for _ in range(WORKERS - 1):
        feed.add(lambda: Sample("d", HANG))

    def fail() -> Sample:
        raise LookupError("no such token")

    feed.add(fail)
    feed.end()
    with pytest.raises(LookupError, match=naming("no such token")):
        list(make().evaluate_all(feed))
    assert none_within(running, 2.0)


def test_closing_leaves_no_process_and_no_child_of_one(
    make: Callable[..., RewardPool], running: Running, tmp_path: Path
):
    stray = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    pool = make()
    list(pool.evaluate_all(samples([stray + meeting(tmp_path, WORKERS)] * WORKERS)))
    assert len(running()) == 2 * WORKERS
    pool.close()
    assert running() == []
    assert [outcome.score for outcome in pool.evaluate_all(samples(["result = 7.0"]))] == [7.0]


def test_a_function_that_cannot_be_loaded_there_stops_the_run(tmp_path: Path, running: Running):
    path = tmp_path / "module_of_a_test.py"
    path.write_text("def compute_score(**sample):\n    return 1.0\n")
    reward = load_custom_reward(str(path))
    path.unlink()
    pool = RewardPool(reward, num_workers=WORKERS)
    with pytest.raises(RewardError, match=naming("no such file")):
        pool.start()
    with pytest.raises(RewardError, match=naming("no such file")):
        list(pool.evaluate_all(samples([""])))
    pool.close()


def test_prime_is_the_manager_of_several_processes(tokenizer: Any):
    keys = ["reward_model.reward_manager=prime", "reward_model.num_workers=3", "reward_model.timeout_s=4"]
    manager = load_reward_manager(load_config(keys), tokenizer, 0)
    assert type(manager) is RewardManager
    assert isinstance(manager._process, RewardPool)
    assert [process.timeout_s for process in manager._process._processes] == [4.0] * 3
    assert len(os.sched_getaffinity(0)) >= default_num_workers() >= 1
    with pytest.raises(ConfigError, match=r"'primes' .*'prime'"):
        load_reward_manager(load_config(["reward_model.reward_manager=primes"]), tokenizer, 0)


def test_what_a_scorer_needs_is_loaded_before_the_clock_starts(running: Running):
    """Else many processes that load at once on few cores would all be cut off, and load again."""
    pytest.importorskip("math_verify")
    scorer = BuiltInScorer("math", {"method": "math-verify"})

    def look(scorer: BuiltInScorer = scorer, **sample: Any) -> float:
        return float("sympy" in sys.modules)

    with RewardProcess(look) as process:
        assert process.evaluate(Sample("d", "")).score == 1.0


def test_a_long_wait_for_scores_is_told(
    make: Callable[..., RewardPool],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
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
        none_within(lambda: [] if "2 of 3 samples are done" in caplog.text else [1], 60)
        (tmp_path / "go").touch()

    threading.Thread(target=watch).start()
    scores = [None if outcome is None else outcome.score for outcome in job.outcomes()]
    assert scores == [1.0, 2.0, 1.0, None]
    assert mentions(caplog.text, "2 of 3")


AT_TIMES_CRASHES = """
import os, time, zlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = zlib.crc32(solution_str.encode())
    if extra_info["index"] == 3:
        os._exit(3)
    time.sleep(number % 7 / 100)  # they end in another order than they began
    return {"score": number % 100 / 100, "length": len(solution_str)}
"""


def test_a_run_learns_the_same_from_many_processes_as_from_one(tmp_path: Path):
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

"""Compare several scoring processes (reward_model.reward_manager=prime) with one (naive).

    python benchmarks/rewards.py --data ../shared/data/math_test/test.jsonl [--workers 8] [--out FILE]

Scores answers to MATH, half of them correct, as in a training run: a batch of 2,000 is submitted at once. The
scorers are the real ones; the cases differ in the cost of a sample:

- text rule: the default for MATH, a few microseconds;
- math-verify: sympy compares values, milliseconds;
- waiting: the text rule after a wait of 20 ms, as for a remote judge;
- faults: the text rule; 1% of the samples hang (half loop, half sleep) and 1% crash the process.

"ideal" is the lower bound by the samples' own cost: their CPU seconds (measured in this process) divided over
the cores in use, their waits divided over the workers, and the timeouts that one worker must wait for in
sequence. Every score is compared with a direct call of the function; in the faults case all samples without
a fault must be scored, and no others. No process may survive the benchmark. Figures are wall-clock seconds,
medians over rounds that alternate between one and several processes; the faults case has one round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from machine import description

from strop.rewards.arguments import Sample
from strop.rewards.batch import ScoringJob
from strop.rewards.reward_output import ErrorBudget
from strop.rewards.router import BuiltInScorer
from strop.rewards.scorer import Outcome
from strop.rewards.worker.pool import RewardPool

WAIT_S = 0.02
FAULTS = {0: "loop", 100: "sleep", 50: "exit", 150: "segfault"}
"""Sample number modulo 200 -> fault."""
_TOKEN = "STROP_BENCHMARK"


class Case(NamedTuple):
    """Workload of one table row."""

    name: str
    method: str = "hendrycks"
    wait_s: float = 0.0
    faults: bool = False

    def scorer(self) -> BuiltInScorer:
        """Return the scoring function."""
        return BuiltInScorer("math", {"method": self.method})


CASES = (
    Case("text rule"),
    Case("math-verify", method="math-verify"),
    Case("waiting 20 ms", wait_s=WAIT_S),
    Case("1% hang, 1% crash", faults=True),
)


def score(*, scorer: BuiltInScorer, wait_s: float, extra_info: Any, **sample: Any) -> float:
    """Call the scorer after the fault named by ``extra_info``, if any, and a wait."""
    fault = extra_info
    if fault == "loop":
        while True:
            pass
    if fault == "sleep":
        time.sleep(1e6)
    if fault == "exit":
        os._exit(3)
    if fault == "segfault":
        import ctypes

        ctypes.string_at(0)
    if wait_s:
        time.sleep(wait_s)
    return scorer(**sample)


def answers(path: Path, count: int, *, faults: bool) -> list[Sample]:
    """Pair solutions with ground truths: even rows with their own, odd rows with the next problem's."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][: count + 1]
    solutions = [row["solution"] for row in rows]
    return [
        Sample(
            "lighteval/MATH",
            solutions[number],
            solutions[number + number % 2],
            FAULTS.get(number % 200) if faults else None,
        )
        for number in range(count)
    ]


def in_this_process(samples: list[Sample], case: Case) -> tuple[list[float | None], float]:
    """Score in this process; return the scores (None for a fault) and the CPU seconds."""
    function = functools.partial(score, scorer=case.scorer(), wait_s=0.0)
    function(**samples[1]._asdict() | {"extra_info": None})  # what is imported once
    started = time.process_time()
    scores = [None if sample.extra_info else function(**sample._asdict()) for sample in samples]
    return scores, time.process_time() - started


def timed(evaluator: RewardPool, samples: list[Sample]) -> tuple[list[Outcome | None], float]:
    """Score a batch; return the outcomes and the wall-clock seconds."""
    started = time.monotonic()
    job = ScoringJob(evaluator, ErrorBudget(1.0), n_rows=len(samples), n_scored=len(samples))
    for row, sample in enumerate(samples):
        job.add(row, lambda sample=sample: sample)
    job.end()
    return job.outcomes(), time.monotonic() - started


def wrong(outcomes: list[Outcome | None], expected: list[float | None]) -> int:
    """Count the outcomes that differ from the expected scores."""
    found = [outcome.score if outcome and not outcome.error else None for outcome in outcomes]
    return sum(one != other for one, other in zip(found, expected, strict=True))


def compare(case: Case, samples: list[Sample], *, workers: int, timeout_s: float, rounds: int) -> str:
    """Measure a case; return its table row."""
    function = functools.partial(score, scorer=case.scorer(), wait_s=case.wait_s)
    expected, cpu_s = in_this_process(samples, case)
    makers: dict[str, Callable[[], RewardPool]] = {
        "naive": lambda: RewardPool(function, num_workers=1, timeout_s=timeout_s),
        "prime": lambda: RewardPool(function, num_workers=workers, timeout_s=timeout_s),
    }
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    mistakes = dict.fromkeys(makers, 0)
    for _ in range(rounds):
        for name, make in makers.items():
            evaluator = make()
            evaluator.start()
            if not case.faults:  # of a run only the first batch pays for imports
                timed(evaluator, samples[: 4 * workers])
            outcomes, elapsed = timed(evaluator, samples)
            seconds[name].append(elapsed)
            mistakes[name] += wrong(outcomes, expected)
            evaluator.close()
    naive, prime = (statistics.median(seconds[name]) for name in makers)
    hangs = sum(sample.extra_info in ("loop", "sleep") for sample in samples)
    ideal = (
        cpu_s / min(workers, len(os.sched_getaffinity(0)))
        + case.wait_s * len(samples) / workers
        + timeout_s * math.ceil(hangs / workers)
    )
    cells = [
        case.name,
        f"{cpu_s:.2f}",
        f"{naive:.2f}",
        f"{prime:.2f}",
        f"{naive / prime:.2f}",
        f"{ideal:.2f}",
        f"{prime / ideal:.2f}",
        f"{mistakes['naive']} / {mistakes['prime']}",
    ]
    return "| " + " | ".join(cells) + " |"


def left_behind(token: str) -> list[int]:
    """Return the ids of live descendants, found by ``token`` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or it is another user's
            if token.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    token = os.environ[_TOKEN] = uuid.uuid4().hex
    lines = [
        "# Scoring processes: one and several",
        "",
        "`python benchmarks/rewards.py`, whose first lines say what is measured; other work was running on "
        "the machine.",
        "",
        description("math-verify", threads=1),
        f"{args.samples} answers to MATH, {args.workers} workers, {len(os.sched_getaffinity(0))} of the "
        f"cores used, a deadline of {args.timeout:g} s, medians of {args.rounds}",
        "",
        "| a sample | CPU s | s, naive | s, prime | naive / prime | s, ideal | prime / ideal | wrong |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in CASES:
        if case.name in args.cases:
            samples = answers(args.data, args.samples, faults=case.faults)
            rounds = 1 if case.faults else args.rounds
            lines.append(compare(case, samples, workers=args.workers, timeout_s=args.timeout, rounds=rounds))
            print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", f"Processes left at the end: {len(left_behind(token))}.", ""]
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()

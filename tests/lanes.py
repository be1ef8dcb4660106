"""The suite as two runs of pytest at the same time: tests that compute, and tests that mostly wait.

Three workers compute on two cores, as each waits at times for a process that starts; three more wait for
deadlines and processes meanwhile. Those that wait have the cores first: ranks that exchange messages would
queue at each one, and a run of 20 s took minutes. Arguments go to both: ``python tests/lanes.py tests/config
-x``, or ``--all`` for the slow tests too, and new random examples. The slowest tests of each run are printed
at its end. The last line counts the skipped ones, with what they need.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

WORKERS = {"computing": 3, "waiting": 3}
NICENESS = {"computing": 19, "waiting": 0}  # 19: whoever waits gets a core at once; 10 was 7 times as slow
NO_TESTS_COLLECTED = 5


def main(arguments: list[str]) -> int:
    slow = "--all" in arguments
    arguments = [argument for argument in arguments if argument != "--all"]
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder) / name for name in WORKERS}
        lanes = {}
        for name, workers in WORKERS.items():
            command = [
                *("nice", "-n", str(NICENESS[name])),
                *(sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile"),
                *("--no-loadscope-reorder", "-m", "slow or not slow" if slow else "not slow"),
                *("--hypothesis-profile", "new" if slow else "same"),
                *("--durations", "10", "-rsfE", "-p", "no:cacheprovider", *arguments),
            ]
            with outputs[name].open("w") as output:
                # Ray's workers would have the niceness 15, and hardly get a core beside tests that compute
                environment = {**os.environ, "STROP_TEST_LANE": name, "RAY_worker_niceness": "0"}
                # containers often set it, and each of a thousand processes would compile strop again
                environment.pop("PYTHONDONTWRITEBYTECODE", None)
                lanes[name] = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=environment
                )
        for name, lane in lanes.items():
            threading.Thread(target=_progress, args=(name, lane, outputs[name]), daemon=True).start()
        statuses = {name: lane.wait() for name, lane in lanes.items()}
        for name, output in outputs.items():
            print(f"\n===== tests that are {name}\n{output.read_text()}", flush=True)
        print(skipped(output.read_text() for output in outputs.values()), flush=True)
    return exit_status(statuses.values())


def exit_status(statuses: Iterable[int]) -> int:
    """Return 1 if a lane failed, or was killed: the status is then negative."""
    return int(any(status not in (0, NO_TESTS_COLLECTED) for status in statuses))


def skipped(outputs: Iterable[str]) -> str:
    """Return one line with the number of skipped tests and their reasons, from pytest's lines ``-rs``."""
    reasons = Counter()
    for output in outputs:
        for count, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)$", output, re.MULTILINE):
            reasons[reason] += int(count)
    found = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
    return f"Skipped tests: {reasons.total()}" + (f": {found}" if found else "")


def _progress(name: str, lane: subprocess.Popen, output: Path) -> None:
    """Print failures and percentages as they come, each lane's name before them."""
    seen = 0
    while lane.poll() is None:
        threading.Event().wait(5)
        text = output.read_text() if output.exists() else ""
        *lines, _ = text[seen:].split("\n")
        seen += sum(len(line) + 1 for line in lines)
        for line in lines:
            if line.endswith("%]") or "FAILED" in line:
                print(f"{name:9}  {line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The suite as two runs of pytest at the same time: tests that compute, and tests that mostly wait.

Two workers compute on two cores; four more wait for deadlines and processes meanwhile. Arguments go to both:
``python tests/lanes.py tests/config -x``, or ``--all`` for the slow tests too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

LANES = {"computing": ("not waits", "2"), "waiting": ("waits", "4")}
NO_TESTS_COLLECTED = 5


def main(arguments: list[str]) -> int:
    slow = "--all" in arguments
    arguments = [argument for argument in arguments if argument != "--all"]
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder) / name for name in LANES}
        lanes = {}
        for name, (marker, workers) in LANES.items():
            command = [
                *(sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadfile"),
                *("--no-loadscope-reorder", "-m", marker if slow else f"not slow and {marker}"),
                *("-p", "no:cacheprovider" if name == "waiting" else "cacheprovider", *arguments),
            ]
            with outputs[name].open("w") as output:
                lanes[name] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        for name, lane in lanes.items():
            threading.Thread(target=_progress, args=(name, lane, outputs[name]), daemon=True).start()
        statuses = {name: lane.wait() for name, lane in lanes.items()}
        for name, output in outputs.items():
            print(f"\n===== tests that are {name}\n{output.read_text()}", flush=True)
    return max(0 if status == NO_TESTS_COLLECTED else status for status in statuses.values())


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

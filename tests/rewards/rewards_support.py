"""Helpers of the tests of rewards: real data, and waiting for processes to end."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.rewards.arguments import Sample
from strop.rewards.worker import pool

WIDTH = 24
"""Response tokens of the batches here."""
SHARED_DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"


def none_within(look: Callable[[], list[int]], seconds: float) -> bool:
    """Return True if ``look`` lists nothing within this many seconds."""
    deadline = time.monotonic() + seconds
    while look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def cut_off_once(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[Sample], bool]) -> None:
    """Let the deadline of a sample pass once ``hangs`` is true of it, and that of no other one."""
    plain = pool._Conversation._is_alive  # polled while a sample is waited for

    def is_alive(self: Any) -> bool:
        for request in self._begun():
            if any(hangs(pickle.loads(content)) for content in request.contents):
                request.deadline = 0.0
                raise TimeoutError
        return plain(self)

    monkeypatch.setattr(pool._Conversation, "_is_alive", is_alive)


def real_rows(folder: str, *names: str) -> list[dict[str, Any]]:
    """Rows of the real JSONL files; the test is skipped when they are not there."""
    paths = [SHARED_DATA / folder / name for name in names]
    if missing := [str(path) for path in paths if not path.is_file()]:
        pytest.skip(f"the real data is not here: {missing}")
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def children() -> set[int]:
    """The processes that this one started, and not those that they started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def last_box_by_walking(text: str) -> str:
    """An oracle that knows nothing of the code under test: walks through the text, keeping every box."""
    boxes, stack, position = [], [], 0
    while position < len(text):
        if text.startswith("\\boxed{", position):
            stack.append(position + len("\\boxed{"))
            position += len("\\boxed{")
        elif text.startswith(("\\{", "\\}"), position):
            position += 2
        else:
            if text[position] == "{":
                stack.append(None)
            elif text[position] == "}" and stack and (start := stack.pop()) is not None:
                boxes.append(text[start:position])
            position += 1
    return boxes[-1]

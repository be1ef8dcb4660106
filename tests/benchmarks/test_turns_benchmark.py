"""The benchmark of turns at its smallest model: a batch is generated, and its answers are timed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import turns

from rollout_hf import build


def test_a_batch_of_turns_is_measured():
    found = turns.measure(turns.rollout_of(build("140k"), turns.AtOnce, 2), turns.even)
    assert found.token_ms > 0
    assert 0 < found.answering_s < found.seconds

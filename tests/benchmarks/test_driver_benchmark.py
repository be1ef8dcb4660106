"""The driver's benchmark at a tiny size: the bytes are those that one counts by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import driver

PROMPTS, TOKENS = 16, 8
INTS, FLOATS = 8 * TOKENS, 4 * TOKENS  # bytes of a row that is as long as a prompt, or a response
MODEL_INPUTS = 3 * 2 * INTS + INTS + FLOATS  # ids, mask and positions of the whole, responses, their mask
REQUEST = 3 * INTS + 8  # ids, mask and positions of the prompt, a seed


@pytest.mark.slow
def test_the_traffic_of_a_step_is_what_its_columns_hold(ray_session: None, tmp_path: Path) -> None:
    rows, nbytes = driver.measure(2, prompts=PROMPTS, tokens=TOKENS, steps=1)
    on, off = sorted(rows, key=lambda row: not row.handles)
    for row in rows:
        assert all(seconds > 0 for seconds in row.parts.values()), row.parts
        assert row.hottest

    generated = 3 * 2 * INTS + 2 * INTS + 2 * FLOATS + 1
    assert off.cost.received == PROMPTS * (generated + 4 * FLOATS)  # ref, old log-probs, entropies, values
    critic, actor = MODEL_INPUTS + 2 * FLOATS, MODEL_INPUTS + 3 * FLOATS
    assert off.cost.sent == PROMPTS * (REQUEST + 3 * MODEL_INPUTS + critic + actor)

    assert on.cost.sent == PROMPTS * (REQUEST + 2 * FLOATS)  # what the driver made: advantages and returns
    assert on.cost.received <= off.cost.received
    # scores, rewards, kl, advantages, returns, versions of the policy, and whether scoring failed
    computed_here = 5 * FLOATS + 4 * TOKENS + 1
    assert nbytes == PROMPTS * (generated + 4 * FLOATS + computed_here)

    options = argparse.Namespace(prompts=PROMPTS, tokens=TOKENS)
    assert driver.table(rows) in driver.report(rows, nbytes, options)
    driver.draw(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")

"""The growth curves at a tiny size: a point is a whole run, and each changes one thing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import growth
from side_by_side.inputs import characters, write_inputs
from side_by_side.setting import Setting


@pytest.mark.slow
def test_a_point_changes_one_thing_and_is_measured(monkeypatch, tmp_path: Path):
    base = Setting("140k", "grpo", "limit", 4, "float32", str(tmp_path), iterations=1, samples=8, n=4)
    assert growth.point("samples", 16, base, 1).setting == dataclasses.replace(base, samples=16)
    assert growth.point("tokens", 2, base, 1).setting == dataclasses.replace(base, limit=2)
    assert "trainer.n_gpus_per_node=2" in growth.point("ranks", 2, base, 1).keys
    place = growth.point("vocabulary", 96, base, 1)
    write_inputs([place.setting])
    assert growth.MODELS[place.setting.model] == {**growth.MODELS["140k"], "vocab_size": 96}

    monkeypatch.setattr(growth, "peak", lambda dtype: 0.5)
    limits = {1: 0.4}
    speeds = growth.measure(place, tmp_path, limits)
    assert limits == {1: 0.5}
    # 2 layers of 61,440 weights on 128 tokens with 3,904 pairs of them, and 96 words of 64 for 32 responses'
    one_pass = 2 * (2 * 61_440 * 128 + 4 * 64 * 3_904) + 2 * 64 * 96 * 32
    assert speeds[growth.OPERATIONS] == pytest.approx(5 * one_pass / 32 * speeds["iteration"])
    assert 0 < speeds["iteration"] < min(speeds[phase] for phase in growth.PHASES)
    speeds = growth.medians([speeds, speeds, {name: 2 * speed for name, speed in speeds.items()}], 2.0)
    assert speeds["of peak"] == pytest.approx(5 * one_pass / 32 * speeds["iteration"] / 2)
    found = [(place, speeds), (growth.point("tokens", 2, base, 1), speeds)]
    assert f"| vocabulary | 96 | {speeds['generation']:.0f} |" in growth.table(found)
    growth.draw(found, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("vocabulary", [48, 151936])
def test_every_token_that_is_not_special_has_a_character_of_its_own(vocabulary: int):
    assert len(set(characters(vocabulary))) == vocabulary - 4

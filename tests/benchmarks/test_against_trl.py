"""The comparison with TRL at a tiny size: strop's half of it, and the table. TRL itself is not installed."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import against_trl
import torch
import work
from side_by_side.inputs import write_inputs
from side_by_side.setting import Setting
from torch.utils.flop_counter import FlopCounterMode

from messages import naming
from rollout_hf import build


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("inputs")
    setting = Setting("140k", "grpo", "uneven", 16, "float32", str(folder), iterations=1, samples=8, n=4)
    write_inputs([setting])
    return setting


@pytest.mark.slow
def test_strop_ends_its_responses_where_the_setting_plans_it(uneven: Setting, tmp_path: Path) -> None:
    found = against_trl.run(against_trl.STROP, uneven, 1, tmp_path)  # fails by itself where lengths differ
    for row in found["iterations"]:
        parts = sum(row[phase] for phase in ("generation", "log-probs", "update", "rest"))
        assert row["iteration"] == pytest.approx(parts)
        assert min(row["generation"], row["update"]) > 0

    other = copy.deepcopy(found["iterations"])
    other[1]["lengths"][0] += 1
    with pytest.raises(SystemExit, match=naming("iteration 1")):
        against_trl.check_lengths(against_trl.STROP, uneven, other)
    with pytest.raises(SystemExit, match=naming("1 iterations", "2")):
        against_trl.check_lengths(against_trl.STROP, uneven, other[:1])


@pytest.mark.slow
def test_a_run_at_the_limit_has_responses_of_the_limit(uneven: Setting, tmp_path: Path) -> None:
    setting = dataclasses.replace(uneven, lengths="limit", algorithm="ppo", limit=4, kl_coef=0.1)
    write_inputs([setting])
    found = against_trl.run(against_trl.STROP, setting, 1, tmp_path)
    assert all(row["lengths"] == [4] * 8 and row["log-probs"] > 0 for row in found["iterations"])


def test_planned_lengths_are_geometric_up_to_the_limit() -> None:
    setting = Setting("140k", "grpo", "uneven", 128, "float32", "", samples=4096)
    lengths = setting.planned_lengths(0)
    assert lengths is not None
    assert min(lengths) == 1
    assert max(lengths) == 128
    # of a geometric distribution with mean 32: 31/32 to the power of 127 reach the limit, half pass 21 or 22
    assert lengths.count(128) / 4096 == pytest.approx((31 / 32) ** 127, abs=0.01)
    assert statistics.median(lengths) == pytest.approx(22, abs=2)
    assert lengths != setting.planned_lengths(1)
    assert lengths == setting.planned_lengths(0)


def test_figures_are_medians_over_iterations_then_runs_and_leave_the_warm_up_out() -> None:
    def run(*seconds: float) -> dict:
        iterations = [
            {
                "generation": s / 2,
                "log-probs": 0.0,
                "update": s / 4,
                "rest": s / 4,
                "iteration": s,
                "lengths": [5, 5],
            }
            for s in (100.0, *seconds)
        ]
        return {"iterations": iterations, "peak_mb": seconds[0]}

    found = against_trl.medians([run(1.0, 2.0, 9.0), run(3.0, 4.0, 5.0), run(1.0, 1.0, 1.0)])
    assert found["iteration"] == 2.0
    assert found["generation"] == 1.0
    assert found["tokens/s"] == pytest.approx(30 / 12)
    assert found["MB"] == 1.0
    setting = Setting("5M", "grpo", "limit", 64, "float32", "")
    line = against_trl.row(
        setting, "TRL", {**found, "of peak": 0.131, "peak": 95.4}, {**found, "tokens/s": 10.0}
    )
    assert (
        line
        == "| grpo 5M limit 64 float32 | TRL | 1.00 | 0.00 | 0.50 | 0.50 | 2.00 | 2 | 1 | 0.13 | 95 | 0.25 |"
    )


def test_the_share_of_the_peak_counts_the_matrix_products_of_a_model() -> None:
    """Against torch's own count of a forward pass of one sample, which leaves out attention on a CPU."""
    model, lengths = build("140k"), [13]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        states = model.model(torch.zeros(1, 48 + 13, dtype=torch.long), use_cache=False).last_hidden_state
        model.lm_head(states[:, -13:])
    layers, hidden = 2, 64
    attention = layers * 2 * (2 * hidden * (48 + 13) ** 2) / 2  # two products over half of the matrix
    found = work.pass_operations("140k", 48, lengths, 1, head=True)
    assert found == pytest.approx(counter.get_total_flops() + attention, rel=1e-9)
    setting = Setting("140k", "grpo", "limit", 13, "float32", "", samples=1, n=1)
    assert work.iteration_operations(setting, lengths) == 4 * found
    runs = [{"iterations": [{"iteration": s, "lengths": lengths} for s in (9.0, 2.0)]}]
    assert against_trl.share_of_peak(setting, runs, found) == 2.0


def test_the_peak_of_memory_counts_running_children_and_none_that_ended():
    from side_by_side.record import peak_mb

    alone = peak_mb()
    with subprocess.Popen(["sleep", "60"]) as child:
        child.kill()
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert peak_mb() == pytest.approx(alone, rel=0.1)
        script = "data = bytearray(100 << 20); print(1, flush=True); input()"
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            assert peak_mb() > alone + 100
            other.communicate(b"\n")

"""The floor is the model that transformers has, and strop's phases stand on the same batch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import floors
from plain_qwen2 import PlainQwen2
from side_by_side.inputs import write_inputs
from side_by_side.setting import Setting

from rollout_hf import build


def test_the_plain_model_is_that_of_transformers():
    model = build("140k")
    plain = PlainQwen2(model)
    ids = torch.randint(2, 48, (9,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split([5, 4])])
        torch.testing.assert_close(plain.logits(plain(ids, [5, 4])), expected, atol=1e-5, rtol=1e-5)


def test_plain_log_probs_are_strops_and_rows_are_complete(tmp_path: Path):
    setting = Setting("140k", "grpo", "uneven", 16, "float32", str(tmp_path), samples=8, n=4)
    write_inputs([setting])
    strop = floors.Strop(setting, tmp_path / "run")
    plain = floors.Plain("140k", strop.batch, torch.float32, strop.micro)
    mask = strop.batch.batch["response_mask"]
    assert mask.sum(1).int().tolist() == setting.planned_lengths(0)
    with torch.no_grad():
        found = plain.log_probs({**plain.pieces[0]})
    # the learning rate is so small that the one update made no difference that counts
    [order] = strop.micro.split(strop.batch, packed=True)
    expected = strop.batch.batch["old_log_probs"][order][mask[order].bool()]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)

    rows = floors.compare(setting, 1, tmp_path)
    assert [row.split(" | ")[4] for row in rows] == ["log-probs", "update", "iteration"]
    for row in rows:
        cells = row.strip("| ").split(" | ")
        assert len(cells) == len(floors.TITLES)
        assert all(float(cell) >= 0 for cell in cells[5:] if cell != "-")
    strop.close()


def test_operations_are_counted_by_hand():
    left, right = torch.randn(3, 5), torch.randn(5, 7)
    assert floors.flops(lambda: left @ right) == 2 * 3 * 5 * 7

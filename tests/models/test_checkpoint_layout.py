"""Weights as a checkpoint holds them, one after another: the oracle is the file of ``save_pretrained``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.loader import persistent_buffers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tiny_families


@pytest.mark.parametrize(
    "family",
    ["llama", "mixtral", "qwen3_moe", "gpt_neox", "olmo_hybrid", "exaone_moe", "deepseek_v4", "gemma3"],
)
def test_weights_come_one_by_one_as_save_pretrained_writes_them(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_families.tiny_config(family), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    if family == "gemma3":  # published files have a part of the name that transformers leaves out
        whole = "vision_tower.vision_model."
        saved = {name.replace("vision_tower.", whole): weight for name, weight in saved.items()}
    layout, waiting, found = CheckpointLayout(model), {}, {}
    weights = [*model.named_parameters(), *persistent_buffers(model)]
    for weight in reversed(weights):  # an update comes in any order, in several calls
        found |= layout.convert([weight], waiting)
    assert not waiting
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], weight) for name, weight in saved.items())
    buffers = {layout.renamed(name) for name, _ in persistent_buffers(model)}
    shapes = {name: weight.shape for name, weight in saved.items() if name not in buffers}
    assert layout.shapes() == shapes

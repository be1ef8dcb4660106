"""Compiled layers with graphs that run as they are, so that no compiler is needed."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import families
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AttentionInterface

from strop.models.attention import run_outside_graphs
from strop.models.passes.compiled import reason_not_compiled
from strop.models.passes.low_precision import low_precision
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel

STEPS = [[(7, [6, 2, 5]), (3, [4])], [(5, [6, 1])], [(2, [3, 4, 4]), (3, [1, 2])]]


@pytest.fixture
def graphs(monkeypatch, caplog):
    """Counters of torch.compile; passing its limit raises an error."""
    caplog.set_level(logging.WARNING, logger="torch.__trace")  # each graph's text takes seconds
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield counters["stats"]
    torch._dynamo.reset()


def roles(family: str, **critic: Any) -> list[Any]:
    """A reference, an actor and a critic."""
    models = [PolicyModel(families.model(family), packed=True) for _ in range(2)]
    models.append(ValueModel(families.model(family, "ForSequenceClassification", **critic), packed=True))
    models[0].requires_grad_(False)
    for model in models:
        model.compile_layers()
    return models


def step(models: list[Any], batch: families.Columns, dtype: torch.dtype | None) -> None:
    for model in filter(None, models):
        with low_precision(model, dtype):
            with torch.no_grad():
                model.eval().figures(batch)
            if model is not models[0]:
                model.train().figures(batch).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "critic"), [("Qwen2 with windows", {}), ("Qwen2", {"hidden_size": 16, "head_dim": 4})]
)
def test_the_roles_of_a_family_stay_compiled(graphs, family, critic):
    models, numbers = roles(family, **critic), []
    for groups in STEPS:
        batch = families.samples(groups)
        for dtype in (None, torch.bfloat16):  # the comparison at start-up, and the passes
            step(models, batch, dtype)
        numbers.append(graphs["unique_graphs"])
    assert numbers == numbers[:1] * len(STEPS)
    assert numbers[0] > 8


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_new_lengths_compile_nothing_again(graphs, checkpointing):
    """Six rounds; the first two see a length, and that it changes."""
    model = PolicyModel(families.model("Qwen2"), packed=True)
    if checkpointing:
        model.enable_gradient_checkpointing(selective=False)
    model.compile_layers()
    numbers = []
    for length in (5, 9, 14, 20, 27, 35):
        step([None, model], families.samples([(length, [length // 2, 3]), (3, [length, 1, 2])]), None)
        numbers.append(graphs["unique_graphs"])
    assert numbers == numbers[:1] * 6


def test_attention_is_kept_out_of_graphs_once():
    """Each engine that wraps it again would slow down every call."""
    run_outside_graphs()
    before = dict(AttentionInterface())
    run_outside_graphs()
    assert all(AttentionInterface()[name] is function for name, function in before.items())


@pytest.mark.parametrize(
    ("device", "there", "variables", "missing"),
    [
        ("cpu", ["g++"], {}, ""),
        ("cpu", ["gcc", "clang"], {}, "C++ compiler 'g++'"),
        ("cpu", ["g++"], {"CXX": "icpx"}, "C++ compiler 'icpx'"),
        ("cuda", ["clang"], {}, ""),
        ("cuda", ["g++"], {}, "C compiler 'gcc' or 'clang'"),
        ("cuda", ["gcc"], {"CC": "icx"}, "C compiler 'icx'"),
    ],
)
def test_the_compiler_that_torch_calls_must_be_there(
    tmp_path, monkeypatch, device, there, variables, missing
):
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PATH": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    found = reason_not_compiled(torch.device(device))
    assert missing in found
    assert bool(found) == bool(missing)


def test_a_gpu_needs_triton(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton" in reason_not_compiled(torch.device("cuda"))
    assert not reason_not_compiled(torch.device("cpu"))

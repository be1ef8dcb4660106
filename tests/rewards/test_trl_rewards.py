"""Reward functions of TRL give the same numbers here; TRL's own are recorded in ``trl_values.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import trl_functions
from trl_functions import COLUMNS, FUNCTIONS, QUESTIONS, RESPONSES, messages

from strop.protocol import DataProto
from strop.rewards.manager import RewardManager

VALUES = json.loads((Path(__file__).parent / "trl_values.json").read_text())


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_scores_are_those_of_trl(
    make: Callable[..., RewardManager], batch_of: Callable[..., DataProto], kind: str
):
    prompts = QUESTIONS if kind == "text" else messages("user", QUESTIONS)
    columns = {"prompt": prompts, **COLUMNS}
    batch = batch_of(RESPONSES, [None] * 4).union(DataProto.from_dict(non_tensors=columns))
    parts = {
        name: {"weight": weight, "scorer": f"trl_functions:{name}"} for name, weight in FUNCTIONS.items()
    }
    output = make(
        trl_functions.reward,
        parts={"rule": FUNCTIONS["reward"], **{name: parts[name] for name in ("short", "judged")}},
    )(batch)
    assert output.errors == [""] * 4
    for number, name in enumerate(["rule", "short", "judged"]):
        found = [None if value != value else value for value in output.parts[name].tolist()]
        assert found == [row[number] for row in VALUES[kind]]
    # TRL adds what is not None; the third sample, for which everything is, has no reward there and 0 here.
    weighted = [sum(w * (value or 0) for w, value in zip(FUNCTIONS.values(), row)) for row in VALUES[kind]]  # noqa: B905
    assert output.token_level_scores.sum(dim=1).tolist() == pytest.approx(weighted, rel=1e-6)

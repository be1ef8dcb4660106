"""Samples that are scored before their batch is there. One id a character, 0 pads, 1 ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rewards_support import none_within

from strop.columns import ENDED_BY
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.manager import RewardManager

from messages import naming


@pytest.fixture
def manager(tokenizer: Any, tmp_path: Path, running: Any) -> Iterator[RewardManager]:
    """Scores a response by its length, and notes it."""
    log = str(tmp_path / "log")

    def score(solution_str: str, ground_truth: Any, **rest: Any) -> float:
        with open(log, "a") as file:
            file.write(f"{solution_str}/{ground_truth} ")
        return 1.0 / 0 if solution_str == "bad" else float(len(solution_str))

    manager = RewardManager(tokenizer, 0, score, timeout_s=60.0)
    yield manager
    manager.close()


@pytest.fixture
def batch(tokenizer: Any) -> DataProto:
    """Two samples of each of two prompts."""
    rows = [[*tokenizer(text)["input_ids"], 1] for text in ("a", "bb", "ccc", "dddd")]
    ids = torch.tensor([row + [0] * (6 - len(row)) for row in rows])
    return prompts().repeat(2).union(DataProto({"responses": ids, "response_mask": (ids > 0).float()}))


def prompts() -> DataProto:
    columns = {"data_source": ["own"] * 2, "reward_model": [{"ground_truth": truth} for truth in "xy"]}
    return DataProto.from_dict(non_tensors=columns)


def tokens(batch: DataProto, row: int) -> list[int]:
    return batch.batch["responses"][row][batch.batch["response_mask"][row].bool()].tolist()


def test_samples_are_scored_on_arrival_and_returned_in_batch_order(
    manager: RewardManager, batch: DataProto, tmp_path: Path
):
    pending = manager.expect(prompts(), n=2)
    for row in (3, 1):
        pending.add(row, tokens(batch, row))
    log = tmp_path / "log"
    assert none_within(lambda: [] if log.exists() and log.read_text() == "dddd/y bb/x " else [1], 20.0)
    pending.complete(batch)
    pending.add(0, tokens(batch, 0))  # news that comes late
    output = pending.get()
    assert output.parts["rule"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert output.responses == ["a", "bb", "ccc", "dddd"]
    assert log.read_text() == "dddd/y bb/x a/x ccc/y "
    whole = manager(batch)
    assert torch.equal(whole.token_level_scores, output.token_level_scores)
    assert whole.metrics == output.metrics


def test_a_failed_sample_is_named_by_its_row_of_the_batch(
    manager: RewardManager, batch: DataProto, tokenizer: Any, caplog: pytest.LogCaptureFixture
):
    bad = [*tokenizer("bad")["input_ids"], 1]
    batch.batch["responses"][2, :] = torch.tensor([*bad, 0, 0])
    pending = manager.expect(prompts(), n=2)
    pending.add(2, bad)
    pending.complete(batch)
    output = pending.get()
    assert [bool(error) for error in output.errors] == [False, False, True, False]
    assert "sample 2 (data_source='own', response='bad')" in caplog.text


def test_other_tokens_than_those_of_the_batch_are_an_error(manager: RewardManager, batch: DataProto):
    pending = manager.expect(prompts(), n=2)
    pending.add(1, tokens(batch, 1)[:-1])
    with pytest.raises(RewardError, match=naming("sample 1")):
        pending.complete(batch)


def test_batches_that_overlap_are_scored_one_after_the_other(manager: RewardManager, batch: DataProto):
    first, second = manager.expect(prompts(), n=2), manager.expect(batch)
    second.complete(batch)
    first.add(3, tokens(batch, 3))
    first.complete(batch)
    for pending in (second, first):
        assert pending.get().parts["rule"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_was_given_up_holds_nothing_up(manager: RewardManager, batch: DataProto):
    given_up = manager.expect(prompts(), n=2)
    given_up.add(0, tokens(batch, 0))
    given_up.cancel()
    assert manager(batch).parts["rule"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_closing_gives_up_what_was_never_completed(manager: RewardManager, batch: DataProto):
    pendings = [manager.expect(prompts(), n=2) for _ in range(3)]
    pendings[0].add(0, tokens(batch, 0))
    manager.close()


def test_a_sample_that_its_environment_lost_is_not_scored(
    manager: RewardManager, batch: DataProto, tmp_path: Path
):
    batch.batch["ended_by"] = torch.tensor([ENDED_BY.index("stop")] * 3 + [ENDED_BY.index("error")])
    batch.batch["response_mask"][3] = 0
    turns = [{"text": "t"}]
    columns = {"conversation": np.array([json.dumps({"turns": turns, "error": "away"})] * 4, object)}
    batch = batch.union(DataProto({}, columns))
    pending = manager.expect(prompts(), n=2)
    pending.complete(batch)
    output = pending.get()
    assert [bool(error) for error in output.errors] == [False, False, False, True]
    assert "away" in output.errors[3]
    assert len((tmp_path / "log").read_text().split()) == 3


def test_the_reward_model_has_no_score_for_a_sample_that_its_environment_lost(
    tokenizer: Any, batch: DataProto
):
    batch.batch["ended_by"] = torch.tensor([ENDED_BY.index("stop")] * 3 + [ENDED_BY.index("error")])
    batch.batch["response_mask"][3] = 0
    batch.batch["rm_scores"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    columns = {"conversation": np.array([json.dumps({"turns": [], "error": "away"})] * 4, object)}
    for mode in ("train", "validate"):
        manager = RewardManager(tokenizer, 0, error_score=-1.0)
        output = manager(batch.union(DataProto({}, columns, {"mode": mode})))
        manager.close()
        assert output.token_level_scores.sum(1).tolist() == [1, 2, 3, -1]
        assert output.parts["reward_model"].nan_to_num(nan=0).tolist() == [1, 2, 3, 0]

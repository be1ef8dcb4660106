"""Reward managers of verl, unchanged but for their imports, and one written like them."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.config.load import load_config
from strop.protocol import DataProto
from strop.rewards.base import as_reward
from strop.rewards.loading import load_reward_manager
from strop.trainer.scores import PendingScores

LIKE_THEIRS = """
from collections import defaultdict
import torch
from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager

@register("own")
class Manager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", penalty=None):
        self.tokenizer, self.key, self.penalty = tokenizer, reward_fn_key, penalty
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict=False):
        ready = self._extract_reward_from_rm_scores(data, return_dict)
        if ready is not None:
            return ready
        rewards, extra = torch.zeros_like(data.batch["responses"], dtype=torch.float32), defaultdict(list)
        assert data.batch.batch_size[0] == len(data) == len([item for item in data])
        for i in range(len(data)):
            item = data[i]
            width = item.batch["prompts"].shape[-1]
            assert item.batch["prompts"].dim() == 1
            length = item.batch["attention_mask"][width:].sum()
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            columns = item.non_tensor_batch
            columns.get("extra_info", {})["rollout_reward_scores"] = {}
            truth = columns["reward_model"]["ground_truth"]
            score = self.compute_score(columns[self.key], text, truth, columns["extra_info"])
            rewards[i, length - 1] = score - self.penalty.cost * length
            extra["acc"].append(score)
            extra["pred"].append(text if i else None)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
"""


@pytest.fixture
def load(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make the manager of a class in a source file for verl, with its imports changed as the docs say."""

    def build(source: str, name: str, **options: Any) -> Any:
        changed = re.sub("from verl[a-z_.]* import", "from strop.rewards.verl import", source)
        assert "import verl" not in changed
        (tmp_path / "manager_for_verl.py").write_text(changed)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "manager_for_verl", raising=False)
        config = load_config([f"reward_model.reward_manager=manager_for_verl:{name}"])
        return load_reward_manager(config, tokenizer, 1, **options)

    return build


def scored(manager: Any, batch: DataProto, model_scores: torch.Tensor | None = None) -> DataProto:
    """Score a batch as the trainer does."""
    model = None
    if model_scores is not None:
        call = types.SimpleNamespace(get=lambda: DataProto({"rm_scores": model_scores}))
        start = types.SimpleNamespace(start=lambda batch: call)
        model = types.SimpleNamespace(compute_rm_score=start)
    scores = PendingScores(DataProto(), 1, manager, model)
    scores.complete(batch)
    return scores.get()


@pytest.fixture
def batch(batch_of: Callable[..., DataProto]) -> DataProto:
    return batch_of(["3", "12", "345"], ["3", "13", "345"])


def test_a_manager_written_for_verl_scores_as_there(load: Callable[..., Any], batch: DataProto):
    found = scored(load(LIKE_THEIRS, "Manager", penalty={"cost": 0.25}), batch)
    expected = torch.zeros_like(batch.batch["response_mask"])
    expected[0, 1], expected[1, 2], expected[2, 3] = 1 - 0.25 * 2, -0.25 * 3, 1 - 0.25 * 4
    assert torch.equal(found.batch["token_level_scores"], expected)
    assert found.batch["reward/acc"].tolist() == [1.0, 0.0, 1.0]
    assert found.non_tensor_batch["reward_text/pred"].tolist() == [None, "12", "345"]
    assert "reward/pred" not in found.batch
    reward = as_reward(load(LIKE_THEIRS, "Manager", penalty={"cost": 0.25}))
    assert torch.equal(reward(batch, return_dict=False), expected)


def test_scores_of_the_reward_model_stand_at_the_last_token(load: Callable[..., Any], batch: DataProto):
    found = scored(load(LIKE_THEIRS, "Manager"), batch, torch.tensor([0.5, -1.0, 2.0]))
    assert found.batch["token_level_scores"].sum(dim=1).tolist() == [0.5, -1.0, 2.0]
    assert found.batch["token_level_scores"][1, 2] == -1.0


@pytest.mark.parametrize("has_turns", [False, True])
def test_the_manager_in_the_documentation_scores_groups(
    load: Callable[..., Any], batch: DataProto, has_turns: bool
):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    [source] = re.findall(r"```python\n(# my_manager\.py.*?)```", page, re.DOTALL)
    batch.non_tensor_batch["uid"] = np.array(["a", "a", "a"], dtype=object)
    ids, mask = batch.batch["responses"], batch.batch["response_mask"]
    if has_turns:  # of the last, "3" and "45", with a "4" of another between them
        ids[2, 2:5] = ids[2, 1:4].clone()
        mask[2, :5] = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    found = scored(load(source, "Shortest"), batch)  # "3" and "345" are right
    expected = torch.zeros_like(mask)
    expected[0, 1], expected[2, 4 if has_turns else 3] = 1.0, 0.5
    assert torch.equal(found.batch["token_level_scores"], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name", "options"),
    [
        ("naive", "NaiveRewardManager", {}),
        ("prime", "PrimeRewardManager", {}),
        (
            "dapo",
            "DAPORewardManager",
            {
                "max_resp_len": 5,
                "overlong_buffer_cfg": {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True},
            },
        ),
    ],
)
def test_verls_own_managers_score_as_there(
    load: Callable[..., Any], batch: DataProto, file: str, name: str, options: dict[str, Any]
):
    spec = importlib.util.find_spec("verl")  # finds the package without importing it
    if spec is None or spec.origin is None:
        pytest.skip("verl is not here: pip install --no-deps --target FOLDER verl, and PYTHONPATH=FOLDER")
    path = Path(spec.origin).parent / "workers" / "reward_manager" / f"{file}.py"
    if not path.is_file():
        pytest.skip(f"this version of verl has no manager {file!r}")
    source = path.read_text()
    found = scored(load(source, name, **options), batch)
    expected = torch.zeros_like(batch.batch["response_mask"])
    expected[0, 1], expected[2, 3] = 1.0, 1.0
    if file == "dapo":  # -(length - (5 - 4)) / 4 over the buffer; the length includes the end token
        expected[0, 1] -= 1 / 4
        expected[1, 2] -= 2 / 4
        expected[2, 3] -= 3 / 4
        assert found.batch["reward/overlong_reward"].tolist() == [-0.25, -0.5, -0.75]
    assert torch.allclose(found.batch["token_level_scores"], expected)
    by_model = scored(load(source, name, **options), batch, torch.tensor([0.5, -1.0, 2.0]))
    assert by_model.batch["token_level_scores"].sum(dim=1).tolist() == [0.5, -1.0, 2.0]

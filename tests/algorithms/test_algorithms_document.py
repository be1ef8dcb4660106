"""docs/algorithms.md: names and examples."""

from __future__ import annotations

from pathlib import Path

import torch

from strop.algorithms.advantages import ESTIMATORS, estimate
from strop.algorithms.aggregation import AGGREGATION_MODES
from strop.algorithms.kl import KL_CONTROLLERS, KL_KINDS
from strop.algorithms.policy_loss import POLICY_LOSSES

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_document_names_everything_that_a_configuration_can_choose():
    text = DOCUMENT.read_text()
    chosen = [*ESTIMATORS, *POLICY_LOSSES, *AGGREGATION_MODES, *KL_KINDS, *KL_CONTROLLERS]
    assert [name for name in chosen if f"`{name}`" not in text] == []


def test_the_documents_example_of_an_estimator_runs():
    example = DOCUMENT.read_text().split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(example, names)
    rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    advantages, returns = estimate(names["centred"], rewards=rewards, response_mask=mask, gamma=1.0)
    assert advantages.tolist() == [[-2.0, -2.0], [2.0, 0.0]]
    assert returns.tolist() == [[1.0, 1.0], [3.0, 0.0]]

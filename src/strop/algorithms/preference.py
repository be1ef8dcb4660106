"""Reward modelling on pairs of answers: the Bradley-Terry model and its calibration.

Shapes: B pairs. A margin is the chosen answer's score minus the rejected one's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return -log sigmoid(chosen - rejected) [B] (Bradley & Terry 1952)."""
    return softplus(rejected_B - chosen_B)


def centering_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return (chosen + rejected)^2 [B], which centers scores at 0 (Eisenstein et al. 2023, section 2)."""
    return (chosen_B + rejected_B).square()


def pairwise_accuracy(margin_B: Tensor) -> Tensor:
    """Return [B]: 1 where the chosen answer scores higher, 0.5 at a tie, else 0."""
    return (margin_B.sign() + 1) / 2


class Calibration(NamedTuple):
    """Reliability diagram: predicted and observed preference rate by bin."""

    confidence: list[float]
    accuracy: list[float]
    error: float
    """Expected calibration error: mean distance of the two over all pairs."""


def calibration(margin_B: Tensor, *, bins: int = 10) -> Calibration:
    """Return the reliability diagram and the expected calibration error of predicted preferences.

    The predicted probability that the higher-scoring answer is preferred is sigmoid(|margin|). Pairs sorted
    by it form ``bins`` bins of equal size, or as many as there are pairs (Naeini et al. 2015, with bins of
    equal mass; ties count half).
    """
    confidence_B, order_B = margin_B.double().abs().sigmoid().sort(stable=True)
    accuracy_B = pairwise_accuracy(margin_B.double())[order_B]
    n_pairs = len(margin_B)
    parts = [part for part in torch.arange(n_pairs).tensor_split(min(bins, n_pairs)) if len(part)]
    confidence = [confidence_B[part].mean().item() for part in parts]
    accuracy = [accuracy_B[part].mean().item() for part in parts]
    error = sum(
        len(part) / n_pairs * abs(said - seen)
        for part, said, seen in zip(parts, confidence, accuracy, strict=True)
    )
    return Calibration(confidence, accuracy, error)

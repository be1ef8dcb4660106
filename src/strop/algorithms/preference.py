"""Reward modelling on pairs of answers: the Bradley-Terry model and how well it is calibrated.

Shapes: B pairs. A margin is the chosen answer's score less the rejected one's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """[B]: -log sigmoid(chosen - rejected), the surprise at the preference (Bradley & Terry 1952)."""
    return softplus(rejected_B - chosen_B)


def centering_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """[B]: (chosen + rejected)^2, which draws scores to 0 (Eisenstein et al. 2023, section 2)."""
    return (chosen_B + rejected_B).square()


def pairwise_accuracy(margin_B: Tensor) -> Tensor:
    """[B]: 1 where the chosen answer scores higher, 0.5 at a tie, else 0."""
    return (margin_B.sign() + 1) / 2


class Calibration(NamedTuple):
    """Confidence in the answer that scores higher, and how often it was the chosen one, by bin."""

    confidence: list[float]
    accuracy: list[float]
    error: float
    """Mean distance of the two over all pairs: the expected calibration error."""


def calibration(margin_B: Tensor, *, bins: int = 10) -> Calibration:
    """How often preferences come true that the model foretells with a given probability.

    The probability that the higher-scoring answer is preferred is sigmoid(|margin|); pairs in its order are
    cut into ``bins`` parts of equal size, or as many as there are pairs (Naeini et al. 2015, with bins of
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

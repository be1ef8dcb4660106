"""Learning from pairs of answers: Bradley-Terry models of rewards, and losses of a policy (DPO and others).

Shapes: B pairs. A margin is the chosen answer's score minus the rejected one's.

A preference loss is a pure function that returns a ``PreferenceLoss``. The names of its parameters select its
inputs, all float [B]:

    chosen_log_prob, rejected_log_prob           sums of the log-probs of an answer's tokens, with a gradient
    chosen_length, rejected_length               tokens of the answers, at least 1
    ref_chosen_log_prob, ref_rejected_log_prob   the sums under the reference model, without a gradient

Any other parameter is a setting with a default: ``beta``, ``label_smoothing`` and ``gamma`` are keys of
``update``, others come from ``update.loss_kwargs``. A loss without ``ref_`` parameters needs no reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from strop.algorithms.registry import accepted, register, required_parameters, resolve, with_options

if TYPE_CHECKING:
    from torch import Tensor


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return -log sigmoid(chosen - rejected) [B] (Bradley & Terry 1952)."""
    return torch.nn.functional.softplus(rejected_B - chosen_B)


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
    # stable: ties keep the pairs' order, so bins do not depend on the device's sort
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


class PreferenceLoss(NamedTuple):
    """Results of B pairs; only the loss has a gradient."""

    loss_B: Tensor
    chosen_reward_B: Tensor
    """The reward that the policy implies, of which the loss compares those of both answers."""
    rejected_reward_B: Tensor


PreferenceLossFunction = Callable[..., PreferenceLoss]

PREFERENCE_LOSSES: dict[str, PreferenceLossFunction] = {}

REFERENCE_INPUTS = ("ref_chosen_log_prob", "ref_rejected_log_prob")
PREFERENCE_INPUTS = (
    *("chosen_log_prob", "rejected_log_prob", "chosen_length", "rejected_length"),
    *REFERENCE_INPUTS,
)


def register_preference_loss(name: str) -> Callable[[PreferenceLossFunction], PreferenceLossFunction]:
    """Register a function as ``update.loss=name``."""
    return register(PREFERENCE_LOSSES, name, "preference loss")


def get_preference_loss(
    name_or_import_path: str, settings: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None
) -> PreferenceLossFunction:
    """Return the preference loss of that name or import path (``package.module:function``).

    ``settings`` are given to it where it has parameters for them, ``kwargs`` in any case.

    Raises:
        ConfigError: it is not known, cannot be imported, requires another input, or has no parameter for one
            of ``kwargs``.
    """
    key = "update.loss"
    loss = resolve(name_or_import_path, PREFERENCE_LOSSES, key=key)
    given = {name: value for name, value in settings.items() if value is not None}
    bound = functools.partial(loss, **accepted(loss, given))
    computed, available = {*PREFERENCE_INPUTS, *settings}, {*PREFERENCE_INPUTS, *given}
    return with_options(
        bound, kwargs or {}, key=key, name=name_or_import_path, computed=computed, available=available
    )


def needs_reference(loss: PreferenceLossFunction) -> bool:
    """Return True if the loss requires log-probs of the reference model."""
    return bool(required_parameters(loss) & set(REFERENCE_INPUTS))


@register_preference_loss("dpo")
def dpo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    ref_chosen_log_prob: Tensor,
    ref_rejected_log_prob: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Compute -log sigmoid(r_chosen - r_rejected): Rafailov et al., arXiv:2305.18290, equation 7.

    r = beta (log pi(y|x) - log ref(y|x)). ``label_smoothing`` is the assumed share of flipped labels: the
    conservative DPO of Mitchell, "A note on DPO with noisy preferences" (2023), equation 3:
    -(1 - e) log sigmoid(margin) - e log sigmoid(-margin).
    """
    chosen_B = beta * (chosen_log_prob - ref_chosen_log_prob)
    rejected_B = beta * (rejected_log_prob - ref_rejected_log_prob)
    margin_B = chosen_B - rejected_B
    log_sigmoid = torch.nn.functional.logsigmoid
    loss_B = -(1 - label_smoothing) * log_sigmoid(margin_B) - label_smoothing * log_sigmoid(-margin_B)
    return _result(loss_B, chosen_B, rejected_B)


@register_preference_loss("cdpo")
def cdpo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    ref_chosen_log_prob: Tensor,
    ref_rejected_log_prob: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> PreferenceLoss:
    """Compute ``dpo`` with a tenth of the labels assumed to be flipped."""
    log_probs = chosen_log_prob, rejected_log_prob, ref_chosen_log_prob, ref_rejected_log_prob
    return dpo(*log_probs, beta=beta, label_smoothing=label_smoothing)


@register_preference_loss("ipo")
def ipo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    ref_chosen_log_prob: Tensor,
    ref_rejected_log_prob: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    beta: float = 0.1,
) -> PreferenceLoss:
    """Compute (h - 1 / (2 beta))^2: Azar et al., arXiv:2310.12036, equation 17, whose tau is ``beta``.

    h is the difference of log-ratios, here each the mean over the answer's tokens. Rewards are ``dpo``'s.
    """
    chosen_B = chosen_log_prob - ref_chosen_log_prob
    rejected_B = rejected_log_prob - ref_rejected_log_prob
    # means, as in TRL after consulting the authors: a sum would scale with the length
    loss_B = (chosen_B / chosen_length - rejected_B / rejected_length - 1 / (2 * beta)).square()
    return _result(loss_B, beta * chosen_B, beta * rejected_B)


@register_preference_loss("hinge")
def hinge(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    ref_chosen_log_prob: Tensor,
    ref_rejected_log_prob: Tensor,
    *,
    beta: float = 0.1,
) -> PreferenceLoss:
    """Compute max(0, 1 - (r_chosen - r_rejected)): Liu et al. (RSO), arXiv:2309.06657, section 3.2.

    r is ``dpo``'s; the normalised form of SLiC's hinge loss (Zhao et al., arXiv:2305.10425).
    """
    chosen_B = beta * (chosen_log_prob - ref_chosen_log_prob)
    rejected_B = beta * (rejected_log_prob - ref_rejected_log_prob)
    return _result(torch.relu(1 - (chosen_B - rejected_B)), chosen_B, rejected_B)


@register_preference_loss("simpo")
def simpo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> PreferenceLoss:
    """Compute -log sigmoid(r_chosen - r_rejected - gamma): Meng et al., arXiv:2405.14734, equation 6.

    r = beta log pi(y|x) / |y|; there is no reference.
    """
    chosen_B = beta * chosen_log_prob / chosen_length
    rejected_B = beta * rejected_log_prob / rejected_length
    return _result(-torch.nn.functional.logsigmoid(chosen_B - rejected_B - gamma), chosen_B, rejected_B)


@register_preference_loss("orpo")
def orpo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    beta: float = 0.1,
) -> PreferenceLoss:
    """Compute -log p_chosen - beta log sigmoid(log odds ratio): Hong et al., arXiv:2403.07691, eq. 6 and 7.

    log p = log pi(y|x) / |y|, odds = p / (1 - p), and ``beta`` is the paper's lambda; there is no reference.
    Rewards are beta log p, as in TRL.
    """
    chosen_B, rejected_B = chosen_log_prob / chosen_length, rejected_log_prob / rejected_length
    log_odds_ratio_B = (chosen_B - rejected_B) - (_log1mexp(chosen_B) - _log1mexp(rejected_B))
    loss_B = -chosen_B - beta * torch.nn.functional.logsigmoid(log_odds_ratio_B)
    return _result(loss_B, beta * chosen_B, beta * rejected_B)


def _log1mexp(log_p_B: Tensor) -> Tensor:
    """Return log(1 - exp(log_p)) of log-probs <= 0."""
    # a certain answer has log p = 0, whose log(1 - p) is -inf and whose gradient is NaN
    log_p_B = log_p_B.clamp(max=-torch.finfo(log_p_B.dtype).eps)
    # expm1: 1 - exp(log_p) loses all digits near log p = 0
    return torch.log(-torch.expm1(log_p_B))


def _result(loss_B: Tensor, chosen_B: Tensor, rejected_B: Tensor) -> PreferenceLoss:
    return PreferenceLoss(loss_B, chosen_B.detach(), rejected_B.detach())

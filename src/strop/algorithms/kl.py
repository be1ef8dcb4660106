"""The KL divergence to the reference model: estimators per token, the reward penalty, its coefficient.

Shapes: B samples, T response tokens. The estimators k1, k2, k3: J. Schulman, "Approximating KL Divergence"
(2020), http://joschu.net/blog/kl-approx.html. The adaptive coefficient: Ziegler et al., arXiv:1909.08593,
section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from strop.algorithms.aggregation import log_ratio, masked_mean, zero_masked
from strop.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "low_var_kl_clamped", "full")
KL_CONTROLLERS = ("fixed", "adaptive")


def kl_penalty(
    log_prob: Tensor, ref_log_prob: Tensor, kind: str, response_mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled token alone.

    With d = log_prob - ref_log_prob: ``kl``/``k1``: d. ``abs``: |d|. ``mse``/``k2``: d^2 / 2.
    ``low_var_kl``/``k3``: exp(-d) - 1 + d, with d clamped to +-20. ``low_var_kl_clamped``: the same with the
    result clamped to 10, as in verl: tokens below d = -2.6 and above d = 11 have no gradient.

    With a mask, masked slots are 0 without gradient, whatever they hold; without a mask, NaN propagates.

    Raises:
        ValueError: ``full`` needs whole distributions: ``token_log_probs(..., ref=...)`` computes it.
        ConfigError: an unknown kind.
    """
    if response_mask is not None:
        log_prob = zero_masked(log_prob, response_mask)
        ref_log_prob = zero_masked(ref_log_prob, response_mask)
    d = log_ratio(log_prob, ref_log_prob)
    match kind:
        case "kl" | "k1":
            return d
        case "abs":
            return d.abs()
        case "mse" | "k2":
            return d.square() / 2
        case "low_var_kl" | "k3":
            return k3(d.clamp(-20, 20))
        case "low_var_kl_clamped":
            return k3(d.clamp(-20, 20)).clamp(max=10)
        case "full":
            raise ValueError(
                "the full KL cannot be computed from the log-probs of sampled tokens; "
                "strop.algorithms.logprobs.token_log_probs(..., ref=...) returns it as full_kl_N"
            )
    raise ConfigError(f"unknown kind of KL estimate {kind!r} (known: {', '.join(KL_KINDS)})")


def k3(d: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, the non-negative estimate of a KL of which the mean of d is another."""
    # in float32 exp(-d) - 1 is 80 times too large at d = 1e-5, and may be below -d
    return (-d).expm1() + d


def apply_kl_penalty(scores_BT: Tensor, kl_BT: Tensor, mask_BT: Tensor, beta: float) -> Tensor:
    """Return token rewards [B,T]: r_t = score_t - beta kl_t where the mask is 1, and 0 elsewhere."""
    return zero_masked(scores_BT, mask_BT) - beta * zero_masked(kl_BT, mask_BT)


def mean_sequence_kl(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over sequences of the mean over each sequence's tokens, the input of a controller."""
    # rows without tokens pad a batch to the number of ranks
    return masked_mean(masked_mean(kl_BT, mask_BT, dim=-1), mask_BT.bool().any(-1))


class FixedKLController:
    """A constant coefficient beta. It belongs to the configuration, so checkpoints do not hold it."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_samples: int) -> None:
        """Do nothing: beta is constant."""

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Do nothing: there is no state."""


class AdaptiveKLController(FixedKLController):
    """A coefficient that steers the KL to ``target_kl``, by at most 20% in ``horizon`` samples.

    beta <- beta (1 + clip(kl / target - 1, +-0.2) n_samples / horizon)
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Update beta, given the mean sequence KL of ``n_samples`` samples.

        Raises:
            ConfigError: the horizon is so short that the coefficient could become 0 or negative.
            TrainingError: the KL is NaN or infinite.
        """
        if not math.isfinite(current_kl):
            raise TrainingError(f"KL to the reference model: found {current_kl}, expected a finite number")
        # the largest decrease is 0.2 n / horizon of beta: at n = 5 horizon beta would reach 0
        if n_samples >= 5 * self.horizon:
            raise ConfigError(
                f"algorithm.kl_ctrl.horizon={self.horizon} is too short for {n_samples} samples an "
                f"iteration: the coefficient could reach 0 (needed: more than {n_samples // 5})"
            )
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved coefficient; the empty state of a fixed controller changes nothing."""
        self.value = state.get("value", self.value)


def make_kl_controller(
    type: str, *, kl_coef: float, target_kl: float = 0.1, horizon: int = 10_000
) -> FixedKLController:
    """Make the controller that ``algorithm.kl_ctrl`` describes; its keys are the arguments.

    Raises:
        ConfigError: a type other than ``fixed`` or ``adaptive``.
    """
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type={type!r} is unknown (known: {', '.join(KL_CONTROLLERS)})")

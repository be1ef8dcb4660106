"""Objectives of actor and critic: losses composed by the configuration, over global denominators.

Shapes: B sequences of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from strop.algorithms.aggregation import aggregate, log_ratio, masked_sum, zero_masked
from strop.algorithms.correction import rollout_is_weights
from strop.algorithms.kl import kl_penalty
from strop.algorithms.policy_loss import extra_inputs, get_policy_loss, value_loss
from strop.algorithms.preference import (
    PreferenceLoss,
    PreferenceLossFunction,
    get_preference_loss,
    pairwise_accuracy,
)
from strop.algorithms.registry import call
from strop.config.schema.supervised import PreferenceUpdateConfig
from strop.protocol import DataProto

if TYPE_CHECKING:
    from torch import Tensor

    from strop.engines.base import Loss

_ROW = "row"


def actor_objective(
    actor: Any,
    *,
    n_tokens: float,
    n_seqs: float,
    max_response_length: int,
    teacher_coef: float | None = None,
    has_reward: bool = True,
) -> Loss:
    """Return the loss agg(policy loss) - entropy_coeff agg(entropy) + kl_loss_coef agg(KL to ref).

    With a ``teacher_coef``, plus that x agg(divergence from the teacher); without a reward the policy
    loss then has no gradient, as all advantages are 0.

    Formulas: ``strop docs algorithms``. ``actor`` is the section ``actor_rollout_ref.actor``; ``n_tokens``
    and ``n_seqs`` count the whole mini-batch over all ranks and micro-batches. The old log-probs are the
    column ``rollout_log_probs`` with ``use_rollout_log_probs``, else ``old_log_probs``. Without that column
    the current policy is the one before the update: its detached log-probs stand in, and every ratio is 1.
    ``rollout_is`` weighs the loss of each token by the old log-probs against ``rollout_log_probs``.
    """
    policy_loss = get_policy_loss(actor.policy_loss, actor.policy_loss_kwargs)
    extra = extra_inputs(policy_loss)
    clip_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    clip_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high

    learns_policy = has_reward or teacher_coef is None

    def objective(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT = columns["response_mask"]
        agg = partial(
            aggregate,
            mask_BT=mask_BT,
            mode=actor.loss_agg_mode,
            n_tokens=n_tokens,
            n_seqs=n_seqs,
            max_response_length=max_response_length,
        )

        def mean(figure_BT: Tensor) -> Tensor:
            return masked_sum(figure_BT, mask_BT) / n_tokens

        old_log_probs_BT = _old_log_probs(actor, outputs, columns)
        weights_BT = _rollout_weights(actor, old_log_probs_BT, columns)
        available = {**columns, **outputs}
        if weights_BT is not None:
            available["rollout_is_weights"] = weights_BT
        inputs = {
            "log_prob": outputs["log_prob"] if learns_policy else outputs["log_prob"].detach(),
            "old_log_prob": old_log_probs_BT,
            "advantages": columns["advantages"],
            "response_mask": mask_BT,
            "clip_ratio_low": clip_low,
            "clip_ratio_high": clip_high,
            "clip_ratio_c": actor.clip_ratio_c,
            **{name: available[name] for name in extra if name in available},
        }
        policy = call(policy_loss, inputs)
        # weights have no gradient; one of 0 leaves the token in the denominator
        loss_BT = policy.loss_BT if weights_BT is None else policy.loss_BT * weights_BT
        total = agg(loss_BT)
        excess_BT = _ratio_excess(outputs["log_prob"], old_log_probs_BT, mask_BT)
        metrics = {
            **{name: mean(figure_BT) for name, figure_BT in policy.metrics_BT.items()},
            "pg_loss": total,
            "pg_clipfrac": mean(policy.clipped_BT),
            "ppo_kl": mean(log_ratio(old_log_probs_BT, outputs["log_prob"])),
            "approx_kl": mean(policy.approx_kl_BT),
            "ratio_excess": excess_BT.sum() / n_tokens,
            "squared_ratio_excess": excess_BT.square().sum() / n_tokens,
        }
        if weights_BT is not None and actor.rollout_is_mode == "mask":
            metrics["rollout_is_masked"] = mean((weights_BT == 0).double())
        if "entropy" in outputs:
            metrics["entropy"] = mean(outputs["entropy"])
            metrics["entropy_loss"] = agg(outputs["entropy"])
            if actor.entropy_coeff:  # at 0, skip the backward pass through the vocabulary
                total = total - actor.entropy_coeff * metrics["entropy_loss"]
        if actor.use_kl_loss:
            metrics["kl_loss"] = agg(_kl(actor.kl_loss_type, outputs, columns))
            total = total + actor.kl_loss_coef * metrics["kl_loss"]
        if teacher_coef is not None:
            metrics["teacher_loss"] = agg(outputs["teacher_kl"])
            total = total + teacher_coef * metrics["teacher_loss"]
            metrics["teacher/kl"] = mean(outputs["teacher_kl"])
            metrics["teacher/agreement"] = mean(outputs["teacher_agrees"])
        return total, metrics

    return objective


def _old_log_probs(actor: Any, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    if actor.use_rollout_log_probs:
        return columns["rollout_log_probs"]
    # detached: the ratio is 1, and its gradient that of the log-prob
    return columns.get("old_log_probs", outputs["log_prob"].detach())


def _rollout_weights(actor: Any, old_log_probs_BT: Tensor, columns: Mapping[str, Tensor]) -> Tensor | None:
    if actor.rollout_is is None:
        return None
    return rollout_is_weights(
        old_log_probs_BT,
        columns["rollout_log_probs"],
        columns["response_mask"],
        level=actor.rollout_is,
        threshold=actor.rollout_is_threshold,
        mode=actor.rollout_is_mode,
        threshold_low=actor.rollout_is_threshold_low,
    )


def _ratio_excess(log_prob_BT: Tensor, old_log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return exp(new - old) - 1, float64, 0 where the mask is 0; exponents are clamped to +-20.

    Without the 1 its squares keep the digits from which a variance over several steps is computed.
    """
    with torch.no_grad():
        k_BT = log_ratio(zero_masked(log_prob_BT, mask_BT), zero_masked(old_log_probs_BT, mask_BT))
        return k_BT.double().clamp(-20, 20).expm1()


def _kl(kind: str, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    if kind == "full":
        return outputs["full_kl"]
    return kl_penalty(outputs["log_prob"], columns["ref_log_prob"], kind, columns["response_mask"])


class Recorder:
    """Record per-token outputs of an update's forward passes, for all rows of a mini-batch."""

    def __init__(self, mini_batch: DataProto, names: Mapping[str, str]) -> None:
        """Record the outputs in ``names``: output -> name of its column [B, T]."""
        self._names = names
        self._shape = mini_batch.batch["response_mask"].shape
        self._seen: dict[str, Tensor] = {}  # on the model's device: a copy to the CPU would synchronize
        rows = {_ROW: torch.arange(len(mini_batch))}
        self.mini_batch = DataProto({**mini_batch.batch, **rows}, {}, mini_batch.meta_info)

    def watch(self, loss: Loss) -> Loss:
        """Return ``loss`` with recording of its outputs, for a pass over ``self.mini_batch``."""

        def watched(
            outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            for name, column in self._names.items():
                output_bt = outputs[name].detach().float()  # [rows, columns] of a micro-batch
                if column not in self._seen:
                    self._seen[column] = output_bt.new_zeros(self._shape)
                # Added, not assigned: an empty micro-batch repeats row 0 with zeros.
                self._seen[column][:, : output_bt.shape[1]].index_add_(0, columns[_ROW], output_bt)
            return loss(outputs, columns)

        return watched

    def columns(self) -> dict[str, Tensor]:
        """Return the recorded columns, float32 [B, T] on the CPU."""
        return {name: seen_BT.cpu() for name, seen_BT in self._seen.items()}


def critic_objective(critic: Any, *, n_tokens: float, n_seqs: float, max_response_length: int) -> Loss:
    """Return the loss 0.5 agg(max of the unclipped and the clipped squared error)."""

    def objective(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT = columns["response_mask"]
        loss_BT, clipped_BT = value_loss(
            outputs["values"],
            columns["returns"],
            columns["values"],
            mask_BT,
            cliprange_value=critic.cliprange_value,
        )
        total = aggregate(
            loss_BT,
            mask_BT,
            mode=critic.loss_agg_mode,
            n_tokens=n_tokens,
            n_seqs=n_seqs,
            max_response_length=max_response_length,
        )
        return total, {
            "vf_loss": total,
            "vf_clipfrac": masked_sum(clipped_BT, mask_BT) / n_tokens,
            "vpred_mean": masked_sum(outputs["values"], mask_BT) / n_tokens,
        }

    return objective


def preference_loss(update: PreferenceUpdateConfig) -> PreferenceLossFunction:
    """Return the preference loss with its settings; ``ConfigError`` if it cannot be used."""
    settings = {name: getattr(update, name) for name in ("beta", "label_smoothing", "gamma")}
    return get_preference_loss(update.loss, settings, update.loss_kwargs)


def pair_figures(found: PreferenceLoss, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the figures [B] of which means over pairs are metrics, by the metrics' names."""
    margin_B = found.chosen_reward_B - found.rejected_reward_B
    return {
        "rewards/chosen": found.chosen_reward_B,
        "rewards/rejected": found.rejected_reward_B,
        "rewards/margin": margin_B,
        "rewards/accuracy": pairwise_accuracy(margin_B),
        "logps/chosen": columns["chosen_log_prob"],
        "logps/rejected": columns["rejected_log_prob"],
    }

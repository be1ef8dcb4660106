"""Advantage estimators: from rewards per token to advantages and returns per token.

Shapes: B samples, T response tokens, G groups.

An estimator is a pure function; the names of its parameters select its inputs. The trainer reads them by
``required_parameters`` (without ``values`` there is no critic; with ``baseline_scores`` greedy responses are
generated) and calls it through ``estimate``:

    rewards [B,T]          reward per token, with the KL penalty if that is in the reward
    response_mask [B,T]    1 on tokens that the policy sampled, 0 on padding and on a tool's insertions
    values [B,T]           the critic's value of the state before each token
    uid (B hashables)      equal for responses to the same prompt
    scores [B]             the score of each sample, before the KL penalty
    token_scores [B,T]     the same per token
    baseline_scores [B]    the score of the greedy response to the sample's prompt
    follows [B,T]          the token before each (``strop.algorithms.token_tree``); None: all rows are plain
    gamma, lam             algorithm.gamma, algorithm.lam
    whiten                 algorithm.whiten_advantages
    norm_by_std            algorithm.norm_adv_by_std_in_grpo

It returns (advantages [B,T], returns [B,T]), both 0 where the mask is 0. The returns are the critic's target
and the metric ``critic/returns``: the reward that followed a token, before any baseline or scale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from strop.algorithms import aggregation
from strop.algorithms.aggregation import masked_sum, zero_masked
from strop.algorithms.registry import call, name_of, register, require_parameters, resolve

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Uid = Sequence[Hashable] | np.ndarray


class GroupStatistics(NamedTuple):
    """For each sample, the statistics of its group (usually the n responses to its prompt); float64."""

    size_B: Tensor
    mean_B: Tensor
    std_B: Tensor
    """unbiased; 0 in a group of one"""
    is_equal_B: Tensor
    """bool: True if no two scores of the group differ by more than 1e-6"""


def group_statistics(
    scores_B: Tensor, uid: Sequence[Hashable] | np.ndarray, member_B: Tensor | None = None
) -> GroupStatistics:
    """Return size, mean and unbiased standard deviation of each sample's group, and whether it is equal.

    ``member_B`` (bool; None: all) leaves out samples that no environment could finish.

    Raises:
        ValueError: the numbers of uids and samples differ.
    """
    if len(uid) != len(scores_B):
        raise ValueError(f"{len(uid)} uids do not fit {len(scores_B)} samples")
    numbers: dict[Hashable, int] = {}
    # by uid, not by position: the responses to a prompt may be in any order, or some of them missing
    members = [numbers.setdefault(one, len(numbers)) for one in uid]
    index_B = torch.tensor(members, dtype=torch.int64, device=scores_B.device)

    def group_sum(values_B: Tensor) -> Tensor:
        totals_G = values_B.new_zeros(len(numbers)).index_add(0, index_B, values_B)
        return totals_G[index_B]

    # in float32 equal scores such as 0.1 have a rounded mean and a tiny deviation: rounding errors, divided
    scores_B = scores_B.double()
    counts_B = torch.ones_like(scores_B) if member_B is None else member_B.double()
    size_B = group_sum(counts_B)
    mean_B = group_sum(scores_B * counts_B) / size_B.clamp(min=1)
    # two passes, not E[s^2] - mean^2, whose digits cancel; the clamp makes 0 / 0 of a group of one 0
    variance_B = group_sum((scores_B - mean_B).square() * counts_B) / (size_B - 1).clamp(min=1)
    known_B = scores_B if member_B is None else torch.where(member_B, scores_B, mean_B)
    ends_G = {
        end: scores_B.new_zeros(len(numbers)).scatter_reduce(0, index_B, known_B, end, include_self=False)
        for end in ("amin", "amax")
    }
    is_equal_B = (ends_G["amax"] - ends_G["amin"] <= EQUAL)[index_B]
    return GroupStatistics(size_B, mean_B, variance_B.sqrt(), is_equal_B)


Estimator = Callable[..., "tuple[Tensor, Tensor]"]

EQUAL = 1e-6
"""Scores that differ by no more are equal."""

_INPUTS = ("rewards", "response_mask", "values", "uid", "scores", "token_scores", "baseline_scores")
AVAILABLE = frozenset((*_INPUTS, "follows", "gamma", "lam", "whiten", "norm_by_std"))

ESTIMATORS: dict[str, Estimator] = {}


def register_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register a function as ``algorithm.adv_estimator=name``."""
    return register(ESTIMATORS, name, "advantage estimator")


def get_estimator(name_or_import_path: str) -> Estimator:
    """Return the estimator of that name, or a user's by import path (``package.module:function``).

    Raises:
        ConfigError: it is unknown, cannot be imported, or requires a parameter that is not available.
    """
    estimator = resolve(name_or_import_path, ESTIMATORS, key="algorithm.adv_estimator")
    require_parameters(estimator, AVAILABLE, key=f"algorithm.adv_estimator={name_or_import_path!r}")
    return estimator


def estimate(estimator: Estimator, *, response_mask: Tensor, **available: Any) -> tuple[Tensor, Tensor]:
    """Call the estimator with the inputs that it has parameters for, without gradients.

    Raises:
        ConfigError: a required input is missing or None.
        ValueError: the result is not two tensors of the response mask's shape.
    """
    present = {name: value for name, value in available.items() if value is not None}
    with torch.no_grad():
        result = call(estimator, {**present, "response_mask": response_mask})
    parts = result if isinstance(result, tuple) else (result,)
    found = [tuple(part.shape) if torch.is_tensor(part) else type(part).__name__ for part in parts]
    expected = tuple(response_mask.shape)
    if found != [expected, expected]:
        raise ValueError(
            f"the advantage estimator {name_of(estimator)} must return two tensors (advantages, returns) "
            f"of the response mask's shape {expected}, not {found}"
        )
    return result


def estimate_columns(
    estimator: Estimator, columns: Mapping[str, Tensor], uid: Uid, **constants: Any
) -> tuple[Tensor, Tensor]:
    """Call ``estimate`` with the columns of a batch; ``constants``: gamma, lam, whiten and norm_by_std."""
    mask_BT, scores_BT = columns["response_mask"], columns.get("token_level_scores")
    return estimate(
        estimator,
        rewards=columns["token_level_rewards"],
        response_mask=mask_BT,
        scores=None if scores_BT is None else masked_sum(scores_BT, mask_BT, dim=-1),
        token_scores=scores_BT,
        uid=uid,
        **{name: columns.get(name) for name in ("values", "baseline_scores", "follows")},
        **constants,
    )


@register_estimator("gae")
def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates: Schulman et al., arXiv:1506.02438, equation 16.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next
    position with mask 1: positions with mask 0 are skipped without a discount, and their rewards do not
    count. After the last one, V and A are 0. returns = A + V, before the advantages are whitened over the
    batch. In a session whose tokens form a tree, t + 1 is the next sampled token in the order of its calls,
    also over a rewritten history or the calls of a sub-agent: they are one episode, with one score.
    """
    rewards_BT, values_BT = zero_masked(rewards, response_mask), zero_masked(values, response_mask)
    next_value_B = next_advantage_B = rewards_BT.new_zeros(len(rewards_BT))
    advantages_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(rewards_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        sampled_B = response_mask[:, t].bool()
        # a tool's tokens pass V and A through undiscounted: time counts the policy's decisions
        next_value_B = torch.where(sampled_B, values_BT[:, t], next_value_B)
        next_advantage_B = torch.where(sampled_B, advantage_B, next_advantage_B)
        advantages_BT[:, t] = next_advantage_B
    advantages_BT = zero_masked(advantages_BT, response_mask)
    # before whitening: the critic's target has the scale of the rewards
    returns_BT = advantages_BT + values_BT
    if whiten:
        advantages_BT = aggregation.whiten(advantages_BT, response_mask)
    return advantages_BT, returns_BT


@register_estimator("grpo")
def grpo(
    rewards: Tensor, response_mask: Tensor, uid: Uid, scores: Tensor | None = None, *, norm_by_std: bool
) -> tuple[Tensor, Tensor]:
    """Compute group-relative advantages: Shao et al., arXiv:2402.03300, section 4.1.2.

    A_i = (s_i - mean) / (std + 1e-6) over the group, with s_i the sum of the sequence's rewards and the
    unbiased standard deviation, on every token of the sequence; 0 in a group of one. There is no division
    without ``norm_by_std`` (Dr. GRPO, Liu et al., arXiv:2503.20783), and none in a group whose ``scores``
    (None: whose s_i) are equal. returns: s_i on every token.
    """
    scores_B = masked_sum(rewards, response_mask, dim=-1)
    member_B = response_mask.bool().any(-1)
    group = group_statistics(scores_B, uid, member_B)
    # float64 until the division: equal scores leave differences of exactly 0 for the 1e-6 to divide
    advantages_B = scores_B.double() - group.mean_B
    if norm_by_std:
        # the KL penalties of equal scores differ by about 1e-3; divided by their deviation they would weigh
        # as much as right against wrong, whatever the coefficient
        is_equal_B = group.is_equal_B
        if scores is not None:
            is_equal_B = group_statistics(scores, uid, member_B).is_equal_B
        advantages_B = torch.where(is_equal_B, advantages_B, advantages_B / (group.std_B + 1e-6))
    return _on_tokens(advantages_B, rewards, response_mask), _on_tokens(scores_B, rewards, response_mask)


@register_estimator("turn_level")
def turn_level(
    rewards: Tensor,
    response_mask: Tensor,
    uid: Uid,
    token_scores: Tensor | None = None,
    follows: Tensor | None = None,
    *,
    norm_by_std: bool,
) -> tuple[Tensor, Tensor]:
    """Compute group-relative advantages of turns, for samples of several turns with rewards by turn.

    R_ik is the sum of the rewards of sample i in its turns k and later; A_ik = R_ik - mean over the members
    of the group that have a turn k, divided by their deviation + 1e-6 with ``norm_by_std``, on the tokens of
    turn k; 0 where one member has it. There is no division where these R_ik of ``token_scores`` (None: of the
    rewards) are equal, as in ``grpo``, which it is with one turn. returns: R_ik.
    """
    rewards_BT = zero_masked(rewards, response_mask)
    scores_BT = rewards_BT if token_scores is None else zero_masked(token_scores, response_mask)
    turn_BT = turns_of(response_mask, follows)
    advantages_BT, returns_BT = torch.zeros_like(rewards_BT), torch.zeros_like(rewards_BT)
    for turn in range(int(turn_BT.max()) + 1):
        own_BT = turn_BT == turn
        has_turn_B = own_BT.any(-1)
        left_B = (rewards_BT * (turn_BT >= turn)).sum(-1)
        group = group_statistics(left_B, uid, has_turn_B)
        advantages_B = left_B.double() - group.mean_B
        if norm_by_std:
            scored_B = (scores_BT * (turn_BT >= turn)).sum(-1)
            is_equal_B = group_statistics(scored_B, uid, has_turn_B).is_equal_B
            advantages_B = torch.where(is_equal_B, advantages_B, advantages_B / (group.std_B + 1e-6))
        advantages_B = torch.where(group.size_B > 1, advantages_B, 0.0)
        advantages_BT = torch.where(own_BT, advantages_B[:, None].to(rewards.dtype), advantages_BT)
        returns_BT = torch.where(own_BT, left_B[:, None], returns_BT)
    return advantages_BT, returns_BT


def turns_of(response_mask: Tensor, follows: Tensor | None = None) -> Tensor:
    """Return the number of each token's turn [B, T] int64, from 0; -1 on tokens with mask 0.

    A turn is a run of tokens with mask 1, each after the one before it: every answer that is inserted has a
    token, but a second call with the same context has none.
    """
    sampled_BT = response_mask.bool()
    goes_on_BT = torch.nn.functional.pad(sampled_BT[:, :-1], (1, 0))
    if follows is not None:
        goes_on_BT &= follows == torch.arange(-1, follows.shape[1] - 1, device=follows.device)
    begins_BT = sampled_BT & ~goes_on_BT
    return (begins_BT.cumsum(-1) - 1).masked_fill(~sampled_BT, -1)


@register_estimator("reinforce_plus_plus")
def reinforce_plus_plus(
    rewards: Tensor, response_mask: Tensor, *, gamma: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++ advantages: Hu et al., arXiv:2501.03262. No critic and no groups.

    G_t = r_t + gamma G_{t+1} over the positions with mask 1; advantages: G, whitened over the batch with
    ``whiten``. returns: G.
    """
    returns_BT = _discounted_returns(rewards, response_mask, gamma)
    return aggregation.whiten(returns_BT, response_mask) if whiten else returns_BT, returns_BT


@register_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    rewards: Tensor, response_mask: Tensor, uid: Uid, scores: Tensor | None = None, *, whiten: bool
) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++ advantages with the group's mean score as baseline: Hu et al., arXiv:2501.03262.

    s_i - mean over the group (0 in a group of one), on every token; whitened over the tokens of the batch
    with ``whiten``, unless the ``scores`` of every group (None: the s_i) are equal, as in ``grpo``. returns:
    s_i on every token.
    """
    scores_B, member_B = masked_sum(rewards, response_mask, dim=-1), response_mask.bool().any(-1)
    group = group_statistics(scores_B, uid, member_B)
    advantages_BT = _on_tokens(scores_B.double() - group.mean_B, rewards, response_mask)
    is_equal_B = group.is_equal_B
    if scores is not None:
        is_equal_B = group_statistics(scores, uid, member_B).is_equal_B
    if whiten and not is_equal_B.all():
        advantages_BT = aggregation.whiten(advantages_BT, response_mask)
    return advantages_BT, _on_tokens(scores_B, rewards, response_mask)


@register_estimator("rloo")
def rloo(rewards: Tensor, response_mask: Tensor, uid: Uid) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE leave-one-out advantages: Ahmadian et al., arXiv:2402.14740; Kool et al., 2019.

    s_i minus the mean score of the other members of its group, on every token; 0 in a group of one. returns:
    s_i on every token.
    """
    scores_B = masked_sum(rewards, response_mask, dim=-1)
    group = group_statistics(scores_B, uid, response_mask.bool().any(-1))
    # s - (n mean - s) / (n - 1) = (s - mean) n / (n - 1); in a group of one, s - mean is 0
    advantages_B = (scores_B.double() - group.mean_B) * group.size_B / (group.size_B - 1).clamp(min=1)
    return _on_tokens(advantages_B, rewards, response_mask), _on_tokens(scores_B, rewards, response_mask)


@register_estimator("remax")
def remax(rewards: Tensor, response_mask: Tensor, baseline_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ReMax advantages: Li et al., arXiv:2310.10505.

    returns: the sum of the rewards from each token to the end. advantages: returns minus the score of the
    greedy response to the same prompt, and 0 where that is NaN: no environment could finish it.
    """
    returns_BT = _discounted_returns(rewards, response_mask, gamma=1.0)
    baseline_B1 = baseline_scores.unsqueeze(-1)
    return zero_masked(returns_BT - baseline_B1, response_mask.bool() & ~baseline_B1.isnan()), returns_BT


def _discounted_returns(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1}, skipping positions with mask 0; 0 there."""
    rewards_BT = zero_masked(rewards, response_mask)
    following_B = rewards_BT.new_zeros(len(rewards_BT))
    returns_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(rewards_BT.shape[1])):
        sampled_B = response_mask[:, t].bool()
        following_B = torch.where(sampled_B, rewards_BT[:, t] + gamma * following_B, following_B)
        returns_BT[:, t] = following_B
    return zero_masked(returns_BT, response_mask)


def _on_tokens(sequence_B: Tensor, like_BT: Tensor, response_mask: Tensor) -> Tensor:
    """Repeat the value of a sequence on each of its tokens; 0 elsewhere."""
    return zero_masked(sequence_B.to(like_BT.dtype).unsqueeze(-1).expand_as(like_BT), response_mask)

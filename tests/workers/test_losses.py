"""Objectives put together by configuration, against the formulas written out sequence by sequence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from strop.config.load import load_config
from strop.workers.losses import actor_objective, critic_objective

LENGTHS = (4, 2, 0, 3)  # a row that only fills up the batch
WIDTH, MAX_LENGTH = 4, 6
COUNTS = {"n_tokens": sum(LENGTHS), "n_seqs": 3, "max_response_length": MAX_LENGTH}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def batch(*names: str) -> dict[str, torch.Tensor]:
    """Columns [B,T] far enough from one another that clips and clamps take effect."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), WIDTH)
    columns = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in names}
    columns["response_mask"] = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double()
    return columns


def aggregated(mode: str, sequences: list[list[torch.Tensor]]) -> torch.Tensor:
    """One number of the losses of each sequence's tokens."""
    rows = [torch.stack(tokens) for tokens in sequences if tokens]
    total = torch.stack([row.sum() for row in rows]).sum()
    return {
        "token-mean": total / COUNTS["n_tokens"],
        "seq-mean-token-sum": total / len(rows),
        "seq-mean-token-mean": torch.stack([row.mean() for row in rows]).sum() / len(rows),
        "seq-mean-token-sum-norm": total / len(rows) / MAX_LENGTH,
    }[mode]


def policy_token_losses(kind: str, low: float, high: float, c: float | None, columns) -> list[list]:
    losses = []
    for row, length in enumerate(LENGTHS):
        log_prob, old, advantage = (
            columns[name][row, :length] for name in ("log_prob", "old_log_probs", "advantages")
        )
        k = log_prob - old
        if kind == "gspo" and length:
            k, advantage = k.mean().expand(length), advantage.mean().expand(length)
        tokens = []
        for t in range(length):
            ratio, a = k[t].exp(), advantage[t]
            near = ratio.clamp(1 - low, 1 + high)
            if kind == "cispo":
                tokens.append(-near.detach() * a * log_prob[t])
                continue
            loss = torch.maximum(-a * ratio, -a * near)
            tokens.append(torch.minimum(loss, -a * c) if c is not None and a < 0 else loss)
        losses.append(tokens)
    return losses


@pytest.mark.parametrize(("kind", "mode"), itertools.product(("ppo", "gspo", "cispo"), MODES))
@pytest.mark.parametrize("kl", [None, "kl", "mse", "low_var_kl", "low_var_kl_clamped", "full"])
def test_the_actors_objective_is_the_weighted_sum_of_its_terms(kind, mode, kl):
    c = None if kind == "cispo" else 1.5
    actor = load_config(
        [
            *(f"actor_rollout_ref.actor.{key}={'null' if value is None else value}" for key, value in {
                "policy_loss": kind, "loss_agg_mode": mode, "entropy_coeff": 0.3, "clip_ratio_c": c,
                "clip_ratio_low": 0.2, "clip_ratio_high": 0.4, "use_kl_loss": kl is not None,
                "kl_loss_type": kl or "kl", "kl_loss_coef": 0.7, "rollout_is": "token",
                "rollout_is_threshold": 1.5}.items())
        ]
    ).actor_rollout_ref.actor  # fmt: skip
    outputs = {"log_prob", "entropy", "full_kl"}
    columns = batch(*sorted(outputs), "old_log_probs", "ref_log_prob", "advantages", "rollout_log_probs")
    weights = (columns["old_log_probs"] - columns["rollout_log_probs"]).exp().clamp(max=1.5)
    assert (weights == 1.5).any()
    for name in outputs:
        columns[name].requires_grad_()

    expected = aggregated(
        mode,
        [
            [loss * weights[row, t] for t, loss in enumerate(tokens)]
            for row, tokens in enumerate(policy_token_losses(kind, 0.2, 0.4, c, columns))
        ],
    )
    d = columns["log_prob"] - columns["ref_log_prob"]
    penalty = {
        None: torch.zeros_like(d),
        "kl": d,
        "mse": d**2 / 2,
        "low_var_kl": torch.exp(-d) - 1 + d,
        "low_var_kl_clamped": (torch.exp(-d) - 1 + d).clamp(-10, 10),
        "full": columns["full_kl"],
    }[kl]
    for coefficient, column in ((-0.3, columns["entropy"]), (0.7, penalty)):
        tokens = [[column[row, t] for t in range(length)] for row, length in enumerate(LENGTHS)]
        expected = expected + coefficient * aggregated(mode, tokens)

    given = {name: columns[name] for name in outputs}
    total, metrics = actor_objective(actor, **COUNTS)(given, columns)
    assert_close(total, expected)
    assert ("kl_loss" in metrics) == (kl is not None)
    leaves = [columns[name] for name in sorted(outputs)]
    for found, wanted in zip(
        torch.autograd.grad(total, leaves, allow_unused=True),
        torch.autograd.grad(expected, leaves, allow_unused=True),
        strict=True,
    ):
        assert (found is None or not found.any()) == (wanted is None or not wanted.any())
        if found is not None and wanted is not None:
            assert_close(found, wanted)


def settings(**keys):
    options = [
        f"actor_rollout_ref.actor.{key}={value}" for key, value in {"entropy_coeff": 0, **keys}.items()
    ]
    return load_config(options).actor_rollout_ref.actor


def test_the_samplers_log_probs_are_the_old_ones_also_beside_others():
    columns = batch("log_prob", "old_log_probs", "rollout_log_probs", "advantages")
    given = {"log_prob": columns["log_prob"]}
    total, metrics = actor_objective(settings(use_rollout_log_probs=True), **COUNTS)(given, columns)
    tokens = policy_token_losses(
        "ppo", 0.2, 0.2, None, {**columns, "old_log_probs": columns["rollout_log_probs"]}
    )
    assert_close(total, aggregated("token-mean", tokens))
    difference = columns["rollout_log_probs"] - columns["log_prob"]
    assert_close(metrics["ppo_kl"], (difference * columns["response_mask"]).sum() / COUNTS["n_tokens"])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_step_weighs_by_its_own_forward_pass(level):
    """The gradient is -A w: the ratio is 1 and the weight is a constant of the update."""
    columns = batch("log_prob", "rollout_log_probs", "advantages")
    log_prob = columns["log_prob"].requires_grad_()
    actor = settings(
        rollout_is=level, rollout_is_mode="mask", rollout_is_threshold=2, rollout_is_threshold_low=0.3
    )
    total, metrics = actor_objective(actor, **COUNTS)({"log_prob": log_prob}, columns)
    (found,) = torch.autograd.grad(total, log_prob)
    expected, masked = torch.zeros_like(found), 0
    for row, length in enumerate(LENGTHS):
        d = [(log_prob[row, t] - columns["rollout_log_probs"][row, t]).item() for t in range(length)]
        d = d if level == "token" else [sum(d)] * length
        for t in range(length):
            weight = math.exp(d[t]) if 0.3 <= math.exp(d[t]) <= 2 else 0.0
            masked += weight == 0
            expected[row, t] = -columns["advantages"][row, t] * weight / COUNTS["n_tokens"]
    assert_close(found, expected)
    assert 0 < masked < COUNTS["n_tokens"]
    assert metrics["rollout_is_masked"].item() == pytest.approx(masked / COUNTS["n_tokens"])
    assert metrics["ratio_excess"] == metrics["squared_ratio_excess"] == 0


def test_ratios_are_those_of_tokens_whatever_the_loss():
    columns = batch("log_prob", "old_log_probs", "advantages")
    columns["old_log_probs"][2] = math.nan  # a row without tokens
    _, metrics = actor_objective(settings(policy_loss="gspo"), **COUNTS)(columns, columns)
    excess = torch.cat(
        [
            (columns["log_prob"] - columns["old_log_probs"])[row, :length].exp() - 1
            for row, length in enumerate(LENGTHS)
        ]
    )
    assert_close(metrics["ratio_excess"], excess.mean())
    assert_close(metrics["squared_ratio_excess"], excess.square().mean())


@pytest.mark.parametrize("mode", MODES)
def test_the_critics_objective_takes_the_larger_of_two_errors(mode):
    critic = load_config([f"critic.loss_agg_mode={mode}", "critic.cliprange_value=0.5"]).critic
    columns = batch("found", "returns", "values")
    found = columns["found"].requires_grad_()
    tokens = []
    for row, length in enumerate(LENGTHS):
        errors = []
        for t in range(length):
            value, old, target = found[row, t], columns["values"][row, t].item(), columns["returns"][row, t]
            near = value.clamp(old - 0.5, old + 0.5)
            errors.append(torch.maximum((value - target) ** 2, (near - target) ** 2) / 2)
        tokens.append(errors)
    expected = aggregated(mode, tokens)
    total, metrics = critic_objective(critic, **COUNTS)({"values": found}, columns)
    assert_close(total, expected)
    assert_close(torch.autograd.grad(total, found), torch.autograd.grad(expected, found))
    assert math.isclose(metrics["vf_loss"].item(), expected.item())

from __future__ import annotations

import copy
import random

import torch

import ppo_single_file as ppo  # examples/ is on the path, see conftest.py
from messages import mentions


def scored_batch():
    """A policy that can sometimes add, its critic, and answers of different lengths to update them on."""
    torch.manual_seed(0)
    policy = ppo.GPT(ppo.VOCABULARY, width=16, layers=1, heads=2)
    critic = ppo.Critic(policy)
    problems = ppo.make_problems(9, random.Random(0))
    return policy, critic, ppo.collect(policy, critic, problems[:12], 3, 1.0)


def updated(policy, critic, batch) -> torch.Tensor:
    """The parameters of copies of both models after one ppo_update."""
    models = copy.deepcopy((policy, critic))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ppo.ppo_update(*models, *optimizers, batch, ppo.HyperParameters())
    return torch.cat([weight.detach().flatten() for model in models for weight in model.parameters()])


def test_gae_equals_hand_computed_values_and_steps_over_a_masked_token():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 9.0], [0.0, torch.nan, 1.0, torch.nan]])
    values = torch.tensor([[0.2, 0.4, 0.6, 9.0], [0.2, torch.nan, 0.6, torch.nan]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 1, 0]])
    advantages, returns = ppo.gae(rewards, values, mask, gamma=0.9, lam=0.5)
    # row 0: A2 = 1 - 0.6 = 0.4; A1 = 0.9*0.6 - 0.4 + 0.45*0.4 = 0.32; A0 = 0.9*0.4 - 0.2 + 0.45*0.32 = 0.304
    # row 1: A2 = 0.4; A0 = 0.9*0.6 - 0.2 + 0.45*0.4 = 0.52, as if token 1 were not there
    torch.testing.assert_close(advantages, torch.tensor([[0.304, 0.32, 0.4, 0], [0.52, 0, 0.4, 0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.504, 0.72, 1.0, 0], [0.72, 0, 1.0, 0]]))


def test_whitening_uses_the_unbiased_variance_of_real_tokens_only():
    x = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    mask = torch.tensor([[1.0, 1], [1, 0]])  # mean 2, variance (1 + 0 + 1) / 2 = 1
    torch.testing.assert_close(ppo.whiten(x, mask), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))


def test_policy_loss_is_clipped_only_in_the_direction_of_the_advantage():
    ratios = torch.tensor([[1.5, 0.5, 1.5, 0.5]])
    advantages = torch.tensor([[2.0, 2.0, -2.0, -2.0]])
    loss = ppo.policy_loss(ratios.log(), torch.zeros(1, 4), advantages, 0.2)
    torch.testing.assert_close(loss, torch.tensor([[-2.4, -1.0, 3.0, 1.6]]))


def test_value_loss_takes_the_worse_of_the_free_and_the_clipped_value():
    values, old, returns = torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    # clipped to 0.5: errors 0 and -1.5, the worse 0.5 * 2.25; then 1 and 0.5, the worse 0.5 * 1
    torch.testing.assert_close(ppo.value_loss(values, old, returns, 0.5), torch.tensor([[1.125, 0.5]]))


def test_log_probs_divide_the_logits_by_the_temperature():
    logits = torch.tensor([[[0.0, 2.0]]])
    found = ppo.token_log_probs(logits, torch.tensor([[1]]), temperature=2.0)
    torch.testing.assert_close(found, torch.tensor([[-0.31326169]]))  # -log(1 + e^-1)


def test_padding_after_the_answer_has_no_influence():
    policy, critic, batch = scored_batch()
    after = batch["response_mask"] == 0
    assert after.any()
    poisoned = {**batch}
    for name in ("old_log_probs", "values", "token_level_rewards"):
        poisoned[name] = batch[name].masked_fill(after, torch.nan)
    torch.testing.assert_close(
        updated(policy, critic, poisoned), updated(policy, critic, batch), atol=0, rtol=0
    )


def test_only_an_exact_answer_that_was_ended_counts():
    problems = [("9+9=", "18")] * 4
    answers = ["18", "18", "81", "1"]
    ids = torch.tensor([[*ppo.encode(answer), ppo.END, ppo.PAD, ppo.PAD][:3] for answer in answers])
    ids[1, 2] = ppo.encode("0")[0]  # no end token
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]])
    assert ppo.score(problems, ids, mask).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_ppo_makes_a_warmed_up_policy_right_more_often():
    torch.manual_seed(0)
    rng = random.Random(0)
    problems = ppo.make_problems(4, rng)
    policy = ppo.GPT(ppo.VOCABULARY, width=32, layers=1)
    ppo.warm_up(policy, problems, 25, 2, rng)
    critic = ppo.Critic(policy)
    before = ppo.accuracy(policy, problems * 20, 2, 1.0)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (policy, critic)]
    for _ in range(60):
        batch = ppo.collect(policy, critic, problems * 4, 2, 1.0)
        ppo.ppo_update(policy, critic, *optimizers, batch, ppo.HyperParameters(mini_batch_size=50))
    after = ppo.accuracy(policy, problems * 20, 2, 1.0)
    assert before < 0.6
    assert after > before + 0.3


def test_the_program_reports_accuracy_before_and_after(capsys):
    before, after = ppo.train(largest=9, warm_up_steps=5, iterations=2, prompts=4)
    printed = capsys.readouterr().out
    for name, accuracy in (("before", before), ("after", after)):
        line = next(line for line in printed.splitlines() if line.startswith(name))
        assert mentions(line, f"{accuracy[0]:.3f}", f"{accuracy[1]:.3f}")

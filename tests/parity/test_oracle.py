"""The library against ``examples/ppo_single_file.py``: the same samples give the same numbers."""

from __future__ import annotations

import pytest
import torch

from strop.config.load import load_config
from strop.models.loader import load_causal_lm, load_scorer
from strop.trainer.build import build_trainer

import ppo_single_file as oracle
from runs import make_inputs, overrides

SETTINGS = (
    "algorithm.gamma=0.97",
    "algorithm.lam=0.9",
    "algorithm.kl_ctrl.kl_coef=0",
    "actor_rollout_ref.rollout.temperature=0.8",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.entropy_coeff=0.02",
    "actor_rollout_ref.actor.clip_ratio=0.1",
    "actor_rollout_ref.actor.optim.lr=3e-3",
    "critic.optim.lr=3e-3",
    "critic.cliprange_value=0.3",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    "critic.ppo_micro_batch_size_per_gpu=5",
    "trainer.log_rollouts=false",
)
HP = oracle.HyperParameters(
    mini_batch_size=8,
    micro_batch_size=8,
    ppo_epochs=2,
    clip_ratio=0.1,
    cliprange_value=0.3,
    entropy_coeff=0.02,
    gamma=0.97,
    lam=0.9,
    temperature=0.8,
)


@pytest.fixture
def trainer(tmp_path):
    trainer = build_trainer(load_config(overrides(make_inputs(tmp_path), tmp_path / "run", *SETTINGS)))
    trainer.init_workers()

    def noisy(batch):  # a reward on every token, so that discounting and bootstrapping matter
        generator = torch.Generator().manual_seed(trainer.global_step)
        mask = batch.batch["response_mask"]
        return torch.randn(mask.shape, generator=generator) * mask

    trainer.ppo.reward_fn = noisy
    return trainer


@pytest.fixture
def twin(tmp_path, trainer):
    """The same starting weights behind the oracle's interface."""
    language_model = load_causal_lm(tmp_path / "model")
    scorer = load_scorer(tmp_path / "model", fresh_head_seed=trainer.config.trainer.seed)

    def policy(ids, mask, positions):
        return language_model(input_ids=ids, attention_mask=mask, position_ids=positions).logits

    def critic(ids, mask, positions):
        hidden = scorer.model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        return scorer.score(hidden).squeeze(-1)

    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        for model in (language_model, scorer)
    ]
    return language_model, scorer, policy, critic, optimizers


def _flat(model) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def _distance(ours, theirs) -> float:
    return ((_flat(ours) - _flat(theirs)).norm() / _flat(theirs).norm()).item()


def test_three_iterations_give_the_oracles_numbers(trainer, twin):
    language_model, scorer, policy, critic, optimizers = twin
    start = _flat(language_model).clone()
    for _, prompts in zip(range(3), trainer.train_loader, strict=False):
        batch, metrics = trainer.step(prompts)
        trainer.global_step += 1

        columns = {
            name: batch.batch[name]
            for name in ("input_ids", "attention_mask", "position_ids", "response_mask")
        }
        with torch.no_grad():
            logits = oracle.run_on_responses(policy, columns)
            columns["old_log_probs"] = oracle.token_log_probs(logits, oracle.responses(columns), 0.8)
            columns["values"] = oracle.run_on_responses(critic, columns)
        columns["token_level_rewards"] = batch.batch["token_level_scores"]
        mask = columns["response_mask"]
        for name in ("old_log_probs", "values"):
            torch.testing.assert_close(batch.batch[name], columns[name] * mask, atol=2e-5, rtol=1e-5)

        advantages, returns = oracle.gae(
            columns["token_level_rewards"], columns["values"], mask, HP.gamma, HP.lam
        )
        whitened = oracle.whiten(advantages, mask)
        torch.testing.assert_close(batch.batch["advantages"], whitened, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batch.batch["returns"], returns, atol=1e-4, rtol=1e-4)

        expected = oracle.ppo_update(policy, critic, *optimizers, columns, HP)
        assert metrics["objective/loss"] == pytest.approx(expected["actor/loss"], abs=1e-5)
        assert metrics["critic/vf_loss"] == pytest.approx(expected["critic/vf_loss"], abs=1e-4)

    ours = trainer.actor.worker.engine.module.hugging_face_model
    our_critic = trainer.critic.worker.engine.module.hugging_face_model
    assert (_flat(language_model) - start).norm() / start.norm() > 1e-2, "the weights hardly moved"
    assert _distance(ours, language_model) < 1e-5
    assert _distance(our_critic, scorer) < 1e-5

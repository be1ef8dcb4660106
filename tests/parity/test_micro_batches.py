"""Micro-batches are about memory: three PPO steps end at the same weights however they are cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from strop.models.loader import load_causal_lm

from runs import make_inputs, overrides, train

# 4 prompts x 2 samples a mini-batch, 16 samples an iteration.
SETTINGS = (
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
)


def _cut(rows: int) -> list[str]:
    return [
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={rows}",
        f"actor_rollout_ref.rollout.micro_batch_size_per_gpu={rows}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={rows}",
        f"critic.ppo_micro_batch_size_per_gpu={rows}",
        f"critic.forward_micro_batch_size_per_gpu={rows}",
    ]


DYNAMIC = [
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30",
    "critic.ppo_max_token_len_per_gpu=26",
]


def _weights(trainer) -> torch.Tensor:
    return torch.cat(
        [
            weight.detach().flatten()
            for group in (trainer.actor, trainer.critic)
            for weight in group.worker.engine.module.parameters()
        ]
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs):
    trainer = train(overrides(inputs, inputs / "whole", *SETTINGS, *_cut(16)))
    for group in (trainer.actor, trainer.critic):  # else any two runs would agree
        moved = dict(group.worker.engine.module.named_parameters())
        start = load_causal_lm(inputs / "model").state_dict()
        body = [name for name in start if name.endswith("proj.weight")]
        change = sum((moved[_name_in(moved, name)] - start[name]).norm() ** 2 for name in body) ** 0.5
        assert change > 0.01 * sum(start[name].norm() ** 2 for name in body) ** 0.5
    return _weights(trainer)


def _name_in(names: Iterable[str], name: str) -> str:
    """The parameter of a role's module that was ``name`` in the model's folder."""
    return next(own for own in names if own.endswith(name))


@pytest.mark.parametrize("cut", [_cut(1), _cut(3), _cut(8), DYNAMIC], ids=["1", "3", "8", "dynamic"])
def test_the_weights_do_not_depend_on_the_micro_batches(inputs, whole, tmp_path, cut):
    found = _weights(train(overrides(inputs, tmp_path, *SETTINGS, *cut)))
    assert (found - whole).norm() / whole.norm() < 1e-5

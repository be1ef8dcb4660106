"""Micro-batches are about memory: three PPO steps end at the same weights however they are cut."""

from __future__ import annotations

import pytest
import torch

from strop.config.load import load_config
from strop.trainer.build import build_trainer

from runs import fit, make_inputs, overrides, train

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
    trainer = build_trainer(load_config(overrides(inputs, inputs / "whole", *SETTINGS, *_cut(16))))
    trainer.init_workers()
    start = _weights(trainer).clone()
    fit(trainer)
    found = _weights(trainer)
    assert (found - start).norm() > 0.01 * start.norm()  # else any two runs would agree
    return found


@pytest.mark.fast("dynamic")
@pytest.mark.parametrize("cut", [_cut(3), DYNAMIC], ids=["3", "dynamic"])
def test_the_weights_do_not_depend_on_the_micro_batches(inputs, whole, tmp_path, cut):
    found = _weights(train(overrides(inputs, tmp_path, *SETTINGS, *cut)))
    assert (found - whole).norm() / whole.norm() < 1e-5

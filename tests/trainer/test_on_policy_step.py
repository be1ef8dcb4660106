"""Old log-probs from the update's own forward pass, against a forward pass before it."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest
import torch

from strop.config.load import load_config
from strop.config.roles import why_old_log_probs_are_computed_apart
from strop.errors import TrainingError
from strop.models.policy import PolicyModel
from strop.workers.policy import ActorRolloutRefWorker

from messages import naming
from runs import hashes, make_inputs, metrics, overrides, train

ACTOR = "actor_rollout_ref.actor"
KL_IN_LOSS = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type=k3")
REWARD = """
import zlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 100 / 100
"""
SETTINGS = (
    f"{ACTOR}.ppo_mini_batch_size=8",
    "critic.ppo_mini_batch_size=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=3",
)
# In both runs the passes see the same micro-batches, so that equal means equal to the last bit.
VARIANTS = {
    "PPO with warm-up": ("trainer.critic_warmup=1", "algorithm.kl_ctrl.kl_coef=0"),
    "GRPO with KL in the loss, packed": (
        "algorithm.adv_estimator=grpo",
        *KL_IN_LOSS,
        "actor_rollout_ref.model.use_remove_padding=true",
    ),
    "sequence ratios, shuffled, small micro-batches": (
        "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0",
        f"{ACTOR}.shuffle=true",
        f"{ACTOR}.policy_loss=gspo",
        f"{ACTOR}.entropy_coeff=0",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_weights_metrics_and_samples_are_those_of_a_pass_before_the_update(
    inputs, tmp_path, monkeypatch, variant
):
    calls = []
    plain = ActorRolloutRefWorker.compute_log_prob

    def counted(worker, batch):
        calls.append(worker.role)
        return plain(worker, batch)

    counted._strop_dispatch = plain._strop_dispatch
    monkeypatch.setattr(ActorRolloutRefWorker, "compute_log_prob", counted)
    reward = f"custom_reward_function.path={inputs / 'reward.py'}"
    found = {}
    for apart in (True, False):
        run = tmp_path / str(apart)
        calls.clear()
        options = (*SETTINGS, *variant, reward, f"{ACTOR}.old_log_prob_from_update={not apart}")
        if "micro_batch" not in str(variant):
            options += ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",)
        trainer = train(overrides(inputs, run, *options))
        samples = [pq.read_table(path).to_pylist() for path in sorted((run / "rollouts").iterdir())]
        found[apart] = (hashes(trainer), metrics(run), samples, len(calls))
    weights, lines, samples, passes = found[False]
    warm_up = 1 if "trainer.critic_warmup=1" in variant else 0
    assert (found[True][3], passes) == (3, warm_up)  # in the warm-up there is no update to take them from
    assert weights == found[True][0]
    assert lines == found[True][1]
    assert samples == found[True][2]
    assert len(lines) == len(samples) == 3
    assert lines[-1]["actor/grad_norm"] > 0
    assert [line["lr"] > 0 for line in lines] == [number >= warm_up for number in range(3)]
    assert lines[0]["lr"] == (0.0 if warm_up else lines[0]["actor/lr"])
    assert 0 < lines[-1]["training/rollout_probs_diff_max"] < 1e-5
    assert ("objective/kl" in lines[-1]) == ("grpo" in str(variant) and KL_IN_LOSS[0] in variant)
    assert all(row["old_log_probs"] and row["entropys"] for step in samples for row in step)


@pytest.mark.parametrize("apart", [True, False])
def test_a_sampled_token_of_probability_0_is_refused_with_its_sample(inputs, tmp_path, monkeypatch, apart):
    """Its loss was NaN: every step of the run would have been skipped, with a count and nothing else."""
    plain, seen = PolicyModel.forward, []

    def forbids_a_sampled_token(model, batch, **options):
        outputs = plain(model, batch, **options)
        if len(outputs["log_prob"]) < 16:  # the comparison at start-up
            return outputs
        impossible = torch.zeros_like(outputs["log_prob"])
        impossible[3, 0] = -torch.inf
        seen.append(int(batch["responses"][3, 0]))
        return {**outputs, "log_prob": outputs["log_prob"] + impossible}

    monkeypatch.setattr(PolicyModel, "forward", forbids_a_sampled_token)
    options = (*SETTINGS, "algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0")
    one_batch = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=16", f"{ACTOR}.old_log_prob_from_update={not apart}")
    passes = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16"
    with pytest.raises(
        TrainingError, match=naming("old_log_probs", "1 of 16", "strop/arithmetic")
    ) as refusal:
        train(overrides(inputs, tmp_path, *options, *one_batch, passes))
    text = str(refusal.value)
    sample, token = re.search(r"sample (\d+): -inf at response token (\d+)", text).groups()
    assert (token, f"token id {seen[0]})" in text) == ("0", True)
    assert f"uid 1-{int(sample) // 2}," in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("algorithm.kl_ctrl.kl_coef=0",), None),
        (KL_IN_LOSS, None),
        ((f"{ACTOR}.ppo_epochs=2",), "several steps"),
        ((f"{ACTOR}.ppo_mini_batch_size=4",), "several steps"),
        ((f"{ACTOR}.old_log_prob_from_update=false",), "old_log_prob_from_update=False"),
        (("algorithm.kl_ctrl.kl_coef=0.1",), "KL in the reward"),
        ((*KL_IN_LOSS[:2], f"{ACTOR}.kl_loss_type=full"), "full KL"),
        ((*KL_IN_LOSS, "algorithm.kl_penalty=full"), "full KL"),
        (("algorithm.kl_ctrl.kl_coef=0", f"{ACTOR}.rollout_is=token"), "rollout_is"),
        (
            (
                "algorithm.kl_ctrl.kl_coef=0",
                "+actor_rollout_ref.model.override_config={text_config: {attention_dropout: 0.1}}",
            ),
            "dropout",
        ),
    ],
)
def test_old_log_probs_that_are_needed_earlier_are_computed_apart(inputs, tmp_path, options, reason):
    config = load_config(overrides(inputs, tmp_path, f"{ACTOR}.ppo_mini_batch_size=8", *options))
    found = why_old_log_probs_are_computed_apart(config)
    assert (found is None) if reason is None else (reason in found)

"""Old log-probs from the update's own forward pass, or from the sampler, against a forward pass before it."""

from __future__ import annotations

import itertools
import math
import re

import pyarrow.parquet as pq
import pytest
import torch

from strop.config.load import load_config
from strop.config.roles import reason_for_old_log_prob_pass, sampler_in_words
from strop.errors import TrainingError
from strop.models.policy import PolicyModel
from strop.protocol import DataProto
from strop.workers.policy import ActorRolloutRefWorker

from messages import mentions, naming
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
    "sequence ratios, shuffled, padded, small micro-batches": (
        "actor_rollout_ref.model.use_remove_padding=false",
        "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0",
        f"{ACTOR}.shuffle=true",
        f"{ACTOR}.policy_loss=gspo",
        f"{ACTOR}.entropy_coeff=0",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
    ),
    "another policy's samples, weighed by token": (
        "algorithm.adv_estimator=grpo",
        *KL_IN_LOSS,
        f"{ACTOR}.rollout_is=token",
        f"{ACTOR}.rollout_is_threshold=1.1",
    ),
    "another policy's samples, weighed by sequence, packed, small micro-batches": (
        "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0",
        "actor_rollout_ref.model.use_remove_padding=true",
        f"{ACTOR}.rollout_is=sequence",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
    ),
    "another policy's samples, PPO with masked weights": (
        "algorithm.kl_ctrl.kl_coef=0",
        f"{ACTOR}.rollout_is=token",
        f"{ACTOR}.rollout_is_mode=mask",
        f"{ACTOR}.rollout_is_threshold=1.2",
        f"{ACTOR}.rollout_is_threshold_low=0.8",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "reward.py").write_text(REWARD)
    return folder


def replace(monkeypatch, name, make):
    """Replace a method of the worker by ``make(method)``."""
    plain = getattr(ActorRolloutRefWorker, name)
    changed = make(plain)
    changed._strop_dispatch = plain._strop_dispatch
    monkeypatch.setattr(ActorRolloutRefWorker, name, changed)


def sample_from_another_policy(monkeypatch):
    """Add up to 0.3 to the sampler's log-probs, by token id; return them by iteration."""
    seen = []

    def make(plain):
        def generate(worker, prompts, **callbacks):
            batch = plain(worker, prompts, **callbacks)
            columns = dict(batch.batch)
            shift = 0.3 * torch.sin(7.0 * columns["responses"]) * columns["response_mask"]
            columns["rollout_log_probs"] = columns["rollout_log_probs"] + shift
            seen.append(columns["rollout_log_probs"])
            return DataProto(columns, batch.non_tensor_batch, batch.meta_info)

        return generate

    replace(monkeypatch, "generate_sequences", make)
    return seen


NEIGHBOURS = {
    "another policy's samples, weighed by token",
    "another policy's samples, PPO with masked weights",
    "GRPO, one step",
    "warm-up",
}


def variants(settings):
    return [
        pytest.param(variant, id=name, marks=[pytest.mark.slow] if name in NEIGHBOURS else [])
        for name, variant in settings.items()
    ]


@pytest.mark.parametrize("variant", variants(VARIANTS))
def test_weights_metrics_and_samples_are_those_of_a_pass_before_the_update(
    inputs, tmp_path, monkeypatch, variant
):
    calls, is_weighed = [], "rollout_is=" in str(variant)

    def make(plain):
        def counted(worker, batch):
            calls.append(worker.role)
            return plain(worker, batch)

        return counted

    replace(monkeypatch, "compute_log_prob", make)
    if is_weighed:
        sample_from_another_policy(monkeypatch)
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
        for row in itertools.chain(*samples):  # a ratio of 1 is not recorded where it cannot be another
            assert row.pop("update_log_probs", row["old_log_probs"]) == row["old_log_probs"]
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
    assert all(line.get("val/ratio", 1.0) == 1 and not line.get("val/ratio_var") for line in lines)
    assert 0 < lines[-1]["training/rollout_probs_diff_max"] < (0.4 if is_weighed else 1e-5)
    assert ("actor/rollout_is_masked" in lines[-1]) == ("rollout_is_mode=mask" in str(variant))
    if is_weighed:
        assert lines[-1]["training/rollout_probs_diff_max"] > 1e-3
        assert 0 < lines[-1].get("actor/rollout_is_masked", 0.5) < 1
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
        (("algorithm.kl_ctrl.kl_coef=0", f"{ACTOR}.rollout_is=token"), None),
        (
            (f"{ACTOR}.use_rollout_log_probs=true", f"{ACTOR}.ppo_epochs=2", "algorithm.kl_ctrl.kl_coef=1"),
            None,
        ),
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
    found = reason_for_old_log_prob_pass(config)
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("algorithm.kl_ctrl.kl_coef=0",), None),
        ((f"{ACTOR}.ppo_epochs=2",), "several steps"),
        (("+actor_rollout_ref.model.override_config={attention_dropout: 0.1}",), "dropout"),
        ((f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.use_rollout_log_probs=false"), None),
        ((f"{ACTOR}.ppo_epochs=2", "trainer.val_only=true"), None),
    ],
)
def test_a_run_that_never_compares_sampler_and_trainer_is_told(inputs, tmp_path, options, words):
    settings = (f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.use_rollout_log_probs=true", *options)
    found = sampler_in_words(load_config(overrides(inputs, tmp_path, *settings)))
    assert found is None if words is None else mentions(found, "training/rollout_*", words, "val/ratio")


OWN_LOG_PROBS = {
    "PPO, several steps, KL in the reward": (
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_epochs=2",
        "algorithm.kl_ctrl.kl_coef=0.1",
    ),
    "GRPO, one step": ("algorithm.adv_estimator=grpo", *KL_IN_LOSS),
    "full KL in the loss": (
        "algorithm.adv_estimator=grpo",
        *KL_IN_LOSS[:2],
        f"{ACTOR}.kl_loss_type=full",
    ),
    "warm-up": ("trainer.critic_warmup=1", "algorithm.kl_ctrl.kl_coef=0"),
}


@pytest.mark.fast("full KL in the loss")
@pytest.mark.parametrize("variant", variants(OWN_LOG_PROBS))
def test_the_samplers_log_probs_as_old_ones_need_no_pass(inputs, tmp_path, monkeypatch, variant):
    """Against a run whose pass before the update is made to answer with the sampler's log-probs."""
    seen = sample_from_another_policy(monkeypatch)
    calls = []

    def make(plain):
        def answered_by_the_sampler(worker, batch):
            calls.append(batch)
            found = plain(worker, batch)
            return DataProto({**found.batch, "old_log_probs": seen[-1]})

        return answered_by_the_sampler

    replace(monkeypatch, "compute_log_prob", make)
    reward = f"custom_reward_function.path={inputs / 'reward.py'}"
    options = (*SETTINGS, *variant, reward, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8")
    other = train(overrides(inputs, tmp_path / "pass", *options, f"{ACTOR}.old_log_prob_from_update=false"))
    assert len(calls) == 3
    calls.clear()
    trainer = train(overrides(inputs, tmp_path / "sampler", *options, f"{ACTOR}.use_rollout_log_probs=true"))
    assert calls == []
    assert hashes(trainer) == hashes(other)
    expected, found = metrics(tmp_path / "pass"), metrics(tmp_path / "sampler")
    one_step = "ppo_epochs" not in str(variant)
    for number, (line, wanted) in enumerate(zip(found, expected, strict=True)):
        of_a_pass = {name for name in wanted if name.startswith("training/") or name == "objective/entropy"}
        is_trained = number > 0 or "critic_warmup" not in str(variant)
        assert set(wanted) - set(line) == (set() if one_step and is_trained else of_a_pass)
        for name in set(line) - of_a_pass:
            # The other run reports the full KL's estimate by a pass of its own; all else is the same.
            assert line[name] == wanted[name] or math.isnan(line[name]), name
        if one_step and is_trained:
            assert 1e-3 < line["training/rollout_probs_diff_max"] < 0.4
            assert line["objective/entropy"] == wanted["objective/entropy"]
        if is_trained:
            assert line["val/ratio_var"] > 1e-3

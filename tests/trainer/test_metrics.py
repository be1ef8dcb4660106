"""Every figure on a batch small enough to compute by hand.

Two samples, two prompt columns, three response columns; the second response is one token and then garbage.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from strop.protocol import DataProto
from strop.trainer.metrics import (
    UpdateRecord,
    batch_metrics,
    critic_metrics,
    merge_updates,
    objective_metrics,
    picture_metrics,
    sampler_metrics,
    speed_metrics,
)

NAN = float("nan")


@pytest.fixture
def batch() -> DataProto:
    return DataProto(
        {
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
            "response_mask": torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
            "truncated": torch.tensor([True, False]),
            "stop_tokens": torch.tensor([3, 1]),
            "hidden_tokens": torch.tensor([3, 0]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.5, NAN, NAN]]),
            "token_level_rewards": torch.tensor([[-0.1, 0.0, 0.9], [0.25, NAN, NAN]]),
            "advantages": torch.tensor([[1.0, 2.0, 3.0], [-2.0, NAN, NAN]]),
            "returns": torch.tensor([[1.0, 1.0, 1.0], [0.0, NAN, NAN]]),
            "values": torch.tensor([[0.5, 1.0, 1.0], [0.5, NAN, NAN]]),
            "entropys": torch.tensor([[1.0, 2.0, 3.0], [6.0, NAN, NAN]]),
            "kl": torch.tensor([[0.1, 0.2, 0.3], [0.4, NAN, NAN]]),
            "old_log_probs": torch.tensor([[-1.0, -1.0, -1.0], [-2.0, NAN, NAN]]),
            "rollout_log_probs": torch.tensor([[-1.0, -1.0, -1.0], [-1.0, NAN, NAN]]),
            "reward/rule": torch.tensor([1.0, 0.5]),
        },
        {"uid": ["a", "b"]},
    )


@pytest.mark.parametrize(
    ("uid", "share"),
    [
        ("aabbb", 0.5),  # 0, 0 and 1, 1, 2: each group counts once, whatever its size
        ("aaabb", 0.0),
        ("aabcd", 1.0),  # groups of one do not count
        ("abcde", None),
    ],
)
def test_the_share_of_groups_with_equal_scores(uid, share):
    scores, ones = torch.tensor([[0.0], [5e-7], [1.0], [1.0], [2.0]]), torch.ones(5, 1)
    columns = {
        **dict.fromkeys(("response_mask", "advantages", "returns", "truncated"), ones),
        "attention_mask": torch.ones(5, 2),
        "token_level_scores": scores,
        "token_level_rewards": scores,
    }
    found = batch_metrics(DataProto(columns, {"uid": list(uid)}), max_prompt_length=1)
    assert found.get("reward/equal_groups") == (share if share is None else pytest.approx(share))


def test_batch_metrics_count_real_tokens_only(batch):
    found = batch_metrics(batch, max_prompt_length=2)
    assert found == pytest.approx(
        {
            "critic/score/mean": 0.75,
            "critic/score/max": 1.0,
            "critic/score/min": 0.5,
            "critic/rewards/mean": (0.8 + 0.25) / 2,
            "critic/rewards/max": 0.8,
            "critic/rewards/min": 0.25,
            "critic/advantages/mean": (1 + 2 + 3 - 2) / 4,
            "critic/advantages/max": 3.0,
            "critic/advantages/min": -2.0,
            "critic/returns/mean": 0.75,
            "critic/returns/max": 1.0,
            "critic/returns/min": 0.0,
            "critic/values/mean": 0.75,
            "critic/values/max": 1.0,
            "critic/values/min": 0.5,
            # returns - values: 0.5, 0, 0, -0.5, variance 1/6; returns: 1, 1, 1, 0, variance 1/4
            "critic/vf_explained_var": 1 - (1 / 6) / (1 / 4),
            "response_length/mean": 2.0,
            "response_length/max": 3.0,
            "response_length/min": 1.0,
            "response_length/clip_ratio": 0.5,
            "prompt_length/mean": 1.5,
            "prompt_length/max": 2.0,
            "prompt_length/min": 1.0,
            "prompt_length/clip_ratio": 0.5,
            "val/sequence_lengths": 2.0,
            "val/num_stop_token_ids": 2.0,
            "val/stop_token_rate": 1.0,
            "response/hidden_tokens": 1.5,
            "response/hidden_rate": 0.5,
        },
        rel=1e-5,
    )


def test_objective_metrics_sum_over_a_sequence_and_average_over_sequences(batch):
    found = objective_metrics(batch, kl_coef=0.05)
    assert found == pytest.approx(
        {
            "objective/scores": 0.75,
            "objective/rlhf_reward": 0.525,
            "objective/non_score_reward": -0.225,
            "objective/entropy": 3.0,
            "objective/kl": (0.6 + 0.4) / 2,
            "critic/kl": (0.2 + 0.4) / 2,
            "critic/kl_coeff": 0.05,
            "objective/verifiable_correct_rate": 0.5,
        }
    )


def test_samples_without_a_rules_score_do_not_count_as_wrong(batch):
    batch.batch["reward/rule"] = torch.tensor([1.0, NAN])
    assert objective_metrics(batch, kl_coef=0.0)["objective/verifiable_correct_rate"] == 1.0


def test_without_a_reference_there_is_no_kl_to_report(batch):
    del batch.batch["kl"]
    assert not [name for name in objective_metrics(batch, kl_coef=0.0) if "kl" in name]


def test_without_a_pass_of_the_policy_before_the_update_nothing_is_said_of_it(batch):
    del batch.batch["old_log_probs"], batch.batch["entropys"]
    assert sampler_metrics(batch) == {}
    assert "objective/entropy" not in objective_metrics(batch, kl_coef=0.0)


def test_sampler_metrics_compare_probabilities_of_real_tokens(batch):
    found = sampler_metrics(batch)
    difference = 2.718281828**-1 - 2.718281828**-2
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(difference / 4, rel=1e-5)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(difference, rel=1e-5)


def test_sampler_metrics_of_the_newest_version_leave_older_tokens_out(batch):
    batch.batch["rollout_versions"] = torch.tensor([[3, 3, 4], [3, -1, -1]])
    found = sampler_metrics(batch)
    assert found["training/rollout_probs_diff_max/newest"] == 0
    assert found["training/rollout_effective_sample_size/newest"] == 1
    assert found["training/rollout_probs_diff_max"] > 0.2  # of the token of version 3 in the second row
    batch.batch["rollout_versions"] = torch.tensor([[3, 3, 3], [3, 4, 4]])  # all are the newest: 4 is masked
    assert not [name for name in sampler_metrics(batch) if name.endswith("/newest")]


def _records(**changes):
    first = {"pg_loss": 1.0, "pg_clipfrac": 0.5, "grad_norm": 2.0, "lr": 1e-3, "skipped_steps": 0.0}
    second = {"pg_loss": 4.0, "pg_clipfrac": 0.0, "grad_norm": 4.0, "lr": 5e-4, "skipped_steps": 0.0}
    return [UpdateRecord(first, n_tokens=30, n_seqs=2), UpdateRecord({**second, **changes}, 10, 2)]


def test_updates_are_merged_by_what_their_figures_average_over():
    tokens = merge_updates(_records(), loss_agg_mode="token-mean")
    assert tokens == pytest.approx(
        {
            "pg_loss": (30 * 1 + 10 * 4) / 40,
            "pg_clipfrac": 30 * 0.5 / 40,
            "grad_norm": 3.0,
            "lr": 5e-4,
            "skipped_steps": 0.0,
        }
    )
    sequences = merge_updates(_records(), loss_agg_mode="seq-mean-token-sum")
    assert sequences["pg_loss"] == pytest.approx(2.5)
    assert sequences["pg_clipfrac"] == pytest.approx(30 * 0.5 / 40)


@pytest.mark.parametrize("width", [1e-5, 0.3])
def test_the_variance_of_ratios_is_that_over_the_tokens_of_all_steps(width):
    """Against one computation over all ratios; a mean of the steps' variances is another number."""
    generator = torch.Generator().manual_seed(1)
    steps = [
        (width * (torch.rand(tokens, generator=generator, dtype=torch.float64) + shift))
        for tokens, shift in ((30, 0.0), (7, -1.0), (1, 2.0))
    ]
    records = [
        UpdateRecord(
            {
                "ratio_excess": excess.mean().item(),
                "squared_ratio_excess": excess.square().mean().item(),
            },
            n_tokens=len(excess),
            n_seqs=2,
        )
        for excess in steps
    ]
    ratios = 1 + torch.cat(steps)
    found = merge_updates(records, loss_agg_mode="seq-mean-token-mean")
    assert found == {
        "ratio_mean": pytest.approx(ratios.mean().item(), rel=1e-12),
        "ratio_var": pytest.approx(ratios.var().item(), rel=1e-6),
    }
    one = merge_updates(records[2:], loss_agg_mode="token-mean")
    assert one["ratio_var"] == 0


def test_the_largest_load_of_an_expert_is_that_of_all_steps():
    loads = [UpdateRecord({"router_load_max": load}, n_tokens=30, n_seqs=2) for load in (1.2, 6.0, 1.3)]
    assert merge_updates(loads, loss_agg_mode="token-mean") == {"router_load_max": 6.0}


def test_a_skipped_step_is_counted_and_left_out_of_the_gradient_norm():
    merged = merge_updates(_records(skipped_steps=1.0, grad_norm=NAN), loss_agg_mode="token-mean")
    assert merged["skipped_steps"] == 1.0
    assert merged["grad_norm"] == 2.0


def test_speed_counts_prompt_and_response_tokens_and_generation_response_tokens(batch):
    found = speed_metrics(batch, {"timing_s/step": 2.0, "timing_s/gen": 1.0, "timing_s/ref": 0.7}, devices=1)
    assert found == pytest.approx(
        {
            "perf/total_num_tokens": 7.0,
            "perf/time_per_step": 2.0,
            "perf/throughput": 3.5,
            "time/training": 2.0,
            "timing_per_token_ms/gen": 1000 / 4,
            "timing_per_token_ms/ref": 100.0,
        }
    )


def test_speed_counts_the_tokens_of_each_branch():
    columns = {  # the example of strop.algorithms.token_tree, and a plain row
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]]),
        "response_mask": torch.tensor([[1.0, 1, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0]]),
        "follows": torch.tensor([[-1, 0, -1, 2, 1, 4], [-1, 0, 1, 2, 3, 4]], dtype=torch.int32),
    }
    found = speed_metrics(DataProto(columns), {"timing_s/step": 2.0}, devices=1)
    assert found["perf/total_num_tokens"] == (2 + 4) + (2 + 2) + 4


def test_the_critics_update_has_both_families_of_names():
    found = critic_metrics({"vf_loss": 2.0, "vf_clipfrac": 0.25, "lr": 1e-5})
    of_verl = {"critic/vf_loss": 2.0, "critic/vf_clipfrac": 0.25, "critic/lr": 1e-5}
    assert found == {**of_verl, "loss/value_avg": 2.0, "val/clipfrac_avg": 0.25}


def test_pictures_of_prompts_and_of_turns(batch):
    """Of 7 tokens 2 stand for the picture of the first prompt, and 3 for one that a turn brought."""
    images = torch.tensor([[5, 0], [0, 0]])
    images_at = torch.tensor([[7, -1, -1], [0, 0, 0]])
    known = SimpleNamespace(tokens={5: 2}.__getitem__)

    def found(pictures=None, **columns):
        return picture_metrics(DataProto({**batch.batch, **columns}), [], pictures)

    none = {"images/processed": 0.0, "timing_s/pictures": 0.0}
    assert found(known, images=images) == {"images/per_prompt": 0.5, "images/tokens_share": 2 / 7, **none}
    both = found(known, images=images, images_at=images_at)
    assert both == {"images/per_prompt": 0.5, "images/tokens_share": 5 / 7, **none}
    turns = {"images/per_prompt": 0.0, "images/tokens_share": 3 / 7, **none}
    assert found(images_at=images_at) == found(known, images_at=images_at) == turns
    assert found(known) == found() == found(images=images) == {}

"""Metrics of one iteration, under the names that ``strop docs metrics`` defines.

Shapes: B samples, T response tokens. Means are over real tokens or over sequences, never over padding and
never means of means.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.algorithms.advantages import group_statistics
from strop.algorithms.aggregation import masked_mean, masked_sum, masked_var
from strop.algorithms.correction import rollout_statistics
from strop.algorithms.kl import mean_sequence_kl
from strop.algorithms.token_tree import computed_tokens
from strop.columns import ENDED_BY
from strop.protocol import DataProto

if TYPE_CHECKING:
    from torch import Tensor

    from strop.data.pictures.expand import PromptPictures

_CLOCK = time.time() - time.perf_counter()
"""Seconds of ``time.time()`` at 0 of the monotonic clock, which adjustments of the time do not move."""


class PhaseTimer:
    """Sum wall-clock seconds by phase; ``take`` returns them as ``timing_s/<name>`` and resets."""

    def __init__(self, running: list[tuple[str, float]] | None = None) -> None:
        """Keep the phases under way in ``running``; see ``strop.trainer.progress``."""
        self._running = [] if running is None else running
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.intervals: list[tuple[str, float, float]] = []
        """Name, start and end of every phase since the last ``take``, in seconds of ``time.time()``."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the seconds of the body to ``name``."""
        start = time.perf_counter()
        self._running.append((name, start))
        try:
            yield
        finally:
            self._running.pop()
            end = time.perf_counter()
            self._seconds[name] += end - start
            self.intervals.append((name, _CLOCK + start, _CLOCK + end))

    def record(self, name: str, seconds: float) -> None:
        """Add the seconds of a phase that another process measured."""
        self._seconds[name] += seconds

    def add(self, other: PhaseTimer) -> None:
        """Add the phases of ``other`` and reset it."""
        for name, seconds in other._seconds.items():
            self._seconds[name] += seconds
        self.intervals += other.intervals
        other._clear()

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._clear()
        return taken

    def _clear(self) -> None:
        self._seconds.clear()
        self.intervals = []


def peak_memory(groups: Iterable[Any]) -> dict[str, float]:
    """Return the peaks of memory by phase since the last call, of rank zero of each worker group.

    A group of the user's own workers has none.
    """
    calls = [group.memory_peaks.start() for group in groups if hasattr(group, "memory_peaks")]
    return {f"perf/peak_memory_gb/{phase}": gib for call in calls for phase, gib in call.get().items()}


def picture_metrics(
    batch: DataProto, groups: Iterable[Any], pictures: PromptPictures | None
) -> dict[str, float]:
    """Return metrics of the pictures of a batch; {} without any, and for those of a user's data set.

    ``pictures``: those of the data set, which know the tokens of one. The groups' processes have processed
    some of them since the last call.
    """
    columns, held, count = batch.batch, [], 0
    if "images" in columns:
        if pictures is None:
            return {}
        held = columns["images"][columns["images"] != 0].tolist()
        count = sum(map(pictures.tokens, held))
    elif "images_at" not in columns:
        return {}
    if "images_at" in columns:
        count += int(columns["images_at"].count_nonzero())
    calls = [group.picture_work.start() for group in groups if hasattr(group, "picture_work")]
    work = sum((Counter(call.get()) for call in calls), Counter[str]())
    return {
        "images/per_prompt": len(held) / len(batch),
        "images/tokens_share": count / columns["attention_mask"].sum().item(),
        **{name: float(work[name]) for name in ("images/processed", "timing_s/pictures")},
    }


_SEQUENCE_LOSSES = ("loss", "pg_loss", "vf_loss", "entropy_loss", "kl_loss", "teacher_loss")


@dataclass(frozen=True)
class UpdateRecord:
    """Metrics of one optimizer step, with the tokens and sequences that weight them."""

    metrics: Mapping[str, float]
    n_tokens: float
    n_seqs: float


def merge_updates(records: Iterable[UpdateRecord], *, loss_agg_mode: str) -> dict[str, float]:
    """Merge the metrics of all optimizer steps of an iteration.

    Losses are weighted by their denominators (tokens, or sequences under the ``seq-*`` aggregations),
    shares of tokens by tokens; the learning rate is the last one; skipped steps are counted; the gradient
    norm is the mean over the steps that were taken. The policy's ratios, given as sums of their excess over 1
    and of its square, become mean and unbiased variance over the tokens of all steps.
    """
    records = list(records)
    n_tokens = sum(record.n_tokens for record in records)
    n_seqs = sum(record.n_seqs for record in records)
    merged = {}
    for name in records[0].metrics:
        values = [record.metrics[name] for record in records]
        if name == "lr":
            merged[name] = values[-1]
        elif name == "skipped_steps":
            merged[name] = sum(values)
        elif name == "grad_norm":
            taken = [v for v, r in zip(values, records, strict=True) if not r.metrics.get("skipped_steps")]
            # skipped steps have a norm of NaN or infinity, which would be the mean
            merged[name] = sum(taken) / len(taken) if taken else float("nan")
        elif name == "router_load_max":
            merged[name] = max(values)
        elif name in _SEQUENCE_LOSSES and loss_agg_mode != "token-mean":
            merged[name] = sum(v * r.n_seqs for v, r in zip(values, records, strict=True)) / n_seqs
        else:
            merged[name] = sum(v * r.n_tokens for v, r in zip(values, records, strict=True)) / n_tokens
    if "ratio_excess" in merged:
        excess, squared = merged.pop("ratio_excess"), merged.pop("squared_ratio_excess")
        merged["ratio_mean"] = 1 + excess
        # of ratio - 1, whose squares keep digits that those of ratios near 1 would lose
        merged["ratio_var"] = max(squared - excess**2, 0.0) * n_tokens / max(n_tokens - 1, 1)
    return merged


def _spread(name: str, values: Tensor) -> dict[str, float]:
    values = values.float() if len(values) else values.new_zeros(1)  # lengths have no mean; all may be lost
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{statistic}": value.item() for statistic, value in found.items()}


def batch_metrics(batch: DataProto, *, max_prompt_length: int) -> dict[str, float]:
    """Return statistics of scores, rewards, advantages, returns, values and lengths."""
    columns, mask_BT = batch.batch, batch.batch["response_mask"]
    real_BT = mask_BT.bool()
    member_B = real_BT.any(1)  # a sample that its environment lost has no tokens, and is in no mean of scores
    scores_B = masked_sum(columns["token_level_scores"], mask_BT, dim=1)
    rewards_B = masked_sum(columns["token_level_rewards"], mask_BT, dim=1)
    metrics = {
        **_spread("critic/score", scores_B[member_B]),
        **_spread("critic/rewards", rewards_B[member_B]),
        **_spread("critic/advantages", columns["advantages"][real_BT]),
        **_spread("critic/returns", columns["returns"][real_BT]),
    }
    group = group_statistics(scores_B, batch.non_tensor_batch["uid"], member_B)
    if (several_B := (group.size_B > 1) & member_B).any():
        # each sample counts 1 / size, so each group counts 1
        equal_B = group.is_equal_B.double() / group.size_B
        metrics["reward/equal_groups"] = (
            equal_B[several_B].sum() / (1 / group.size_B[several_B]).sum()
        ).item()
    if "values" in columns:
        metrics |= _spread("critic/values", columns["values"][real_BT])
        residual = masked_var(columns["returns"] - columns["values"], mask_BT)
        metrics["critic/vf_explained_var"] = (
            1 - residual / (masked_var(columns["returns"], mask_BT) + 1e-8)
        ).item()
    lengths_B = real_BT.sum(dim=1)
    prompt_width = columns["attention_mask"].shape[1] - mask_BT.shape[1]
    prompts_B = columns["attention_mask"][:, :prompt_width].sum(dim=1)
    if "stop_tokens" in columns:
        metrics["val/num_stop_token_ids"] = columns["stop_tokens"].float().mean().item()
        metrics["val/stop_token_rate"] = (columns["stop_tokens"] > 0).float().mean().item()
    if "hidden_tokens" in columns:
        metrics["response/hidden_tokens"] = columns["hidden_tokens"].float().mean().item()
        metrics["response/hidden_rate"] = (columns["hidden_tokens"] > 0).float().mean().item()
    return {
        **metrics,
        **turn_metrics(batch),
        **_spread("response_length", lengths_B),
        "response_length/clip_ratio": columns["truncated"].float().mean().item(),
        **_spread("prompt_length", prompts_B),
        "prompt_length/clip_ratio": (prompts_B >= max_prompt_length).float().mean().item(),
        "val/sequence_lengths": lengths_B.float().mean().item(),
    }


def turn_metrics(batch: DataProto) -> dict[str, float]:
    """Return statistics of the turns of samples, and of the answers between them; {} without turns."""
    columns, mask_BT = batch.batch, batch.batch["response_mask"]
    if "n_turns" not in columns:
        return {}
    if "n_branches" in columns:
        counts = {
            f"agent/{name}": columns[f"n_{name}"].float().sum().item()
            for name in ("branches", "overlapping", "replayed", "abandoned")
        }
        counts |= {
            "agent/sessions": float(len(mask_BT)),
            "agent/requests": columns["n_turns"].float().sum().item(),
            "agent/without_calls": (columns["n_turns"] == 0).sum().item(),
            "agent/forked_share": (columns["n_branches"] > 1).float().mean().item(),
            "agent/waiting_share": columns["agent_waiting"].mean().item(),
        }
    else:
        counts = {}
    turns_B, ended_B = columns["n_turns"].float(), columns["ended_by"]
    # tokens of a sample that its environment lost are no answers
    present_BT = columns["attention_mask"][:, -mask_BT.shape[1] :] * mask_BT.any(1, keepdim=True)
    inserted = (present_BT.sum() - mask_BT.sum()).item()
    counts |= {
        f"turns/{name}": columns[f"n_{name}"].float().sum().item()
        for name in ("calls", "malformed", "errors", "timeouts", "other_stop")
    }
    reasons = {
        f"turns/ended_by/{reason}": (ended_B == code).float().mean().item()
        for code, reason in enumerate(ENDED_BY)
        if reason
    }
    return {
        "turns/mean": turns_B.mean().item(),
        "turns/max": turns_B.max().item(),
        "turns/answer_tokens": inserted / len(turns_B),
        "turns/share_inserted": inserted / max(present_BT.sum().item(), 1),
        "turns/cut": columns["turn_cut"].float().mean().item(),
        **counts,
        **reasons,
    }


def objective_metrics(batch: DataProto, *, kl_coef: float) -> dict[str, float]:
    """Return the ``objective/*`` family: per-sequence sums averaged over sequences.

    ``kl_coef`` is the beta that was applied. KL metrics need a reference model. The sign of
    ``non_score_reward`` is such that scores + non_score_reward = rlhf_reward.
    """
    columns, mask_BT = batch.batch, batch.batch["response_mask"]
    member_B = mask_BT.bool().any(1)

    def mean_sum(name: str) -> float:
        return masked_mean(masked_sum(columns[name], mask_BT, dim=1), member_B).item()

    scores, rewards = mean_sum("token_level_scores"), mean_sum("token_level_rewards")
    metrics = {
        "objective/scores": scores,
        "objective/rlhf_reward": rewards,
        "objective/non_score_reward": rewards - scores,
    }
    if "entropys" in columns:
        metrics["objective/entropy"] = masked_mean(columns["entropys"], mask_BT).item()
    if "kl" in columns:
        metrics["objective/kl"] = mean_sum("kl")
        metrics["critic/kl"] = mean_sequence_kl(columns["kl"], mask_BT).item()
        metrics["critic/kl_coeff"] = kl_coef
    for name in ("entropy", "kl"):
        if (column := f"teacher_{name}") in columns:
            metrics[f"teacher/{name}"] = masked_mean(columns[column], mask_BT).item()
    if "reward/rule" in columns:
        rule = columns["reward/rule"][member_B]
        verifiable = rule[~rule.isnan()]  # NaN for samples that no rule scored
        if len(verifiable):
            metrics["objective/verifiable_correct_rate"] = (verifiable >= 1).float().mean().item()
    return metrics


def sampler_metrics(batch: DataProto) -> dict[str, float]:
    """Return statistics of the difference between the sampler's and the trainer's log-probs, if known."""
    columns = batch.batch
    if "old_log_probs" not in columns:
        return {}
    given = tuple(columns[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    metrics = {f"training/rollout_{name}": x for name, x in rollout_statistics(*given)._asdict().items()}
    named = [columns[name].any(dim=1) for name in ("images", "images_at") if name in columns]
    if named:  # a fault in the way of pictures would drown in rows of text
        has_pictures_B = named[0] | named[-1]
        for name, rows_B in (("pictures", has_pictures_B), ("text", ~has_pictures_B)):
            if rows_B.any():
                found = rollout_statistics(*(column[rows_B] for column in given))
                metrics[f"training/rollout_probs_diff_max/{name}"] = found.probs_diff_max
    if "rollout_versions" in columns and given[-1].any():
        versions_BT, mask_BT = columns["rollout_versions"], given[-1]
        newest = versions_BT[mask_BT > 0].max()  # a lost sample has versions, too
        newest_BT = mask_BT * versions_BT.eq(newest)
        if newest_BT.sum() < mask_BT.sum():  # of all tokens, age adds to what the engines compute otherwise
            found = rollout_statistics(*given[:2], newest_BT)._asdict()
            metrics |= {f"training/rollout_{name}/newest": x for name, x in found.items()}
    return metrics


def staleness_metrics(batch: DataProto, *, version: int, warmup: int) -> dict[str, float]:
    """Return updates between the policy that sampled a token and ``version``, which learns from it.

    Versions are iterations; the first ``warmup`` did not change the policy.
    """
    columns = batch.batch
    if "rollout_versions" not in columns:
        return {}
    versions_BT, mask_BT = columns["rollout_versions"].clamp(min=warmup), columns["response_mask"]
    behind_BT = (max(version, warmup) - versions_BT) * mask_BT
    return {
        "async/staleness/mean": masked_mean(behind_BT.float(), mask_BT).item(),
        "async/staleness/max": behind_BT.max().item(),
    }


def policy_metrics(actor: Mapping[str, float]) -> dict[str, float]:
    """Return the actor's merged update under both families of names."""
    aliases = {
        "objective/loss": "loss",
        "loss/policy_avg": "pg_loss",
        "policy/approxkl_avg": "approx_kl",
        "policy/clipfrac_avg": "pg_clipfrac",
        "policy/entropy_avg": "entropy",
        "val/ratio": "ratio_mean",
        "val/ratio_var": "ratio_var",
        "lr": "lr",
    }
    named = {
        name if "/" in name else f"actor/{name}": value
        for name, value in actor.items()
        if name not in ("approx_kl", "entropy")
    }
    return {**named, **{alias: actor[name] for alias, name in aliases.items() if name in actor}}


def critic_metrics(critic: Mapping[str, float]) -> dict[str, float]:
    """Return the critic's merged update under both families of names."""
    aliases = {"loss/value_avg": "vf_loss", "val/clipfrac_avg": "vf_clipfrac"}
    named = {f"critic/{name}": value for name, value in critic.items()}
    return {**named, **{alias: critic[name] for alias, name in aliases.items() if name in critic}}


def speed_metrics(batch: DataProto, timing: Mapping[str, float], *, devices: int) -> dict[str, float]:
    """Return tokens per second and milliseconds per token from ``timing_s/*``.

    Tokens of sessions are those of all their sequences, which passes compute.
    """
    has_branches = "follows" in batch.batch
    total = sum(computed_tokens(batch.batch)) if has_branches else int(batch.batch["attention_mask"].sum())
    rewards = batch.meta_info.get("reward_metrics", {})
    # with the groups that the filter dropped, which took time, too
    generated = rewards.get("filter/generated_tokens") or int(batch.batch["response_mask"].sum())
    step_s = timing["timing_s/step"]
    metrics = {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": step_s,
        "perf/throughput": total / (step_s * devices),
        "time/training": step_s,
    }
    for name in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        if (seconds := timing.get(f"timing_s/{name}")) is not None:
            tokens = generated if name == "gen" else total
            metrics[f"timing_per_token_ms/{name}"] = 1000 * seconds / max(tokens, 1)
    return metrics

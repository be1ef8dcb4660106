"""Dynamic sampling (DAPO): train on prompts whose samples differ in score; generate until there are enough.

If all samples of a prompt have one score, group-relative advantages are 0 and the group teaches nothing.

Shapes: B samples of G prompts, N of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from strop.algorithms.advantages import EQUAL
from strop.algorithms.aggregation import masked_sum
from strop.config.schema.root import FilterGroupsConfig
from strop.errors import RewardError, TrainingError
from strop.protocol import DataProto
from strop.rewards.reward_output import counted
from strop.trainer.metrics import PhaseTimer
from strop.trainer.scores import Samples, with_equal_columns

if TYPE_CHECKING:
    from torch import Tensor


def differing_groups(batch: DataProto, n: int, metric: str) -> Tensor:
    """Return whether the samples of each prompt differ in ``metric`` by more than rounding: bool [G].

    ``batch`` has scores and ``n`` adjacent samples of each prompt. ``metric``: ``score``, the whole score, or
    the name of one of its parts; ``acc`` is the part of that name, or else the rule's. Samples that the part
    does not apply to, that could not be scored, or without sampled tokens, are left out.
    """
    columns = batch.batch
    if metric == "score":
        values_B = masked_sum(columns["token_level_scores"], columns["response_mask"], dim=1)
    elif found := _columns_of(metric, columns):
        values_B = columns[found[0]]
    else:
        return torch.zeros(len(batch) // n, dtype=torch.bool)
    values_GN = values_B.double().reshape(-1, n)
    known_GN = values_GN.isfinite() & columns["response_mask"].bool().any(1).reshape(-1, n)
    if "reward_failed" in columns:
        known_GN &= ~columns["reward_failed"].reshape(-1, n)
    highest_G = values_GN.masked_fill(~known_GN, -torch.inf).amax(1)
    lowest_G = values_GN.masked_fill(~known_GN, torch.inf).amin(1)
    # a group without a known score: -inf - inf is below, so it is dropped
    return highest_G - lowest_G > EQUAL


def _columns_of(metric: str, columns: Iterable[str]) -> list[str]:
    """Return the columns of a metric that there are, the first of which counts."""
    names = [f"reward/{metric}", *(["reward/rule"] if metric == "acc" else [])]
    return [name for name in names if name in columns]


_BATCHES_WITHOUT_PART = 3


class GroupFilter:
    """Collects groups that differ over several batches; those beyond ``size`` are used in the next iteration.

    Args:
        size: prompts of an iteration.
        n: samples of a prompt.
    """

    def __init__(self, settings: FilterGroupsConfig, *, size: int, n: int) -> None:
        self.settings, self.size, self.n = settings, size, n
        self.kept: list[DataProto] = []
        """Scored samples that no iteration has used, oldest first."""
        self._parts: set[str] = set()
        """Columns of the parts that rewards have had."""
        self._begin()

    def _begin(self) -> None:
        self._timer = PhaseTimer()
        self._counts: Counter[str] = Counter()
        self._rollout: dict[str, float] = {}
        self._greedy: dict[str, list[float]] = {}

    @property
    def is_full(self) -> bool:
        """True if there are enough groups for an iteration."""
        return sum(map(len, self.kept)) >= self.size * self.n

    def add(self, samples: Samples) -> None:
        """Wait for the scores of a batch, and keep its groups that differ.

        Raises ``TrainingError`` if that is the last of ``max_num_gen_batches`` and there are not enough, and
        ``RewardError`` if no reward of several batches has the part.
        """
        with self._timer.phase("reward"):
            batch = samples.scored()
        self._parts |= {name for name in batch.batch if name.startswith("reward/")}
        differ_G = differing_groups(batch, self.n, self.settings.metric)
        differ_B = differ_G.repeat_interleave(self.n)
        tokens_B, rewards = batch.batch["response_mask"].sum(1), batch.meta_info["reward_metrics"]
        self._timer.add(samples.timer)
        self._counts.update(
            batches=1,
            groups=len(differ_G),
            kept=int(differ_G.sum()),
            tokens=int(tokens_B.sum()),
            dropped_tokens=int(tokens_B[~differ_B].sum()),
            **{name: int(rewards.get(f"reward/{name}", 0)) for name in ("errors", "timeouts")},
        )
        for name, value in batch.meta_info.get("rollout_metrics", {}).items():
            is_state = name.startswith("rollout/server")  # the last one holds; others are counts
            self._rollout[name] = value if is_state else value + self._rollout.get(name, 0)
        for name, value in batch.meta_info.pop("greedy_reward_metrics", {}).items():
            self._greedy.setdefault(name, []).append(value)
        if differ_G.any():
            self.kept.append(batch[differ_B])
        limit = self.settings.max_num_gen_batches
        self._require_part(min(limit or _BATCHES_WITHOUT_PART, _BATCHES_WITHOUT_PART))
        if not self.is_full and limit and self._counts["batches"] >= limit:
            found = sum(map(len, self.kept)) // self.n
            raise TrainingError(
                f"algorithm.filter_groups: after {limit} batches, {found} of {self.size} prompts have "
                f"answers with different {self.settings.metric} (max_num_gen_batches={limit}). Are the "
                "prompts too easy or too hard? Use others, sample more answers (rollout.n), lower "
                "data.train_batch_size, or raise max_num_gen_batches (0: no limit)"
            )

    def _require_part(self, limit: int) -> None:
        """Raise ``RewardError`` if no reward has had the part that counts in ``limit`` batches.

        A batch may have no row that the part applies to; with the wrong name no batch has one.
        """
        metric = self.settings.metric
        if metric == "score" or _columns_of(metric, self._parts) or self._counts["batches"] < limit:
            return
        parts = ["score", *sorted(name.removeprefix("reward/") for name in self._parts)]
        raise RewardError(
            f"algorithm.filter_groups.metric={metric}: the rewards of {limit} batches have no such part; set "
            f"it to one that they have: {', '.join(parts)}"
        )

    def take(self) -> Samples:
        """Return the samples of an iteration, the oldest first."""
        every, rows, counts = (
            DataProto.concat(with_equal_columns(self.kept)),
            self.size * self.n,
            self._counts,
        )
        taken, rest = every[:rows], every[rows:]
        parts = {name: values_B for name, values_B in taken.batch.items() if name.startswith("reward/")}
        member_B = counted(taken)
        taken.meta_info["reward_metrics"] = {
            "reward/errors": float(counts["errors"]),
            "reward/error_rate": counts["errors"] / (counts["groups"] * self.n),
            "reward/timeouts": float(counts["timeouts"]),
            # NaN: the part does not apply to the sample
            **{f"{name}/mean": values_B[member_B].nanmean().item() for name, values_B in parts.items()},
            "filter/batches": float(counts["batches"]),
            "filter/kept_groups": counts["kept"] / counts["groups"],
            "filter/generated_tokens": float(counts["tokens"]),
            "filter/tokens_dropped": float(counts["dropped_tokens"]),
            "filter/groups_carried_over": len(rest) / self.n,
        }
        taken.meta_info["rollout_metrics"] = self._rollout
        taken.meta_info["greedy_reward_metrics"] = {
            name: math.fsum(values)
            if name.endswith(("errors", "timeouts"))
            else torch.tensor(values).nanmean().item()
            for name, values in self._greedy.items()
        }
        samples = Samples(taken, timer=self._timer)
        self.kept = [rest] if len(rest) else []
        self._begin()
        return samples

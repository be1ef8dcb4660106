"""Warnings of a run of reinforcement learning that its metrics give."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strop.config.backends import ROLLOUTS
from strop.config.keys import value_at
from strop.config.placement import uses_gpu
from strop.config.roles import has_reward, is_off_policy
from strop.config.schema import Config
from strop.config.schema.agent import uses_agent

_STALL = 50
"""Iterations in which score and entropy of a policy that learns move by more than their noise."""


def equal_scores(metrics: Mapping[str, float], sample: Mapping[str, Any]) -> str:
    """Return what an iteration whose scores are all equal means, with a ``sample`` of it."""
    advantages = (metrics["critic/advantages/min"], metrics["critic/advantages/max"])
    learns = "the reward has no gradient" if any(advantages) else "advantages and their gradient are 0"
    lines = [
        f"every sample of this step has the score {metrics['critic/score/max']:g}: {learns}. One of them:"
    ]
    for label, column in (("prompt", "prompt"), ("answer", "response"), ("truth", "ground_truth")):
        text = str(sample.get(column))
        lines.append(f"  {label}: {text if len(text) <= 400 else f'{text[:200]} ... {text[-200:]}'}")
    return "\n".join(lines)


class SignalWatch:
    """Warn of iterations in a row that cannot train: all scores equal, or all advantages 0.

    Warns after ``patience`` of them (None: never), and again when their number has doubled. ``rate`` is the
    learning rate, named where there were higher scores before.
    """

    def __init__(self, patience: int | None, *, rate: str = "actor_rollout_ref.actor.optim.lr") -> None:
        self._next = self._patience = patience
        self._count = 0
        self._score: float | None = None
        self._rate, self._best, self._signals, self._total = rate, -math.inf, 0, 0

    def __call__(self, metrics: Mapping[str, float]) -> str | None:
        """Count an iteration with these ``metrics``; return a warning that is due."""
        score, largest = metrics["critic/score/min"], metrics["critic/score/max"]
        advantages = (metrics["critic/advantages/min"], metrics["critic/advantages/max"])
        is_flat = score == largest and self._score in (None, score)  # a batch may have one sample
        self._score = score
        self._total += 1
        if not is_flat and any(advantages):
            self._count, self._next, self._best = 0, self._patience, max(self._best, largest)
            self._signals += 1
            return None
        self._count += 1
        if self._next is None or self._count < self._next:
            return None
        self._next *= 2
        # in a run with few scores above the lowest, some iterations have none
        had_scored = score < self._best and self._signals >= (self._total - self._count) / 2
        if is_flat and had_scored:
            return (
                f"for {self._count} iterations every sample has the score {score:g}, and before there were "
                f"scores of up to {self._best:g}: the policy may have collapsed (strop view RUN shows its "
                f"answers). Lower {self._rate}, and start again"
            )
        if is_flat:
            found = f"every sample has the score {score:g}"
        else:
            found = "all advantages are 0: the samples of each prompt have equal scores"
        return (
            f"for {self._count} iterations {found}, so there is nothing to learn from. Look at samples "
            "(strop view RUN): is the answer in the form that the reward function reads, is "
            "max_response_length long enough (response_length/clip_ratio), does the ground truth reach the "
            "function (strop check)? Easier or harder prompts, more samples of each (rollout.n) or a higher "
            "temperature give different scores"
        )


class CutWatch:
    """Warn once of an iteration of which most responses were cut, with the key that cut more of them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first: float | None = None
        """Their share in the first iteration."""
        self._has_warned = False

    def __call__(self, metrics: Mapping[str, float]) -> str | None:
        """Return the warning if these ``metrics`` of an iteration are the first that call for it."""
        share, by_turn = metrics["response_length/clip_ratio"], metrics.get("turns/cut", 0.0)
        self._first = share if self._first is None else self._first
        if share <= 0.5 or self._has_warned:
            return None
        self._has_warned = True
        key = "environment.turn_length" if by_turn > share / 2 else "data.max_response_length"
        place = f"{key}={value_at(self._config, key)}"
        if uses_agent(self._config) and by_turn > share / 2:
            place = "max_tokens of the program's requests"
        cut = f"of the answers were cut at {place} before they ended"
        if has_reward(self._config) and share >= 2 * self._first:
            return (
                f"{share:.0%} {cut}, and {self._first:.0%} in the first iteration: the score may pay for "
                "length, or for answers without an end (strop view RUN shows them). "
                "reward_model.non_stop_penalty=True with a low penalty_reward_value makes them worse"
            )
        scored = ", and are scored as they stand" if has_reward(self._config) else ""
        return (
            f"{share:.0%} {cut}{scored}. Raise it if they need more tokens; strop view "
            "RUN shows them. (response_length/clip_ratio has the share of each iteration)"
        )


class StallWatch:
    """Warn once of ``_STALL`` iterations in which neither the score nor the entropy has moved.

    A mean has not moved if it differs by less than two standard errors between the halves of these
    iterations, and from that of as many before them: a slow run moves by less than its noise within them.
    """

    def __init__(self, rate: str, *, has_adapters: bool) -> None:
        """``rate`` is the learning rate, with its key."""
        self._advice = f"Unless the run has converged, raise {rate}"
        if has_adapters:
            self._advice += ", or train the output layer whole (modules_to_save; strop docs lora)"
        self._seen: list[tuple[float, float]] | None = []
        """None: it has warned."""

    def __call__(self, metrics: Mapping[str, float]) -> str | None:
        """Count an iteration with these ``metrics``; return the warning if it is due."""
        entropy = metrics.get("objective/entropy", metrics.get("policy/entropy_avg"))
        if self._seen is None or entropy is None or metrics.get("lr") == 0:  # the critic's warm-up
            return None
        self._seen.append((metrics["critic/score/mean"], entropy))
        if len(self._seen) % _STALL:
            return None
        found = list(zip(*self._seen, strict=True))
        if any(_has_moved(values) or _has_moved(values[-_STALL:]) for values in found):
            self._seen = self._seen[-_STALL:]
            return None
        self._seen = None
        score, entropy = (statistics.mean(values[-_STALL:]) for values in found)
        return (
            f"score ({score:.3g}) and entropy ({entropy:.3g}) have not "
            f"moved in {_STALL} iterations. {self._advice}"
        )


class PicturesWatch:
    """Warn once of two iterations in which sampler and trainer differ on rows with pictures."""

    def __init__(self, config: Config) -> None:
        rollout = config.actor_rollout_ref.rollout
        dtypes = config.actor_rollout_ref.model.compute_dtype, ROLLOUTS[rollout.name].dtype(config)
        exact = all(name == "float32" or (name == "auto" and not uses_gpu(config)) for name in dtypes)
        self._bound = 0.1 if exact else 0.5
        self._left = 0 if is_off_policy(config) else 2  # samples of older weights differ, too

    def __call__(self, metrics: Mapping[str, float]) -> str | None:
        """Count an iteration with these ``metrics``; return the warning if it is due."""
        name = "training/rollout_probs_diff_max/pictures"
        found = metrics.get(name, 0.0)
        self._left -= found > self._bound
        if self._left or found <= self._bound:
            return None
        return (
            f"{name} is {found:.2g}, above {self._bound}, in two iterations: sampler and trainer see other "
            "pictures. Features of older weights in the sampler's encoder cache, another back-end of image "
            "processing (torchvision in one environment alone), or dummy weights in the sampler "
            "(rollout.load_format) do that. training/rollout_probs_diff_max/text is the difference of text"
        )


def watches_of(config: Config) -> Sequence[Callable[[Mapping[str, float]], str | None]]:
    """Return those of a run; each takes the metrics of an iteration, and returns a warning that is due."""
    policy, watches = config.actor_rollout_ref, [PicturesWatch(config), CutWatch(config)]
    if not has_reward(config):
        return watches
    rate = f"actor_rollout_ref.actor.optim.lr={policy.actor.optim.lr:g}"
    signal = SignalWatch(config.trainer.warn_without_signal, rate=rate)
    return [*watches, signal, StallWatch(rate, has_adapters=policy.model.has_adapters)]


def _has_moved(values: tuple[float, ...]) -> bool:
    halves = values[: len(values) // 2], values[len(values) // 2 :]
    error = math.sqrt(sum(statistics.variance(half) / len(half) for half in halves))
    return abs(statistics.mean(halves[1]) - statistics.mean(halves[0])) > 2 * error

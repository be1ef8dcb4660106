"""Validation: answers and scores of the validation prompts, and their statistics by data source.

Shapes: P prompts, N samples of each, B = P x N.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from strop.checkpoint.folder import name_of
from strop.config.schema import Config
from strop.data.loader import PromptLoader
from strop.protocol import DataProto
from strop.rewards.base import Reward
from strop.rewards.reward_output import ScoreCheck
from strop.rewards.score.answers import Extractor, answer_extractor
from strop.tracking.report import Estimate, ShownSample, SourceReport, ValidationReport
from strop.tracking.samples import InWords, samples_table
from strop.trainer.metrics import PhaseTimer
from strop.trainer.progress import Progress
from strop.trainer.sample_statistics import (
    bootstrap_intervals,
    expected_best,
    expected_majority,
    expected_worst,
    sample_counts,
)
from strop.trainer.scores import PendingScores, with_equal_columns
from strop.trainer.seeds import sample_seeds


class BestValidation:
    """The validation with the highest mean score over data sources, among those of a run."""

    def __init__(self, score: float | None = None, step: int | None = None) -> None:
        self.score, self.step = score, step
        self._last: tuple[int, float, float] | None = None

    def add(self, step: int, report: ValidationReport) -> float:
        """Count a validation; return the highest mean score so far."""
        found = [source.scores[f"mean@{report.n}"] for source in report.sources.values()]
        count = max(len(found), 1)
        mean = sum(score.value for score in found) / count
        width = math.hypot(*(score.high - score.low for score in found)) / count
        self._last = step, mean, width / 4  # of 95 %: two standard errors to each side
        if self.score is None or mean > self.score:
            self.score, self.step = mean, step
        return self.score

    def if_later_ones_are_worse(self, run_folder: Path) -> str | None:
        """Return a warning if the last score is below the best by more than its standard error."""
        if self._last is None or self.step is None or self.score is None:
            return None
        step, mean, error = self._last
        if self.score - mean <= error:
            return None
        best = run_folder / name_of(self.step)
        if self.step == 0:
            where = "the best one is the model that training began with"
        elif best.is_dir():
            where = f"{best} is the best one's model"
        else:
            where = (
                "the best one's model was not kept: trainer.save_freq with the value of trainer.test_freq "
                "keeps a checkpoint of each validation"
            )
        return (
            f"the best validation, at step {self.step}, had {self.score:.3f}, and the last, at step {step}, "
            f"{mean:.3f} (standard error {error:.3f}). The trained model is the last; {where}"
        )


def make_report(
    samples: pa.Table, *, n: int, extractor_of: Callable[[str], Extractor | None], seed: int, show: int = 0
) -> ValidationReport:
    """Return the report on ``samples``, ``n`` adjacent rows per prompt.

    Prompts that no scorer can judge are left out. ``extractor_of(source)`` returns a function that
    extracts the answers that vote, or None. ``seed`` draws the resamples of intervals and majorities. The
    report has ``show`` samples, of prompts spread evenly.
    """
    samples = _judged(samples, n)
    if "data_source" not in samples.column_names:  # of a user's data set
        samples = samples.append_column("data_source", pa.array(["unnamed"] * len(samples), pa.string()))
    sources_B = samples["data_source"].to_numpy()
    sources = {
        name: _report_source(samples.filter(pa.array(sources_B == name)), n, extractor_of(name), seed=seed)
        for name in sorted(set(sources_B))
    }
    chosen = _shown(samples, n, show)
    pictures = chosen["images"].to_pylist() if "images" in chosen.column_names else ()
    return ValidationReport(n, sources, _as_shown(chosen), pictures)


def _judged(samples: pa.Table, n: int) -> pa.Table:
    """Return the prompts with a part of a score, or an error; all if none has one."""
    parts = [samples[name] for name in samples.column_names if name.startswith("reward/")]
    if not parts or "reward_failed" not in samples.column_names:
        return samples
    is_judged_B = samples["reward_failed"].to_numpy() | np.any([part.is_valid() for part in parts], axis=0)
    is_judged_B = is_judged_B.reshape(-1, n).any(axis=1).repeat(n)
    return samples.filter(pa.array(is_judged_B)) if is_judged_B.any() else samples


def _report_source(samples: pa.Table, n: int, extract: Extractor | None, *, seed: int) -> SourceReport:
    scores_PN = samples["score"].to_numpy().astype(np.float64).reshape(-1, n)
    by_statistic = {f"mean@{n}": scores_PN.mean(axis=1)}
    for k in sample_counts(n):
        by_statistic[f"best@{k}"] = expected_best(scores_PN, k)
        by_statistic[f"worst@{k}"] = expected_worst(scores_PN, k)
    if extract is not None:
        answers = [extract(response) for response in _scored_texts(samples)]
        answers_PN = [answers[start : start + n] for start in range(0, len(answers), n)]
        for k in sample_counts(n):
            by_statistic[f"maj@{k}"] = expected_majority(scores_PN, answers_PN, k, seed=seed)
    intervals = bootstrap_intervals(np.stack(list(by_statistic.values())), seed=seed)
    return SourceReport(
        prompts=len(scores_PN),
        samples=len(samples),
        scores={
            name: Estimate(float(values_P.mean()), *interval.tolist())
            for (name, values_P), interval in zip(by_statistic.items(), intervals, strict=True)
        },
        mean_length=_mean(samples, "response_length"),
        truncated=_mean(samples, "truncated"),
        error_rate=_mean(samples, "reward_failed") if "reward_failed" in samples.column_names else None,
        hidden_tokens=_mean(samples, "hidden_tokens") if "hidden_tokens" in samples.column_names else None,
    )


def _scored_texts(samples: pa.Table) -> list[str]:
    """Return the texts that scorers read: of samples with turns without the answers between these.

    A lost sample has none, and so no vote.
    """
    if "conversation" not in samples.column_names:
        return samples["response"].to_pylist()
    played = map(json.loads, samples["conversation"].to_pylist())
    texts = [(one, "\n".join(turn["text"] for turn in one["turns"])) for one in played]
    # a program may return another text than that of its turns
    return ["" if "error" in one else one.get("response", text) for one, text in texts]


def _mean(samples: pa.Table, column: str) -> float:
    return float(np.mean(samples[column].to_numpy()))


def _shown(samples: pa.Table, n: int, count: int) -> pa.Table:
    """Return the first sample of ``count`` prompts, the same prompts in every validation."""
    prompts = len(samples) // n
    return samples.take(pa.array(np.linspace(0, prompts - 1, min(count, prompts)).round().astype(int) * n))


def _as_shown(samples: pa.Table) -> list[ShownSample]:
    chosen = samples.to_pylist()
    for row in chosen:
        row["response"] = row.get("response_with_special_tokens") or row["response"]
    return [
        ShownSample(**{field.name: row.get(field.name) for field in dataclasses.fields(ShownSample)})
        for row in chosen
    ]


class Validator:
    """Answer and score every validation prompt, sampled as set in ``rollout.val_kwargs``."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        loader: PromptLoader,
        reward_fn: Reward,
        *,
        reward_model: Any,
        generate: Callable[..., DataProto],
        progress: Progress,
        pictures_in_words: InWords | None = None,
        warn_of_hidden_tokens: Callable[[DataProto], None] = lambda batch: None,
    ) -> None:
        """``reward_model``: a worker group, or None; ``generate``: ``PPO.generate``."""
        self._config, self._tokenizer, self._loader = config, tokenizer, loader
        self._reward_fn, self._reward_model = reward_fn, reward_model
        self._generate, self._progress, self._in_words = generate, progress, pictures_in_words
        self._warn_of_hidden_tokens = warn_of_hidden_tokens
        self._n, self._seed = config.actor_rollout_ref.rollout.val_kwargs.n, config.trainer.seed

    def samples(self, timer: PhaseTimer, *, examine: bool = True) -> pa.Table:
        """Return every validation prompt answered and scored (columns: ``strop.tracking.samples``).

        The random stream depends on a prompt's place alone: all validations of a run draw the same noise.
        ``examine``: log ``reward_model.val_num_examine`` of the samples.
        """
        batch = self._scored(timer, examine=examine)
        self._warn_of_hidden_tokens(batch)
        return samples_table(batch, self._tokenizer, self._in_words)

    def report(self, samples: pa.Table, *, show: int = 0) -> ValidationReport:
        """Return the statistics of ``samples`` by data source, and ``show`` samples to look at."""
        options = self._config.reward_model.reward_kwargs.get("scorer_kwargs", {})

        def extractor_of(source: str) -> Extractor | None:
            """Return the extractor of answers; None if no built-in scorer judges ``source``."""
            if not self._reward_fn.is_built_in(source):
                return None
            return answer_extractor(source, options.get(source))

        return make_report(samples, n=self._n, extractor_of=extractor_of, seed=self._seed, show=show)

    def _scored(self, timer: PhaseTimer, *, examine: bool) -> DataProto:
        scored, waiting, done = [], None, 0
        total = len(self._loader.dataset) * self._n
        # of all prompts: a seed depends on a prompt's place among them, not on the size of batches
        seeds_PN = sample_seeds(self._seed, "validation", 0, len(self._loader.dataset), self._n)
        limits = self._config.reward_model
        check = ScoreCheck(error_score=limits.error_score, max_error_rate=limits.max_error_rate)
        for number, prompts in enumerate(self._loader):
            uids = [f"val-{number}-{row}" for row in range(len(prompts))]
            prompts = prompts.union(DataProto.from_dict(non_tensors={"uid": uids}))
            scores = PendingScores(prompts, self._n, self._reward_fn, self._reward_model, check)
            with scores.cancelled_on_error():
                calls = {"finished": scores.finished, "advanced": self._progress.generating(total, done)}
                seeds = seeds_PN[done // self._n :][: len(prompts)]
                batch = self._generate(prompts, seeds, timer, mode="validate", **calls)
                batch.meta_info["examine"] = examine
                scores.complete(batch)
            previous, waiting = waiting, scores
            if previous is not None:  # scored while this batch was generated
                scored.append(previous.get())
            done += len(prompts) * self._n
        if waiting is not None:
            scored.append(waiting.get())
        return DataProto.concat(with_equal_columns(scored))

"""``RewardManager``, the built-in reward. B samples, T padded response tokens."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.registry import name_of
from strop.config.reward_parts import NON_STOP_PENALTY, REWARD_MODEL, RULE, read_parts
from strop.errors import ConfigError
from strop.protocol import DataProto
from strop.rewards.arguments import Function, Sample, ScoreFunction
from strop.rewards.base import BatchReward, PendingReward, Reward
from strop.rewards.batch import ErrorBudget, PendingSamples, ScoringJob, log_first, name_row, with_errors
from strop.rewards.custom import CustomReward
from strop.rewards.example import Example, doubt, example_answers
from strop.rewards.parts import Composition, UnusedParts, part_scorers
from strop.rewards.reward_output import (
    RewardOutput,
    SamplePrinter,
    at_last_token,
    rule_parts,
    score_metrics,
)
from strop.rewards.router import BuiltInScorer, Router
from strop.rewards.sample_values import SampleValues, row_fields, warn_without_ground_truths
from strop.rewards.scorer import Outcome, Scorer
from strop.rewards.worker.pool import Feed, RewardPool

logger = logging.getLogger(__name__)


class RewardManager(Reward):
    """Score samples in killable processes, each sample under a deadline.

    One process scores one sample after another; ``num_workers`` processes score as many in parallel.

    ``compute_score`` is called with the values that its parameters name (:mod:`strop.rewards.arguments`),
    for one sample or for a batch, and returns a number, or a dict with a number under "score" and further
    named numbers; for a batch a list of these. ``async def`` functions score up to ``max_concurrency``
    samples at the same time in one process. ``prompt_key`` names the prompts' column. Without
    ``compute_score``, the data source selects the scorer (:mod:`strop.rewards.router`); ``scorer_kwargs`` has
    its options.

    If the batch has ``rm_scores`` [B], the reward model's score is added. It is the whole score of samples
    with ``reward_model.style`` "model" and, without ``compute_score``, of data sources without a scorer.

    ``parts`` weighs these two and further scorers by data source
    (:func:`strop.config.reward_parts.read_parts`); :class:`strop.rewards.parts.Composition` has the rules,
    also for ``non_stop_penalty``, ``penalty_reward_value`` and ``min_response_length``.

    A sample whose scorer raises, takes over ``timeout_s``, ends its process or returns a number that is not
    finite gets ``error_score`` as rule, and no other parts of the scorer. If the reward model's score or the
    weighted sum is not finite, ``error_score`` is the whole score. Above a rate of ``max_error_rate``
    (:class:`strop.rewards.batch.ErrorBudget`) scoring raises. ``memory_limit_mb`` limits the private memory
    of a scoring process, and of each that it starts.

    ``num_examine`` samples of each data source in every batch go to ``printer`` (default: the log) as text,
    unless the batch's ``meta_info["examine"]`` is False.

    Raises:
        ConfigError: ``compute_score`` cannot be called as above or cannot be pickled, or ``parts`` is wrong.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ScoreFunction | None = None,
        reward_fn_key: str = "data_source",
        *,
        timeout_s: float = 10.0,
        error_score: float = 0.0,
        max_error_rate: float = 0.1,
        memory_limit_mb: int | None = None,
        num_workers: int = 1,
        max_concurrency: int = 32,
        prompt_key: str = "prompt",
        scorer_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        parts: Mapping[str, Any] | None = None,
        non_stop_penalty: bool = False,
        penalty_reward_value: float = -10.0,
        min_response_length: int = 0,
        printer: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self._print = SamplePrinter(tokenizer, num_examine, printer or logger.info)
        self.reward_fn_key, self.prompt_key = reward_fn_key, prompt_key
        self.error_score = error_score
        self._sources: list[str] | None = None  # None: every source has a scorer
        self._router: Router | None = None
        self._timeout_s = timeout_s
        if compute_score is None:
            self._router = Router(scorer_kwargs)
            self._sources = self._router.sources
            own = Function(self._router, "the router of data sources")
        elif scorer_kwargs:
            raise ConfigError(
                "scorer_kwargs sets options of built-in scorers, but a custom reward function is set"
            )
        else:
            is_custom = isinstance(compute_score, CustomReward)
            where = compute_score.where if is_custom else f"the reward function {name_of(compute_score)}"
            own = Function(compute_score, where)
        self.composition = Composition(
            parts=read_parts(parts),
            non_stop_penalty=non_stop_penalty,
            penalty_reward_value=penalty_reward_value,
            min_response_length=min_response_length,
        )
        self._part_scorers = part_scorers(self.composition.parts)
        self.scorer = Scorer(own, self._part_scorers)
        self._unused_parts = UnusedParts(self.composition.parts)
        self._budget = ErrorBudget(max_error_rate)  # of functions
        self._final_budget = ErrorBudget(max_error_rate)  # also of what is added to their scores
        self._pool = RewardPool(
            self.scorer,
            num_workers=num_workers,
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
            max_concurrency=max_concurrency,
        )
        self._last_job: ScoringJob | None = None

    def __call__(self, batch: DataProto) -> RewardOutput:
        """Score every sample of the batch.

        Requires ``responses`` and ``response_mask`` [B, T] and the columns ``reward_fn_key`` and (for rules)
        ``reward_model`` {"style", "ground_truth"}. Reads ``extra_info`` and, to print samples, ``prompts``
        and ``attention_mask``. The score of an empty response is at token 0.

        Raises:
            RewardError: a data source without a scorer, too many failed samples, or a scorer that cannot be
                loaded.
        """
        model_B = batch.batch.get("rm_scores")
        pending = self._expect(batch, n=1, with_model=model_B is not None)
        pending.complete(batch)
        return pending.get(model_B)

    def expect(self, prompts: DataProto, *, n: int = 1, with_model: bool = False) -> PendingReward:
        """Start scoring a batch of ``n`` adjacent samples for each prompt, which are still to be generated.

        A subclass with its own ``__call__`` scores whole batches: that call would otherwise be skipped.
        """
        if type(self).__call__ is not RewardManager.__call__:
            return BatchReward(self).expect(prompts)
        return self._expect(prompts, n=n, with_model=with_model)

    def _expect(self, prompts: DataProto, *, n: int, with_model: bool) -> PendingSamples:
        fields = [fields for fields in row_fields(prompts, self.reward_fn_key) for _ in range(n)]
        required = [parts for parts in self._required(prompts, has_model=with_model) for _ in range(n)]
        self._last_job = ScoringJob(
            self._pool,
            self._budget,
            n_rows=len(fields),
            n_scored=sum(map(bool, required)),
            after=self._last_job,
        )

        values = SampleValues(self.scorer, self.tokenizer, prompts, self.prompt_key)

        def sample(row: int, token_ids: list[int]) -> Sample:
            truncated = pending.truncated(row) if self.scorer.waits else None
            return self._sample(values, row // n, fields[row], required[row], token_ids, truncated=truncated)

        compose = functools.partial(self._compose, [RULE in parts for parts in required])
        is_scored = [bool(parts) for parts in required]
        pending = PendingSamples(self._last_job, is_scored, sample, compose, waits=self.scorer.waits)
        return pending

    def _sample(
        self,
        values: SampleValues,
        prompt: int,
        fields: tuple[str, Any, Any],
        parts: tuple[str, ...],
        token_ids: list[int],
        *,
        truncated: bool | None,
    ) -> Sample:
        """Return the scorer's input for a response to the prompt in row ``prompt`` of ``values``."""
        response = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        source, ground_truth, extra = fields
        named = values.of(prompt, token_ids, response, truncated=truncated)
        needed = parts if self._part_scorers else None
        return Sample(source, response, ground_truth, extra, needed, len(token_ids), named)

    def _compose(
        self,
        has_rule: Sequence[bool],
        batch: DataProto,
        samples: Sequence[Sample],
        outcomes: Sequence[Outcome | None],
        model_scores: Tensor | None,
    ) -> RewardOutput:
        """Return the rewards of a batch; ``has_rule`` is True for the samples with a rule."""
        logged = ["" if outcome is None else outcome.error for outcome in outcomes]
        validating = batch.meta_info.get("mode") == "validate"
        sources = [sample.data_source for sample in samples]
        weigh = functools.partial(self._weigh, has_rule=has_rule, sources=sources, validating=validating)
        model_B = None
        if model_scores is not None:
            model_B = model_scores.detach().float().cpu().reshape(len(samples))
            rules_B = torch.tensor(has_rule)
            used_B = ~rules_B if validating else torch.ones_like(rules_B)  # in validation rules alone count
            lost_B = used_B & ~model_B.isfinite()
            outcomes = with_errors(outcomes, lost_B, "the reward model returned", model_B)
            model_B = model_B.masked_fill(~used_B | lost_B, math.nan)
        parts, added = weigh(outcomes, model_B)
        scores_B = sum(added.values(), torch.zeros(len(samples)))
        lost_B = ~scores_B.isfinite()
        if lost_B.any():
            outcomes = with_errors(outcomes, lost_B, "the weighted sum of the parts is", scores_B)
            parts, added = weigh(outcomes, None if model_B is None else model_B.masked_fill(lost_B, math.nan))
            scores_B = sum(added.values(), torch.zeros(len(samples)))
        errors = ["" if outcome is None else outcome.error for outcome in outcomes]
        name = functools.partial(name_row, samples)
        self._final_budget.require(errors, name)
        log_first(["" if known else error for known, error in zip(logged, errors, strict=True)], name)
        if self.composition.non_stop_penalty and not validating:
            penalty_B = parts[NON_STOP_PENALTY] = self.composition.penalty(batch, scores_B)
            added[NON_STOP_PENALTY] = penalty_B.nan_to_num()
            scores_B = scores_B + added[NON_STOP_PENALTY]
        if batch.meta_info.get("examine", True):
            self._print(batch, samples, scores_B, parts, errors)
        return RewardOutput(
            token_level_scores=at_last_token(scores_B, batch.batch["response_mask"]),
            parts=parts,
            metrics=score_metrics(outcomes, sources, parts, added),
            responses=[sample.solution_str for sample in samples],
            errors=errors,
        )

    def _weigh(
        self,
        outcomes: Sequence[Outcome | None],
        model_B: Tensor | None,
        *,
        has_rule: Sequence[bool],
        sources: Sequence[str],
        validating: bool,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parts [B] by name, NaN where they do not apply, and their contributions."""
        parts = rule_parts(outcomes, has_rule, error_score=self.error_score)
        if model_B is not None:
            parts[REWARD_MODEL] = model_B
        failed = [outcome is not None and bool(outcome.error) for outcome in outcomes]
        rows = zip(sources, outcomes, has_rule, failed, strict=True)
        self._unused_parts.require_returned(
            parts, [source for source, outcome, rule, error in rows if rule and outcome and not error]
        )
        failed_B = torch.tensor(failed)
        return parts, self.composition.contributions(parts, sources, failed_B=failed_B, validating=validating)

    def validate_sources(
        self, sources: Iterable[str], *, has_reward_model: bool = False, elsewhere: Iterable[str] = ()
    ) -> None:
        """Check at start-up that all data sources can be scored.

        Warns once about each weight for a source that neither ``sources`` nor other prompts of the run
        (``elsewhere``) have.

        Raises:
            RewardError: nothing scores one of them.
            ConfigError: its scorer cannot work here (code without bubblewrap), or not within the deadline.
        """
        sources = set(sources)
        self.require_scored(sources, has_reward_model=has_reward_model)
        self._unused_parts.warn_of_sources(sources, known={*(self._sources or ()), *elsewhere})

    def require_scored(self, sources: Iterable[str], *, has_reward_model: bool = False) -> None:
        """Raise the errors of ``validate_sources``, without its warnings."""
        for source in sorted(set(sources)):
            has_rule = self._has_scorer(source)
            for name in self.composition.required(source, has_rule=has_rule):
                scorer = self._part_scorers.get(name)
                if name == RULE and self._router is not None:
                    self._router.require_ready(source, self._timeout_s)
                elif scorer is not None and isinstance(scorer.function, BuiltInScorer):
                    scorer.function.require_ready(self._timeout_s)
            self.composition.require_scored(
                source, has_rule=has_rule, has_reward_model=has_reward_model, known=self._sources or ()
            )

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise ``ConfigError`` if a function needs an argument that is neither a value nor a column."""
        if self._router is not None:
            self._router.require_columns(columns)
        for function in (self.scorer.own, *self._part_scorers.values()):
            function.require(columns)

    def warn_without_ground_truths(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Warn if a user's function names the ground truth, and no row has one."""
        warn_without_ground_truths(self._own_functions(), rows)

    def score_example(
        self, prompts: DataProto, *, n: int, has_reward_model: bool, is_check: bool
    ) -> Example | None:
        """See ``Reward.score_example``.

        The response is the ground truth if a function takes it; else one of the columns that they name, the
        first with a score above 0; else the ground truth, or empty without one.
        """
        own = self._own_functions()
        if not own and (self._router is None or not self._router.has_own):
            return None
        if self.scorer.is_async and not is_check:
            return None
        (parts,) = self._required(prompts, has_model=has_reward_model)
        if not parts:
            return None
        (fields,) = row_fields(prompts, self.reward_fn_key)
        values = SampleValues(self.scorer, self.tokenizer, prompts, self.prompt_key)
        taken = (
            "everything (**kwargs)" if self.scorer.wanted is None else ", ".join(sorted(self.scorer.wanted))
        )
        function = f"{self.scorer.own.where} takes {taken}"

        def score(what: str, text: str) -> Example:
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
            sample = self._sample(values, 0, fields, parts, ids, truncated=False)
            copies = n if self.scorer.is_batch else 1
            outcome, *_ = self._pool.evaluate_all(Feed.of([sample] * copies))
            return Example(what, text, outcome, function)

        answers, is_taken = example_answers(own, prompts, self.prompt_key, self.reward_fn_key)
        first, *others = answers
        example = score(*first)
        if example.outcome.error:
            was_ended = example.outcome.status != "raised"
            example.always_fails = (is_check or not self.scorer.is_batch) and (
                was_ended or all(score(*answer).outcome.error for answer in (*others, ("", "")))
            )
        if not example.is_without_reward() or not is_taken or self._router is not None:
            return example
        scored = [example]
        for answer in others:
            scored.append(score(*answer))
            if (scored[-1].outcome.score or 0.0) > 0:
                return scored[-1]
        columns = {name: column[0] for name, column in prompts.non_tensor_batch.items()}
        if found := doubt(scored, score("", ""), self.scorer.own.numbers(columns)):
            example.doubt = f"{self.scorer.own.where}: {found}"
        return example

    def _own_functions(self) -> list[Function]:
        """Return the user's functions: the custom one, and those of parts."""
        own = [] if self._router is not None else [self.scorer.own]
        parts = self._part_scorers.values()
        return [*own, *(part for part in parts if not isinstance(part.function, BuiltInScorer))]

    def is_built_in(self, source: str) -> bool:
        """Return True if the source's rule is its built-in scorer, with a weight other than 0."""
        weight = self.composition.parts[RULE].weight(source)
        return self._router is not None and self._router.is_built_in(source) and weight != 0

    def _has_scorer(self, source: str) -> bool:
        return self._sources is None or source in self._sources

    def start(self) -> None:
        """Start the scoring process before the first batch. Raises ``RewardError`` if it cannot start."""
        self._pool.start()

    def close(self) -> None:
        """Cancel what is being scored and end the scoring process. It also ends with the program."""
        if self._last_job is not None:
            self._last_job.cancel(with_earlier=True)
            self._last_job.wait()
        self._pool.close()

    def _required(self, prompts: DataProto, *, has_model: bool) -> list[tuple[str, ...]]:
        """Return the parts that functions compute for each row; check all rows before scoring the first."""
        sources = [source for source, *_ in row_fields(prompts, self.reward_fn_key)]
        self.require_scored(sources, has_reward_model=has_model)
        targets = prompts.non_tensor_batch.get("reward_model", [None] * len(sources))
        by_model = [has_model and (target or {}).get("style") == "model" for target in targets]
        return [
            self.composition.required(source, has_rule=not model_alone and self._has_scorer(source))
            for source, model_alone in zip(sources, by_model, strict=True)
        ]

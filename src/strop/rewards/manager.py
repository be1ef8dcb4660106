"""``RewardManager``, the built-in reward: which functions score a sample, and with which weights.

B samples, T padded response tokens. One file, so that functions and weights are read together.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from strop.algorithms.aggregation import zero_masked
from strop.algorithms.registry import name_of, resolve
from strop.config.reward_parts import (
    BUILT_IN,
    ENVIRONMENT,
    KEY,
    NON_STOP_PENALTY,
    OTHER_SOURCES,
    REWARD_MODEL,
    RULE,
    SCORERS,
    RewardPart,
    read_parts,
)
from strop.errors import ConfigError, RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import (
    SAMPLE_NAMES,
    Function,
    Played,
    Sample,
    SampleValues,
    ScoreFunction,
    row_fields,
    warn_without_ground_truths,
)
from strop.rewards.base import BatchReward, Example, PendingReward, Reward
from strop.rewards.batch import PendingSamples, ScoringJob
from strop.rewards.custom import CustomReward
from strop.rewards.example import LONGEST_ANSWER, Convert, example_of
from strop.rewards.reward_output import (
    ErrorBudget,
    RewardOutput,
    SamplePrinter,
    at_last_token,
    counted,
    log_first,
    lost_in,
    model_scores,
    name_row,
    program_parts,
    rule_parts,
    score_metrics,
    scored_by_programs,
    with_errors,
    with_lost,
)
from strop.rewards.router import BuiltInScorer, Router, UnknownSourceError
from strop.rewards.scorer import Outcome, Scorer
from strop.rewards.worker.pool import Feed, RewardPool

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def _scorer(name: str, part: RewardPart) -> Function:
    """Return the function of a part with a scorer. Raises ``ConfigError`` for a wrong name or options."""
    key, scorer = f"{KEY}.{name}.scorer", part.scorer
    if callable(scorer):
        return Function(scorer, key, part.kwargs)
    if scorer in SCORERS:
        return Function(BuiltInScorer(scorer, part.kwargs, where=f"{KEY}.{name}.kwargs"), key)
    function = resolve(scorer, dict.fromkeys(SCORERS, BuiltInScorer), key)
    return Function(function, f"{key}={scorer!r}", part.kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composition:
    """Rules that make a score of parts.

    The score is the weighted sum; with ``non_stop_penalty``, in training, a response cut at the limit, or of
    fewer than ``min_response_length`` tokens, scores ``penalty_reward_value`` instead.

    In validation the score is the rule alone, else the reward model alone, else the weighted sum of the
    others, so that runs with different weights are comparable.
    """

    parts: Mapping[str, RewardPart]
    non_stop_penalty: bool = False
    penalty_reward_value: float = -10.0
    min_response_length: int = 0
    _returned: set[str] = dataclasses.field(default_factory=set)  # parts that appeared once
    _warned: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def required(self, data_source: str, *, has_rule: bool) -> tuple[str, ...]:
        """Return the parts that functions compute for a sample."""
        rule = (RULE,) if has_rule and self.parts[RULE].weight(data_source) != 0 else ()
        others = (
            name for name, part in self.parts.items() if part.scorer is not None and part.weight(data_source)
        )
        return (*rule, *others)

    def require_scored(
        self, source: str, *, has_rule: bool, others: Collection[str], known: Collection[str]
    ) -> None:
        """Raise ``RewardError`` if nothing scores rows of ``source``; ``known`` are sources with a rule.

        ``others``: further parts that the run has: the reward model, the environment.
        """
        if any(self.parts[name].weight(source) != 0 for name in others):
            return
        if self.parts[RULE].weight(source) != 0 and not has_rule:
            raise UnknownSourceError.of(source, known)
        if not self.required(source, has_rule=has_rule):
            raise RewardError(
                f"data_source {source!r}: nothing scores it; every part of {KEY} has weight 0 for it"
            )

    def contributions(
        self, parts: Mapping[str, Tensor], sources: Sequence[str], *, failed_B: Tensor, validating: bool
    ) -> dict[str, Tensor]:
        """Return each part's contribution [B]. ``parts`` are NaN where absent; a failed rule has weight 1."""
        added = {}
        decided_B = torch.zeros(len(sources), dtype=torch.bool)
        for name in {RULE, REWARD_MODEL} & parts.keys():
            decided_B |= ~parts[name].isnan()
        for name, values_B in parts.items():
            if name not in self.parts:
                continue  # a number of the scorer for metrics only
            weights_B = torch.tensor([self.parts[name].weight(source) for source in sources])
            if name == RULE:
                weights_B = weights_B.masked_fill(failed_B, 1.0)
            if validating:
                is_judge = float(name in (RULE, REWARD_MODEL))
                weights_B = torch.where(decided_B, is_judge, weights_B)
            if weights_B.any():
                added[name] = values_B.nan_to_num() * weights_B
        return added

    def penalty(self, batch: DataProto, scores_B: Tensor) -> Tensor:
        """Return the difference [B] between non-stop penalty and score; NaN where no penalty is due."""
        columns = batch.batch
        if "truncated" not in columns:
            raise RewardError(
                "reward_model.non_stop_penalty needs the column 'truncated' [B], which is true for responses "
                f"without a stop token; the batch has {sorted(columns)}"
            )
        is_short_B = columns["response_mask"].sum(dim=1).cpu() < self.min_response_length
        due_B = columns["truncated"].cpu().bool() | is_short_B
        return (self.penalty_reward_value - scores_B).masked_fill(~due_B, math.nan)

    def warn_of_sources(self, sources: Collection[str], *, known: Collection[str]) -> None:
        """Warn once about each weight for a data source that is not among ``sources``, the prompts'.

        Skips ``known`` sources: training and validation prompts may have different ones.
        """
        for name, part in self.parts.items():
            for source in part.weights.keys() - {OTHER_SOURCES, *sources, *known}:
                if (name, source) not in self._warned:
                    self._warned.add((name, source))
                    logger.warning(
                        "%s.%s.weight: no prompt has data_source %r (found: %s); is it misspelt?",
                        KEY, name, source, ", ".join(sorted(sources)),
                    )  # fmt: skip

    def require_returned(self, found: Collection[str], sources: Collection[str]) -> None:
        """Raise ``RewardError`` if a part with a weight is not in ``found``, the parts of these scores.

        ``sources`` are the data sources of the samples that the reward function scored. A part is required
        until it appeared once: a function may leave it out for later samples.
        """
        self._returned.update(found)
        for name, part in sorted(self.parts.items()):
            if part.scorer is not None or name in BUILT_IN or name in self._returned:
                continue
            if any(part.weight(source) != 0 for source in sources):
                returned = ", ".join(sorted(set(found) - {RULE, REWARD_MODEL})) or "a score alone"
                raise RewardError(
                    f"{KEY}.{name} has a weight and no scorer, so the reward function must return it; for "
                    f"{len(sources)} samples it returned {returned}. Correct the name, return it (0 where it "
                    "does not apply), set its scorer, or remove it"
                )


class RewardManager(Reward):
    """Score samples in killable processes, each sample under a deadline.

    One process scores one sample after another; ``num_workers`` processes score as many in parallel.

    ``compute_score`` is called with the values that its parameters name (:mod:`strop.rewards.arguments`),
    for one sample or for a batch, and returns a number, or a dict with a number under "score" and further
    named numbers; for a batch a list of these. ``async def`` functions score up to ``max_concurrency``
    samples at the same time in one process. ``prompt_key`` names the prompts' column. Without
    ``compute_score``, the data source selects the scorer (:mod:`strop.rewards.router`); ``scorer_kwargs`` has
    its options.

    If the batch has ``rm_scores`` ([B]; [B, T] are summed), the reward model's score is added. It is the
    whole score of samples with ``reward_model.style`` "model" and, without ``compute_score``, of data sources
    without a scorer.

    With ``by_environment`` the rewards of an environment (``environment_scores`` [B, T]) are a part, too.
    Samples of several turns (a column ``conversation``) are scored once the batch is complete, with the
    values of ``TURN_NAMES``.

    ``parts`` weighs these and further scorers by data source
    (:func:`strop.config.reward_parts.read_parts`); :class:`Composition` has the rules, also for
    ``non_stop_penalty``, ``penalty_reward_value`` and ``min_response_length``.

    A sample whose scorer raises, takes over ``timeout_s``, ends its process or returns a number that is not
    finite gets ``error_score`` as rule, and no other parts of the scorer. If the reward model's score or the
    weighted sum is not finite, ``error_score`` is the whole score. Above a rate of ``max_error_rate``
    (:class:`strop.rewards.reward_output.ErrorBudget`) scoring raises. ``memory_limit_mb`` limits the private
    memory of a scoring process, and of each that it starts.

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
        by_environment: bool = False,
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
        self.by_environment = by_environment
        self.error_score = error_score
        self._sources: list[str] | None = None  # None: every source has a scorer
        self._known: set[str] = set()  # sources of the data set
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
        self.compute_score = own.function
        """Function of one sample, which managers derived from this class may call."""
        self.composition = Composition(
            parts=read_parts(parts),
            non_stop_penalty=non_stop_penalty,
            penalty_reward_value=penalty_reward_value,
            min_response_length=min_response_length,
        )
        self._part_scorers = {
            name: _scorer(name, part)
            for name, part in self.composition.parts.items()
            if part.scorer is not None
        }
        self.scorer = Scorer(own, self._part_scorers)
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
        if model_B is not None:
            model_B = model_scores(model_B, batch.batch["response_mask"])
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

        values = self._values(prompts)

        def sample(pending: PendingSamples, row: int, token_ids: list[int]) -> Sample:
            truncated = pending.truncated(row) if self.scorer.waits else None
            played = pending.played(row, self.tokenizer)
            return self._sample(
                values, row // n, fields[row], required[row], token_ids, truncated=truncated, played=played
            )

        compose = functools.partial(self._compose, required)
        is_scored = [bool(parts) for parts in required]
        return PendingSamples(self._last_job, is_scored, sample, compose, waits=self.scorer.waits)

    def _values(self, prompts: DataProto) -> SampleValues:
        scorer = self.scorer
        names = scorer.wanted, scorer.takes_all, scorer.is_batch
        return SampleValues(*names, self.tokenizer, prompts, self.prompt_key)

    def _sample(
        self,
        values: SampleValues,
        prompt: int,
        fields: tuple[str, Any, Any],
        parts: tuple[str, ...],
        token_ids: list[int],
        *,
        truncated: bool | None,
        played: Played | None = None,
    ) -> Sample:
        """Return the scorer's input for a response to the prompt in row ``prompt`` of ``values``."""
        if played is not None:
            response = played.text
        else:
            response = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        source, ground_truth, extra = fields
        named = values.of(prompt, token_ids, response, truncated=truncated, played=played)
        needed = parts if self._part_scorers else None
        return Sample(source, response, ground_truth, extra, needed, len(token_ids), named)

    def _compose(
        self,
        required: Sequence[tuple[str, ...]],
        batch: DataProto,
        samples: Sequence[Sample],
        outcomes: Sequence[Outcome | None],
        model_scores: Tensor | None,
    ) -> RewardOutput:
        """Return the rewards of a batch; ``required`` are the parts that functions compute of each sample."""
        logged = ["" if outcome is None else outcome.error for outcome in outcomes]
        validating = batch.meta_info.get("mode") == "validate"
        sources = [sample.data_source for sample in samples]
        outcomes = with_lost(outcomes, batch)
        given, texts = program_parts(batch)
        own_B = scored_by_programs(batch)
        has_rule = [RULE in names and not own for names, own in zip(required, own_B.tolist(), strict=True)]
        if "n_branches" in batch.batch and model_scores is None:
            rule = self.composition.parts[RULE]
            is_scored = [
                RULE in names or (bool(names) and not rule.weight(source))
                for names, source in zip(required, sources, strict=True)
            ]
            unscored_B = ~(own_B | torch.tensor(is_scored))
            outcomes = with_errors(
                outcomes,
                unscored_B,
                "no function scores the text that the program returned: its own score is",
                own_B,
            )
        environment_BT = batch.batch.get("environment_scores")
        if environment_BT is not None:
            environment_BT = environment_BT.float().cpu()
            given[ENVIRONMENT] = environment_BT.sum(dim=1)  # NaN for samples without
        weigh = functools.partial(self._weigh, has_rule=has_rule, sources=sources, validating=validating)
        if model_scores is not None:
            model_B = model_scores.detach().float().cpu().reshape(len(samples))
            rules_B = torch.tensor(has_rule)
            used_B = ~rules_B if validating else torch.ones_like(rules_B)  # in validation rules alone count
            lost_B = used_B & ~model_B.isfinite()
            outcomes = with_errors(outcomes, lost_B, "the reward model returned", model_B)
            no_score_B = ~used_B | lost_B | lost_in(batch)  # of a lost sample no part counts
            given[REWARD_MODEL] = model_B.masked_fill(no_score_B, math.nan)
        parts, added = weigh(outcomes, given)
        scores_B = sum(added.values(), torch.zeros(len(samples)))
        lost_B = ~scores_B.isfinite()
        if lost_B.any():
            outcomes = with_errors(outcomes, lost_B, "the weighted sum of the parts is", scores_B)
            known = {name: values_B.masked_fill(lost_B, math.nan) for name, values_B in given.items()}
            parts, added = weigh(outcomes, known)
            scores_B = sum(added.values(), torch.zeros(len(samples)))
        if RULE in parts and not any(has_rule) and bool((parts[RULE].isnan() | lost_in(batch)).all()):
            del parts[RULE]  # there are no rules: lost samples alone have it
            added.pop(RULE, None)
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
            token_level_scores=self._on_tokens(
                scores_B, None if validating else environment_BT, added, sources, batch
            ),
            parts=parts,
            # of one source with one part they would repeat the score
            metrics=score_metrics(
                outcomes,
                sources,
                parts,
                added,
                counted_B=counted(batch),
                by_source=len(self._known | {*sources}) > 1 or len(added) > 1,
            ),
            responses=[sample.solution_str for sample in samples],
            errors=errors,
            texts=texts | rule_parts(outcomes, has_rule, error_score=self.error_score)[1],
        )

    def _on_tokens(
        self,
        scores_B: Tensor,
        environment_BT: Tensor | None,
        added: Mapping[str, Tensor],
        sources: Sequence[str],
        batch: DataProto,
    ) -> Tensor:
        """Return the scores [B, T]: the environment's on the turns' last tokens, all others on the last."""
        mask_BT = batch.batch["response_mask"]
        if environment_BT is None or ENVIRONMENT not in added:
            return at_last_token(scores_B, mask_BT)
        weights_B = torch.tensor([self.composition.parts[ENVIRONMENT].weight(source) for source in sources])
        levels_BT = zero_masked(environment_BT.nan_to_num(), mask_BT.cpu()) * weights_B[:, None]
        rest_B = scores_B - added[ENVIRONMENT]
        return at_last_token(rest_B, mask_BT) + levels_BT.to(mask_BT.device)

    def _weigh(
        self,
        outcomes: Sequence[Outcome | None],
        given: Mapping[str, Tensor],
        *,
        has_rule: Sequence[bool],
        sources: Sequence[str],
        validating: bool,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parts [B] by name, NaN where they do not apply, and their contributions."""
        parts, _ = rule_parts(outcomes, has_rule, error_score=self.error_score)
        parts |= given
        failed = [outcome is not None and bool(outcome.error) for outcome in outcomes]
        rows = zip(sources, outcomes, has_rule, failed, strict=True)
        self.composition.require_returned(
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
        self._known = sources = set(sources)
        self.require_scored(sources, has_reward_model=has_reward_model)
        self.composition.warn_of_sources(sources, known={*(self._sources or ()), *elsewhere})

    def require_scored(
        self, sources: Iterable[str], *, has_reward_model: bool = False, by_environment: bool = True
    ) -> None:
        """Raise the errors of ``validate_sources``, without its warnings.

        ``by_environment``: the environment of rows of these sources gives rewards, if one does.
        """
        for source in sorted(set(sources)):
            has_rule = self._has_scorer(source)
            for name in self.composition.required(source, has_rule=has_rule):
                scorer = self._part_scorers.get(name)
                if name == RULE and self._router is not None:
                    self._router.require_ready(source, self._timeout_s)
                elif scorer is not None and isinstance(scorer.function, BuiltInScorer):
                    scorer.function.require_ready(self._timeout_s)
            others = [REWARD_MODEL] * has_reward_model
            others += [name for name, part in self._part_scorers.items() if part.of_any_source]
            others += [ENVIRONMENT] * (self.by_environment and by_environment)
            self.composition.require_scored(
                source, has_rule=has_rule, others=others, known=self._sources or ()
            )

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise ``ConfigError`` if a function needs an argument that is neither a value nor a column."""
        for function in (self.scorer.own, *self._part_scorers.values()):
            function.require(columns)

    def warn_without_ground_truths(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Warn if a user's function names the ground truth, and no row has one."""
        warn_without_ground_truths(self._own_functions(), rows)

    def score_example(
        self, prompts: DataProto, *, n: int, has_reward_model: bool, is_check: bool
    ) -> Example | None:
        """See ``Reward.score_example``, and ``example_of`` for the response."""
        own = self._own_functions()
        if self.scorer.is_async and not is_check:
            return None
        (parts,) = map(self._without_judges, self._required(prompts, has_model=has_reward_model))
        if not parts:
            return None
        (fields,) = row_fields(prompts, self.reward_fn_key)
        is_known = self._router is not None and self._router.is_built_in(fields[0])
        if is_known and len(str(fields[1])) > LONGEST_ANSWER:  # such as the tests of a program
            return None
        values = self._values(prompts)
        taken = "everything (**kwargs)" if self.scorer.takes_all else ", ".join(sorted(self.scorer.wanted))
        function = f"{self.scorer.own.where} takes {taken}"

        def score(text: str, convert: Convert | None) -> tuple[str, Outcome]:
            end = self.tokenizer.eos_token_id  # None: the model's configuration alone has one
            ids = [
                *self.tokenizer(text, add_special_tokens=False)["input_ids"],
                *([] if end is None else [end]),
            ]
            sample = self._sample(values, 0, fields, parts, ids, truncated=False)
            if convert is not None:
                named = {
                    name: value if name in SAMPLE_NAMES else convert(value)
                    for name, value in (sample.named or {}).items()
                }
                sample = sample._replace(ground_truth=convert(sample.ground_truth), named=named)
            copies = n if self.scorer.is_batch else 1
            outcome, *_ = self._pool.evaluate_all(Feed.of([sample] * copies))
            return sample.solution_str, outcome

        found = example_of(
            own or [self.scorer.own],
            prompts,
            score,
            function=function,
            prompt_key=self.prompt_key,
            reward_fn_key=self.reward_fn_key,
            error_score=self.error_score,
            fails_always=is_check or not self.scorer.is_batch,
            is_judged=self._router is None,
        )
        # a built-in scorer may expect a form of its own
        return None if is_known and found.tried[0].value <= self.error_score else found

    def _own_functions(self) -> list[Function]:
        """Return the user's functions: the custom one, and those of parts."""
        own = [] if self._router is not None else [self.scorer.own]
        parts = [part for part in self._part_scorers.values() if not part.of_any_source]
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
        required = [
            self.composition.required(source, has_rule=not model_alone and self._has_scorer(source))
            for source, model_alone in zip(sources, by_model, strict=True)
        ]
        if (
            prompts.meta_info.get("mode") == "validate"
        ):  # a rule decides alone, and its failure must be its own
            return [self._without_judges(parts) if RULE in parts else parts for parts in required]
        return required

    def _without_judges(self, parts: Iterable[str]) -> tuple[str, ...]:
        scorers = self._part_scorers
        return tuple(name for name in parts if name not in scorers or not scorers[name].of_any_source)

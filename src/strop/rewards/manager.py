"""``RewardManager``, the built-in reward, and its loading. B samples, T padded response tokens."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from strop.algorithms.registry import accepted, resolve
from strop.config.paths import is_function
from strop.config.reward_parts import NON_STOP_PENALTY, REWARD_MODEL, RULE, read_parts
from strop.errors import ConfigError, RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import Function, named_values
from strop.rewards.base import BatchReward, PendingReward, Reward
from strop.rewards.batch import ErrorBudget, PendingSamples, ScoringJob, log_first, name_row, real_tokens
from strop.rewards.custom import CustomReward, load_custom_reward, passed
from strop.rewards.parts import Composition, UnusedParts, part_scorers
from strop.rewards.reward_output import (
    RewardOutput,
    at_last_token,
    describe_sample,
    rule_parts,
    score_metrics,
)
from strop.rewards.router import BuiltInScorer, Router
from strop.rewards.scorer import Scorer
from strop.rewards.worker.pool import default_num_workers, reward_process
from strop.rewards.worker.records import Outcome, Sample, ScoreFunction

if TYPE_CHECKING:
    from strop.config.schema import Config

logger = logging.getLogger(__name__)

_KEY = "reward_model.reward_manager"
_SECTION_KEYS = (
    "timeout_s",
    "error_score",
    "max_error_rate",
    "memory_limit_mb",
    "max_concurrency",
    "parts",
    "non_stop_penalty",
    "penalty_reward_value",
    "min_response_length",
)
_GROUND_TRUTHS = {"ground_truth", "ground_truths"}
_OFF_UNLESS_SET = ("memory_limit_mb", "parts", "non_stop_penalty", "min_response_length")


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

    ``num_examine`` samples of each data source in every batch go to ``printer`` (default: the log) as text.

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
        self.reward_fn_key, self.prompt_key = reward_fn_key, prompt_key
        self.error_score = error_score
        self.printer = printer or logger.info
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
            where = compute_score.where if isinstance(compute_score, CustomReward) else "compute_score"
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
        self._process = reward_process(
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
        fields = [fields for fields in self._fields(prompts) for _ in range(n)]
        required = [parts for parts in self._required(prompts, has_model=with_model) for _ in range(n)]
        self._last_job = ScoringJob(
            self._process,
            self._budget,
            n_rows=len(fields),
            n_scored=sum(map(bool, required)),
            after=self._last_job,
        )

        values = SampleValues(self.scorer, self.tokenizer, prompts, self.prompt_key)

        def sample(row: int, token_ids: list[int]) -> Sample:
            response = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            source, ground_truth, extra = fields[row]
            parts = required[row] if self._part_scorers else None
            truncated = pending.truncated(row) if self.scorer.waits else None
            named = values.of(row // n, token_ids, response, truncated=truncated)
            return Sample(source, response, ground_truth, extra, parts, len(token_ids), named)

        compose = functools.partial(self._compose, [RULE in parts for parts in required])
        is_scored = [bool(parts) for parts in required]
        pending = PendingSamples(self._last_job, is_scored, sample, compose, waits=self.scorer.waits)
        return pending

    def _compose(
        self,
        has_rule: Sequence[bool],
        batch: DataProto,
        samples: Sequence[Sample],
        outcomes: Sequence[Outcome | None],
        model_scores: Tensor | None,
    ) -> RewardOutput:
        """Return the rewards of a batch; ``has_rule`` is True for the samples with a rule."""
        validating = batch.meta_info.get("mode") == "validate"
        sources = [sample.data_source for sample in samples]
        weigh = functools.partial(self._weigh, has_rule=has_rule, sources=sources, validating=validating)
        model_B = None
        if model_scores is not None:
            model_B = model_scores.detach().float().cpu().reshape(len(samples))
            rules_B = torch.tensor(has_rule)
            used_B = ~rules_B if validating else torch.ones_like(rules_B)  # in validation rules alone count
            lost_B = used_B & ~model_B.isfinite()
            outcomes = _with_errors(outcomes, samples, lost_B, "the reward model returned", model_B)
            model_B = model_B.masked_fill(~used_B | lost_B, math.nan)
        parts, added = weigh(outcomes, model_B)
        scores_B = sum(added.values(), torch.zeros(len(samples)))
        lost_B = ~scores_B.isfinite()
        if lost_B.any():
            outcomes = _with_errors(outcomes, samples, lost_B, "the weighted sum of the parts is", scores_B)
            parts, added = weigh(outcomes, None if model_B is None else model_B.masked_fill(lost_B, math.nan))
            scores_B = sum(added.values(), torch.zeros(len(samples)))
        errors = ["" if outcome is None else outcome.error for outcome in outcomes]
        self._final_budget.require(errors, functools.partial(name_row, samples))
        if self.composition.non_stop_penalty and not validating:
            penalty_B = parts[NON_STOP_PENALTY] = self._penalty(batch, scores_B)
            added[NON_STOP_PENALTY] = penalty_B.nan_to_num()
            scores_B = scores_B + added[NON_STOP_PENALTY]
        self._examine(batch, samples, scores_B, parts, outcomes)
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

    def _penalty(self, batch: DataProto, scores_B: Tensor) -> Tensor:
        """Return the difference [B] between non-stop penalty and score; NaN where no penalty is due."""
        columns = batch.batch
        if "truncated" not in columns:
            raise RewardError(
                "reward_model.non_stop_penalty needs the column 'truncated' [B], which is true for responses "
                f"without a stop token; the batch has {sorted(columns)}"
            )
        is_short_B = columns["response_mask"].sum(dim=1).cpu() < self.composition.min_response_length
        due_B = columns["truncated"].cpu().bool() | is_short_B
        return (self.composition.penalty_reward_value - scores_B).masked_fill(~due_B, math.nan)

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
        own = () if self._router is not None else (self.scorer.own,)
        functions = [
            function
            for function in (*own, *self._part_scorers.values())
            if function.names & _GROUND_TRUTHS and not isinstance(function.function, BuiltInScorer)
        ]
        if not functions:
            return
        columns: set[str] = set()
        for row in rows:
            columns |= row.keys()
            if _ground_truth(row.get("reward_model"), row.get("ground_truth")) is not None:
                return
        found = ", ".join(sorted(columns - {"input_ids", "index"}))
        logger.warning(
            "warning: %s gets ground_truth=None for every row: the data has neither "
            "reward_model.ground_truth nor a column ground_truth. Name the column with the answers "
            "(data.answer_key), or take it as a parameter of the function; the columns are %s",
            functions[0].where, found,
        )  # fmt: skip

    def score_example(self, prompts: DataProto, *, has_reward_model: bool) -> tuple[str, Outcome] | None:
        """Score one row, as a check, with its ground truth as the response; return this text and the outcome.

        ``prompts`` is a batch of one row. None without a function of the user's. Raises as ``__call__``.
        """
        if self._router is not None and not self._router.has_own and not self._own_parts():
            return None
        if not any(self._required(prompts, has_model=has_reward_model)):
            return None
        ((_, ground_truth, _),) = self._fields(prompts)
        text = (
            ground_truth
            if isinstance(ground_truth, str)
            else ""
            if ground_truth is None
            else str(ground_truth)
        )
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        mask_1L = torch.cat(
            [prompts.batch["attention_mask"], torch.ones(1, len(ids), dtype=torch.long)], dim=1
        )
        batch = DataProto(
            {
                "prompts": prompts.batch["input_ids"],
                "responses": torch.tensor([ids]),
                "response_mask": torch.ones(1, len(ids)),
                "attention_mask": mask_1L,
                "truncated": torch.zeros(1, dtype=torch.bool),
            },
            prompts.non_tensor_batch,
        )
        pending = self._expect(batch, n=1, with_model=has_reward_model)
        pending.complete(batch)
        (outcome,) = pending.outcomes()
        return None if outcome is None else (text, outcome)

    def _own_parts(self) -> bool:
        return any(not isinstance(part.function, BuiltInScorer) for part in self._part_scorers.values())

    def is_built_in(self, source: str) -> bool:
        """Return True if the source's rule is its built-in scorer, with a weight other than 0."""
        weight = self.composition.parts[RULE].weight(source)
        return self._router is not None and self._router.is_built_in(source) and weight != 0

    def _has_scorer(self, source: str) -> bool:
        return self._sources is None or source in self._sources

    def start(self) -> None:
        """Start the scoring process before the first batch. Raises ``RewardError`` if it cannot start."""
        self._process.start()

    def close(self) -> None:
        """Cancel what is being scored and end the scoring process. It also ends with the program."""
        if self._last_job is not None:
            self._last_job.cancel(with_earlier=True)
            self._last_job.wait()
        self._process.close()

    def _fields(self, prompts: DataProto) -> list[tuple[str, Any, Any]]:
        """Return data source, ground truth and extra info of each row."""
        columns = prompts.non_tensor_batch
        if self.reward_fn_key not in columns:
            raise RewardError(
                f"the data has no column {self.reward_fn_key!r} (data.reward_fn_key), which selects a row's "
                f"scorer; it has {sorted(columns)}"
            )
        nothing = np.full(len(prompts), None, dtype=object)
        return [
            (str(source), _ground_truth(target, plain), extra)
            for source, target, plain, extra in zip(
                columns[self.reward_fn_key],
                columns.get("reward_model", nothing),
                columns.get("ground_truth", nothing),
                columns.get("extra_info", nothing),
                strict=True,
            )
        ]

    def _required(self, prompts: DataProto, *, has_model: bool) -> list[tuple[str, ...]]:
        """Return the parts that functions compute for each row; check all rows before scoring the first."""
        sources = [source for source, *_ in self._fields(prompts)]
        self.require_scored(sources, has_reward_model=has_model)
        targets = prompts.non_tensor_batch.get("reward_model", [None] * len(sources))
        by_model = [has_model and (target or {}).get("style") == "model" for target in targets]
        return [
            self.composition.required(source, has_rule=not model_alone and self._has_scorer(source))
            for source, model_alone in zip(sources, by_model, strict=True)
        ]

    def _examine(
        self,
        batch: DataProto,
        samples: Sequence[Sample],
        scores_B: Tensor,
        parts: Mapping[str, Tensor],
        outcomes: Sequence[Outcome | None],
    ) -> None:
        """Print the first samples of every data source."""
        shown: Counter[str] = Counter()
        for row, sample in enumerate(samples):
            if shown[sample.data_source] >= self.num_examine:
                continue
            shown[sample.data_source] += 1
            outcome = outcomes[row]
            own_parts = {name: values[row].item() for name, values in parts.items()}
            self.printer(
                describe_sample(
                    sample,
                    prompt=self._prompt(batch, row),
                    score=scores_B[row].item(),
                    parts={name: value for name, value in own_parts.items() if not math.isnan(value)},
                    error=outcome.error if outcome else "",
                    whole=self._with_special_tokens(batch, row),
                )
            )

    def _with_special_tokens(self, batch: DataProto, row: int) -> str:
        """Decode the response with its special tokens, if some are hidden from its scored text."""
        if "hidden_tokens" not in batch or not batch.batch["hidden_tokens"][row]:
            return ""
        columns = (batch.batch[name][row : row + 1] for name in ("responses", "response_mask"))
        return self.tokenizer.decode(real_tokens(*columns)[0], skip_special_tokens=False)

    def _prompt(self, batch: DataProto, row: int) -> str:
        """Decode the prompt with its chat template."""
        if not {"prompts", "attention_mask"} <= batch.batch.keys():
            return "(not in the batch)"
        prompts = batch.batch["prompts"][row : row + 1]
        mask = batch.batch["attention_mask"][row : row + 1, : prompts.shape[1]]
        return self.tokenizer.decode(real_tokens(prompts, mask)[0], skip_special_tokens=False)


def _with_errors(
    outcomes: Sequence[Outcome | None],
    samples: Sequence[Sample],
    lost_B: Tensor,
    found: str,
    values_B: Tensor,
) -> list[Outcome | None]:
    """Return the outcomes with an error for the rows in ``lost_B`` that have none, and log the first."""
    changed = list(outcomes)
    errors = [""] * len(changed)
    for row in lost_B.nonzero().flatten().tolist():
        if not ((outcome := changed[row]) and outcome.error):
            errors[row] = f"{found} {values_B[row].item()}"
            changed[row] = Outcome("raised", error=errors[row])
    log_first(errors, functools.partial(name_row, samples))
    return changed


def _ground_truth(record: Mapping[str, Any] | None, column: Any) -> Any:
    """Return ``reward_model.ground_truth``, or the column ``ground_truth`` without it."""
    return record["ground_truth"] if record and "ground_truth" in record else column


class SampleValues:
    """``Sample.named`` of the samples of a batch of prompts, as the functions of ``scorer`` take them."""

    def __init__(self, scorer: Scorer, tokenizer: Any, prompts: DataProto, prompt_key: str) -> None:
        self._scorer, self._tokenizer, self._prompts = scorer, tokenizer, prompts
        self._given = prompts.non_tensor_batch.get(prompt_key)
        self._columns = dict(prompts.non_tensor_batch)

    def of(
        self, prompt: int, token_ids: list[int], response: str, *, truncated: bool | None
    ) -> dict[str, Any]:
        """Return the values for a response to the prompt in row ``prompt``."""
        given = None if self._given is None else self._given[prompt]
        is_chat = given is not None and not isinstance(given, str)

        def messages() -> list[dict[str, Any]]:
            if given is None or not is_chat:
                return [{"role": "user", "content": self._text(prompt) if given is None else given}]
            # Arrow gives every message the keys of all others.
            return [{key: value for key, value in message.items() if value is not None} for message in given]

        known: dict[str, Callable[[], Any]] = {
            "prompt": lambda: given if isinstance(given, str) else self._text(prompt),
            "messages": messages,
            "prompt_ids": lambda: self._ids(prompt),
            "n_prompt_tokens": lambda: len(self._ids(prompt)),
            "response_ids": lambda: token_ids,
        }
        if truncated is not None:
            known["truncated"] = lambda: truncated
        if self._scorer.is_batch:
            answer = [{"role": "assistant", "content": response}]
            known["prompts"] = lambda: messages() if is_chat else known["prompt"]()
            known["completions"] = lambda: answer if is_chat else response
        columns = {name: column[prompt] for name, column in self._columns.items()}
        return named_values(self._scorer.wanted, columns=columns, known=known)

    def _ids(self, prompt: int) -> list[int]:
        tensors = self._prompts.batch
        name = next((name for name in ("prompts", "input_ids") if name in tensors), None)
        if name is None or "attention_mask" not in tensors:
            return []
        ids_P = tensors[name][prompt]
        return ids_P[tensors["attention_mask"][prompt, : len(ids_P)].bool()].tolist()

    def _text(self, prompt: int) -> str:
        return self._tokenizer.decode(self._ids(prompt), skip_special_tokens=False)


def load_reward_manager(
    config: Config,
    tokenizer: Any,
    num_examine: int,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    /,
    **reward_kwargs: Any,
) -> Any:
    """Make the reward manager that ``reward_model.reward_manager`` names.

    ``naive`` scores in one process, ``prime`` in several; any other name is the import path of a class. Its
    arguments are ``tokenizer``, ``num_examine``, ``compute_score`` (from ``custom_reward_function``, or
    None), ``reward_fn_key``, the entries of ``reward_kwargs`` (mappings as ``DictConfig``), and those of
    ``_SECTION_KEYS`` that it accepts. ``functions`` are those that a program passes, by the names that stand
    for them in the configuration.

    Raises:
        ConfigError: an unknown name, an argument that the class does not take, a key that is on and would be
            ignored, or an unusable custom reward function.
    """
    section = config.reward_model
    workers = section.num_workers or default_num_workers()
    built_in = {"naive": RewardManager, "prime": functools.partial(RewardManager, num_workers=workers)}
    build = resolve(section.reward_manager, built_in, _KEY)
    custom = load_custom_reward(
        config.custom_reward_function.path, config.custom_reward_function.name, functions
    )
    own = {name: getattr(section, name) for name in _SECTION_KEYS}
    own["prompt_key"] = config.data.prompt_key
    own["parts"] = _with_functions(section.parts, functions)
    _require_honoured(build, own, section.reward_manager)
    if section.reward_manager not in built_in:  # verl's managers read attributes: overlong_buffer_cfg.enable
        reward_kwargs = {
            name: OmegaConf.create(value) if type(value) is dict else value
            for name, value in reward_kwargs.items()
        }
    arguments = {
        "tokenizer": tokenizer,
        "num_examine": num_examine,
        "compute_score": custom,
        "reward_fn_key": config.data.reward_fn_key,
        **accepted(build, own),
        **reward_kwargs,
    }
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{_KEY}={section.reward_manager!r} with reward_model.reward_kwargs={reward_kwargs}: {error}; "
            f"its parameters are {inspect.signature(build)}"
        ) from None
    return build(**arguments)


def _with_functions(
    parts: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None
) -> dict[str, Any]:
    """Return ``reward_model.parts`` with the functions of a program in place of their names."""
    found = dict(parts)
    for name, part in parts.items():
        scorer = part.get("scorer") if isinstance(part, Mapping) else None
        if isinstance(scorer, str) and is_function(scorer):
            function = passed(scorer, functions, f"reward_model.parts.{name}.scorer")
            found[name] = {**part, "scorer": function}
    return found


def _require_honoured(build: Callable[..., Any], settings: Mapping[str, Any], name: str) -> None:
    """Raise ``ConfigError`` if a user's manager does not take a key that is on."""
    taken = accepted(build, settings)
    if ignored := [key for key in _OFF_UNLESS_SET if settings[key] and key not in taken]:
        keys = ", ".join(f"reward_model.{key}" for key in ignored)
        raise ConfigError(f"{_KEY}={name!r} does not take {keys}: remove these, or add them as parameters")

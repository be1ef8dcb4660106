"""The scores of a batch as tensors, metrics and text, and how many may fail. B samples, T response tokens."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from strop.columns import ENDED_BY
from strop.config.reward_parts import ENVIRONMENT, REWARD_MODEL, RULE
from strop.errors import RewardError
from strop.protocol import DataProto
from strop.rewards.arguments import Sample
from strop.rewards.scorer import Outcome, recorded
from strop.terminal import printable

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

WINDOW = 256
_SHOWN = 200
"""Characters of a response; at each end of one with special tokens."""


@dataclass(frozen=True)
class RewardOutput:
    """The scores of a batch and their parts."""

    token_level_scores: Tensor
    """float32 [B, T]: the sample's score at its last response token, 0 elsewhere."""
    parts: dict[str, Tensor]
    """float32 [B] by name: ``rule``, ``reward_model``, the names of ``reward_model.parts``, and further
    numbers of a scorer. NaN where a part does not apply to a sample."""
    metrics: dict[str, float]
    """See :func:`score_metrics`."""
    responses: list[str]
    """The decoded responses [B]; empty if the batch was scored as a whole."""
    errors: list[str]
    """Reason why a sample could not be scored [B]; "" for one that could."""
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    """What a scorer returned next to its numbers, [B] by name: recorded with the samples, in no metric."""


def read_output(result: Any, batch: DataProto, *, error_score: float) -> tuple[RewardOutput, list[str]]:
    """Return the rewards of a whole batch, and the errors [B] that are found here, "" for other samples.

    ``result`` is a ``RewardOutput``, scores [B] or [B, T], or, from verl's reward managers, a dict with these
    as "reward_tensor" and lists [B] by name as "reward_extra_info". Numbers in such a list are a part
    of the score, which does not apply where the list has None or text. A sample that is lost, or whose
    numbers are not finite, gets ``error_score`` and no parts.

    Raises ``RewardError`` if the result is anything else, its shape is not that of ``response_mask``, or a
    score is between two turns.
    """
    mask_BT, lost = batch.batch["response_mask"], lost_errors(batch)
    errors = list(lost)
    output = result if isinstance(result, RewardOutput) else _plain_output(result, errors)
    scores_BT = output.token_level_scores.float()
    if scores_BT.shape == mask_BT.shape[:1]:
        scores_BT = at_last_token(scores_BT, mask_BT)
    if scores_BT.shape != mask_BT.shape:
        raise RewardError(
            "the reward function of the whole batch (reward_model.reward_manager) returned scores of shape "
            f"{list(scores_BT.shape)}: expected {_shapes(mask_BT)}"
        )
    _add_errors(errors, ~scores_BT.isfinite().all(dim=1), "NaN or infinity as score")
    for name, values_B in output.parts.items():  # NaN: the part does not apply
        _add_errors(errors, values_B.float().isinf(), f"infinity as {name}")
    _require_at_turns(scores_BT, mask_BT)
    if not any(errors):
        return dataclasses.replace(output, token_level_scores=scores_BT), errors
    failed_B = torch.tensor([bool(error) for error in errors], device=scores_BT.device)
    filler_BT = at_last_token(torch.full(failed_B.shape, error_score), mask_BT).to(scores_BT.device)
    all_errors = [own or found for own, found in zip(output.errors, errors, strict=True)]
    # the built-in manager has lost samples among its own errors
    errors = [
        "" if own and is_lost else found
        for own, is_lost, found in zip(output.errors, lost, errors, strict=True)
    ]
    output = dataclasses.replace(
        output,
        token_level_scores=torch.where(failed_B[:, None], filler_BT, scores_BT),
        parts={
            name: values_B.float().masked_fill(failed_B.to(values_B.device), math.nan)
            for name, values_B in output.parts.items()
        },
        metrics={**output.metrics, **(_error_metrics(all_errors) if any(errors) else {})},
        errors=all_errors,
    )
    return output, errors


def _require_at_turns(scores_BT: Tensor, mask_BT: Tensor) -> None:
    """Raise ``RewardError`` for a score at a token before the last sampled one that was not sampled itself.

    Training would leave it out, as that of a manager that takes the number of sampled tokens for the place of
    the last one, which it is in samples of one turn.
    """
    is_before_BT = mask_BT.flip(1).cumsum(1).flip(1) > 0
    is_score_BT = (scores_BT != 0) & scores_BT.isfinite()  # others are errors of their samples
    stray_BT = is_score_BT.to(mask_BT.device) & (mask_BT == 0) & is_before_BT
    if stray_BT.any():
        row, token = stray_BT.nonzero()[0].tolist()
        raise RewardError(
            "the reward function of the whole batch (reward_model.reward_manager) put the score "
            f"{scores_BT[row, token].item():g} of sample {row} at response token {token}, which is between "
            "two turns: response_mask is 0. Put scores at tokens with response_mask 1, such as the last "
            "of them, or return one for each sample"
        )


def _plain_output(result: Any, errors: list[str]) -> RewardOutput:
    """Convert scores, or verl's dict, and add ``errors`` [B] for numbers in the dict that are not finite."""
    scores, extra = result, {}
    if isinstance(result, Mapping):
        scores, extra = result.get("reward_tensor"), result.get("reward_extra_info") or {}
    if not torch.is_tensor(scores):
        raise RewardError(
            f"the reward function of the whole batch returned {result!r:.200}: expected a RewardOutput, "
            'a tensor of scores, [B] or [B, T], or a dict with one as "reward_tensor"'
        )
    columns: dict[str, list[float | str | None]] = {}
    for name, values in extra.items():
        column = [_recorded(value) for value in values]
        if len(column) == len(errors):
            columns[str(name)] = column
        else:
            _warn_not_recorded(str(name))
    parts, texts = _numbers_and_texts(columns)
    for name, values_B in parts.items():
        wrong_B = torch.tensor([isinstance(value, float) for value in columns[name]]) & ~values_B.isfinite()
        _add_errors(errors, wrong_B, f"NaN or infinity as {name}")
    failed_B = torch.tensor([bool(error) for error in errors])
    means = {name: values_B.masked_fill(failed_B, math.nan).nanmean() for name, values_B in parts.items()}
    metrics = {
        **_error_metrics(errors),
        **{f"reward/{name}/mean": mean.item() for name, mean in means.items()},
    }
    return RewardOutput(scores, parts, metrics, responses=[], errors=[""] * len(errors), texts=texts)


def _recorded(value: Any) -> float | str | None:
    try:
        return recorded(value, "")
    except TypeError:
        return None


@functools.cache
def _warn_not_recorded(name: str) -> None:
    logger.warning("reward_extra_info[%r] is not recorded: expected a value for each sample", name)


def _add_errors(errors: list[str], wrong_B: Tensor, found: str) -> None:
    for row in wrong_B.nonzero().flatten().tolist():
        errors[row] = errors[row] or f"the reward function returned {found}"


def _error_metrics(errors: Sequence[str]) -> dict[str, float]:
    count = sum(map(bool, errors))
    return {"reward/error_rate": count / max(len(errors), 1), "reward/errors": float(count)}


class ErrorBudget:
    """Count failed samples over a window: the current batch and earlier ones, 256 samples in total.

    A larger batch is judged alone. Without the window, one failure in a batch of four would exceed any rate;
    for the same reason one failure is always allowed, unless ``max_rate`` is 0.
    """

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self._before: deque[bool] = deque(maxlen=WINDOW)
        self._allowed = math.inf
        self._failed = 0

    def begin(self, samples: int) -> None:
        """Start a batch of this many samples."""
        kept = list(self._before)[-(WINDOW - samples) :] if samples < WINDOW else []
        self._failed = sum(kept)
        allowed = self.max_rate * (len(kept) + samples)
        self._allowed = max(allowed, 1.0) if self.max_rate > 0 else 0.0

    def count(self, failed: bool) -> bool:
        """Count one sample; return True if the batch exceeds the budget even if all others succeed."""
        self._failed += failed
        return self._failed > self._allowed

    def end(self, failed: Iterable[bool]) -> None:
        """Add the finished batch to the window, by row, so that its state does not depend on timing."""
        self._before.extend(failed)

    def require(self, errors: Sequence[str], name: Callable[[int], str]) -> None:
        """Count a finished batch; ``errors`` [B] are "" where there is none, and ``name`` describes a row.

        Raises ``RewardError`` with the first error if the batch exceeds the budget.
        """
        self.begin(len(errors))
        for row, error in enumerate(errors):
            if self.count(bool(error)):
                raise self.exceeded(errors[: row + 1], len(errors), name)
        self.end(map(bool, errors))

    def exceeded(self, errors: Sequence[str], size: int, name: Callable[[int], str]) -> RewardError:
        """Return the error for a batch of ``size`` samples, given the ``errors`` of the first ones."""
        first = next((row for row, error in enumerate(errors) if error), 0)  # 0: earlier batches failed
        return RewardError(
            f"too many samples cannot be scored: {sum(map(bool, errors))} of the first {len(errors)} samples "
            f"of a batch of {size} (reward_model.max_error_rate={self.max_rate:g}). "
            f"The first was {name(first)}:\n{errors[first]}"
        )


class ScoreCheck:
    """Make an error of a sample that is lost, or whose reward is NaN or infinite, whatever the manager is.

    Such a sample scores ``error_score``. Raises ``RewardError`` above a rate of ``max_error_rate``
    (:class:`ErrorBudget`), and for a result that is no reward.
    """

    def __init__(self, *, error_score: float = 0.0, max_error_rate: float = 0.1) -> None:
        self._error_score, self._budget = error_score, ErrorBudget(max_error_rate)

    def __call__(self, result: Any, batch: DataProto) -> RewardOutput:
        """Return the rewards in ``result`` (``read_output``), all finite."""
        output, errors = read_output(result, batch, error_score=self._error_score)
        columns = batch.non_tensor_batch
        nothing = [None] * len(errors)
        extras, sources = columns.get("extra_info", nothing), columns.get("data_source", nothing)

        def name(row: int) -> str:
            return name_sample(row, sources[row], extras[row])

        self._budget.require(errors, name)
        log_first(errors, name)
        return output


def log_first(errors: Sequence[str], name: Callable[[int], str]) -> None:
    """Log the first error of a batch within the budget; otherwise it is part of what is raised."""
    for row, error in enumerate(errors):
        if error:
            logger.warning("could not score %s:\n%s", name(row), printable(error))
            return


def with_errors(
    outcomes: Sequence[Outcome | None], lost_B: Tensor, found: str, values_B: Tensor
) -> list[Outcome | None]:
    """Return the outcomes with an error for the rows in ``lost_B`` that have none."""
    changed = list(outcomes)
    for row in lost_B.nonzero().flatten().tolist():
        if not ((outcome := changed[row]) and outcome.error):
            changed[row] = Outcome("raised", error=f"{found} {values_B[row].item()}")
    return changed


def lost_in(batch: DataProto) -> Tensor:
    """Return True [B] for samples that their environment lost; on the CPU."""
    ended_B = batch.batch.get("ended_by")
    if ended_B is None:
        return torch.zeros(len(batch), dtype=torch.bool)
    return ended_B.cpu() == ENDED_BY.index("error")


def scored_by_programs(batch: DataProto) -> Tensor:
    """Return True [B] for samples whose agent program returned a score; on the CPU."""
    if "n_branches" not in batch.batch or "environment_scores" not in batch.batch:
        return torch.zeros(len(batch), dtype=torch.bool)
    return ~batch.batch["environment_scores"].cpu().isnan().any(dim=1)


def program_parts(batch: DataProto) -> tuple[dict[str, Tensor], dict[str, list[str | None]]]:
    """Return the further numbers [B] that agent programs returned, NaN where there is none; and texts."""
    if not scored_by_programs(batch).any():
        return {}, {}
    found = [json.loads(text).get("parts", {}) for text in batch.non_tensor_batch["conversation"]]
    names = sorted({name for parts in found for name in parts})
    return _numbers_and_texts({name: [parts.get(name) for parts in found] for name in names})


def lost_errors(batch: DataProto) -> list[str]:
    """Return the reason why its environment, or program, lost a sample [B]; "" for others."""
    errors = [""] * len(batch)
    who = "program" if "n_branches" in batch.batch else "environment"
    for row in lost_in(batch).nonzero().flatten().tolist():
        reason = json.loads(batch.non_tensor_batch["conversation"][row]).get("error", "")
        errors[row] = f"the {who} lost the sample: {reason}"
    return errors


def with_lost(outcomes: Sequence[Outcome | None], batch: DataProto) -> list[Outcome | None]:
    """Return the outcomes with an error for each lost sample."""
    pairs = zip(outcomes, lost_errors(batch), strict=True)
    return [Outcome("raised", error=error) if error else outcome for outcome, error in pairs]


def counted(batch: DataProto) -> Tensor:
    """Return True [B] for samples that means are over, on the CPU: of those with turns with a sampled token.

    A lost sample has none, and is in no group and no loss.
    """
    if "ended_by" not in batch.batch:
        return torch.ones(len(batch), dtype=torch.bool)
    return batch.batch["response_mask"].cpu().bool().any(dim=1)


def name_row(samples: Sequence[Sample | None], row: int) -> str:
    """Describe a row for an error text; "" if its sample was not added."""
    sample = samples[row]
    if sample is None:
        return ""
    return name_sample(row, sample.data_source, sample.extra_info, sample.solution_str)


def name_sample(row: int, data_source: Any, extra_info: Any, response: str | None = None) -> str:
    """Describe a sample for an error text."""
    facts = [f"data_source={data_source!r}"]
    if isinstance(extra_info, Mapping) and extra_info.get("index") is not None:
        facts.append(f"extra_info.index={extra_info['index']}")
    if response is not None:
        shown = response if len(response) <= _SHOWN else response[:_SHOWN] + "..."
        facts.append(f"response={shown!r}")
    return f"sample {row} ({', '.join(facts)})"


def rule_parts(
    outcomes: Sequence[Outcome | None], has_rule: Sequence[bool], *, error_score: float
) -> tuple[dict[str, Tensor], dict[str, list[str | None]]]:
    """Return ``rule`` and the scorers' other parts [B], NaN for samples without; and their texts.

    A sample that could not be scored has ``rule`` = ``error_score`` and no other parts.
    """
    columns: dict[str, list[float | str | None]] = {}
    for row, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        rule = {} if outcome.score is None or not has_rule[row] else {RULE: outcome.score}
        named = {RULE: float(error_score)} if outcome.error else {**rule, **outcome.parts}
        for name, value in named.items():
            columns.setdefault(name, [None] * len(outcomes))[row] = value
    return _numbers_and_texts(columns)


def _numbers_and_texts(
    columns: Mapping[str, Sequence[float | str | None]],
) -> tuple[dict[str, Tensor], dict[str, list[str | None]]]:
    """Return the numbers of the columns, float32 [B] with NaN elsewhere, and their texts, or None alone."""
    parts, texts = {}, {}
    for name, values in columns.items():
        numbers = [value if isinstance(value, float) else math.nan for value in values]
        if has_numbers := any(isinstance(value, float) for value in values):
            parts[name] = torch.tensor(numbers, dtype=torch.float32)
        if not has_numbers or any(isinstance(value, str) for value in values):
            texts[name] = [value if isinstance(value, str) else None for value in values]
    return parts, texts


def at_last_token(scores_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Put each score at the last position with mask 1, or at 0 where there is none; float32 [B, T]."""
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = (positions_T * mask_BT.bool()).amax(dim=1)
    scores_BT = torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
    return scores_BT.scatter_(1, last_B[:, None], scores_B.float().to(mask_BT.device)[:, None])


def model_scores(scores: Tensor | None, mask_BT: Tensor) -> Tensor:
    """Return ``rm_scores`` as [B]: token-level ones, as of verl's workers, are summed.

    Raises ``RewardError`` without scores, or for another shape.
    """
    if scores is not None and scores.shape == mask_BT.shape:
        return scores.float().sum(dim=1)
    if scores is None or scores.shape != mask_BT.shape[:1]:
        found = "no such column" if scores is None else f"shape {list(scores.shape)}"
        raise RewardError(
            f"column rm_scores of the role RewardModel (its worker's compute_rm_score): found {found}, "
            f"expected {_shapes(mask_BT)}"
        )
    return scores


def _shapes(mask_BT: Tensor) -> str:
    rows, tokens = mask_BT.shape
    return f"[{rows}], one for each sample, or [{rows}, {tokens}], one for each token of the padded responses"


def score_metrics(
    outcomes: Sequence[Outcome | None],
    sources: Sequence[str],
    parts: Mapping[str, Tensor],
    contributions: Mapping[str, Tensor],
    *,
    counted_B: Tensor,
    by_source: bool,
) -> dict[str, float]:
    """Return the metrics of a batch's scores, by part and with ``by_source`` by data source.

    Means are over the samples in ``counted_B`` (``counted``).

    ``reward/error_rate``, ``/errors``, ``/timeouts``: over the samples that functions, a model, an
    environment or a program scored;
    ``reward/left_out``, if there are any: samples for which nothing returned a number;
    ``reward/<part>/mean``: over the samples that have the part, before its weight;
    ``reward/score/<source>/mean``: over the samples of a data source;
    ``reward/added/<source>/<part>``: the contribution to the mean score of the batch. These sum to it.
    """
    asked = [outcome for outcome in outcomes if outcome is not None]
    errors = sum(bool(outcome.error) for outcome in asked)
    by_others_B = torch.zeros(len(outcomes), dtype=torch.bool)
    for name in parts.keys() & {REWARD_MODEL, ENVIRONMENT}:
        by_others_B |= ~parts[name].isnan()
    n_scored = sum(
        outcome is not None or by_others
        for outcome, by_others in zip(outcomes, by_others_B.tolist(), strict=True)
    )
    left_out = sum(
        outcome is not None and not (outcome.error or outcome.parts or by_others) and outcome.score is None
        for outcome, by_others in zip(outcomes, by_others_B.tolist(), strict=True)
    )
    return {
        "reward/error_rate": errors / max(n_scored, 1),
        "reward/errors": float(errors),
        **({"reward/left_out": float(left_out)} if left_out else {}),
        "reward/timeouts": float(sum(outcome.status == "timeout" for outcome in asked)),
        **{f"reward/{name}/mean": values[counted_B].nanmean().item() for name, values in parts.items()},
        **(_by_source(sources, contributions, counted_B) if by_source else {}),
    }


def _by_source(
    sources: Sequence[str], contributions: Mapping[str, Tensor], counted_B: Tensor
) -> dict[str, float]:
    metrics = {}
    for source in sorted(set(sources)):
        of_source_B = torch.tensor([other == source for other in sources]) & counted_B
        if not of_source_B.any():
            continue
        added = {name: values_B[of_source_B].sum().item() for name, values_B in contributions.items()}
        metrics[f"reward/score/{source}/mean"] = sum(added.values()) / int(of_source_B.sum())
        for name, total in added.items():
            metrics[f"reward/added/{source}/{name}"] = total / int(counted_B.sum())
    return metrics


def describe_sample(
    sample: Sample, *, prompt: str, score: float, parts: Mapping[str, float], error: str, whole: str = ""
) -> str:
    """Format source, prompt, response, ground truth and score, one per line, for a terminal.

    ``whole``: the response with special tokens, if its scored text lacks some. The middle of a
    long one is left out: a model that never ends may write hundreds of them.
    """
    if len(whole) > 2 * _SHOWN:
        left_out = len(whole) - 2 * _SHOWN
        whole = f"{whole[:_SHOWN]} ... ({left_out} characters) ... {whole[-_SHOWN:]}"
    named = "".join(f", {name} {value:g}" for name, value in parts.items())
    lines = [
        _field("data source", sample.data_source),
        _field("prompt", prompt),
        _field("response", sample.solution_str),
        *([_field("response with special tokens", whole)] if whole else []),
        _field("ground truth", sample.ground_truth),
        _field("score", f"{score:g}{named}"),
    ]
    if error:
        lines.append(_field("error", error.strip()))
    return "\n".join(lines)


def _field(name: str, value: Any) -> str:
    text = printable(str(value))
    return f"[{name}]\n{text}" if "\n" in text else f"[{name}] {text}"


class SamplePrinter:
    """Print the first ``num_examine`` samples of every data source of a batch, to ``printer``."""

    def __init__(self, tokenizer: Any, num_examine: int, printer: Callable[[str], None]) -> None:
        self._tokenizer, self._num_examine, self._printer = tokenizer, num_examine, printer

    def __call__(
        self,
        batch: DataProto,
        samples: Sequence[Sample],
        scores_B: Tensor,
        parts: Mapping[str, Tensor],
        errors: Sequence[str],
    ) -> None:
        """Print samples of a batch, with their scores [B], parts [B] by name and errors [B]."""
        shown: Counter[str] = Counter()
        for row, sample in enumerate(samples):
            if shown[sample.data_source] >= self._num_examine:
                continue
            shown[sample.data_source] += 1
            own_parts = {name: values[row].item() for name, values in parts.items()}
            self._printer(
                describe_sample(
                    sample,
                    prompt=self._prompt(batch, row),
                    score=scores_B[row].item(),
                    parts={name: value for name, value in own_parts.items() if not math.isnan(value)},
                    error=errors[row],
                    whole=self._with_special_tokens(batch, row),
                )
            )

    def _with_special_tokens(self, batch: DataProto, row: int) -> str:
        """Decode the response with its special tokens, if some are hidden from its scored text."""
        if "hidden_tokens" not in batch or not batch.batch["hidden_tokens"][row]:
            return ""
        columns = (batch.batch[name][row : row + 1] for name in ("responses", "response_mask"))
        return self._tokenizer.decode(real_tokens(*columns)[0], skip_special_tokens=False)

    def _prompt(self, batch: DataProto, row: int) -> str:
        """Decode the prompt with its chat template."""
        if not {"prompts", "attention_mask"} <= batch.batch.keys():
            return "(not in the batch)"
        prompts = batch.batch["prompts"][row : row + 1]
        mask = batch.batch["attention_mask"][row : row + 1, : prompts.shape[1]]
        return self._tokenizer.decode(real_tokens(prompts, mask)[0], skip_special_tokens=False)


def real_tokens(ids_BT: Tensor, mask_BT: Tensor) -> list[list[int]]:
    """Return the token ids of each row where the mask is 1."""
    rows = zip(ids_BT.cpu(), mask_BT.cpu().bool(), strict=True)
    return [ids_T[mask_T].tolist() for ids_T, mask_T in rows]

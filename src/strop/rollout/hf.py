"""Rollout ``hf``: generation in this process, on the very module that is trained where it is not sharded.

Columns of the result, for B prompts and n samples each (a prompt's samples are adjacent rows): the prompts'
other columns, repeated, and
    prompts [B*n, P], responses [B*n, T], input_ids, attention_mask, position_ids [B*n, P+T]: int64
    response_mask [B*n, T]: float32, 1 for sampled tokens up to and including the stop token
    rollout_log_probs [B*n, T]: float32, of the distribution sampled from (``next_tokens``); 0 in padding
    truncated [B*n]: bool, ended by the length limit and not by a stop token
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.errors import DataError, ModelError, TrainingError
from strop.protocol import DataProto
from strop.rollout.attention import attention_windows
from strop.rollout.base import SamplingParams
from strop.rollout.decoding import Prompts, Samples, decode
from strop.rollout.packed_linear import packed_linears
from strop.rollout.sampling import draw_uniforms
from strop.rollout.self_check import check_decoding

_PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")
_PACK_FROM = 8
"""Steps from which packing the weights pays for itself."""


class HFRollout:
    """Generates with a transformers causal LM, in place: the trainer's weights, and no cache outlives a call.

    On a CPU, long generations pack a copy of the large linear layers for the length of one call
    (``strop.rollout.packed_linear``): memory of one more model in the computing dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        autocast_dtype: torch.dtype | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        """``micro_batch_size``: samples generated at once, None for all; memory only, it changes no number.

        Raises ``ModelError`` for a model that this loop would decode wrongly.
        """
        self.model = model
        self.pad_token_id = pad_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.micro_batch_size = micro_batch_size
        self._windows = attention_windows(model.config)
        parameters = inspect.signature(model.forward).parameters
        missing = {"position_ids", "past_key_values", "logits_to_keep"} - parameters.keys()
        if missing:
            raise ModelError(
                f"rollout.name=hf: {type(model).__name__} does not take {', '.join(sorted(missing))}"
            )
        self.autocast_dtype: torch.dtype | None = None
        with torch.no_grad(), _eval_mode(model):
            check_decoding(model, self.generate)
        self.autocast_dtype = autocast_dtype  # only now: the check wants no bfloat16 rounding

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, last: bool = True) -> None:
        """Nothing to do: the weights are the trainer's."""

    def release(self) -> None:
        """Nothing to do: the weights are the trainer's."""

    @torch.no_grad()
    def generate(self, prompts: DataProto, params: SamplingParams) -> DataProto:
        """Sample ``params.n`` responses for every row of ``prompts``.

        ``prompts`` has input_ids, attention_mask and position_ids [B, P], left-padded, and, unless greedy,
        seeds [B, n]. A sample's random numbers depend on its seed alone.

        Raises:
            DataError: a column is missing or has another shape, or a prompt is empty or not left-padded.
            TrainingError: the model's logits are not finite.
        """
        seeds = self._check(prompts, params)
        columns = [prompts.batch[name].to(self.model.device) for name in _PROMPT_COLUMNS]
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        stop_ids_S = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self.model.device)
        total = len(prompts) * params.n
        size = self.micro_batch_size or total
        parts = []
        pack = params.max_tokens >= _PACK_FROM
        packed = packed_linears(self.model, self.autocast_dtype) if pack else contextlib.nullcontext()
        with _eval_mode(self.model), self._autocast(), packed:
            for start in range(0, total, size):
                rows = range(start, min(start + size, total))
                uniforms = (
                    None if params.greedy else draw_uniforms(seeds[rows.start : rows.stop], params.max_tokens)
                )
                parts.append(
                    decode(
                        self.model,
                        self._windows,
                        _prompts_of(columns, rows, params.n),
                        uniforms,
                        params,
                        stop_ids_S,
                        self.autocast_dtype or self.model.dtype,
                    )
                )
        return self._assemble(prompts, params, parts)

    def _check(self, prompts: DataProto, params: SamplingParams) -> list[int]:
        """The seeds of all samples, in order; none if greedy."""
        needed = _PROMPT_COLUMNS if params.greedy else (*_PROMPT_COLUMNS, "seeds")
        missing = [name for name in needed if name not in prompts.batch]
        if missing:
            raise DataError(f"generate: the prompts have no column {', '.join(missing)}")
        mask_BP = prompts.batch["attention_mask"].bool()
        misplaced_B = ~mask_BP[:, -1] | (mask_BP[:, 1:] < mask_BP[:, :-1]).any(1)
        if misplaced_B.any():
            row = int(misplaced_B.nonzero()[0])
            raise DataError(f"generate: prompt {row} is empty or not left-padded (see its attention_mask)")
        if params.greedy:
            return []
        seeds = prompts.batch["seeds"]
        if seeds.shape != (len(prompts), params.n):
            raise DataError(
                f"generate: seeds have shape {list(seeds.shape)}, expected [{len(prompts)}, {params.n}]: "
                "one for each sample of each prompt"
            )
        return seeds.flatten().tolist()

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.autocast_dtype)

    def _assemble(self, prompts: DataProto, params: SamplingParams, parts: list[Samples]) -> DataProto:
        device = prompts.batch["input_ids"].device
        tokens, log_probs, lengths, truncated = (
            torch.cat([getattr(part, name) for part in parts]).to(device)
            for name in ("tokens", "log_probs", "lengths", "truncated")
        )
        sampled = torch.arange(params.max_tokens, device=device) < lengths[:, None]
        log_probs = log_probs.masked_fill(~sampled, 0.0)
        if not log_probs.isfinite().all():
            raise TrainingError("generate: the model's logits are not finite; have its weights diverged?")
        responses = tokens.masked_fill(~sampled, self.pad_token_id)
        rest = DataProto(
            {
                name: column
                for name, column in prompts.batch.items()
                if name not in (*_PROMPT_COLUMNS, "seeds")
            },
            prompts.non_tensor_batch,
            prompts.meta_info,
        )
        prompt_ids, prompt_mask = (
            prompts.batch[name].repeat_interleave(params.n, dim=0) for name in ("input_ids", "attention_mask")
        )
        attention_mask = torch.cat([prompt_mask, sampled.to(prompt_mask.dtype)], dim=1)
        generated = {
            "prompts": prompt_ids,
            "responses": responses,
            "input_ids": torch.cat([prompt_ids, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": sampled.float(),
            "rollout_log_probs": log_probs,
            "truncated": truncated,
        }
        return rest.repeat(params.n).union(DataProto.from_dict(generated))


def _prompts_of(columns: list[Tensor], rows: range, n: int) -> Prompts:
    """The prompts of these rows, without the columns that are padding in all of them."""
    first = rows.start // n
    ids_BP, mask_BP, positions_BP = (column[first : (rows.stop - 1) // n + 1] for column in columns)
    width = int(mask_BP.sum(1).max())
    of_row = torch.arange(rows.start, rows.stop, device=ids_BP.device) // n - first
    return Prompts(ids_BP[:, -width:], mask_BP[:, -width:], positions_BP[:, -width:], of_row)


@contextlib.contextmanager
def _eval_mode(model: PreTrainedModel) -> Generator[None]:
    """No dropout; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True

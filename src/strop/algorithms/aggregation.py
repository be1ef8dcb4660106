"""Masked sums and means, and the aggregation of token losses with denominators of the whole mini-batch.

Shapes: B samples, T response tokens.

The denominators count the whole mini-batch over all ranks and micro-batches, and are arguments. So the losses
and gradients of micro-batches add up to those of the mini-batch, however it is split; a mean of the
micro-batches' means would change with the split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from strop.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` where the mask is 1, and 0 elsewhere; the gradient is 0 there too.

    Apply it to the inputs of a formula as well as to its result: the derivative of ``exp`` at NaN is NaN, and
    masking the result does not remove it.
    """
    # where, not a product: NaN x 0 is NaN
    return torch.where(mask.bool(), values, 0)


def log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``log_p - log_q``, and 0 without a gradient where both are -inf: 0/0 counts as the ratio 1.

    The trainer refuses such a token by name; a caller of the formulas alone gets no NaN of it.
    """
    return zero_masked(log_p - log_q, ~(torch.isneginf(log_p) & torch.isneginf(log_q)))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the selected values, over all of them or along ``dim``."""
    return zero_masked(values, mask).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the selected values, over all of them or along ``dim``; 0 where nothing is selected."""
    selected = mask.bool().expand_as(values)
    # the clamp: a row of padding has the mean 0, not 0 / 0
    return masked_sum(values, selected, dim) / selected.sum(dim=dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance of all selected values, float64; 0 if fewer than two are selected."""
    values, selected = values.double(), mask.bool().expand_as(values)
    deviations = values - masked_mean(values, selected)
    return masked_sum(deviations.square(), selected) / (selected.sum() - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``(values - mean) / sqrt(var + 1e-8)``, masked mean and unbiased variance; 0 elsewhere.

    A single value, or equal values, give 0.
    """
    # in float32 the mean of 4,097 values of 1000.1 is another number: over the floor of 1e-4 they gave 0.95
    exact = values.double()
    whitened = (exact - masked_mean(exact, mask)) * torch.rsqrt(masked_var(exact, mask) + 1e-8)
    return zero_masked(whitened, mask).to(values.dtype)


AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    *,
    mode: str,
    n_tokens: float,
    n_seqs: float,
    max_response_length: int,
) -> Tensor:
    """Return the share of these rows, a scalar, in the aggregated loss of a mini-batch.

    ``token-mean``               sum of all tokens / n_tokens (DAPO, arXiv:2503.14476)
    ``seq-mean-token-sum``       sum of all tokens / n_seqs
    ``seq-mean-token-mean``      sum over sequences of their tokens' mean / n_seqs (GRPO, arXiv:2402.03300)
    ``seq-mean-token-sum-norm``  sum of all tokens / (n_seqs x max_response_length) (Dr. GRPO, 2503.20783)

    Args:
        loss_BT: losses of these rows; masked slots are ignored.
        mask_BT: 1 on the tokens that count. A row without any adds 0.
        mode: one of the four.
        n_tokens: tokens with mask 1 in the whole mini-batch.
        n_seqs: sequences in the whole mini-batch.
        max_response_length: ``data.max_response_length``.

    Raises:
        ConfigError: another mode.
        ValueError: the denominator is not above 0.
    """
    match mode:
        case "token-mean":
            denominator = n_tokens
        case "seq-mean-token-sum" | "seq-mean-token-mean":
            denominator = n_seqs
        case "seq-mean-token-sum-norm":
            denominator = n_seqs * max_response_length
        case _:
            raise ConfigError(f"loss_agg_mode={mode!r} is unknown (known: {', '.join(AGGREGATION_MODES)})")
    if denominator <= 0:
        raise ValueError(
            f"{mode} divides by {denominator}: n_tokens={n_tokens}, n_seqs={n_seqs} and "
            f"max_response_length={max_response_length} of a whole mini-batch must be above 0"
        )
    if mode == "seq-mean-token-mean":
        return masked_mean(loss_BT, mask_BT, dim=-1).sum() / denominator
    return masked_sum(loss_BT, mask_BT) / denominator

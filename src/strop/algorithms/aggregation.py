"""From a loss per token to one number, with denominators of the whole mini-batch.

Shapes: B samples, T response tokens.

The denominators count the whole mini-batch over all ranks and micro-batches, and are arguments. So the
numbers of the parts of any split by rows add up to the number of the whole, and so do their gradients; the
mean of the means of the parts would change with the split.
"""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.masked import masked_mean, masked_sum
from strop.errors import ConfigError

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
    """This part's share, a scalar, of the aggregated loss of a mini-batch.

    ``token-mean``               sum of all tokens / n_tokens (DAPO, arXiv:2503.14476)
    ``seq-mean-token-sum``       sum of all tokens / n_seqs
    ``seq-mean-token-mean``      sum over sequences of their tokens' mean / n_seqs (GRPO, arXiv:2402.03300)
    ``seq-mean-token-sum-norm``  sum of all tokens / (n_seqs x max_response_length) (Dr. GRPO, 2503.20783)

    Args:
        loss_BT: the rows of this part; what stands in masked slots does not count.
        mask_BT: 1 on the tokens that count. A row without any adds 0.
        mode: one of the four.
        n_tokens: tokens that count in the whole mini-batch.
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

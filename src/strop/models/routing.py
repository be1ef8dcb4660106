"""Auxiliary loss and load of routed experts.

Loss of a sequence in a layer: E sum_e f_e p_e, where f_e is the mean number of times that a token chooses
expert e among its k (they sum to k), and p_e the mean probability of e (Fedus et al., arXiv:2101.03961,
equations 4 to 6; ``load_balancing_loss_func`` of transformers for one layer and one sequence). It is k if all
experts are used evenly. The mean over layers and over the sequences of a mini-batch is added to the
objective, times the model's ``router_aux_loss_coef``: sequence by sequence, so that neither micro-batches
nor ranks nor packing have an influence. The last token of a sequence predicts nothing and does not count.

Shapes: B padded rows of L columns, N tokens of a pass, S pairs of a sequence and one of its tokens, E
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.models.heads import decoder_of
from strop.models.packing import Packing
from strop.models.passes.micro_batch import on_cpu, places_of, send
from strop.models.transformers_private import recorded_outputs


class SequenceTokens(NamedTuple):
    """Tokens of sequences in a pass, where sequences may share tokens."""

    token_S: Tensor
    """Place of a token in the pass."""
    row_S: Tensor
    """Sequence that it belongs to."""
    length_B: Tensor
    """Tokens of each sequence, float32."""
    counts_B: Tensor
    """1.0 for a sequence that has something to learn from, else 0.0."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], packing: Packing | None) -> SequenceTokens:
        """Return the tokens of a micro-batch; with a packing that ranks share, those of this rank."""
        mask_BL, device = on_cpu(batch, "attention_mask").bool(), batch["input_ids"].device
        # counted from the end: the last token predicts nothing, and PromptsOnce does not compute it
        counted_BL = mask_BL & (mask_BL.flip(1).cumsum(1).flip(1) > 1)
        length_B = send(counted_BL.sum(dim=1).clamp(min=1).float(), device)
        if packing is None:
            token_S = places_of(counted_BL, device)
        else:
            if packing.group is not None:
                counted_BL = counted_BL & packing.own_BL
            token_S = packing.places(counted_BL)
        row_S = send(counted_BL.nonzero()[:, 0], device)
        return cls(token_S, row_S, length_B, learning_rows(batch).float())

    def within(self, start: int, end: int) -> SequenceTokens:
        """Return those of the tokens from ``start`` to ``end``, counted from ``start``."""
        inside_S = (self.token_S >= start) & (self.token_S < end)
        return self._replace(token_S=self.token_S[inside_S] - start, row_S=self.row_S[inside_S])


def learning_rows(batch: Mapping[str, Tensor]) -> Tensor:
    """Return True for the rows [B] with something to learn from: others fill up ranks and micro-batches."""
    if "response_mask" not in batch:
        return batch["attention_mask"].any(dim=1)
    return batch["response_mask"].bool().any(dim=1)


def balance_loss(
    logits_NE: Tensor, tokens: SequenceTokens, top_k: int, total: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return a layer's loss, summed over the sequences that count, and the number of tokens [E] of experts.

    ``total`` sums over the ranks that hold other tokens of the same sequences; the loss is this rank's part.
    """
    probs_NE = logits_NE.float().softmax(dim=-1)
    # f_e is a count without a gradient: the loss moves the probabilities alone
    chosen_NE = torch.zeros_like(probs_NE).scatter(1, probs_NE.detach().topk(top_k).indices, 1.0)
    zeros_BE = probs_NE.new_zeros(len(tokens.length_B), probs_NE.shape[1])
    chosen_BE = zeros_BE.index_add(0, tokens.row_S, chosen_NE[tokens.token_S])
    probs_BE = zeros_BE.index_add(0, tokens.row_S, probs_NE[tokens.token_S])
    load_E = (chosen_BE * tokens.counts_B[:, None]).sum(dim=0)
    if total is not None:
        chosen_BE = total(chosen_BE)
    # f_e and p_e are both means over the sequence's tokens, chosen and probs are sums
    weight_B = tokens.counts_B / tokens.length_B**2
    return probs_NE.shape[1] * ((chosen_BE * probs_BE).sum(dim=1) * weight_B).sum(), load_E


class Balance:
    """Auxiliary loss of one update, and the load of the experts of each layer."""

    def __init__(
        self,
        coefficient: float,
        top_k: int,
        *,
        layers: int,
        experts: int,
        sequences: float,
        device: torch.device,
    ) -> None:
        """Begin an update on so many ``sequences`` on all ranks; ``layers`` have experts."""
        self.top_k = top_k
        self.coefficient = coefficient
        self._scale = 1.0 / (layers * max(sequences, 1.0))
        # one tensor, for one all-reduce at the end of the update
        self.sums = torch.zeros(layers * experts + 1, dtype=torch.float64, device=device)
        """Loads of the layers' experts, then the loss, on this rank."""
        self._experts = experts

    def add(
        self,
        layer: int,
        logits_NE: Tensor,
        tokens: SequenceTokens,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return what a layer (of those with experts) adds to the objective."""
        loss, load_E = balance_loss(logits_NE, tokens, self.top_k, total)
        self.sums[layer * self._experts :][: self._experts] += load_E
        self.sums[-1] += self._scale * loss.detach()
        return self.coefficient * self._scale * loss

    def metrics(self) -> dict[str, float]:
        """Return the loss without its coefficient, and the largest load: 1 if tokens are spread evenly.

        Collective over the default process group.
        """
        if dist.is_initialized():
            dist.all_reduce(self.sums)
        load_LE = self.sums[:-1].view(-1, self._experts)
        share_LE = load_LE / load_LE.sum(dim=1, keepdim=True).clamp(min=1)
        return {
            "router_aux_loss": float(self.sums[-1]),
            "router_load_max": float(share_LE.max()) * self._experts,
        }


class Routers:
    """The routers of a Hugging Face model whose configuration has a coefficient of the auxiliary loss."""

    @staticmethod
    def of(model: PreTrainedModel) -> Routers | None:
        """Return the routers of ``model``; None without experts, or with a coefficient of 0."""
        config: Any = model.config.get_text_config()
        if not getattr(config, "router_aux_loss_coef", 0.0):
            return None
        if (recorder := recorded_outputs(decoder_of(model)).get("router_logits")) is None:
            return None
        found = [
            module
            for name, module in model.named_modules()
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
        ]
        return Routers(config, found, recorder.index) if found else None

    def __init__(self, config: Any, routers: list[nn.Module], index: int) -> None:
        """Watch the output ``index`` of ``routers``: their logits [N, E]."""
        self._config, self._routers, self._index = config, routers, index
        self._recorded: list[Tensor] | None = None
        self._balance: Balance | None = None
        self._loss: Tensor | None = None
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, module: nn.Module, inputs: object, output: Any) -> None:
        del module, inputs
        if self._recorded is not None:  # not in a recomputation
            self._recorded.append(output[self._index] if isinstance(output, tuple) else output)

    def begin(self, sequences: float, device: torch.device) -> Balance:
        """Begin an update on so many sequences on all ranks."""
        self._balance = Balance(
            self._config.router_aux_loss_coef,
            self._config.num_experts_per_tok,
            layers=len(self._routers),
            experts=experts_of(self._config),
            sequences=sequences,
            device=device,
        )
        return self._balance

    @contextmanager
    def watching(self, batch: Mapping[str, Tensor], packing: Packing | None) -> Generator[None]:
        """Compute the loss of the pass over ``batch`` in the body, in an update."""
        if self._balance is None or not torch.is_grad_enabled():
            yield
            return
        self._recorded = []
        try:
            yield
            logits, group = self._recorded, None if packing is None else packing.group
        finally:
            self._recorded = None
        tokens = SequenceTokens.of(batch, packing)
        total = None if group is None else group.sum_of_parts
        parts = [self._balance.add(i, each.flatten(0, -2), tokens, total) for i, each in enumerate(logits)]
        loss = torch.stack(parts).sum()
        self._loss = loss if group is None else group.sum_of_parts(loss)

    def take_loss(self) -> Tensor | float:
        """Return the loss of the latest pass, for its objective."""
        loss, self._loss = self._loss, None
        return 0.0 if loss is None else loss

    def end(self) -> dict[str, float]:
        """End the update: further passes have no auxiliary loss. Return its metrics. Collective."""
        assert self._balance is not None
        balance, self._balance = self._balance, None
        return balance.metrics()


def experts_of(config: Any) -> int:
    """Return the number of routed experts in a layer; 0 without any."""
    for name in ("num_experts", "num_local_experts"):
        if number := getattr(config, name, None):
            return number
    return 0

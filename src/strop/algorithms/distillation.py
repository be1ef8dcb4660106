"""Divergences between the next-word distributions of a teacher and a student, in blocks of the vocabulary.

p: teacher, q: student. Forward: KL(p || q). Reverse: KL(q || p). Jensen-Shannon of weight b (Agarwal et al.,
2023, arXiv:2306.13649): b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q. Gradients are the
student's only. No tensor of [N, V] exists: see ``strop.algorithms.output_layer``.

Shapes: N tokens, H hidden, V vocabulary, v words of one block, K words that are compared one by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.algorithms.output_layer import Blocks, OutputLayer, differentiate, product_dtype
from strop.algorithms.output_sums import LOWEST, VANISHES

_NEARLY_ALL = 80.0
"""A log-ratio whose exp is finite; the smaller probability of the two counts nothing beyond it."""
_TOP_ROWS = 128
"""Tokens whose likeliest words are found at once: wide blocks, as each gives k candidates."""
_FORBIDDEN = -1e4
"""Stands for a logit of -inf: its exp is 0, and differences are finite."""


def divergence(teacher: Tensor, student: Tensor, kind: str, js_weight: float = 0.5) -> Tensor:
    """Return the divergence [...] of log-probs [..., K], each the log of a whole distribution."""
    # the others of a top k that is the whole vocabulary have no probability
    teacher, student = (x.masked_fill(x.isneginf(), VANISHES) for x in (teacher, student))
    if kind == "forward":
        return (teacher.exp() * (teacher - student)).sum(-1)
    if kind == "reverse":
        return (student.exp() * (student - teacher)).sum(-1)
    above_p, above_q = _mixture(teacher - student, js_weight)
    terms = js_weight * teacher.exp() * above_p + (1 - js_weight) * student.exp() * above_q
    return -terms.sum(-1)


def _mixture(difference: Tensor, js_weight: float) -> tuple[Tensor, Tensor]:
    """Return log m - log p and log m - log q, given log p - log q; exactly 0 where that is 0."""
    shares = difference.new_full((), js_weight), difference.new_full((), 1 - js_weight)
    weight = torch.where(difference < 0, *shares)
    common = (weight * (-difference.abs()).expm1()).log1p()
    return (-difference).relu() + common, difference.relu() + common


def _mixture_in(
    above_p: Tensor, above_q: Tensor, difference: Tensor, js_weight: float
) -> tuple[Tensor, Tensor]:
    """Return what ``_mixture`` does, which has a gradient, in the first two; overwrites ``difference``.

    A temporary tensor of a block's size costs more than the arithmetic, as its memory is new each time.
    """
    weight = torch.lt(difference, 0, out=above_q).mul_(2 * js_weight - 1).add_(1 - js_weight)
    common = torch.abs(difference, out=above_p).neg_().expm1_().mul_(weight).log1p_()
    above_q = torch.clamp(difference, min=0, out=above_q).add_(common)
    return common.sub_(difference.clamp_(max=0)), above_q


def cut(layer: Any, words: int) -> Any:
    """Return the first ``words`` of an output layer: models pad theirs to sizes that suit the hardware."""
    if not isinstance(layer, OutputLayer):
        return lambda hidden: layer(hidden)[..., :words]
    if len(layer.weight_VH) <= words:
        return layer
    bias_V = None if layer.bias_V is None else layer.bias_V[:words]
    return replace(layer, weight_VH=layer.weight_VH[:words], bias_V=bias_V)


class Compared(NamedTuple):
    """Figures of N tokens, float32."""

    divergence_N: Tensor
    agrees_N: Tensor
    """1 where both have the same likeliest word."""


def compare(
    hidden_NH: Tensor,
    layer: OutputLayer,
    teacher_hidden_NH: Tensor,
    teacher_layer: OutputLayer,
    *,
    kind: str,
    js_weight: float,
    temperature: float,
) -> Compared:
    """Compare the distributions of hidden states, of any widths, through layers of equal words."""
    if len(layer.weight_VH) != len(teacher_layer.weight_VH):
        raise ValueError(f"{len(layer.weight_VH)} words and {len(teacher_layer.weight_VH)} of the teacher")
    dtype = product_dtype(hidden_NH)
    pair = _blocks(_Pair, hidden_NH, dtype, layer, temperature)
    pair.teacher = _blocks(_Forbidding, teacher_hidden_NH, dtype, teacher_layer, temperature)
    pair.kind, pair.js_weight = kind, js_weight
    return Compared(*_Measured.apply(hidden_NH, layer.weight_VH, layer.bias_V, pair))


def chosen_log_probs(
    hidden_NH: Tensor, layer: OutputLayer, ids_NK: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs [N, K + 1] of K words and of all others as one, and the likeliest word [N]."""
    blocks = _blocks(_ChosenBlocks, hidden_NH, product_dtype(hidden_NH), layer, temperature)
    blocks.choose(ids_NK)
    return _Measured.apply(hidden_NH, layer.weight_VH, layer.bias_V, blocks)


@torch.no_grad()
def top_words(hidden_NH: Tensor, layer: OutputLayer, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the ids [N, K] of the k likeliest words, and their ``chosen_log_probs`` [N, K + 1]."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        parts = [
            _top_of(_blocks(_Forbidding, rows, product_dtype(rows), layer, temperature), k)
            for rows in hidden_NH.split(
                _TOP_ROWS if hidden_NH.device.type == "cpu" else max(len(hidden_NH), 1)
            )
        ]
        ids_NK = torch.cat(parts)
    return ids_NK, chosen_log_probs(hidden_NH, layer, ids_NK, temperature=temperature)[0]


def _top_of(blocks: Blocks, k: int) -> Tensor:
    best_NK = blocks.hidden_NH.new_empty(len(blocks.hidden_NH), 0, dtype=torch.float32)
    ids_NK = best_NK.long()
    for words in blocks.words:
        logits_Nv = blocks.logits(words)
        found_NK, places_NK = logits_Nv.topk(min(k, logits_Nv.shape[1]), dim=1)
        places_NK += words.start
        ids_NK = torch.cat([ids_NK, places_NK], dim=1)
        best_NK, order_NK = torch.cat([best_NK, found_NK], dim=1).topk(min(k, ids_NK.shape[1]), dim=1)
        ids_NK = ids_NK.gather(1, order_NK)
    return ids_NK


def _blocks(kind: Any, hidden_NH: Tensor, dtype: torch.dtype, layer: OutputLayer, temperature: float) -> Any:
    return kind(hidden_NH.detach().to(dtype), layer, temperature, [])


class _Measured(torch.autograd.Function):
    """The two results of ``measured`` of blocks, of which the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, blocks: Any) -> Any:
        del weight_VH, bias_V  # the blocks have them
        ctx.hidden_dtype, ctx.blocks = hidden_NH.dtype, blocks
        with torch.autocast(hidden_NH.device.type, enabled=False):
            keep = blocks.room_for(len(blocks.hidden_NH)) if any(ctx.needs_input_grad) else 0
            saved, found, best_N = blocks.measured(keep)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(best_N)
        return found, best_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        del others
        with torch.autocast(gradient.device.type, enabled=False):
            upstream = (*ctx.saved_tensors, gradient)
            hidden, weight, bias = differentiate(ctx.blocks, upstream, wanted=ctx.needs_input_grad)
        return None if hidden is None else hidden.to(ctx.hidden_dtype), weight, bias, None


class _Sum:
    """log sum exp of N rows that arrive in blocks, with sums that are weighed by the same exponentials."""

    def __init__(self, n_tokens: int, device: torch.device) -> None:
        self.highest_N = torch.full((n_tokens,), LOWEST, device=device)
        # float64: a sum over hundreds of blocks keeps the digits of each
        self.sum_N, self.weighed_N = torch.zeros(2, n_tokens, dtype=torch.float64, device=device)
        self.best_N = torch.zeros(n_tokens, dtype=torch.long, device=device)

    def add(self, logits_Nv: Tensor, first: int, below_Nv: Tensor, exp_Nv: Tensor) -> None:
        """Add a block; write logits - highest and their exponentials to the last two."""
        top_N = logits_Nv.amax(dim=1)
        # of few rows after the first blocks: a search for the place takes three times as long as amax
        higher = (top_N > self.highest_N).nonzero()[:, 0]
        self.best_N[higher] = logits_Nv[higher].argmax(dim=1) + first
        highest_N = torch.maximum(self.highest_N, top_N)
        down_N = (self.highest_N - highest_N).clamp(min=VANISHES).double()
        self.sum_N, self.weighed_N = self.sum_N * down_N.exp(), self.weighed_N * down_N.exp()
        self.highest_N = highest_N
        torch.sub(logits_Nv, highest_N[:, None], out=below_Nv)
        torch.exp(below_Nv, out=exp_Nv)
        self.sum_N = self.sum_N + exp_Nv.sum(dim=1)

    def weigh(self, figures_Nv: Tensor, exp_Nv: Tensor) -> None:
        """Add figures of the last block, each times its word's exponential; overwrites them."""
        self.weighed_N = self.weighed_N + figures_Nv.mul_(exp_Nv).sum(dim=1)

    def log(self) -> Tensor:
        """Return the logarithm of the sum."""
        return self.highest_N + self.sum_N.log()


class _Forbidding(Blocks):
    """Logits in which -inf, a bias that forbids a word, is a finite number."""

    def logits(self, words: slice, *, keep: bool = False) -> Tensor:
        logits_Nv = super().logits(words, keep=keep)
        return logits_Nv if self.layer.bias_V is None else logits_Nv.clamp_(min=_FORBIDDEN)


class _Pair(_Forbidding):
    """Logits of a student, and beside them those of its teacher."""

    teacher: Blocks
    kind: str
    js_weight: float

    def both(self, words: slice, *, keep: int = 0) -> tuple[Tensor, Tensor]:
        """Return the logits [N, v] of student and teacher."""
        q_Nv = self.logits(words, keep=words.stop <= keep)
        return q_Nv, self.teacher.logits(words, keep=words.stop <= keep)

    def measured(self, keep: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
        """Make one pass over the vocabulary, for js two; return what ``gradient`` takes, and ``Compared``.

        That is log-sums of student and teacher, and the student's mean of what each of its words adds.
        """
        n_tokens, device = len(self.hidden_NH), self.hidden_NH.device
        whole = self.words[-1].stop
        if self.kind == "js" and keep < whole and n_tokens > (n_rows := max(self.room_for(whole), 1)):
            # the second pass takes the logits of the first, for which there is room a few rows at a time
            rows = [slice(first, first + n_rows) for first in range(0, n_tokens, n_rows)]
            saved, *figures = zip(*(self._part(part).measured(whole) for part in rows), strict=True)
            q_log_N, p_log_N, mean_N = map(torch.cat, zip(*saved, strict=True))
            found_N, agrees_N = map(torch.cat, figures)
            return (q_log_N, p_log_N, mean_N), found_N, agrees_N
        student, teacher = (_Sum(n_tokens, device) for _ in range(2))
        for words in self.words:
            q_Nv, p_Nv = self.both(words, keep=keep)
            for blocks, sums, logits_Nv in ((self.teacher, teacher, p_Nv), (self, student, q_Nv)):
                sums.add(logits_Nv, words.start, blocks.room(1, words), blocks.room(2, words))
            if self.kind == "reverse":
                difference_Nv = torch.sub(q_Nv, p_Nv, out=self.room(1, words))
                student.weigh(difference_Nv, self.room(2, words))
            elif self.kind == "forward":
                difference_Nv = torch.sub(p_Nv, q_Nv, out=self.room(1, words))
                teacher.weigh(difference_Nv, self.teacher.room(2, words))
        q_log_N, p_log_N = student.log(), teacher.log()
        # equal logits give exactly 0
        shift_N = (student.highest_N.double() - teacher.highest_N) + (
            student.sum_N.log() - teacher.sum_N.log()
        )
        if self.kind == "reverse":
            mean_N = found_N = student.weighed_N / student.sum_N - shift_N
        elif self.kind == "forward":
            mean_N = found_N = teacher.weighed_N / teacher.sum_N + shift_N
        else:
            mean_N, rest_N = torch.zeros_like(q_log_N), torch.zeros_like(q_log_N)
            for words in self.words:
                log_q_Nv, log_p_Nv = self.log_probs(words, self.both(words), q_log_N, p_log_N)
                difference_Nv = torch.sub(log_p_Nv, log_q_Nv, out=self.room(2, words))
                above_p_Nv, above_q_Nv = _mixture_in(
                    self.room(0, words), self.teacher.room(2, words), difference_Nv, self.js_weight
                )
                mean_N = mean_N - log_q_Nv.exp_().mul_(above_q_Nv).sum(dim=1)
                rest_N = rest_N - log_p_Nv.exp_().mul_(above_p_Nv).sum(dim=1)
            found_N = self.js_weight * rest_N + (1 - self.js_weight) * mean_N
        agrees_N = student.best_N == teacher.best_N
        return (q_log_N, p_log_N, mean_N), found_N.float(), agrees_N.float()

    def _part(self, rows: slice) -> _Pair:
        """Return the pair of some rows, with no products kept."""
        part = _Pair(self.hidden_NH[rows], self.layer, self.temperature, [])
        teacher = self.teacher
        part.teacher = _Forbidding(teacher.hidden_NH[rows], teacher.layer, teacher.temperature, [])
        part.kind, part.js_weight = self.kind, self.js_weight
        return part

    def log_probs(
        self, words: slice, logits: tuple[Tensor, Tensor], q_log_N: Tensor, p_log_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log q and log p [N, v] in scratch buffers."""
        return (
            torch.sub(logits[0], q_log_N.float()[:, None], out=self.room(1, words)),
            torch.sub(logits[1], p_log_N.float()[:, None], out=self.teacher.room(1, words)),
        )

    def _logit_gradient(self, words: slice, logits_Nv: Tensor, upstream: Any) -> Tensor:
        """Return the gradient by the student's logits [N, v]."""
        q_log_N, p_log_N, mean_N, gradient_N = upstream
        logits = logits_Nv, self.teacher.logits(words)
        log_q_Nv, log_p_Nv = self.log_probs(words, logits, q_log_N, p_log_N)
        q_Nv = torch.exp(log_q_Nv, out=self.room(2, words))
        if self.kind == "forward":
            gradient_Nv = q_Nv.sub_(log_p_Nv.exp_())
        else:
            mean_N1 = mean_N.float()[:, None]
            if self.kind == "reverse":
                gradient_Nv = log_q_Nv.sub_(log_p_Nv).sub_(mean_N1).mul_(q_Nv)
            else:
                # log m - log q in place: shorter than ``_mixture``, and less exact for log m - log p alone
                above_q_Nv = log_p_Nv.sub_(log_q_Nv).clamp_(max=_NEARLY_ALL)
                above_q_Nv.expm1_().mul_(self.js_weight).log1p_()
                gradient_Nv = above_q_Nv.add_(mean_N1).mul_(q_Nv).mul_(self.js_weight - 1)
        return gradient_Nv.mul_(gradient_N[:, None])


class _ChosenBlocks(_Forbidding):
    """Logits with K words of each token apart from the others."""

    def choose(self, ids_NK: Tensor) -> None:
        """Sort the chosen words, so that each block finds its own."""
        self._ids_NK = ids_NK
        ids, order = ids_NK.flatten().sort(stable=True)
        self._rows, self._columns, self._ids = order // ids_NK.shape[1], order % ids_NK.shape[1], ids
        starts = torch.tensor([words.start for words in self.words], device=ids.device)
        self._ends = [*torch.searchsorted(ids, starts).tolist(), len(ids)]

    def chosen(self, words: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return row, column of the chosen words of a block, and their number k among the row's K."""
        block = words.start // self.words[0].stop
        here = slice(self._ends[block], self._ends[block + 1])
        return self._rows[here], self._ids[here] - words.start, self._columns[here]

    def measured(self, keep: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Return what ``gradient`` takes, and ``chosen_log_probs``.

        That is log-sums of all words, and of those that are not chosen (-inf: there are none).
        """
        others = _Sum(len(self._ids_NK), self.hidden_NH.device)
        picked_NK = torch.zeros(self._ids_NK.shape, device=self.hidden_NH.device)
        for words in self.words:
            logits_Nv = self.logits(words, keep=words.stop <= keep)
            rows, places, number = self.chosen(words)
            picked_NK[rows, number] = logits_Nv[rows, places]
            rest_Nv = self.room(2, words).copy_(logits_Nv)
            rest_Nv[rows, places] = LOWEST
            others.add(rest_Nv, words.start, self.room(1, words), self.room(2, words))
        others_N = torch.where(others.highest_N > LOWEST, others.log(), -torch.inf)
        log_sum_N = torch.logaddexp(picked_NK.double().logsumexp(dim=1), others_N)
        top_N, number_N = picked_NK.max(dim=1)
        chosen_N = self._ids_NK.gather(1, number_N[:, None])[:, 0]
        best_N = torch.where(top_N >= others.highest_N, chosen_N, others.best_N)
        log_probs = torch.cat([picked_NK, others_N[:, None]], dim=1).sub(log_sum_N[:, None]).float()
        return (log_sum_N, others_N), log_probs, best_N

    def _logit_gradient(self, words: slice, logits_Nv: Tensor, upstream: Any) -> Tensor:
        """Return the gradient by logits [N, v]."""
        log_sum_N, others_N, gradient_NK = upstream
        rows, places, number = self.chosen(words)
        whole_N = gradient_NK.sum(dim=1)
        logits_n = logits_Nv[rows, places]
        at_chosen = gradient_NK[rows, number] - whole_N[rows] * (logits_n - log_sum_N[rows]).exp()
        # of the others: their share among themselves, times what reaches them together
        reaching_N = gradient_NK[:, -1] - whole_N * (others_N - log_sum_N).exp()
        others_N = others_N.float().clamp(min=LOWEST)
        gradient_Nv = torch.sub(logits_Nv, others_N[:, None], out=self.room(1, words)).clamp_(max=0).exp_()
        gradient_Nv.mul_(reaching_N.float()[:, None])
        gradient_Nv[rows, places] = at_chosen.float()
        return gradient_Nv

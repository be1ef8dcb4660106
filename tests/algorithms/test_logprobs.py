from __future__ import annotations

import math

import pytest
import torch
from largest import Largest
from torch.testing import assert_close

from strop.algorithms.logprobs import token_log_probs

# probabilities 1/6, 1/3, 1/2
LOGITS = torch.tensor([[0.0, math.log(2), math.log(3)]])
ENTROPY = 1.0114043  # (ln 6)/6 + (ln 3)/3 + (ln 2)/2 = 0.2986266 + 0.3662041 + 0.3465736


def identity(logits):
    return logits


def test_log_prob_and_entropy_by_hand():
    log_prob, entropy, _ = token_log_probs(LOGITS, identity, torch.tensor([1]), temperature=1.0)
    assert log_prob.item() == pytest.approx(-1.0986123)  # ln(1/3)
    assert entropy.item() == pytest.approx(ENTROPY)


def test_full_kl_by_hand():
    # to a uniform reference: ln 3 - entropy; to the weights 1, 4, 9 (the policy's, at temperature 0.5):
    # (ln(14/6))/6 + (ln(14/12))/3 + (ln(14/18))/2 = 0.1412163 + 0.0513835 - 0.1256572
    for ref_logits, kl in ((torch.zeros(1, 3), 0.0872080), (2 * LOGITS, 0.0669426)):
        scored = token_log_probs(
            LOGITS, identity, torch.tensor([1]), temperature=1.0, ref=(ref_logits, identity)
        )
        assert scored.full_kl_N.item() == pytest.approx(kl, abs=1e-6)


def test_full_kl_counts_words_that_the_reference_makes_very_unlikely():
    # policy (1/2, 1/2); reference logits 0, -1500: log ref = 0, -1500; KL = -ln 2 + 750, and by the policy's
    # logit difference z: p q (z + 1500) at p = q = 1/2, z = 0: 375
    logits = torch.zeros(1, 2, requires_grad=True)
    ref_logits = torch.tensor([[0.0, -1500.0]])
    scored = token_log_probs(logits, identity, torch.tensor([0]), temperature=1.0, ref=(ref_logits, identity))
    assert scored.full_kl_N.item() == pytest.approx(750 - 0.6931472)
    scored.full_kl_N.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([-375.0, 375.0])


@pytest.mark.parametrize("forbidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_full_kl_counts_words_that_the_reference_forbids_as_1000(forbidden):
    logits = torch.zeros(1, 2, requires_grad=True)
    ref = (torch.tensor([[0.0, forbidden]]), identity)
    scored = token_log_probs(logits, identity, torch.tensor([0]), temperature=1.0, ref=ref)
    assert scored.full_kl_N.item() == pytest.approx(500 - 0.6931472)
    (3 * scored.full_kl_N).sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([-750.0, 750.0])


def test_the_reference_gets_no_gradient():
    hidden, ref_hidden = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    scored = token_log_probs(
        hidden, identity, torch.zeros(4, dtype=torch.int64), temperature=1.0, chunk_size=2,
        ref=(ref_hidden, identity),
    )  # fmt: skip
    scored.full_kl_N.sum().backward()
    assert ref_hidden.grad is None
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 10, 100])
def test_values_and_gradients_do_not_depend_on_the_chunks(chunk_size):
    n_tokens, n_hidden, vocabulary = 10, 5, 13
    torch.manual_seed(0)
    hidden, weight = torch.randn(n_tokens, n_hidden), torch.randn(vocabulary, n_hidden)
    ref_hidden, ref_weight = torch.randn(n_tokens, 4), torch.randn(vocabulary, 4)
    ids = torch.randint(vocabulary, (n_tokens,))
    coefficients = torch.randn(3, n_tokens)

    def whole(hidden, weight):
        log_p = torch.log_softmax(hidden @ weight.T / 0.7, -1)
        log_ref = torch.log_softmax(ref_hidden @ ref_weight.T / 0.7, -1)
        taken = torch.stack([log_p[i, ids[i]] for i in range(n_tokens)])
        return taken, -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_ref)).sum(-1)

    def chunked(hidden, weight):
        return token_log_probs(
            hidden, lambda chunk: chunk @ weight.T, ids, temperature=0.7, chunk_size=chunk_size,
            ref=(ref_hidden, lambda chunk: chunk @ ref_weight.T),
        )  # fmt: skip

    results = []
    for function in (whole, chunked):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        columns = function(*leaves)
        total = sum((c * column).sum() for c, column in zip(coefficients, columns, strict=True))
        results.append([*columns, *torch.autograd.grad(total, leaves)])
    for expected, found in zip(*results, strict=True):
        assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_no_tokens_give_empty_columns_and_a_gradient_of_zero():
    hidden = torch.zeros(0, 3, requires_grad=True)
    weight = torch.randn(7, 3, requires_grad=True)
    scored = token_log_probs(
        hidden, lambda chunk: chunk @ weight.T, torch.zeros(0, dtype=torch.int64), temperature=1.0,
        ref=(torch.zeros(0, 3), lambda chunk: chunk @ weight.T),
    )  # fmt: skip
    assert [len(column) for column in scored] == [0, 0, 0]
    (scored.log_probs_N.sum() + scored.entropy_N.sum() + scored.full_kl_N.sum()).backward()
    assert weight.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("n_tokens", "chunk_size", "calls"),
    [(96, 32, [32] * 6), (96, 96, [96]), (40, 32, [32, 8, 8, 32])],
)
def test_only_one_chunk_of_logits_exists_in_the_forward_and_the_backward_pass(n_tokens, chunk_size, calls):
    vocabulary, n_hidden = 40_000, 4
    hidden = torch.randn(n_tokens, n_hidden, requires_grad=True)
    weight = torch.randn(vocabulary, n_hidden, requires_grad=True)
    projected = []

    def project(chunk):
        projected.append(len(chunk))
        return chunk @ weight.T

    ids = torch.randint(vocabulary, (n_tokens,))
    with Largest() as largest:
        scored = token_log_probs(hidden, project, ids, temperature=0.9, chunk_size=chunk_size)
        (scored.log_probs_N - scored.entropy_N).sum().backward()
    # Forward, then again backward, last chunk first; a single chunk is not computed twice.
    assert projected == calls
    assert largest.elements == chunk_size * vocabulary


def test_without_a_gradient_every_chunk_is_projected_once():
    projected = []

    def project(chunk):
        projected.append(len(chunk))
        return chunk

    with torch.no_grad():
        token_log_probs(
            torch.zeros(5, 3), project, torch.zeros(5, dtype=torch.int64), temperature=1.0, chunk_size=2
        )
    assert projected == [2, 2, 1]


def test_no_float32_copy_of_all_logits_is_made():
    logits = torch.zeros(64, 40_000, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(64, dtype=torch.int64)
    with Largest(torch.float32) as largest:
        scored = token_log_probs(logits, identity, ids, temperature=1.0, with_entropy=False, chunk_size=16)
        scored.log_probs_N.sum().backward()
    assert largest.elements == 16 * 40_000


def test_low_precision_logits_are_normalised_in_float32():
    logits = torch.randn(15, 11).bfloat16()
    ids = torch.randint(11, (15,))
    log_probs, entropy, _ = token_log_probs(logits, identity, ids, temperature=1.0, chunk_size=4)
    expected = torch.log_softmax(logits.double(), -1)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert_close(log_probs.double(), expected.gather(-1, ids[..., None])[..., 0], atol=1e-6, rtol=1e-6)
    assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-6, rtol=1e-6)


def test_forbidden_tokens_do_not_break_entropy_kl_or_their_gradients():
    # two tokens left, at 1/4 and 3/4: entropy (ln 4)/4 + 3 ln(4/3)/4; KL to 1/2, 1/2: ln 2 - entropy
    logits = torch.tensor([[0.0, -math.inf, math.log(3)]], requires_grad=True)
    ref = torch.tensor([[0.0, -math.inf, 0.0]])
    scored = token_log_probs(logits, identity, torch.tensor([0]), temperature=0.5, ref=(ref, identity))
    scored_at_1 = token_log_probs(logits, identity, torch.tensor([0]), temperature=1.0, ref=(ref, identity))
    assert scored_at_1.entropy_N.item() == pytest.approx(0.5623351)
    assert scored_at_1.full_kl_N.item() == pytest.approx(0.1308120)
    (scored.full_kl_N + scored_at_1.full_kl_N + scored_at_1.entropy_N).sum().backward()
    assert logits.grad.isfinite().all()


def test_forbidden_tokens_leave_large_gradients_finite_and_exact():
    """-inf was a number near overflow in the backward pass: an upstream gradient above 1 made NaN of it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, generator=generator)
    logits[:, :2] = -math.inf
    ref = torch.randn(4, 6, generator=generator)
    ids = torch.tensor([2, 3, 4, 5])
    found = []
    for ours, theirs, chosen in ((logits, ref, ids), (logits[:, 2:], ref[:, 2:], ids - 2)):
        leaf = ours.clone().requires_grad_()
        theirs = theirs - ref.logsumexp(-1, keepdim=True)  # normalised with the words that the policy lacks
        log_p = torch.log_softmax(leaf, -1)
        if len(found) == 0:
            scored = token_log_probs(leaf, identity, chosen, temperature=1.0, ref=(theirs, identity))
            total = (scored.log_probs_N + scored.entropy_N + scored.full_kl_N).sum()
        else:
            p = log_p.exp()
            total = log_p.gather(1, chosen[:, None]).sum() - (p * log_p).sum() + (p * (log_p - theirs)).sum()
        found.append(torch.autograd.grad(1000 * total, leaf)[0])
    assert_close(found[0][:, 2:], found[1], atol=1e-3, rtol=1e-5)
    assert torch.equal(found[0][:, :2], torch.zeros(4, 2))

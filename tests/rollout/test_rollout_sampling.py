"""Drawing tokens: the inverse of the cumulative distribution, filters, log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from strop.rollout import sampling
from strop.rollout.base import SamplingParams
from strop.rollout.sampling import draw_uniforms, invert_cdf, next_tokens

ALMOST_ONE = 1 - 2**-53
LOGITS = torch.tensor([0.15, 0.5, 0.1, 0.25]).log()


def draw(logits: torch.Tensor, uniforms: list[float], **fields) -> tuple[list[int], torch.Tensor]:
    rows = torch.tensor(uniforms, dtype=torch.float64)
    tokens, log_probs = next_tokens(
        logits.expand(len(rows), -1), rows, SamplingParams(max_tokens=1, **fields)
    )
    return tokens.tolist(), log_probs


def test_uniforms_are_the_stream_of_each_seed_however_long_and_in_whichever_order():
    uniforms = draw_uniforms([5, 6, 5], 40)
    assert uniforms.dtype == torch.float64
    assert torch.equal(uniforms[0], uniforms[2])
    assert not torch.equal(uniforms[0], uniforms[1])
    assert torch.equal(draw_uniforms([6], 7)[0], uniforms[1, :7])
    expected = torch.rand(40, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert torch.equal(uniforms[1], expected)


def test_inverse_of_the_distribution_by_hand():
    weights = torch.tensor([[0.0, 2.0, 3.0, 0.0, 5.0, 0.0]])  # running sums 0, .2, .5, .5, 1, 1 of the total
    uniforms = [0.0, 0.19, 0.2, 0.49, 0.5, 0.99, ALMOST_ONE]
    found = invert_cdf(weights.expand(7, -1), torch.tensor(uniforms, dtype=torch.float64))
    assert found[:, 0].tolist() == [1, 1, 2, 2, 4, 4, 4]


@pytest.mark.parametrize("vocabulary", [50, 5000])
def test_log_probs_are_those_of_float64_for_likely_and_rare_tokens(vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(400, vocabulary, generator=generator) + 1000
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens, log_probs = next_tokens(logits, uniforms, SamplingParams(max_tokens=1))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    assert expected.min() < -5
    assert expected.max() > -0.1
    assert (log_probs - expected).abs().max() < 2e-6


@pytest.mark.parametrize("vocabulary", [513, 1024, 5000])
def test_large_vocabularies_give_the_same_tokens_as_one_running_sum(vocabulary):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(300, vocabulary, generator=generator).mul(3).exp()
    weights[torch.rand(weights.shape, generator=generator) < 0.5] = 0
    weights[:, -100:] = 0
    weights[:, :270] = 0
    uniforms = torch.rand(300, generator=generator, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, ALMOST_ONE
    running = weights.double().cumsum(1)
    expected = torch.searchsorted(running, uniforms[:, None] * running[:, -1:], right=True)
    found = invert_cdf(weights, uniforms)
    assert (weights.gather(1, found) > 0).all()
    assert found[0] == expected[0]
    assert found[1] == weights[1].nonzero().max()
    assert (
        found == expected
    ).float().mean() > 0.99  # sums of blocks are float32: a draw on a border may differ


@pytest.mark.parametrize("vocabulary", [5, 513, 1000])
def test_logits_that_are_not_numbers_give_a_token_id_and_a_log_prob_that_shows_it(vocabulary):
    for fields in ({}, {"top_p": 0.9}, {"top_k": 3}):
        tokens, log_probs = draw(torch.full((vocabulary,), torch.nan), [0.5, 0.999], **fields)
        assert all(0 <= token < vocabulary for token in tokens)
        assert log_probs.isnan().all()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, {0: 0.15, 1: 0.5, 2: 0.1, 3: 0.25}),
        ({"temperature": 0.5}, {0: 0.15**2, 1: 0.5**2, 2: 0.1**2, 3: 0.25**2}),
        ({"top_k": 2}, {1: 0.5, 3: 0.25}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 99}, {1: 0.5, 3: 0.25, 0: 0.15, 2: 0.1}),
        ({"top_p": 0.6}, {1: 0.5, 3: 0.25}),  # the second is needed to reach 0.6
        ({"top_p": 0.45}, {1: 0.5}),
        ({"top_p": 0.85}, {1: 0.5, 3: 0.25, 0: 0.15}),
        ({"top_p": 0.6, "top_k": 2}, {1: 0.5}),  # of the two left, the first has 2/3
        ({"top_p": 1e-9}, {1: 0.5}),
    ],
)
def test_temperature_and_filters_by_hand(fields, kept):
    total = sum(kept.values())
    edges, drawn = 0.0, []
    for probability in kept.values():  # filtered candidates stand in descending order
        drawn += [edges + 1e-6, edges + probability / total - 1e-6]
        edges += probability / total
    tokens, log_probs = draw(LOGITS, drawn, **fields)
    assert tokens == [token for token in kept for _ in range(2)]
    expected = [math.log(kept[token] / total) for token in tokens]
    torch.testing.assert_close(log_probs, torch.tensor(expected))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_nucleus_wider_than_the_first_guess_is_found_row_by_row(top_p):
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.0, 0.1, 1.0, 8.0]).repeat(50)[:, None]  # flat to peaked
    logits = torch.randn(200, 3000, generator=generator) * scale
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    params = SamplingParams(max_tokens=1, top_p=top_p)
    tokens, log_probs = next_tokens(logits, uniforms, params)
    probs, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    probs = (probs / probs.sum(-1, keepdim=True)).scatter(1, order, probs / probs.sum(-1, keepdim=True))
    found = probs.gather(1, tokens[:, None])[:, 0]
    peaked = scale[:, 0] > 0  # among equal logits any choice of the right size is right
    assert (found[peaked] > 0).all()
    torch.testing.assert_close(log_probs[peaked], found[peaked].log().float(), atol=1e-3, rtol=1e-3)
    flat = math.log(1 / math.ceil(3000 * top_p))
    torch.testing.assert_close(log_probs[~peaked], torch.full((50,), flat), atol=2e-3, rtol=0)
    alone = [next_tokens(logits[row][None], uniforms[row][None], params)[0] for row in range(200)]
    assert torch.equal(torch.cat(alone), tokens)


def test_greedy_takes_the_first_of_the_likeliest_and_reports_its_plain_log_prob():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    params = SamplingParams(max_tokens=1, do_sample=False, temperature=0.2, top_k=1)
    tokens, log_probs = next_tokens(logits, None, params)
    assert tokens.tolist() == [1]
    expected = 3 - math.log(1 + 2 * math.exp(3) + math.e)
    torch.testing.assert_close(log_probs, torch.tensor([expected]))


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0}])
def test_working_in_chunks_changes_nothing(monkeypatch, fields):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(23, 700, generator=generator)
    uniforms = torch.rand(23, generator=generator, dtype=torch.float64)
    params = SamplingParams(max_tokens=1, **fields)
    whole = next_tokens(logits, uniforms, params)
    monkeypatch.setattr(sampling, "_CHUNK_ON_CPU", 700 * 4)
    pieces = next_tokens(logits, uniforms, params)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize(("device", "calls"), [("cpu", 11), ("meta", 1)])
def test_a_gpu_samples_the_tokens_of_many_rows_at_once(monkeypatch, device, calls):
    """The meta device stands in for it; 152,064 words are those of Qwen2.5-7B."""
    seen = []

    def greedy(logits):
        seen.append(len(logits))
        return logits[:, 0].long(), logits[:, 0]

    monkeypatch.setattr(sampling, "_greedy", greedy)
    logits = torch.zeros(1, 152_064, device=device).expand(64, -1)
    tokens, log_probs = next_tokens(logits, None, SamplingParams(max_tokens=1, temperature=0))
    assert tokens.shape == log_probs.shape == (64,)
    assert len(seen) == calls
    assert sum(seen) == 64

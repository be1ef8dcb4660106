"""Tiny models of several families, samples of chosen lengths, and packed passes compared with padded ones."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from hypothesis import strategies as st

from strop.models.policy import PolicyModel
from strop.models.scorer import SequenceScorer, ValueModel

FAMILIES = {
    "Qwen2": {},
    "Qwen2 with windows": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 8},
    "Qwen3": {},
}
ROLES = {
    "actor": (PolicyModel, "ForCausalLM"),
    "critic": (ValueModel, "ForSequenceClassification"),
    "reward model": (SequenceScorer, "ForSequenceClassification"),
}
Columns = dict[str, torch.Tensor]
Groups = list[tuple[int, list[int]]]
"""Tokens of each prompt and of each of its responses; 0 is a row with nothing to learn from."""
GROUPS = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=3
)


def config(family: str, **extra: Any) -> transformers.PreTrainedConfig:
    """Build the configuration of a family for the tiny tokenizer."""
    settings = {
        "vocab_size": 19,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.08,  # attention matters: at the usual 0.02 it hardly moves a small model
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **FAMILIES.get(family, {}),
        **extra,
    }
    return getattr(transformers, f"{family.split()[0]}Config")(**settings)


def model(family: str, head: str = "ForCausalLM", **extra: Any) -> Any:
    """Build a random model; the same for the same arguments."""
    torch.manual_seed(0)
    built = getattr(transformers, family.split()[0] + head)(config(family, num_labels=1, **extra))
    built.config._attn_implementation = "sdpa"
    return built


def pair(role: str, family: str) -> tuple[Any, Any]:
    """Build a role's wrapper twice on equal weights: for packed and for padded passes."""
    wrapper, head = ROLES[role]
    return wrapper(model(family, head), packed=True), wrapper(model(family, head))


def samples(groups: Groups, order: int | None = None) -> Columns:
    """Return random samples of these lengths; ``order`` seeds another order of the rows."""
    generator = torch.Generator().manual_seed(order or 0)
    owner = torch.tensor([number for number, (_, responses) in enumerate(groups) for _ in responses])
    prompts = torch.tensor([prompt for prompt, _ in groups])[owner, None]
    responses = torch.tensor([length for _, lengths in groups for length in lengths])[:, None]
    width, response_width = int(prompts.max()), max(int(responses.max()), 1)
    places = torch.arange(response_width)
    # The row that fills up a rank's share is a copy of another: its response is there, but masked.
    masks = [torch.arange(width) >= width - prompts, places < responses.clamp(min=1)]
    mask = torch.cat(masks, dim=1).long()
    prompt_ids = torch.randint(4, 19, (len(groups), width), generator=generator)[owner]
    response_ids = torch.randint(4, 19, (len(owner), response_width), generator=generator)
    ids = torch.cat([prompt_ids, response_ids], dim=1) * mask
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "responses": ids[:, width:],
        "response_mask": (places < responses).float(),
    }
    if order is None:
        return columns
    shuffled = torch.randperm(len(owner), generator=generator)
    return {name: column[shuffled] for name, column in columns.items()}


def rows(*lengths: tuple[int, int]) -> Columns:
    """Return one sample of each (prompt, response) length, each of its own prompt."""
    return samples([(prompt, [response]) for prompt, response in lengths])


def gradient(role: Any, batch: Columns, **options: Any) -> tuple[Columns, torch.Tensor, list[str]]:
    """Return outputs, the gradient of a random combination of them, and the parameters that it reaches."""
    role.zero_grad(set_to_none=True)
    outputs = role(batch, **options)
    generator = torch.Generator().manual_seed(4)
    sum((torch.randn(out.shape, generator=generator) * out).sum() for out in outputs.values()).backward()
    reached = {name: weight.grad for name, weight in role.named_parameters() if weight.grad is not None}
    return outputs, torch.cat([grad.flatten() for grad in reached.values()]).double(), list(reached)


def assert_same(packed: Any, padded: Any, batch: Columns, **options: Any) -> None:
    """Require equal outputs and gradients."""
    found, ours, reached = gradient(packed, batch, **options)
    expected, theirs, expected_reached = gradient(padded, batch, **options)
    assert list(found) == list(expected)
    for name, output in found.items():
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, expected[name], atol=1e-5, rtol=1e-5)
    assert reached == expected_reached  # an empty micro-batch too takes part in every collective
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def flash_attention(
    module, query, key, value, attention_mask, *, cu_seq_lens_q, cu_seq_lens_k, scaling, **options
) -> tuple[torch.Tensor, None]:
    """Attend within sequences as the kernel does, which needs a GPU."""
    assert torch.equal(cu_seq_lens_q, cu_seq_lens_k)
    pieces = []
    for start, end in itertools.pairwise(cu_seq_lens_q.tolist()):
        parts = [heads[:, :, start:end] for heads in (query, key, value)]
        pieces.append(
            torch.nn.functional.scaled_dot_product_attention(
                *parts, is_causal=True, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def varlen_attn(
    query, key, value, q_ends, k_ends, longest_q, longest_k, *, scale, window_size, enable_gqa
) -> torch.Tensor:
    """Do what torch.nn.attention.varlen.varlen_attn documents, which needs a GPU."""
    assert q_ends.dtype == k_ends.dtype == torch.int32
    lengths = [(ends[1:] - ends[:-1]).tolist() for ends in (q_ends, k_ends)]
    assert [longest_q, longest_k] == [max(several) for several in lengths]
    outputs = []
    pieces = zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True)
    for q, k, v in pieces:
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        left, right = window_size
        seen = (behind >= -right) & ((behind <= left) if left >= 0 else True)
        heads = [states.transpose(0, 1)[None] for states in (q, k, v)]
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)

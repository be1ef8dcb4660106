"""Randomly initialised models of several families, small enough to decode in milliseconds, and prompts."""

from __future__ import annotations

import torch
import transformers as hf
from transformers import PreTrainedModel

from strop.protocol import DataProto

VOCABULARY = 61
PAD, EOS = 0, 1
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    # Far from uniform, so that a wrong mask or position changes the likeliest token.
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2}
_WINDOW = 4
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _gemma2(attention: str) -> hf.Gemma2Config:
    return hf.Gemma2Config(
        **_SIZES,
        sliding_window=_WINDOW,
        layer_types=_MIXED,
        query_pre_attn_scalar=8,
        attn_implementation=attention,
    )


FAMILIES = {
    "qwen2": lambda: hf.Qwen2Config(**_SIZES),
    "qwen2 with windows": lambda: hf.Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=_WINDOW, layer_types=_MIXED
    ),
    "qwen3": lambda: hf.Qwen3Config(**_SIZES),
    "llama": lambda: hf.LlamaConfig(**_SIZES),
    "llama eager": lambda: hf.LlamaConfig(**_SIZES, attn_implementation="eager"),
    "mistral": lambda: hf.MistralConfig(**_SIZES, sliding_window=None),
    "mistral with windows": lambda: hf.MistralConfig(**_SIZES, sliding_window=_WINDOW),
    "gemma2": lambda: _gemma2("sdpa"),
    "gemma2 eager": lambda: _gemma2("eager"),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_SIZES, sliding_window=_WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8
    ),
    # the last layers read the keys of earlier ones, and those of full attention have wider heads
    "gemma4": lambda: hf.Gemma4TextConfig(
        **{**_SIZES, "num_hidden_layers": 6},
        sliding_window=_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        global_head_dim=16,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "mixtral": lambda: hf.MixtralConfig(**_SIZES, **_EXPERTS, num_local_experts=3),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=3, moe_intermediate_size=48),
    "olmo2": lambda: hf.Olmo2Config(**_SIZES),
    "phi3": lambda: hf.Phi3Config(**_SIZES),
    "granite": lambda: hf.GraniteConfig(**_SIZES, logits_scaling=2.0),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        initializer_range=0.4,
        bos_token_id=2,
    ),
}


def tiny_lm(family: str = "qwen2", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A model of this family in eval mode; ``changes`` are to its configuration."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    config.update(changes)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def prompts_of(lengths: list[int], n: int = 1, pad: int = PAD, extra_columns: int = 2) -> DataProto:
    """Left-padded prompts of these lengths; ``extra_columns`` are padding in every row."""
    width = max(lengths) + extra_columns
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(2, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(7))
    return DataProto.from_dict(
        {
            "input_ids": torch.where(mask.bool(), ids, pad),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "seeds": torch.arange(len(lengths) * n).view(len(lengths), n) + 1000,
        },
        {"uid": [f"prompt-{row}" for row in range(len(lengths))]},
    )


def full_log_probs(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs [B, T, V] of every response position, from one forward pass over prompt and response."""
    width = batch["prompts"].shape[1]
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
            use_cache=False,
        ).logits
    return torch.log_softmax(logits[:, width - 1 : -1].float() / temperature, -1)


def response_log_probs(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs [B, T] of the responses' tokens, from one forward pass over prompt and response."""
    return full_log_probs(model, batch, temperature).gather(2, batch["responses"][..., None])[..., 0]


def response_ids(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Ids of each response without its padding."""
    rows = zip(batch["responses"], batch["response_mask"].bool(), strict=True)
    return [row[kept].tolist() for row, kept in rows]


def greedy_of_transformers(model: PreTrainedModel, prompts: DataProto, *, stop: list[int]) -> torch.Tensor:
    """Response ids of ``model.generate``, up to 16 per prompt."""
    ids = prompts.batch["input_ids"]
    whole = model.generate(
        input_ids=ids,
        attention_mask=prompts.batch["attention_mask"],
        do_sample=False,
        max_new_tokens=16,
        eos_token_id=stop,
        pad_token_id=PAD,
    )
    return whole[:, ids.shape[1] :]

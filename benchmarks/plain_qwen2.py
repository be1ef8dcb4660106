"""Qwen2 in plain torch: the baseline of ``floors.py``.

Sequences are concatenated without padding; attention runs on one sequence at a time.

Shapes: N tokens of all sequences, H hidden, A heads of D each, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import Qwen2ForCausalLM


class PlainQwen2(nn.Module):
    """Qwen2 with a copy of a transformers model's weights."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        super().__init__()
        config = model.config
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = nn.ParameterList(nn.Parameter(w.detach().clone()) for w in model.parameters())
        self.layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.head_dim = config.hidden_size // config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings), theta**-exponents)
        self.register_buffer("angles", torch.cat([angles, angles], dim=1))

    def forward(self, ids_N: Tensor, lengths: list[int]) -> Tensor:
        """Return the last hidden states [N, H]."""
        weight = dict(zip(self.names, self.weights, strict=True))
        angles_ND = torch.cat([self.angles[:length] for length in lengths])
        turn = angles_ND.cos()[:, None], angles_ND.sin()[:, None]
        hidden_NH = nn.functional.embedding(ids_N, weight["model.embed_tokens.weight"])
        for index in range(self.layers):
            layer = {name.split(".", 3)[3]: w for name, w in weight.items() if f"layers.{index}." in name}
            normed_NH = self._norm(hidden_NH, layer["input_layernorm.weight"])
            hidden_NH = hidden_NH + self._attention(normed_NH, layer, turn, lengths)
            normed_NH = self._norm(hidden_NH, layer["post_attention_layernorm.weight"])
            gate = silu(linear(normed_NH, layer["mlp.gate_proj.weight"]))
            up = linear(normed_NH, layer["mlp.up_proj.weight"])
            hidden_NH = hidden_NH + linear(gate * up, layer["mlp.down_proj.weight"])
        return self._norm(hidden_NH, weight["model.norm.weight"])

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return logits [N, V] by the tied embeddings."""
        return linear(hidden_NH, self.weights[0])

    def _norm(self, hidden_NH: Tensor, weight_H: Tensor) -> Tensor:
        return rms_norm(hidden_NH, weight_H.shape, weight_H, self.eps)

    def _attention(
        self, hidden_NH: Tensor, layer: dict[str, Tensor], turn: tuple[Tensor, Tensor], lengths: list[int]
    ) -> Tensor:
        query, key, value = (
            linear(
                hidden_NH, layer[f"self_attn.{name}_proj.weight"], layer[f"self_attn.{name}_proj.bias"]
            ).unflatten(1, (-1, self.head_dim))
            for name in "qkv"
        )
        query, key = self._turned(query, turn), self._turned(key, turn)
        rows = zip(*(heads.split(lengths) for heads in (query, key, value)), strict=True)
        attended = [
            scaled_dot_product_attention(
                *(heads.transpose(0, 1)[None] for heads in row), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for row in rows
        ]
        return linear(torch.cat(attended).flatten(1), layer["self_attn.o_proj.weight"])

    def _turned(self, heads_NAD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Apply rotary positions."""
        cos, sin = turn
        first, second = heads_NAD.chunk(2, dim=2)
        return heads_NAD * cos + torch.cat([-second, first], dim=2) * sin

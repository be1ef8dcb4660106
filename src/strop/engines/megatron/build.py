"""Build megatron-core's layers for the configuration of a Hugging Face model.

Layers are megatron-core's own (``ColumnParallelLinear`` and so on): they run on GPUs and CPUs alike and need
neither Transformer Engine nor Apex.

Shapes: M tokens of a packed row, which is the only row of a batch (B = 1), H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers import PretrainedConfig

from strop.engines.megatron.attention import PackedAttention
from strop.engines.megatron.experts import MIXTURE, ExpertLayer, has_experts
from strop.engines.megatron.settings import FAMILIES, ParallelSettings, with_choices
from strop.errors import ConfigError, ModelError, raised_as
from strop.models.routing import experts_of


def require_supported(config: PretrainedConfig, settings: ParallelSettings, path: object) -> None:
    """Raise ``ModelError`` or ``ConfigError`` for a model that the layout or this engine cannot hold."""
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"model {path}: strategy=megatron has no layers for the family {config.model_type} (known: "
            f"{', '.join(FAMILIES)}); set strategy=fsdp"
        )
    wrong = [f"{key}=True" for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    if config.hidden_act != "silu":
        wrong.append(f"hidden_act={config.hidden_act}")
    if getattr(config, "attention_dropout", 0.0):
        wrong.append(f"attention_dropout={config.attention_dropout}")
    if wrong:
        raise ModelError(
            f"model {path}: strategy=megatron does not support {', '.join(wrong)}; set strategy=fsdp"
        )
    tensor, stages = settings.tensor, settings.pipeline * (settings.virtual or 1)
    experts = experts_of(config)
    for key, size, what, number in (
        ("tensor", tensor, "attention heads", config.num_attention_heads),
        ("tensor", tensor, "key-value heads", config.num_key_value_heads),
        ("tensor", tensor, "intermediate_size", config.intermediate_size),
        ("tensor", tensor, "shared_expert_intermediate_size", _shared_expert(config) or 0),
        ("expert", settings.expert, "routed experts of a layer", experts),
    ):
        if number % size:
            raise ConfigError(
                f"{key}_model_parallel_size={size} does not divide the {number} {what} of {path}"
            )
    if settings.expert > 1 and not experts:
        raise ConfigError(
            f"expert_model_parallel_size={settings.expert}: {path} has no experts to share; set it to 1"
        )
    if experts and tensor > 1 and not settings.sequence_parallel:
        raise ConfigError(
            f"sequence_parallel=False with tensor_model_parallel_size={tensor}: each rank would send its "
            f"copy of every token to the experts of {path}; set it to True"
        )
    uneven = any(key.startswith("num_layers_in_") for key in settings.transformer)
    if config.num_hidden_layers % stages and not uneven:
        raise ConfigError(
            f"{config.num_hidden_layers} layers of {path} do not divide into {stages} pipeline stages "
            f"(pipeline_model_parallel_size={settings.pipeline}, virtual_pipeline_model_parallel_size="
            f"{settings.virtual}); set override_transformer_config.num_layers_in_last_pipeline_stage"
        )


def transformer_config(
    config: PretrainedConfig, settings: ParallelSettings, *, recompute: bool, layer_dtype: torch.dtype
) -> TransformerConfig:
    """Return megatron-core's configuration of the layers of ``config``, whose outputs are ``layer_dtype``.

    Raises ``ConfigError`` for entries of ``override_transformer_config`` that megatron-core rejects.
    """
    heads = config.num_attention_heads
    entries = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "qk_layernorm": config.model_type in ("qwen3", "qwen3_moe"),
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type == "qwen2" or getattr(config, "qkv_bias", False),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": settings.tensor,
        "pipeline_model_parallel_size": settings.pipeline,
        "virtual_pipeline_model_parallel_size": settings.virtual,
        "sequence_parallel": settings.sequence_parallel and settings.tensor > 1,
        # Rows have different lengths, which is refused with the default dispatcher. An interleaved pipeline
        # of two stages has one rank as both neighbours: without overlap their messages are mixed up, and the
        # shapes of rows in any case, so rows are padded there.
        "variable_seq_lengths": settings.pipeline > 1 and not settings.virtual,
        "overlap_p2p_comm": bool(settings.virtual),
        "batch_p2p_comm": not settings.virtual,
        "moe_token_dispatcher_type": "alltoall",
        # Losses have global denominators, so gradients must not be divided by ranks or micro-batches.
        "calculate_per_token_loss": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": layer_dtype,  # a stage receives into this dtype what the one before returns
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "fp16": False,  # autocast has the dtype
        "bf16": False,
        "moe_expert_capacity_factor": None,  # no token is dropped
        "moe_input_jitter_eps": None,
    }
    choices: dict[str, Any] = {
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    losses = ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_z_loss_coeff")
    if wrong := [key for key in losses if key in settings.transformer]:
        raise ConfigError(
            f"megatron.override_transformer_config.{wrong[0]}: the auxiliary loss is the model's own entry "
            "router_aux_loss_coef; set model.override_config.router_aux_loss_coef"
        )
    if experts := experts_of(config):
        entries |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",  # Router adds the loss
            "moe_shared_expert_intermediate_size": _shared_expert(config),
            "moe_shared_expert_gate": True,
            "expert_model_parallel_size": settings.expert,
            "expert_tensor_parallel_size": 1,
        }
    if recompute:
        choices |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    chosen = with_choices("override_transformer_config", entries, choices, settings.transformer)
    if wrong := sorted({"layernorm", "moe_act", "mla_up_proj"} & set(chosen.get("recompute_modules") or ())):
        raise ConfigError(
            f"megatron.override_transformer_config.recompute_modules: {wrong[0]} needs Transformer Engine, "
            "which is not used here; expected core_attn, mlp or moe"
        )
    types = (TypeError, ValueError, AssertionError, NotImplementedError)
    with raised_as(ConfigError, "megatron.override_transformer_config", *types):
        return TransformerConfig(**chosen)


def _shared_expert(config: PretrainedConfig) -> int | None:
    """Return the intermediate size of the expert that sees all tokens; None without one."""
    return getattr(config, "shared_expert_intermediate_size", None)


def build_chunks(
    config: PretrainedConfig,
    mcore: TransformerConfig,
    *,
    scalar_head: bool,
    implementation: str,
    padding: int | None,
) -> list[GPTModel]:
    """Build this rank's model chunks, without weights: one, or several of an interleaved pipeline.

    The last chunk returns hidden states instead of logits. Collective.

    Args:
        scalar_head: the head is a row of weights, not a vocabulary.
        implementation: attention back-end, as transformers calls it.
        padding: ``padding_idx`` of the model's embedding.
    """
    tensor = mcore.tensor_model_parallel_size
    tied = config.tie_word_embeddings and not scalar_head
    chunks = []
    for stage in range(mcore.virtual_pipeline_model_parallel_size or 1):
        place = {"ignore_virtual": False, "vp_stage": stage}
        last = parallel_state.is_pipeline_last_stage(**place)
        chunk = GPTModel(
            mcore,
            _layers(config, mcore, stage, implementation),
            # megatron-core divides words evenly
            vocab_size=-(-config.vocab_size // tensor) * tensor,
            max_sequence_length=config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=last,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",  # PackedAttention rotates
            vp_stage=stage if mcore.virtual_pipeline_model_parallel_size else None,
        )
        for layer in chunk.decoder.layers:
            if isinstance(layer, ExpertLayer):
                layer.mlp.router.number = sum(has_experts(config, n) for n in range(layer.layer_number - 1))
        if chunk.pre_process and padding is not None:
            chunk.embedding.word_embeddings.register_forward_hook(partial(_without_gradient, word=padding))
        if last:
            weight = chunk.output_layer.weight
            if scalar_head:
                weight = nn.Parameter(torch.empty(1, config.hidden_size))
            chunk.output_layer = HiddenStates(weight, mcore.sequence_parallel)
        chunks.append(chunk)
    return chunks


def _without_gradient(embedding: Any, ids_BM: tuple[Tensor], output: Tensor, *, word: int) -> Tensor:
    """Let no gradient reach the embedding of ``word``, as ``padding_idx`` of torch's embeddings does."""
    is_word = (ids_BM[0] == word)[..., None]
    if embedding.reduce_scatter_embeddings:  # this rank's tokens [M / ranks, B, H]
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        is_word = is_word.transpose(0, 1).chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(is_word, output.detach(), output)


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Return the sliding window of every layer; None: it attends to all earlier tokens."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _layers(
    config: PretrainedConfig, mcore: TransformerConfig, stage: int, implementation: str
) -> TransformerBlockSubmodules:
    core = ModuleSpec(
        PackedAttention, params={"windows": layer_windows(config), "implementation": implementation}
    )
    virtual = stage if mcore.virtual_pipeline_model_parallel_size else None
    first = get_transformer_layer_offset(mcore, vp_stage=virtual)
    count = get_num_layers_to_build(mcore, vp_stage=virtual)
    specs = [_layer(config, mcore, first + number, core) for number in range(count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def _layer(config: PretrainedConfig, mcore: TransformerConfig, number: int, core: ModuleSpec) -> ModuleSpec:
    """Return the modules of layer ``number`` of the whole model."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=mcore.qk_layernorm)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = core
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if mcore.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if has_experts(config, number):
        spec.module, spec.submodules.mlp = ExpertLayer, MIXTURE
    return spec


class Norm(nn.RMSNorm):
    """RMS norm whose weight's gradient is summed over the ranks that share the tokens.

    megatron-core's wrapper of torch's norm refuses sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in float32; under autocast return its dtype.

        megatron-core's linear layers send the gradient of their input in the dtype of that input, so it must
        be the dtype of the products.
        """
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return super().forward(x.float()).to(dtype)


class HiddenStates(nn.Module):
    """Return whole hidden states [M, 1, H] in the place of an output layer, whose weight it keeps."""

    def __init__(self, weight: nn.Parameter | None, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = weight  # None: tied to an embedding on this stage
        self._sequence_parallel = sequence_parallel

    def forward(self, hidden_M1H: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Gather the tokens of all ranks; their gradients are equal on all, so none are summed."""
        if self._sequence_parallel:
            hidden_M1H = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_M1H, tensor_parallel_output_grad=False
            )
        return hidden_M1H, None

"""Keys of a Hugging Face model that is trained, in every tree."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from strop.config.schema.base import (
    FILES,
    MAY_CHANGE,
    SAME_MODEL,
    AttentionName,
    ComputeDtype,
    Count,
    Expected,
    Limit,
    Modules,
    Names,
    PositiveFloat,
    Required,
    Section,
    Text,
    needs,
    no_effect,
    refused,
)


def _no_lora(neutral: Any) -> Limit:
    return no_effect(
        "without lora_rank and lora_adapter_path",
        lambda at: at.value != neutral and not at.section.has_adapters,
        "the whole model is trained",
    )


def _of_new_adapters(neutral: Any) -> Limit:
    return no_effect(
        "with lora_adapter_path",
        lambda at: at.value != neutral and at.section.lora_adapter_path is not None,
        "the adapter in that folder decides",
    )


ModuleNames = Annotated[Text | list[Text], Expected("string or list of strings")]


class ModelConfig(Section, resumes=MAY_CHANGE):
    """A Hugging Face model that is trained."""

    path: Annotated[
        str,
        SAME_MODEL,
        FILES,
        Required("a Hugging Face folder, hub name or URL", "Qwen/Qwen2.5-0.5B-Instruct"),
    ]
    """Hugging Face model: folder, name on the hub, hdfs:// or any fsspec URL, or a GGUF file."""
    external_lib: Modules
    """Package, or list of packages, to import first: they register models or tokenizers with transformers."""
    override_config: dict[str, Any]
    """Values laid over the model's config.json, for example a dropout rate."""
    enable_gradient_checkpointing: Annotated[
        Literal["selective"] | bool,
        Expected("True, False or selective"),
        refused(
            "if selective with compile=True",
            lambda at: at.value == "selective" and at.section.compile is True,
            "operators inside a compiled layer cannot be kept one by one; set one of the two to False",
        ),
        needs("selective", lambda at: at.value == "selective", when="if selective"),
    ]
    """Recompute activations in the backward pass; selective: all but matrix products and attention."""
    use_remove_padding: Annotated[
        Literal["auto"] | bool,
        Expected("auto, True or False"),
        needs("padding", lambda at: at.value is False, when="if False", level="warning"),
    ]
    """Pack sequences without padding: the same numbers in less time; auto: where the model supports it."""
    trust_remote_code: bool
    """Run Python code that comes with the model."""
    attn_implementation: Annotated[
        AttentionName | None,
        refused(
            "if flex_attention on a CPU",
            lambda at: at.value == "flex_attention" and at.on_cpu,
            "it needs a GPU; set it to null, sdpa or eager",
        ),
        refused(
            "if flex_attention with override_config.attention_dropout",
            lambda at: at.value == "flex_attention" and at.section.override_config.get("attention_dropout"),
            "it has no dropout; set attention_dropout to 0, or attn_implementation to null, sdpa or eager",
        ),
    ]
    """Attention kernel of transformers; null: its choice, or eager with attn_logit_softcapping."""
    compute_dtype: ComputeDtype
    """Precision of the passes; auto: bfloat16 on a GPU, float32 on a CPU. Weights stay float32."""
    compile: Annotated[
        Literal["auto"] | bool,
        Expected("auto, True or False"),
        needs("layers_of_transformers", lambda at: at.value is True, level="warning"),
    ]
    """Compile the decoder layers for log-probs and updates (strop docs speed); auto: on a GPU."""
    use_liger: Annotated[
        bool,
        no_effect("in any run", lambda at: at.value, "models compute with their own modules"),
    ]
    """A key of verl: the modules of the package liger_kernel."""
    lora_rank: Annotated[Count, SAME_MODEL, needs("adapters", lambda at: at.value > 0, when="above 0")]
    """Train LoRA adapters of this rank on frozen weights; 0: train the weights (strop docs lora)."""
    lora_alpha: Annotated[PositiveFloat, SAME_MODEL, _no_lora(16), _of_new_adapters(16)]
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Annotated[ModuleNames, SAME_MODEL, _no_lora("all-linear"), _of_new_adapters("all-linear")]
    """Layers with adapters: all-linear, a list of names' ends (q_proj), or a regular expression of names."""
    exclude_modules: Annotated[ModuleNames | None, SAME_MODEL, _no_lora(None), _of_new_adapters(None)]
    """Layers without adapters, named so; null: an encoder's, unless target_modules is an expression."""
    modules_to_save: Annotated[Names, SAME_MODEL, _no_lora([]), _of_new_adapters([])]
    """Ends of names of modules trained whole beside adapters, for example [embed_tokens,norm]."""
    lora_adapter_path: Annotated[Text | None, SAME_MODEL, FILES, needs("adapters")]
    """Folder of an adapter of peft's to start from; it decides rank, alpha and layers."""
    lora_merge: Annotated[bool, _no_lora(False)]
    """Write final_model as a whole model with the adapters merged in, not as an adapter."""
    freeze: Annotated[
        list[Literal["encoder", "projector"]],
        Expected("list of encoder and projector"),
        SAME_MODEL,
        no_effect(
            "with LoRA adapters",
            lambda at: bool(at.value) and at.section.has_adapters,
            "all weights of the model are frozen; exclude_modules says which layers get no adapters",
        ),
        needs("pictures", lambda at: bool(at.value), when="unless []"),
    ]
    """Parts of a model with pictures that keep their weights: encoder, projector (strop docs pictures)."""

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters are trained, not the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

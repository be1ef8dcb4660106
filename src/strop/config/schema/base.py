"""What every section of the configuration shares: the base class and the kinds of numbers.

A section has no defaults: `ppo_trainer.yaml` is their only source, so the two cannot drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from strop.config.backends import ENGINES


class Expected(str):
    """Metadata on a type: the words that an error and the reference page use for it."""

    __slots__ = ()


class Section(BaseModel):
    """One part of the configuration tree: typed, read-only, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # trainer.experiment_name=7 is a name
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):  # Python counts True as 1; nobody who writes total_epochs=True means that
        raise ValueError("a truth value is not a number")
    return value


def _positive_or_minus_one(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("-1 or at least 1")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Integer = Annotated[int, BeforeValidator(_not_a_bool)]

Number = Annotated[float, BeforeValidator(_not_a_bool)]


PositiveInt = Annotated[Integer, Field(gt=0)]

Count = Annotated[Integer, Field(ge=0)]

TopK = Annotated[Integer, Field(ge=-1), Expected("int >= -1 (-1 and 0: off)")]

PositiveOrAll = Annotated[Integer, AfterValidator(_positive_or_minus_one), Expected("int > 0, or -1")]

Every = Annotated[PositiveOrAll, Expected("int > 0, or -1 for never")]


PositiveFloat = Annotated[Number, Field(gt=0)]

NonNegativeFloat = Annotated[Number, Field(ge=0)]

Fraction = Annotated[Number, Field(ge=0, le=1)]

Probability = Annotated[Number, Field(gt=0, le=1)]


Names = Annotated[list[str], BeforeValidator(_one_or_many), Expected("string or list of strings")]


# Sections that several owners use: optimizer, sharding, and the enumerations that they have in common.

if TYPE_CHECKING:
    Strategy = str
else:
    Strategy = Literal[(*ENGINES, "megatron")]  # megatron parses, and a check refuses it

ComputeDtype = Literal["auto", "float32", "bfloat16"]

AttentionName = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]

KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"]

LossAggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


_Beta = Annotated[float, Field(ge=0, lt=1)]

Betas = Annotated[list[_Beta], Field(min_length=2, max_length=2), Expected("list of two floats in [0, 1)")]


class OptimConfig(Section):
    """AdamW and its learning-rate schedule, a function of the iteration."""

    lr: NonNegativeFloat
    """Learning rate after the warm-up."""
    lr_warmup_steps_ratio: Fraction
    """Share of all iterations over which the learning rate rises linearly to lr."""
    min_lr_ratio: Fraction | None
    """The schedule ends at this share of lr (cosine and linear); null: 0."""
    warmup_style: Literal["constant", "cosine", "linear"]
    """What follows the warm-up: constant, or a cosine or linear decay to min_lr_ratio x lr."""
    total_training_steps: PositiveOrAll
    """Filled in by the trainer with the number of iterations; leave it at -1."""
    betas: Betas
    """AdamW's decay rates of the first and second moments."""
    weight_decay: NonNegativeFloat
    """AdamW's decoupled weight decay."""
    eps: PositiveFloat
    """AdamW's constant in the denominator."""


class WrapPolicyConfig(Section):
    """Which modules are sharded as one unit."""

    transformer_layer_cls_to_wrap: str | list[str] | None
    """Layer classes to shard as units; null: the model's own decoder layers."""
    min_num_params: Count
    """Shard modules of at least this many parameters as units; 0: by decoder layer."""


class FrozenFsdpConfig(Section):
    """Sharding of a model that is only evaluated."""

    wrap_policy: WrapPolicyConfig
    param_offload: bool
    """Keep the parameters in CPU memory while they are not used."""


class FsdpConfig(FrozenFsdpConfig):
    """Sharding of a model that is trained."""

    grad_offload: bool
    """Keep the gradients in CPU memory while they are not used."""
    optimizer_offload: bool
    """Keep the optimizer state in CPU memory while it is not used."""
    fsdp_size: PositiveOrAll
    """Ranks that share one copy of the parameters; -1: all."""


class ModelConfig(Section):
    """A Hugging Face model that is trained."""

    path: str
    """Hugging Face model: folder, name on the hub, hdfs:// or any fsspec URL, or a GGUF file."""
    external_lib: str | list[str] | None
    """Package, or list of packages, to import first: they register models or tokenizers with transformers."""
    override_config: dict[str, Any]
    """Values laid over the model's config.json, for example a dropout rate."""
    enable_gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    use_remove_padding: bool
    """Pack sequences without padding: the same numbers in less time."""
    trust_remote_code: bool
    """Run Python code that comes with the model."""
    attn_implementation: AttentionName | None
    """Attention kernel of transformers; null: its own choice."""
    compute_dtype: ComputeDtype
    """Precision of the passes; auto: bfloat16 on a GPU, float32 on a CPU. Weights stay float32."""

"""Keys under `critic`: the value model, which is built only if the advantage estimator needs values."""

from __future__ import annotations

from typing import Annotated

from strop.config.names import needs_critic
from strop.config.schema.base import (
    FILES,
    SAME_MODEL,
    At,
    PositiveFloat,
    PositiveInt,
    PpoUpdateConfig,
    by_rows,
    by_tokens,
    engine_sections,
    no_effect,
)
from strop.config.schema.model import ModelConfig

# The reward model's keys of the same names follow these, unless they are set themselves.
_ALSO_FOR_REWARD_MODEL = (
    "critic.use_dynamic_bsz",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)


def _no_critic(at: At) -> bool:
    if at.path in _ALSO_FOR_REWARD_MODEL and at.config.reward_model.enable:
        return False
    return not needs_critic(at.config.algorithm.adv_estimator)


NO_CRITIC = no_effect("without a critic", _no_critic, "algorithm.adv_estimator needs no values")


@engine_sections("critic.model")
class CriticModelConfig(ModelConfig):
    """The model under the value head."""

    path: Annotated[str, SAME_MODEL, FILES]
    """Hugging Face model whose body the critic starts from."""
    tokenizer_path: str
    """Tokenizer that is saved next to the critic's checkpoint."""
    lora_merge: Annotated[
        bool,
        no_effect(
            "in any run",
            lambda at: at.value,
            "final_model is the policy; strop export CHECKPOINT --role critic --merge writes the critic",
        ),
    ]
    """Write final_model as a whole model with the adapters merged in, not as an adapter."""


@engine_sections("critic")
class CriticConfig(PpoUpdateConfig):
    """The value model and its update."""

    model: CriticModelConfig
    forward_micro_batch_size: PositiveInt | None
    """Deprecated: forward_micro_batch_size_per_gpu times the number of ranks."""
    forward_micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows()]
    """Sequences in one forward pass for the values, per rank; memory only."""
    forward_max_token_len_per_gpu: Annotated[PositiveInt | None, by_tokens()]
    """Most tokens in one forward pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    cliprange_value: PositiveFloat
    """A new value may move this far from the old one before its loss is clipped."""

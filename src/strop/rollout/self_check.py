"""Does step-by-step decoding give what one forward pass gives? Asked once, when the engine is built."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from strop.errors import ModelError
from strop.protocol import DataProto
from strop.rollout.base import SamplingParams

_PROMPTS = ((1, 2, 3, 4, 5), (0, 0, 3, 2, 1))
_LENGTHS = (5, 3)


def check_decoding(
    model: PreTrainedModel, generate: Callable[[DataProto, SamplingParams], DataProto]
) -> None:
    """Decode four tokens after two short prompts and compare log-probs with the model's own forward pass.

    A family whose cache, positions or masks mean something else than this package assumes is refused here,
    with a ``ModelError``, instead of being trained on wrong samples. The model is in eval mode, without
    gradient and autocast.
    """
    vocabulary = model.config.get_text_config().vocab_size
    lengths = torch.tensor(_LENGTHS)
    mask = (torch.arange(5) >= 5 - lengths[:, None]).long()
    prompts = DataProto.from_dict(
        {
            "input_ids": torch.tensor(_PROMPTS) % vocabulary,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
    )
    decoded = generate(prompts, SamplingParams(max_tokens=4, do_sample=False, ignore_eos=True)).to(
        model.device
    )
    whole = model(
        **{name: decoded.batch[name] for name in ("input_ids", "attention_mask", "position_ids")},
        use_cache=False,
    ).logits[:, 4:-1]
    expected = whole.float().log_softmax(-1)
    spread = float(expected.std(-1).max())
    expected = expected.gather(2, decoded.batch["responses"][..., None])[..., 0]
    error = float((decoded.batch["rollout_log_probs"] - expected).abs().max())
    # A wrong mask or position moves log-probs by a good part of their spread; rounding does not.
    tolerance = 1e-5 + spread * (0.01 if model.dtype == torch.float32 else 0.1)
    if error > tolerance:
        raise ModelError(
            f"rollout.name=hf decodes {type(model).__name__} wrongly: log-probs differ from a plain "
            f"forward pass by {error:.3g} (tolerance {tolerance:.3g}); use another rollout back-end"
        )

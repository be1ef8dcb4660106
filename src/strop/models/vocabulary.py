"""Whether two models mean the same by a token id; if not, one's score of the other's ids is noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strop.errors import ModelError
from strop.models.loader import load_model_config, load_tokenizer

_REMEDY = (
    "Set reward_model.model.input_tokenizer to the policy's tokenizer, so that samples are decoded and "
    "written anew for the reward model"
)


def require_same_vocabulary(
    policy: str | Path, reward_model: str | Path, tokenizer: Any, *, trusted: tuple[bool, bool]
) -> None:
    """``ModelError`` when the models in two folders have embeddings of other sizes, or give ids other tokens.

    ``tokenizer`` is the policy's; ``trusted``: whether each of the two may run its own code. Tokens that one
    of them lacks, and those added to a vocabulary, such as reserved ones that got a name, may differ. A
    reward model without a tokenizer is taken at its size.
    """
    sizes = [
        load_model_config(path, override_config={}, trust_remote_code=trust).get_text_config().vocab_size
        for path, trust in zip((policy, reward_model), trusted, strict=True)
    ]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"the vocabularies differ: policy {sizes[0]}, reward model {sizes[1]} tokens. {_REMEDY}"
        )
    try:
        other = load_tokenizer(reward_model, trust_remote_code=trusted[1])
    except ModelError:
        return
    ours, theirs = _ordinary_tokens(tokenizer), _ordinary_tokens(other)
    differing = sorted(token_id for token_id in ours.keys() & theirs if ours[token_id] != theirs[token_id])
    if differing:
        first = differing[0]
        raise ModelError(
            f"the vocabularies have {sizes[0]} tokens each, but {len(differing)} ids mean other tokens: the "
            f"first, {first}, is {ours[first]!r} to the policy and {theirs[first]!r} to the reward model. "
            f"{_REMEDY}"
        )


def _ordinary_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.get_added_vocab()
    return {token_id: token for token, token_id in tokenizer.get_vocab().items() if token not in added}

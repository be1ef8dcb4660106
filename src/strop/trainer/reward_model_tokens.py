"""Before a model loads: the reward model reads what the policy writes, in words that it learned from."""

from __future__ import annotations

import logging
from typing import Any

from strop.config.schema import Config
from strop.data.hub import local_tokenizer
from strop.data.prompts import encode_prompts, encode_responses
from strop.data.tokenize import tokenizer_fingerprint
from strop.models.loader import import_external_lib, load_tokenizer
from strop.models.vocabulary import require_same_vocabulary

logger = logging.getLogger("strop")

_DIALOGUE = [{"role": "user", "content": "1"}], {"role": "assistant", "content": "2"}


def check_reward_model_tokens(config: Config, tokenizer: Any) -> None:
    """``ModelError`` when the policy's token ids are to be scored, and mean other tokens to the reward model.

    A warning when they are to be written anew although both have one ``tokenizer``, and this gives others
    than the policy generates.
    """
    rewards = config.reward_model
    if not rewards.enable:
        return
    import_external_lib(rewards.model.external_lib)
    models = config.actor_rollout_ref.model, rewards.model
    policy, reward_model = (local_tokenizer(model.path, config.data.cache_dir) for model in models)
    if rewards.model.input_tokenizer is None:
        trusted = models[0].trust_remote_code, models[1].trust_remote_code
        require_same_vocabulary(policy, reward_model, tokenizer, trusted=trusted)
        return
    own = load_tokenizer(reward_model, trust_remote_code=rewards.model.trust_remote_code)
    is_shared = tokenizer_fingerprint(own) == tokenizer_fingerprint(tokenizer)
    if is_shared and own.chat_template is not None and _written_anew(own) != _as_generated(own):
        logger.warning(
            "reward_model.model.input_tokenizer=%s: policy and reward model have one tokenizer, and its chat "
            "template ends a conversation otherwise than a policy does. A reward model of `strop train-rm` "
            "has learned from what a policy generates: set the key to null for it",
            rewards.model.input_tokenizer,
        )


def _written_anew(tokenizer: Any) -> list[int]:
    prompt, response = _DIALOGUE
    return tokenizer.apply_chat_template([*prompt, response], return_dict=False)


def _as_generated(tokenizer: Any) -> list[int]:
    prompt, response = _DIALOGUE
    return [
        *encode_prompts([prompt], tokenizer)[0],
        *encode_responses([response["content"]], tokenizer)[0],
    ]

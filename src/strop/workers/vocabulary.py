"""The vocabularies of policy and reward model."""

from __future__ import annotations

from strop.config.schema import Config
from strop.data.hub import local_tokenizer
from strop.errors import ModelError
from strop.models.folder import import_external_lib, load_model_config

REWRITE = (
    "Set reward_model.model.input_tokenizer to the policy's tokenizer, so that samples are decoded and "
    "tokenized again for the reward model"
)


def require_same_vocabulary(config: Config) -> None:
    """Raise ``ModelError`` if the reward model reads the policy's ids, and the sizes of vocabularies differ.

    A model with rows to spare is refused, too: another size is a sign of another tokenizer.
    """
    rewards, policy, sizes = config.reward_model.model, config.actor_rollout_ref.model, []
    if rewards.input_tokenizer is not None:
        return
    for model, changed in ((policy, policy.override_config), (rewards, None)):
        import_external_lib(model.external_lib)
        folder = local_tokenizer(model.path, config.data.cache_dir)
        loaded = load_model_config(folder, override_config=changed, trust_remote_code=model.trust_remote_code)
        sizes.append(loaded.get_text_config().vocab_size)
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"reward_model.model.path={rewards.path}: the vocabularies differ: the policy has {sizes[0]} "
            f"tokens, this model has {sizes[1]} tokens, and input_tokenizer=null passes the policy's ids to "
            f"it. {REWRITE}"
        )

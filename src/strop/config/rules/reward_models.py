"""Rules about the reward model: it reads what the policy writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from strop.config.forecast import read_model_facts
from strop.config.paths import expand, is_url, may_be_a_hub_name
from strop.config.rules.finding import Finding, error, warning
from strop.config.schema import Config


def input_tokenizer(config: Config) -> Iterator[Finding]:
    """The tokenizer that samples are decoded with exists."""
    path = config.reward_model.model.input_tokenizer
    if not config.reward_model.enable or path is None or is_url(path) or may_be_a_hub_name(path):
        return
    if not Path(expand(path)).exists():
        yield error(f"reward_model.model.input_tokenizer={path}: no such folder")


def shared_vocabulary(config: Config) -> Iterator[Finding]:
    """A reward model that scores the policy's token ids has as many; the tokens are compared later."""
    rewards = config.reward_model
    if not rewards.enable or rewards.model.input_tokenizer is not None:
        return
    paths = config.actor_rollout_ref.model.path, rewards.model.path
    policy, reward_model = (read_model_facts(path) for path in paths)
    if policy is not None and reward_model is not None and policy.vocabulary != reward_model.vocabulary:
        yield error(
            f"reward_model.model.input_tokenizer=null has the policy's token ids scored as they are, but the "
            f"vocabularies differ: {policy.vocabulary} tokens of {paths[0]}, {reward_model.vocabulary} of "
            f"{paths[1]}; set it to the policy's tokenizer, so that samples are written anew"
        )


def context_window(config: Config) -> Iterator[Finding]:
    """The reward model was made for sequences as long as these."""
    rewards, data = config.reward_model, config.data
    facts = read_model_facts(rewards.model.path) if rewards.enable else None
    if facts is None or facts.context is None:
        return
    if rewards.model.input_tokenizer is not None and rewards.max_length is not None:
        longest, keys = rewards.max_length, f"reward_model.max_length={rewards.max_length}"
    else:  # samples written anew have about as many tokens as they had
        longest = data.max_prompt_length + data.max_response_length
        keys = (
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {longest} tokens"
        )
    if longest > facts.context:
        yield warning(f"{keys}, more than the {facts.context} that {rewards.model.path} was made for")


def longest_sequence(config: Config) -> Iterator[Finding]:
    """What is written anew has a limit where micro-batches have one."""
    rewards = config.reward_model
    written_anew = rewards.enable and rewards.model.input_tokenizer is not None
    if written_anew and rewards.use_dynamic_bsz and rewards.max_length is None:
        cap = rewards.forward_max_token_len_per_gpu
        yield warning(
            f"reward_model.max_length=null: a sample of more than reward_model.forward_max_token_len_per_gpu="
            f"{cap} tokens of the reward model's would stop the run; with max_length={cap} its end is scored"
        )

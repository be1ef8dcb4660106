"""Which models and tokenizers a run reads, by role."""

from __future__ import annotations

import pytest

from strop.config.load import load_config
from strop.config.roles import critic_tokenizer, tokenizer_paths


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "policy"),
        (["data.tokenizer=apart"], "apart"),
        (["data.tokenizer=apart", "critic.model.path=values"], "apart"),
        (["data.tokenizer=apart", "critic.model.tokenizer_path=own"], "own"),
    ],
)
def test_the_critic_has_the_policys_tokenizer_unless_it_names_one(overrides, expected):
    config = load_config(["actor_rollout_ref.model.path=policy", *overrides])
    assert critic_tokenizer(config) == expected
    assert tokenizer_paths(config)["critic.model.tokenizer_path"] == expected

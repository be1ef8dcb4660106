"""Checks of reward models that cannot read the policy's tokens."""

from __future__ import annotations

import json

import pytest

from strop.config.checks.check import check
from strop.config.load import load_config

from messages import mentions


@pytest.fixture
def report(valid, tmp_path):
    """Findings about a policy of 100 tokens, made for 2048, and a reward model of that shape."""

    def model(name, vocabulary, context):
        (tmp_path / name).mkdir(exist_ok=True)
        shape = {
            "vocab_size": vocabulary, "max_position_embeddings": context, "hidden_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        }  # fmt: skip
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
        return tmp_path / name

    def run(*overrides, vocabulary=100, context=2048):
        policy = f"actor_rollout_ref.model.path={model('policy', 100, 2048)}"
        rewards = f"reward_model.model.path={model('reward_model', vocabulary, context)}"
        result = check(load_config([*valid, policy, rewards, "reward_model.enable=true", *overrides]))
        return result.errors, [line for line in result.warnings if not line.startswith("no effect")]

    return run


SHARED = "reward_model.model.input_tokenizer=null"


def test_a_reward_model_that_fits_is_passed(report):
    assert report() == report(SHARED) == ([], [])
    assert report(vocabulary=99) == ([], [])  # samples are tokenized again


def test_the_default_path_is_no_reward_model(report):
    (line,) = report("reward_model.model.path=~/models/Anomy-RM-v0.1")[0]
    assert mentions(line, "reward_model.model.path=~/models/Anomy-RM-v0.1")


def test_a_tokenizer_that_is_not_there(report):
    (line,) = report("reward_model.model.input_tokenizer=/no/tokenizer")[0]
    assert mentions(line, "reward_model.model.input_tokenizer=/no/tokenizer")
    off = report("reward_model.enable=false", "reward_model.model.input_tokenizer=/no/tokenizer")
    assert off[0] == []
    assert report("reward_model.model.input_tokenizer=owner/name")[0] == []
    assert report("reward_model.model.input_tokenizer=hdfs://cluster/name")[0] == []


def test_sequences_longer_than_it_was_made_for(report):
    lengths = "data.max_prompt_length=512", "data.max_response_length=512"
    for overrides in ((SHARED,), ()):
        (line,) = report(*overrides, *lengths, context=1000)[1]
        assert line.startswith("data.max_prompt_length=512 + data.max_response_length=512: 1024 tokens")
        assert "1000" in line
    assert report(*lengths, "reward_model.max_length=1000", context=1000)[1] == []
    (line,) = report(*lengths, "reward_model.max_length=1001", context=1000)[1]
    assert mentions(line, "reward_model.max_length=1001", "1000")

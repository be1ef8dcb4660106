"""Turns in vLLM: answered as they end, in waves, and on ranks that share an engine."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from strop.config.load import load_config
from strop.data.loader import collate
from strop.environments.loading import load_environments
from strop.environments.pool import EnvironmentPool
from strop.errors import DataError
from strop.passed import passing
from strop.protocol import DataProto
from strop.rollout.base import SamplingParams
from strop.rollout.episodes import Episodes
from strop.rollout.turn_format import TurnFormat

import tiny_model
from outside import require_vllm
from ranks import Ranks
from tiny_lms import EOS, response_log_probs
from tiny_vllm import rollout_of

require_vllm()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.usefixtures("no_vllm_outlives_its_module"),
]

STOPS = (4, 5, 6)
PARAMS = SamplingParams(max_tokens=30, n=4, stop_token_ids=STOPS)


class Replies:
    """Answers of 0 to 2 digits, which follow from row, seed and turn, after ``delay`` or less."""

    def reset(self, seed, index, delay):
        self.seed, self.index, self.delay = seed, index, delay
        return "12" if index == 2 else None

    def respond(self, response, turn):
        time.sleep(self.delay * random.SystemRandom().random())
        return None if turn == 3 else str((self.seed + self.index) % 10) * ((self.index + turn) % 3)

    def reward(self, turns):
        return [float(len(turn.text)) for turn in turns]


class TellsMuch(Replies):
    """One of its prompts is too long, and of one rank only."""

    def reset(self, index, **row):
        return "9" * 20 if index == 2 else None


def _episodes(environment: type = Replies) -> Episodes:
    tokenizer, name = tiny_model.build_tokenizer(), "function:Replies-0"
    config = load_config(["actor_rollout_ref.model.path=m", "data.train_files=f"])
    section = config.environment.model_copy(update={"path": {"": name}, "turn_length": 8})
    with passing({name: environment}):
        environments = load_environments(section)
    assert environments is not None
    form = TurnFormat(config.model_copy(update={"environment": section}), environments, tokenizer, [EOS])
    return Episodes(environments, section, form, EnvironmentPool(environments, section))


def _prompts(delay: float, number: int = 0) -> DataProto:
    tokenizer = tiny_model.build_tokenizer()
    texts = ["1+1=", "23*4=", "5-2=", "77="]
    rows = [
        {
            "input_ids": tokenizer(f"<user>{text}<assistant>", return_tensors="pt")["input_ids"][0],
            "prompt": text,
            "index": index,
            "delay": delay,
        }
        for index, text in enumerate(texts)
    ]
    seeds = DataProto({"seeds": torch.arange(16).view(4, 4) + 50 + 100 * number})
    return collate(rows, pad_token_id=0, max_prompt_length=12).union(seeds)


@pytest.fixture(scope="module")
def model():
    return tiny_model.build_model(tiny_model.build_tokenizer())


@pytest.fixture
def rollout(model, tmp_path_factory):
    made = rollout_of(model, tmp_path_factory.mktemp("engine"))
    made._episodes = _episodes()
    yield made
    made._episodes._pool.close()


def _of_two_batches(rollout, rows: slice = slice(None)) -> list[dict[str, torch.Tensor]]:
    for number in range(2):
        rollout.admit(number, _prompts(0.0, number)[rows], PARAMS)
    return [rollout.finish(number, number).batch for number in range(2)]


def _equal(found, expected) -> None:
    """Log-probs of a sample depend on the others of a step by rounding."""
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        if name == "rollout_log_probs":
            assert (found[name] - column).abs().max() < 1e-5
        else:
            assert torch.equal(found[name], column), name


def test_turns_that_are_answered_as_they_end_are_those_of_waves(rollout, model, monkeypatch):
    found = [rollout.generate(_prompts(delay), PARAMS).batch for delay in (0.0, 0.0, 0.2)]
    in_waves = rollout._episodes.complete
    monkeypatch.setattr(
        rollout,
        "_play",
        lambda episodes, batch, version: in_waves([batch], partial(rollout._decode, [batch], version, None)),
    )
    expected = rollout.generate(_prompts(0.0), PARAMS).batch
    for one in found:
        _equal(one, expected)
    mask = expected["response_mask"].bool()
    assert expected["n_turns"].float().mean() > 2
    assert (expected["attention_mask"][:, 12:].bool() & ~mask).any()
    plain = response_log_probs(model, expected)
    assert (found[2]["rollout_log_probs"] - plain)[mask].abs().max() < 1e-5


def test_ranks_of_one_engine_answer_their_own_samples(rollout, model, tmp_path):
    expected = _of_two_batches(rollout)
    with Ranks(2) as ranks:
        (first, error), (second, other) = ranks.run(2, on_a_rank, model, tmp_path)
    assert "max_prompt_length=12" in error == other
    for number, whole in enumerate(expected):
        both = {name: torch.cat([first[number][name], second[number][name]]) for name in whole}
        _equal(both, whole)


def on_a_rank(model, folder):
    rank = dist.get_rank()
    rollout = rollout_of(model, folder, rank=rank, world_size=2)
    rows, every = [slice(0, 1), slice(1, 4)][rank], [_episodes(), _episodes(TellsMuch)]
    try:
        rollout._episodes, failing = every
        found = _of_two_batches(rollout, rows)
        rollout._episodes = failing
        with pytest.raises(DataError) as error:
            rollout.generate(_prompts(0.0)[rows], PARAMS)
        return found, str(error.value)
    finally:
        for episodes in every:
            episodes._pool.close()

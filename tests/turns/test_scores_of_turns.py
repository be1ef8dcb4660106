"""What estimators, reward functions and metrics make of samples of several turns; values by hand."""

from __future__ import annotations

import json
import random
import statistics

import pytest
import torch

from strop.algorithms.advantages import (
    gae,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    turn_level,
    turns_of,
)
from strop.data.rl_dataset import RLHFDataset
from strop.data.sources import Rows
from strop.errors import DataError
from strop.protocol import DataProto
from strop.rewards.arguments import Played
from strop.rewards.manager import RewardManager
from strop.rewards.reward_output import ScoreCheck
from strop.trainer.metrics import batch_metrics, objective_metrics
from strop.trainer.scores import attach_scores

from byte_tokenizer import byte_tokenizer
from scripted import Script, call, environments_of


class Looks:
    def reset(self, **row):
        pass

    def look(self) -> str:
        """Look."""
        return "42"

    def reward(self, turns):
        return [0.5, *[0] * (len(turns) - 2), 1] if len(turns) > 1 else 0


def test_the_reward_of_a_turn_is_on_its_last_sampled_token():
    result = Script(environments_of(own=Looks), [[call("look"), call("look"), "x"], ["x"]]).play()
    scores, mask = result.batch["environment_scores"], result.batch["response_mask"]
    turns = turns_of(mask)
    lasts = [int((turns[0] == turn).nonzero().max()) for turn in range(3)]
    assert scores[0].nonzero()[:, 0].tolist() == [lasts[0], lasts[2]]
    assert scores[0, lasts].tolist() == [0.5, 0, 1]
    found = [json.loads(text)["rewards"] for text in result.non_tensor_batch["conversation"]]
    assert found == [[0.5, 0, 1], [0]]
    assert int(turns[1].max()) == 0
    holes = torch.tensor([[1, 1, 0, 0, 1, 0, 1]])
    assert turns_of(holes).tolist() == [[0, 0, -1, -1, 1, -1, 2]]


def test_what_a_tool_says_is_no_response_and_turns_are_not_glued_together():
    tokenizer = byte_tokenizer()
    result = Script(environments_of(own=Looks), [[call("look"), "4"]], rows={"ground_truth": ["42"]}).play()
    row = [result.batch[name][0] for name in ("responses", "response_mask")]
    conversation = result.non_tensor_batch["conversation"][0]
    played = Played.of(conversation, *row, "stop", tokenizer)
    assert "42" not in "\n".join(turn.text for turn in played.turns)
    assert played.values([])["last_turn"] == "4"
    seen = []

    def contains(response, ground_truth, turns, n_response_tokens, conversation):
        seen.append((response, n_response_tokens, conversation[-2]["content"]))
        return float(ground_truth in response)

    manager = RewardManager(tokenizer, 0, contains)
    batch = result.union(type(result).from_dict(non_tensors={"data_source": ["d"]}))
    output = manager(batch)
    manager.close()
    assert output.parts["rule"].tolist() == [0]
    assert output.responses == [f"{played.turns[0].text}\n4"]


class Games:
    """It gives no rewards."""

    def reset(self, **row):
        pass

    def respond(self, response, turn):
        return None


def test_an_environment_without_rewards_is_in_no_mean_of_them():
    rows = {"environment": ["looks", "games", "looks"], "data_source": ["a", "b", "a"]}
    scripts = [[call("look"), "x"], ["x"], ["x"]]
    result = Script(environments_of(looks=Looks, games=Games), scripts, rows=rows).play()
    manager = RewardManager(byte_tokenizer(), 0, lambda response: 0.25, by_environment=True)
    output = manager(result)
    manager.close()
    assert output.parts["environment"].nan_to_num(nan=-1).tolist() == [1.5, -1, 0]
    assert output.metrics["reward/environment/mean"] == 0.75
    assert output.metrics["reward/added/b/environment"] == 0
    assert output.token_level_scores.sum(1).tolist() == [1.75, 0.25, 0.25]


class Away(Games):
    def reset(self, **row):
        raise ConnectionError("service away")


def test_contributions_sum_to_the_mean_score_whatever_lost_samples_count():
    rows = {"environment": ["looks", "looks", "away"], "data_source": ["a", "b", "b"]}
    scripts = [[call("look"), "x"], ["x"], ["x"]]
    result = Script(environments_of(looks=Looks, away=Away), scripts, rows=rows).play()
    limits = {"error_score": -8.0, "max_error_rate": 1.0}
    manager = RewardManager(byte_tokenizer(), 0, lambda response: 0.25, by_environment=True, **limits)
    output = ScoreCheck(**limits)(manager(result), result)
    manager.close()
    assert "environment.path=Away: error: ConnectionError: service away" in output.errors[2]
    assert output.metrics["reward/errors"] == 1
    assert output.token_level_scores.sum(1).tolist() == [1.75, 0.25, -8]
    assert (output.metrics["reward/rule/mean"], output.metrics["reward/environment/mean"]) == (0.25, 0.75)
    added = {name: value for name, value in output.metrics.items() if name.startswith("reward/added/")}
    assert added == {
        "reward/added/a/rule": 0.125,
        "reward/added/a/environment": 0.75,
        "reward/added/b/rule": 0.125,
        "reward/added/b/environment": 0.0,
    }
    assert output.metrics["reward/score/b/mean"] == 0.25
    batch = attach_scores(result, output)
    zeros = torch.zeros_like(output.token_level_scores)
    names = {"token_level_rewards": output.token_level_scores, "advantages": zeros, "returns": zeros}
    batch = DataProto({**batch.batch, **names}, {"uid": list("abc")})
    found = batch_metrics(batch, max_prompt_length=999) | objective_metrics(batch, kl_coef=0.0)
    for name in ("critic/score", "critic/rewards"):
        assert [found[f"{name}/{which}"] for which in ("mean", "max", "min")] == [1.0, 1.75, 0.25]
    assert (found["objective/scores"], found["objective/verifiable_correct_rate"]) == (1.0, 0.0)
    assert sum(added.values()) == found["critic/score/mean"]


def test_lost_samples_alone_have_no_rule():
    rows = {"environment": ["looks", "away"], "data_source": ["a", "a"]}
    result = Script(environments_of(looks=Looks, away=Away), [[call("look"), "x"], ["x"]], rows=rows).play()
    manager = RewardManager(byte_tokenizer(), 0, by_environment=True, max_error_rate=1.0)
    output = ScoreCheck(max_error_rate=1.0)(manager(result), result)
    manager.close()
    assert output.token_level_scores.sum(1).tolist() == [1.5, 0]
    assert "away" in output.errors[1]
    assert "rule" not in output.parts
    assert {name for name in output.metrics if "/mean" in name} == {"reward/environment/mean"}


def test_inserted_tokens_cost_no_discount_and_carry_no_value_or_reward():
    mask = torch.tensor([[1.0, 1, 0, 0, 1, 1]])
    for poison in (0.0, 7.0):
        rewards = torch.tensor([[0, 0, poison, poison, 0, 1]])
        values = torch.tensor([[0.1, 0.2, 9 + poison, 9, 0.3, 0.4]])
        advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.8, whiten=False)
        torch.testing.assert_close(advantages, torch.tensor([[0.3854528, 0.42424, 0, 0, 0.492, 0.6]]))
        _, returns = reinforce_plus_plus(rewards, mask, gamma=0.9, whiten=False)
        torch.testing.assert_close(returns, torch.tensor([[0.729, 0.81, 0, 0, 0.9, 1]]))


@pytest.mark.parametrize("lost_score", [0.0, 5.0])
def test_a_lost_sample_is_in_no_group_and_no_denominator(lost_score):
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 0], [0, 0]])
    rewards = torch.tensor([[0.0, 1], [0, 0], [1, 0], [lost_score, 0]])
    uid, scores = ["a"] * 4, torch.tensor([1.0, 0, 1, lost_score])
    expected = torch.tensor([1 / 3, -2 / 3, 1 / 3, 0])[:, None] * mask
    kept = slice(0, 3)
    for norm_by_std in (False, True):
        found, _ = grpo(rewards, mask, uid, scores, norm_by_std=norm_by_std)
        alone, _ = grpo(rewards[kept], mask[kept], uid[kept], scores[kept], norm_by_std=norm_by_std)
        torch.testing.assert_close(found[kept], alone)
        assert found[3].abs().sum() == 0
        by_turn, _ = turn_level(rewards, mask, uid, norm_by_std=norm_by_std)
        torch.testing.assert_close(by_turn, found)
        if not norm_by_std:
            torch.testing.assert_close(found, expected)
    for estimator, options in (
        (rloo, {"uid": uid}),
        (reinforce_plus_plus_baseline, {"uid": uid, "whiten": True}),
        (reinforce_plus_plus, {"gamma": 1.0, "whiten": True}),
    ):
        found, _ = estimator(rewards, mask, **options)
        own = options | ({"uid": uid[kept]} if "uid" in options else {})
        torch.testing.assert_close(found[kept], estimator(rewards[kept], mask[kept], **own)[0])
        assert found[3].abs().sum() == 0


def test_turns_of_equal_scores_are_not_divided_by_the_deviation_of_their_penalties():
    mask = torch.tensor([[1.0, 0, 1]] * 3)
    scores = torch.tensor([[0.0, 9, 1], [1, 9, 1], [0, 9, 1]])  # the last turns are equal, the first ones not
    penalties = torch.tensor([[0.001, 9, 0.0], [0, 9, 0.002], [0, 9, 0.004]])
    found, _ = turn_level(scores - penalties, mask, ["a"] * 3, scores, norm_by_std=True)
    torch.testing.assert_close(
        found[:, 2], torch.tensor([0.002, 0, -0.002])
    )  # 1 - penalty, less the mean 0.998
    left = torch.tensor([0.999, 1.998, 0.996], dtype=torch.float64)
    first = ((left - left.mean()) / (left.std() + 1e-6)).float()
    torch.testing.assert_close(found[:, 0], first, rtol=1e-4, atol=1e-5)
    one_turn = torch.ones(3, 1)
    equal, penalized = torch.ones(3, 1), 1 - penalties[:, 2:]
    by_turn, _ = turn_level(penalized, one_turn, ["a"] * 3, equal, norm_by_std=True)
    by_sample, _ = grpo(penalized, one_turn, ["a"] * 3, equal[:, 0], norm_by_std=True)
    torch.testing.assert_close(by_turn, by_sample)
    assert float(by_turn.abs().max()) < 0.01


def test_a_row_that_names_no_environment_is_an_error():
    rows = [{"prompt": "p", "environment": "code"}, {"prompt": "q", "environment": "codee"}]
    for row in rows:
        row["data_source"] = "d"
    environments = environments_of(code=Looks, game=Looks)
    with pytest.raises(DataError) as error:
        RLHFDataset(
            Rows("rows", rows), byte_tokenizer(), max_prompt_length=999, tools_of=environments.tools_of
        )
    for word in ("row 1", "'codee'", "code, game"):
        assert word in str(error.value)


def _gae_by_hand(rewards, values, sampled, gamma, lam):
    """Sampled tokens one by one, as if the inserted ones were not there; float64."""
    advantages, last, next_value = {}, 0.0, 0.0
    for t in reversed(sampled):
        delta = rewards[t] + gamma * next_value - values[t]
        last, next_value = delta + gamma * lam * last, values[t]
        advantages[t] = last
    return advantages


def _turns_by_hand(rewards, sampled_turns, norm_by_std):
    """For each row and turn: what is left of its rewards against the members that have the turn; float64."""
    left = [[sum(rewards[row][t] for turn in turns[k:] for t in turn) for k in range(len(turns))]
            for row, turns in enumerate(sampled_turns)]  # fmt: skip
    found = [[0.0] * len(turns) for turns in sampled_turns]
    for k in range(max(map(len, left))):
        members = [row for row in range(len(left)) if len(left[row]) > k]
        if len(members) < 2:
            continue
        own = [left[row][k] for row in members]
        mean = statistics.fmean(own)
        scale = statistics.stdev(own) + 1e-6 if norm_by_std and max(own) - min(own) > 1e-6 else 1.0
        for row in members:
            found[row][k] = (left[row][k] - mean) / scale
    return found


@pytest.mark.parametrize("seed", range(20))
def test_estimates_over_turns_are_those_of_plain_loops(seed):
    draw = random.Random(seed)
    n_rows, width = 4, 12
    turns = []  # of each row: runs of tokens with gaps between them
    for _ in range(n_rows):
        at, own = 0, []
        while at < width and len(own) < 4:
            size = draw.randint(1, 3)
            own.append([t for t in range(at, at + size) if t < width])
            at += size + draw.randint(1, 3)
        turns.append(own)
    mask = torch.zeros(n_rows, width)
    for row, own in enumerate(turns):
        mask[row, [t for turn in own for t in turn]] = 1
    rewards, values = torch.rand(n_rows, width).double(), torch.rand(n_rows, width).double()
    found, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8, whiten=False)
    for row, own in enumerate(turns):
        flat = [t for turn in own for t in turn]
        expected = _gae_by_hand(rewards[row].tolist(), values[row].tolist(), flat, 0.9, 0.8)
        assert found[row, flat].tolist() == pytest.approx([expected[t] for t in flat], rel=1e-9)
        assert returns[row, flat].tolist() == pytest.approx(
            [expected[t] + values[row, t].item() for t in flat], rel=1e-9
        )
    assert found[mask == 0].abs().sum() == 0
    for norm_by_std in (False, True):
        by_turn, _ = turn_level(rewards, mask, ["a"] * n_rows, norm_by_std=norm_by_std)
        expected = _turns_by_hand(rewards.tolist(), turns, norm_by_std)
        for row, own in enumerate(turns):
            for turn, value in zip(own, expected[row], strict=True):
                assert by_turn[row, turn].tolist() == pytest.approx([value] * len(turn), rel=1e-6, abs=1e-9)
        assert by_turn[mask == 0].abs().sum() == 0


class Named(Games):
    def reward(self):
        return {"score": 1}


class Beyond(Games):
    def reward(self):
        return 1e39  # infinite in 32 bits


class Counts(Games):
    def reward(self):
        return [0.0, 0.0]  # as one that counts the calls of its methods may


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (Counts, "2 numbers for 1 turns; its argument `turns` has those that reached no method"),
        (Named, "reward returned {'score': 1}: expected a number"),
        (Beyond, "reward returned 1e+39: expected finite numbers"),
    ],
)
def test_a_reward_that_is_no_number_is_named(made, named):
    result = Script(environments_of(own=made), [["x"]]).play()
    assert named in json.loads(result.non_tensor_batch["conversation"][0])["error"]

"""Dynamic sampling: the groups that stay, the batches it takes, and exact resume with groups carried over."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from strop import ActorRolloutRefWorker
from strop.algorithms.advantages import group_statistics
from strop.checkpoint.folder import saved_steps
from strop.errors import RewardError, TrainingError
from strop.protocol import DataProto
from strop.trainer.group_filter import GroupFilter, differing_groups
from strop.trainer.pipeline import lost_of
from strop.trainer.scores import Samples

from killing import kill
from messages import naming
from runs import hashes, make_inputs, metrics, overrides, train

NAN = math.nan


def scored(scores, **parts):
    scores_B = torch.tensor(scores)
    zeros_B = torch.zeros_like(scores_B)
    columns = {f"reward/{name}": torch.tensor(values) for name, values in parts.items()}
    levels = torch.stack([zeros_B, scores_B], dim=1)
    return DataProto({"token_level_scores": levels, "response_mask": torch.ones_like(levels), **columns})


def test_groups_differ_in_the_score_or_in_a_part():
    batch = scored([1.0, 1.0, 0.0, 0.5], rule=[0.0, 1.0, 1.0, 1.0], length=[NAN, 2.0, NAN, NAN])
    assert differing_groups(batch, 2, "score").tolist() == [False, True]
    assert differing_groups(batch, 2, "rule").tolist() == [True, False]
    assert differing_groups(batch, 2, "acc").tolist() == [True, False]
    assert differing_groups(batch, 2, "length").tolist() == [False, False]
    assert differing_groups(batch, 2, "other").tolist() == [False, False]


def _added(groups, found, **metrics):
    found.meta_info |= {"reward_metrics": {}, **metrics}
    groups.add(Samples(found))


def test_a_batch_to_which_the_part_does_not_apply_is_left_out():
    groups = GroupFilter(SimpleNamespace(metric="acc", max_num_gen_batches=10), size=1, n=2)
    for _ in range(2):
        _added(groups, scored([0.0, 1.0], reward_model=[0.0, 1.0]))
    assert not groups.is_full
    _added(groups, scored([0.0, 1.0], rule=[0.0, 1.0]))
    assert groups.take().batch.meta_info["reward_metrics"]["filter/kept_groups"] == 1 / 3
    for _ in range(9):  # of a run that has had the part
        _added(groups, scored([0.0, 1.0], reward_model=[0.0, 1.0]))


@pytest.mark.parametrize(("limit", "batches"), [(0, 3), (10, 3), (1, 1)])
def test_a_part_that_no_reward_has_is_an_error(limit, batches):
    groups = GroupFilter(SimpleNamespace(metric="other", max_num_gen_batches=limit), size=1, n=2)
    for _ in range(batches - 1):
        _added(groups, scored([0.0, 1.0], rule=[0.0, 1.0], length=[1.0, 2.0]))
    with pytest.raises(RewardError, match=naming("metric=other", "score, length, rule")):
        _added(groups, scored([0.0, 1.0], rule=[0.0, 1.0], length=[1.0, 2.0]))


def test_metrics_of_greedy_responses_are_those_of_the_batches():
    groups = GroupFilter(SimpleNamespace(metric="score", max_num_gen_batches=0), size=1, n=2)
    for mean in (1.0, 3.0):
        greedy = {"greedy_reward/rule/mean": mean, "greedy_reward/errors": 1.0}
        _added(groups, scored([0.0, 1.0]), greedy_reward_metrics=greedy)
    found = groups.take().batch.meta_info["greedy_reward_metrics"]
    assert found == {"greedy_reward/rule/mean": 2.0, "greedy_reward/errors": 2.0}
    _added(groups, scored([0.0, 1.0]), greedy_reward_metrics={"greedy_reward/rule/mean": 9.0})
    assert groups.take().batch.meta_info["greedy_reward_metrics"] == {"greedy_reward/rule/mean": 9.0}


def test_scores_that_the_advantages_take_as_equal_do_not_differ():
    # sums of rewards round differently: ten of 0.1, one after the other, are 1.0000001 in float32
    columns = scored([1.0, 1.0000001, 0.0, 2e-6])
    scores_B = columns.batch["token_level_scores"].sum(1)
    assert scores_B[0] != scores_B[1]
    assert differing_groups(columns, 2, "score").tolist() == [False, True]
    assert group_statistics(scores_B, [0, 0, 1, 1]).is_equal_B.tolist() == [True, True, False, False]


def test_metrics_of_the_rollout_are_those_of_all_batches():
    settings = SimpleNamespace(metric="score", max_num_gen_batches=0)
    groups = GroupFilter(settings, size=2, n=2)
    for scores, live in (([0.0, 1.0, 0.0, 0.0], 2), ([1.0] * 4, 1), ([0.0, 1.0, 0.0, 1.0], 3)):
        rollout = {"rollout/servers_live": live, "rollout/lost_requests": 1, "weights/bytes": live}
        found = scored(scores)
        found.meta_info |= {"reward_metrics": {}, "rollout_metrics": rollout}
        groups.add(Samples(found))
    found = groups.take().batch.meta_info["rollout_metrics"]
    assert found == {"rollout/servers_live": 3, "rollout/lost_requests": 3, "weights/bytes": 6}
    assert groups.kept  # whose metrics are not those of the next iteration
    groups.add(Samples(DataProto(groups.kept[0].batch, {}, {"reward_metrics": {}})))
    assert groups.take().batch.meta_info["rollout_metrics"] == {}


REWARD = "def compute_score(solution_str, **sample):\n    return float(len(solution_str) % 2)\n"
SETTINGS = (
    "algorithm.filter_groups.enable=true",
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
)
AHEAD = (
    "actor_rollout_ref.hybrid_engine=false",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
    "trainer.worker_group=local",
    "actor_rollout_ref.actor.rollout_is=token",
    "trainer.async_steps=1",
)
FAILS = 7
"""A batch whose generation fails, where groups are carried over."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), rows=24)
    (folder / "reward.py").write_text(REWARD)
    return folder


def trained(inputs, run, *extra):
    trainer = train(options(inputs, run, *extra))
    try:
        return hashes(trainer)
    finally:
        trainer.shutdown()


def options(inputs, run, *extra):
    return overrides(inputs, run, f"custom_reward_function.path={inputs / 'reward.py'}", *SETTINGS, *extra)


@pytest.mark.parametrize(
    "ahead", [pytest.param((), marks=pytest.mark.slow), AHEAD], ids=["synchronous", "ahead"]
)
def test_every_group_that_is_trained_on_differs_and_a_killed_run_resumes(inputs, tmp_path, ahead):
    expected = trained(inputs, tmp_path / "whole", *ahead)
    seen = []
    for line in metrics(tmp_path / "whole")[1:]:
        rows = pq.read_table(tmp_path / "whole" / "rollouts" / f"step_{line['step']:06d}.parquet").to_pylist()
        scores = [row["score"] for row in rows]
        assert len(rows) == 16
        assert all(a != b for a, b in zip(scores[::2], scores[1::2], strict=True))
        assert line["filter/batches"] >= 1
        tokens = sum(len(row["response_ids"]) for row in rows)
        assert line["filter/generated_tokens"] - line["filter/tokens_dropped"] >= tokens - 4 * 16
        seen += [row["uid"] for row in rows[::2]]
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen, key=lambda uid: tuple(map(int, uid.split("-"))))
    assert max(line["filter/batches"] for line in metrics(tmp_path / "whole")[1:]) > 1
    assert any(line["filter/groups_carried_over"] for line in metrics(tmp_path / "whole")[1:])

    kill("update", 4, options(inputs, tmp_path / "killed", *ahead))
    assert trained(inputs, tmp_path / "killed", *ahead) == expected
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


@pytest.mark.fast("2")
@pytest.mark.parametrize("steps", [1, 2])
def test_groups_carried_over_stay_where_samples_in_flight_fail(inputs, tmp_path, monkeypatch, steps):
    generate = ActorRolloutRefWorker.generate_sequences

    @functools.wraps(generate)
    def generated(self, prompts, *arguments, **callbacks):
        if prompts.meta_info.get("batch") == FAILS:  # none in a validation
            raise ConnectionError("no engine")
        return generate(self, prompts, *arguments, **callbacks)

    monkeypatch.setattr(ActorRolloutRefWorker, "generate_sequences", generated)
    ahead = (*AHEAD, f"trainer.async_steps={steps}")
    with pytest.raises(ConnectionError, match="no engine"):
        trained(inputs, tmp_path, *ahead)
    step = saved_steps(tmp_path)[-1]
    assert metrics(tmp_path)[-1]["filter/groups_carried_over"] > 0
    folder = tmp_path / f"global_step_{step}" / "in_flight"
    assert [path.name for path in folder.iterdir()] == ["kept.pt"]
    kept = torch.load(folder / "kept.pt")["uids"]
    monkeypatch.setattr(ActorRolloutRefWorker, "generate_sequences", generate)
    trained(inputs, tmp_path, *ahead)
    rows = pq.read_table(tmp_path / "rollouts" / f"step_{step + 1:06d}.parquet")
    assert rows["uid"].to_pylist()[: len(kept)] == kept


@pytest.mark.parametrize(
    ("files", "changed", "words"),
    [
        (["kept.pt"], ["trainer.async_steps"], []),
        (["kept.pt"], ["data.seed"], ["groups carried over are dropped"]),
        (["kept.pt", "schedule.pt"], ["trainer.async_steps"], ["samples in flight are not used"]),
        (["schedule.pt"], ["data.seed"], ["samples in flight are not used"]),
        (["kept.pt", "schedule.pt"], ["data.seed"], ["samples in flight", "groups carried over"]),
        (["kept.pt", "schedule.pt"], [], []),
    ],
)
def test_a_resume_says_of_which_samples_the_prompts_come_again_now(tmp_path, files, changed, words):
    for name in files:
        (tmp_path / name).touch()
    lost = lost_of(tmp_path, changed)
    assert [text.startswith(word) for text, word in zip(lost, words, strict=True)] == [True] * len(words)


def test_a_task_without_differences_ends_with_an_error(inputs, tmp_path):
    (inputs / "same.py").write_text("def compute_score(**sample):\n    return 1.0\n")
    with pytest.raises(TrainingError, match=naming("after 2 batches, 0 of 8 prompts")):
        trained(
            inputs,
            tmp_path,
            f"custom_reward_function.path={inputs / 'same.py'}",
            "algorithm.filter_groups.max_num_gen_batches=2",
        )

"""Whole runs with an environment: the same weights for any delay of its answers, and after a resume."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from strop.errors import RewardError

from runs import hashes, make_inputs, overrides, train

ENVIRONMENT = """
import os, random, time

class Replies:
    def reset(self, extra_info, seed):
        self.index, self.seed = extra_info["index"], seed
        self.first = self.index % 10

    def respond(self, response, turn):
        if delay := float(os.environ.get("DELAY", 0)):
            time.sleep(random.SystemRandom().random() * delay)
        return None if turn == 2 else f"{self.first}{self.seed % 10}"

    def reward(self, turns):
        return [len(turn.text) / 10 for turn in turns]

class Flaky(Replies):
    def reset(self, extra_info, seed):
        if extra_info["index"] % 4 == 0:
            raise ConnectionError("service away")
        super().reset(extra_info, seed)

class Breaks(Replies):
    def respond(self, response, turn):
        how = self.index % 6
        if turn:
            return None
        if self.index == 0:
            time.sleep(600)
        if how == 1:
            raise ValueError("no")
        if how == 2:
            print("x" * 10_000_000)
        if how == 3 and os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "314159"])
        if how == 4:
            os._exit(3)
        return "go on"
"""
STOPS = "actor_rollout_ref.rollout.stop_token_ids=[4,5,6,7,8,9]"  # a random policy seldom says <end>


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "replies.py").write_text(ENVIRONMENT)
    return folder


def _options(inputs: Path, run: Path, *extra: str, name: str = "Replies") -> list[str]:
    return overrides(
        inputs,
        run,
        f"environment.path={inputs / 'replies.py'}:{name}",
        "environment.turn_length=4",
        "data.max_response_length=16",
        "data.val_files=[]",
        STOPS,
        *extra,
    )


def _metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


SETTINGS = {
    "sync": ["algorithm.adv_estimator=grpo"],
    "turn_level": ["algorithm.adv_estimator=turn_level"],
    "critic": ["algorithm.adv_estimator=gae"],
    "remax": ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"],
    "async": [
        "algorithm.adv_estimator=grpo",
        "trainer.async_steps=2",
        "trainer.worker_group=local",
        "trainer.resource_pools={learner: [1], rollout: [1]}",
        "trainer.placement={Rollout: rollout}",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.actor.rollout_is=token",
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_do_not_depend_on_when_answers_come(inputs, tmp_path, monkeypatch, name):
    found = []
    for delay in ("0", "0.05"):
        monkeypatch.setenv("DELAY", delay)
        found.append(hashes(train(_options(inputs, tmp_path / delay, *SETTINGS[name]))))
    assert found[0] == found[1]
    last = _metrics(tmp_path / "0")[-1]
    assert last["turns/mean"] > 1
    assert 0 < last["turns/share_inserted"] < 1
    assert last["reward/environment/mean"] > 0


def test_a_resumed_run_with_samples_between_turns_trains_the_same(inputs, tmp_path):
    options = ["trainer.save_freq=1", "trainer.total_training_steps=4", *SETTINGS["async"]]
    whole = hashes(train(_options(inputs, tmp_path / "whole", *options)))
    checkpoint = f"trainer.resume_mode={tmp_path / 'whole' / 'global_step_1'}"
    assert hashes(train(_options(inputs, tmp_path / "resumed", *options, checkpoint))) == whole


def _processes(name: str) -> set[str]:
    """Return ids and commands of the running processes that this one has started, and of orphans."""
    table = subprocess.run(["ps", "-eo", "ppid,pid,args"], capture_output=True, text=True, check=True).stdout
    parents = {str(os.getpid()), "1"}
    return {line for line in table.splitlines() if line.split()[0] in parents and name in line}


def test_methods_that_break_cost_their_turns_and_leave_no_process(inputs, tmp_path):
    grpo = "algorithm.adv_estimator=grpo"
    steps = "trainer.total_training_steps=3"  # an epoch
    before = _processes("strop.environments")
    trainer = train(_options(inputs, tmp_path, grpo, steps, "environment.timeout=4", name="Breaks"))
    assert _processes("strop.environments") > before
    kept = [group.worker for group in trainer.groups.values()]  # as a traceback does
    trainer.shutdown()
    assert _processes("strop.environments") <= before
    assert kept
    assert not _processes("sleep 314159")
    found = _metrics(tmp_path)
    assert [metrics["turns/ended_by/error"] for metrics in found] == [0] * 3
    # of the 24 rows one hangs, 4 raise and 4 exit, unless their first turn is cut at its limit
    assert 0 < sum(metrics["turns/errors"] for metrics in found) <= 2 * 9


def test_lost_samples_are_counted_and_train_nothing(inputs, tmp_path):
    grpo = "algorithm.adv_estimator=grpo"
    with pytest.raises(RewardError, match=r"the environment lost the sample: .*service away"):
        train(_options(inputs, tmp_path / "strict", grpo, name="Flaky"))
    options = _options(inputs, tmp_path / "lax", grpo, "reward_model.max_error_rate=1", name="Flaky")
    train(options)
    last = _metrics(tmp_path / "lax")[-1]
    assert last["turns/ended_by/error"] == pytest.approx(last["reward/error_rate"])
    assert 0 < last["turns/ended_by/error"] < 1

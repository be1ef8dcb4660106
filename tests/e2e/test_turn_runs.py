"""Whole runs with an environment: the same weights for any delay of its answers, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from processes import none_left, with_token
from safetensors.torch import load_file

from strop.engines.torch.engine import TorchEngine
from strop.errors import RewardError
from strop.workers import critic, policy

from runs import hashes, make_inputs, metrics, overrides, train

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
NOTED = "def compute_score(response): return {'score': 0.0, 'note': f'it says {response}'}\n"
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


@pytest.mark.fast("async")
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


FILTER = (
    "trainer.async_steps=1",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=score",
)


@pytest.mark.fast("in flight")
@pytest.mark.parametrize(("step", "more"), [(1, ()), (2, FILTER)], ids=["in flight", "carried over"])
def test_a_resumed_run_with_samples_between_turns_trains_the_same(inputs, tmp_path, step, more):
    (inputs / "noted.py").write_text(NOTED)  # a text in the place of a number
    reward = f"custom_reward_function.path={inputs / 'noted.py'}"
    options = ["trainer.save_freq=1", "trainer.total_training_steps=4", *SETTINGS["async"], reward, *more]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = hashes(train(_options(inputs, whole, *options)))
    assert bool(_metrics(whole)[step - 1].get("filter/groups_carried_over")) == bool(more)
    checkpoint = f"trainer.resume_mode={whole / f'global_step_{step}'}"
    assert hashes(train(_options(inputs, resumed, *options, checkpoint))) == expected
    for later in range(step + 1, 5):  # with the conversations, and the texts of rewards
        found = [pq.read_table(run / "rollouts" / f"step_{later:06d}.parquet") for run in (whole, resumed)]
        assert found[0].equals(found[1])
        assert "reward_text/note" in found[0].column_names


def test_methods_that_break_cost_their_turns_and_leave_no_process(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("STROP_TEST_TOKEN", str(tmp_path))
    grpo = "algorithm.adv_estimator=grpo"
    steps = "trainer.total_training_steps=3"  # an epoch
    trainer = train(_options(inputs, tmp_path, grpo, steps, "environment.timeout=4", name="Breaks"))
    assert any("strop.environments" in command for command in with_token(str(tmp_path)))
    kept = [group.worker for group in trainer.groups.values()]  # as a traceback does
    trainer.shutdown()
    left = ("strop.environments", "sleep 314159")
    assert none_left(lambda: [one for one in with_token(str(tmp_path)) if any(name in one for name in left)])
    assert kept
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


# All that reads numbers of tokens: KL in reward and loss, entropy, ratios to an old policy, a critic.
EVERYTHING = (
    "algorithm.adv_estimator=gae",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.rollout_is=token",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
)


def _noisy(outputs, mask):
    """Replace what a pass says of inserted and missing tokens; the graph of the others stays."""
    return {
        name: torch.where(mask.bool(), found, found + torch.randn_like(found))
        if found.shape == mask.shape
        else found
        for name, found in outputs.items()
    }


@pytest.mark.slow
def test_what_the_models_say_of_inserted_tokens_changes_nothing(inputs, tmp_path, monkeypatch):
    plain = hashes(train(_options(inputs, tmp_path / "plain", *EVERYTHING)))
    infer = TorchEngine.infer

    def noisy_infer(engine, batch, *arguments, **options):
        return _noisy(infer(engine, batch, *arguments, **options), batch.batch["response_mask"])

    def noisy_loss(make):
        def made(*arguments, **options):
            loss = make(*arguments, **options)
            return lambda outputs, columns: loss(_noisy(outputs, columns["response_mask"]), columns)

        return made

    monkeypatch.setattr(TorchEngine, "infer", noisy_infer)
    monkeypatch.setattr(policy, "actor_objective", noisy_loss(policy.actor_objective))
    monkeypatch.setattr(critic, "critic_objective", noisy_loss(critic.critic_objective))
    assert hashes(train(_options(inputs, tmp_path / "noisy", *EVERYTHING))) == plain
    assert metrics(tmp_path / "noisy") == metrics(tmp_path / "plain")


LAYOUTS = {
    "padded": ("actor_rollout_ref.model.use_remove_padding=False",),
    "one row": tuple(
        f"{key}_micro_batch_size_per_gpu=1"
        for key in ("actor_rollout_ref.actor.ppo", "actor_rollout_ref.ref.log_prob", "critic.ppo")
    ),
    "two ranks": ("trainer.n_gpus_per_node=2", "trainer.worker_group=ray", "trainer.save_freq=2"),
}


@pytest.mark.fast("padded")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("ranks" in name)) for name in LAYOUTS]
)
def test_weights_do_not_depend_on_how_turns_are_laid_out(inputs, tmp_path, name, request):
    """Norm of the difference over the norm."""
    if "ranks" in name:
        request.getfixturevalue("ray_session")
    packed = ("actor_rollout_ref.model.use_remove_padding=True", "trainer.save_freq=2", *EVERYTHING)
    found = []
    for folder, extra in (("whole", ()), ("other", LAYOUTS[name])):
        train(_options(inputs, tmp_path / folder, *packed, *extra)).shutdown()
        for role in ("actor", "critic"):
            weights = load_file(tmp_path / folder / f"global_step_2/{role}/huggingface/model.safetensors")
            found.append(torch.cat([weights[key].double().flatten() for key in sorted(weights)]))
    for whole, other in zip(found[:2], found[2:], strict=True):
        assert (whole - other).norm() / whole.norm() < 1e-6

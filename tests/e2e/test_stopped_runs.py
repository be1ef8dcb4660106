"""Runs that are stopped, and not killed: what they save, what they say, and the same numbers in the end."""

from __future__ import annotations

import functools
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from strop import errors
from strop.checkpoint.folder import latest_step, saved_steps, verify
from strop.cli.main import main
from strop.config.load import load_config
from strop.controller.group import LocalWorkerGroup
from strop.data.loader import SampledBatches
from strop.errors import ConfigError, TrainingError
from strop.protocol import DataProto
from strop.rewards.base import as_reward
from strop.trainer.build import build_trainer
from strop.trainer.loop import Run
from strop.trainer.ppo import PPO
from strop.trainer.ray_trainer import ReinforcementRun
from strop.trainer.supervised.base import SupervisedTrainer
from strop.trainer.validation import Validator
from strop.workers.policy import ActorRolloutRefWorker

import forked
import supervised_runs
from messages import mentions
from runs import hashes, make_inputs, metrics, overrides, train, undrawn

SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=200",
    "trainer.total_training_steps=5",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
)
APART = (
    "trainer.worker_group=local",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
)
FILTERED = ("algorithm.filter_groups.enable=true",)
PLACES = {
    "generate": (ActorRolloutRefWorker, "generate_sequences"),
    "evaluate": (ActorRolloutRefWorker, "compute_ref_log_prob"),
    "update": (PPO, "_mini_batches"),
    "validate": (ReinforcementRun, "validate"),
    "finish": (PPO, "finish"),
    "draw": (ReinforcementRun, "_draw"),
    "supervised": (SupervisedTrainer, "step"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), rows=16)
    (folder / "reward.py").write_text("def compute_score(solution_str): return len(solution_str) % 2\n")
    return folder


def options_of(inputs: Path, run: Path, *extra: str) -> list[str]:
    reward = f"custom_reward_function.path={inputs / 'reward.py'}"
    return overrides(inputs, run, *SETTINGS, reward, *extra)


@pytest.fixture(scope="module")
def undisturbed(inputs):
    found: dict[tuple[str, ...], Any] = {}

    def run(extra: tuple[str, ...]) -> Any:
        if extra not in found:
            folder = inputs / f"undisturbed_{len(found)}"
            found[extra] = hashes(train(options_of(inputs, folder, *extra))), metrics(folder)
        return found[extra]

    return run


def strike(place: str, call: int, *numbers: int) -> None:
    """Have this process get the signals in the given call of a method."""
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), iter(range(1, 1000))

    @functools.wraps(original)
    def struck(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(owner, name, struck)


def command_struck(command: str, options: list[str], place: str, call: int, *numbers: int) -> None:
    strike(place, call, *numbers)
    sys.exit(main([command, *options]))


def impatient(*arguments: Any) -> None:
    errors._TOGETHER_S = 0.0
    command_struck(*arguments)


def slow(*values: Any) -> Any:
    """A neighbour of the other cases."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.fast("generate-4-2-SIGINT-extra0", "update-3-3-SIGHUP-extra2")
@pytest.mark.parametrize(
    ("place", "call", "saved", "name", "extra"),
    [
        ("generate", 4, 2, "SIGINT", ()),  # the third call is of the validation
        slow("evaluate", 3, 2, "SIGTERM", ()),
        ("update", 3, 3, "SIGHUP", ()),
        slow("validate", 1, 2, "SIGINT", ()),
        slow("generate", 4, 2, "SIGINT", ("trainer.async_save=true",)),
        slow("finish", 3, None, "SIGINT", (*APART, "trainer.async_steps=1")),
        ("finish", 3, None, "SIGTERM", (*APART, "trainer.async_steps=4")),
        slow("generate", 9, None, "SIGINT", FILTERED),
    ],
)
def test_a_stopped_run_saves_its_last_whole_iteration_and_goes_on_to_the_same_numbers(
    inputs, undisturbed, tmp_path, place, call, saved, name, extra
):
    number, run = getattr(signal, name), tmp_path / "run"
    options = options_of(inputs, run, *extra)
    done = forked.run(command_struck, "train", options, place, call, number)
    assert done.returncode == 128 + number, done.stderr[-3000:]
    said = done.stderr.splitlines()[-1]
    saved = saved or saved_steps(run)[0]  # ahead, what is called when is another one's affair
    assert mentions(said, {"SIGINT": "Ctrl-C"}.get(name, name), f"stopped at step {saved}, saved", "goes on")
    assert saved_steps(run) == [saved]
    verify(run / f"global_step_{saved}")
    assert (hashes(train(options)), metrics(run)) == undisturbed(extra)


@pytest.mark.parametrize("kind", ["sft", slow("train-rm"), slow("dpo")])
def test_a_stopped_supervised_run_saves_the_iteration_under_way_and_goes_on_to_the_same_numbers(
    tmp_path, kind
):
    inputs = supervised_runs.make_inputs(tmp_path)
    options = supervised_runs.overrides(inputs, tmp_path / "run", "trainer.save_freq=-1")
    done = forked.run(command_struck, kind, options, "supervised", 2, signal.SIGTERM)
    assert done.returncode == 143, done.stderr[-3000:]
    assert mentions(done.stderr.splitlines()[-1], "SIGTERM", "stopped at step 2, saved", "goes on")
    assert saved_steps(tmp_path / "run") == [2]
    resumed = supervised_runs.train(kind, options)
    straight = supervised_runs.train(kind, [*options, f"trainer.default_local_dir={tmp_path / 'straight'}"])
    assert resumed.group.weights_hash() == straight.group.weights_hash()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def failing_reward(command: str, options: list[str], flag: Path) -> None:
    """Let the reward function raise from the fourth generation on, in the third iteration."""
    original, calls = ActorRolloutRefWorker.generate_sequences, iter(range(1, 1000))

    @functools.wraps(original)
    def generate(*arguments: Any, **given: Any) -> Any:
        if next(calls) == 4:
            flag.touch()
        return original(*arguments, **given)

    ActorRolloutRefWorker.generate_sequences = generate
    sys.exit(main([command, *options]))


def test_a_run_whose_reward_fails_saves_its_last_whole_iteration_and_goes_on_to_the_same_numbers(
    inputs, tmp_path
):
    flag, reward, run = tmp_path / "flag", tmp_path / "reward.py", tmp_path / "run"
    reward.write_text(
        f"import os\ndef compute_score(solution_str):\n"
        f"    return len(solution_str) % (0 if os.path.exists({str(flag)!r}) else 2)\n"
    )
    options = options_of(inputs, run, f"custom_reward_function.path={reward}")
    done = forked.run(failing_reward, "train", options, flag)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "ZeroDivisionError" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert mentions(last, "stopped at step 2, saved", f"trainer.resume_mode={run}/global_step_2 goes on")
    verify(run / "global_step_2")
    flag.unlink()
    resumed = hashes(train(options)), metrics(run)
    straight = options_of(inputs, tmp_path / "straight", f"custom_reward_function.path={reward}")
    assert resumed == (hashes(train(straight)), metrics(tmp_path / "straight"))


@pytest.mark.parametrize("kind", ["train", "sft", "train-rm"])
def test_an_error_of_a_validation_costs_no_update_and_no_line(inputs, tmp_path, monkeypatch, kind):
    settings = "trainer.save_freq=-1", "trainer.test_freq=2", "trainer.val_before_train=false"
    fails = mock.Mock(side_effect=TrainingError("no validation"))
    if kind == "train":
        monkeypatch.setattr(Validator, "report", fails)
        go, options = train, overrides(inputs, tmp_path / "run", *settings)
    else:
        monkeypatch.setattr(supervised_runs.KINDS[kind][1], "evaluate", fails)
        tables = supervised_runs.make_inputs(tmp_path)
        go = partial(supervised_runs.train, kind)
        options = supervised_runs.overrides(tables, tmp_path / "run", *settings)
        options += ["trainer.total_training_steps=2"] if kind == "train-rm" else []  # after the last one
    with pytest.raises(TrainingError, match="no validation"):
        go(options)
    assert saved_steps(tmp_path / "run") == [2]
    verify(tmp_path / "run" / "global_step_2")
    monkeypatch.undo()
    go(options)
    go([*options, f"trainer.default_local_dir={tmp_path / 'straight'}"])
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    exported = (tmp_path / name / "final_model" / "config.json" for name in ("run", "straight"))
    assert len({path.read_bytes() for path in exported}) == 1  # a reward model's has its calibration


def test_a_run_whose_last_validation_failed_ends_with_its_cause_corrected(inputs, tmp_path, monkeypatch):
    reward, run = tmp_path / "reward.py", tmp_path / "run"
    reward.write_text("def compute_score(solution_str):\n    return len(solution_str) % 2\n")
    settings = "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.val_before_train=false"
    options = overrides(inputs, run, *settings, f"custom_reward_function.path={reward}")
    with monkeypatch.context() as patch:
        patch.setattr(Validator, "report", mock.Mock(side_effect=TrainingError("no validation")))
        with pytest.raises(TrainingError, match="no validation"):
            train(options)
    reward.write_text("def compute_score(solution_str):\n    return len(solution_str) % 3\n")
    train([*options, f"trainer.resume_mode={run / 'global_step_2'}"])
    assert [line["step"] for line in metrics(run)] == [1, 2]
    assert (run / "final_model" / "config.json").is_file()


def test_an_error_remains_the_cause_where_the_reward_of_samples_in_flight_fails(inputs, tmp_path):
    def reward(batch: DataProto) -> torch.Tensor:
        if batch.non_tensor_batch["uid"][0] != "1-0":
            raise ValueError("of samples in flight")
        return torch.ones(batch.batch["responses"].shape)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        raise LookupError("of the program")

    options = options_of(inputs, tmp_path / "run", *APART, "trainer.async_steps=1")
    trainer = build_trainer(load_config(options))
    try:
        trainer.init_workers()
        trainer.ppo.reward_fn = as_reward(reward)
        with undrawn(), pytest.raises(LookupError, match="of the program"):
            trainer.fit(on_step)
    finally:
        trainer.shutdown()
    assert saved_steps(tmp_path / "run") == [1]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(FILTERED, marks=pytest.mark.slow),
        (*APART, "trainer.async_steps=1"),
    ],
    ids=["each for itself", "groups carried over", "a batch ahead"],
)
def test_a_trainer_that_was_stopped_can_go_on(inputs, undisturbed, tmp_path, settings):
    trainer = build_trainer(load_config(options_of(inputs, tmp_path / "run", *settings)))

    def stop(step: int, metrics: dict[str, float]) -> bool:
        if step == 1:
            return False
        raise KeyboardInterrupt

    try:
        trainer.init_workers()
        with undrawn():
            trainer.fit(stop)
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(stop)
            trainer.fit()
        assert (hashes(trainer), metrics(tmp_path / "run")) == undisturbed(settings)
    finally:
        trainer.shutdown()


@pytest.mark.parametrize("settings", [pytest.param((), marks=pytest.mark.slow), FILTERED])
def test_a_trainer_that_saves_nothing_can_go_on(inputs, undisturbed, tmp_path, settings):
    """Its batches keep their numbers, by which samples are drawn, and its filter the groups it has."""
    nothing = "trainer.save_freq=-1", "trainer.save_minutes=null"
    trainer = build_trainer(load_config(options_of(inputs, tmp_path / "run", *settings, *nothing)))
    try:
        trainer.init_workers()
        with undrawn():
            trainer.fit(lambda step, metrics: step < 2)
            trainer.fit()
        assert trainer.global_step > 2
        assert hashes(trainer) == undisturbed(settings)[0]
    finally:
        trainer.shutdown()


def test_a_trainer_whose_rollout_holds_samples_cannot_go_on(inputs, tmp_path):
    options = options_of(inputs, tmp_path / "run", *APART, "trainer.async_steps=2")
    trainer = build_trainer(load_config(options))
    try:
        trainer.init_workers()
        with undrawn():
            trainer.fit(lambda step, metrics: False)
            with pytest.raises(ConfigError, match="make a new trainer") as raised:
                trainer.fit()
        assert mentions(str(raised.value), "trainer.async_steps=2", "goes on from the last checkpoint")
    finally:
        trainer.shutdown()
    assert saved_steps(tmp_path / "run") == [1]


def test_a_worker_class_of_ones_own_is_saved_without_being_stopped(monkeypatch):
    saved: list[dict[str, Any]] = []
    monkeypatch.setattr(Run, "save", lambda self, **options: saved.append(options))
    run = object.__new__(ReinforcementRun)
    run.settings = SimpleNamespace(async_steps=0)
    run.trainer = SimpleNamespace(rollout=LocalWorkerGroup(worker_cls=SimpleNamespace, init_kwargs={}))
    run.save(by_time=True, stopping=True)
    assert saved == [{"by_time": True, "stopping": True}]


def test_the_state_of_a_sampler_that_returns_what_it_changes_stays_that_of_the_iteration(monkeypatch):
    order = [1, 2]

    class Sampler(list):
        def state_dict(self):
            return order

    batches = SampledBatches(Sampler([0]), 1)
    monkeypatch.setattr(ReinforcementRun, "state_dict", lambda self: {"loader": batches.state_dict()})
    run = object.__new__(ReinforcementRun)
    run.trainer, run.settings = SimpleNamespace(pipeline=None), SimpleNamespace(save_freq=1)
    run.mark()
    order.append(3)
    assert run._whole["loader"]["sampler"] == [1, 2]


@pytest.mark.slow
def test_a_stopped_run_copies_what_it_has_saved_by_time(inputs, tmp_path):
    settings = "trainer.save_minutes=1e-9", f"trainer.default_hdfs_dir={tmp_path / 'copies'}"
    options = options_of(inputs, tmp_path / "run", *settings)
    done = forked.run(command_struck, "train", options, "generate", 2, signal.SIGTERM)
    assert mentions(done.stderr.splitlines()[-1], "stopped at step 1, saved")
    verify(tmp_path / "copies" / "global_step_1")


def test_a_second_interrupt_in_an_update_stops_at_once(inputs, tmp_path):
    options = options_of(inputs, tmp_path)
    numbers = signal.SIGINT, signal.SIGTERM
    done = forked.run(impatient, "train", options, "update", 3, *numbers)
    assert done.returncode == 143, done.stderr[-3000:]
    assert mentions(done.stderr.splitlines()[-1], "stopped after step 2", "nothing is saved")
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("numbers", [(signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM, signal.SIGTERM)])
def test_signals_of_one_cause_are_one_interrupt(monkeypatch, numbers):
    """A shell and the kernel report a closed terminal, and ``timeout`` signals its child and the group."""
    monkeypatch.setattr(errors, "_TOGETHER_S", 600.0)
    received: list[int] = []

    def update() -> None:
        with errors.HeldInterrupts(list) as held:
            held.begin()
            for number in numbers:
                os.kill(os.getpid(), number)

    with errors.signals_interrupt(received):
        with pytest.raises(KeyboardInterrupt):
            update()
        os.kill(os.getpid(), signal.SIGHUP)  # in the middle of the save
    assert received == [numbers[0]]


def test_an_interrupt_that_waits_is_not_lost_where_a_worker_dies():
    """A restart would train on."""
    received: list[int] = []

    def update(error: Exception) -> None:
        with errors.HeldInterrupts(list) as held:
            held.begin()
            os.kill(os.getpid(), signal.SIGTERM)
            raise error

    with errors.signals_interrupt(received):
        with pytest.raises(KeyboardInterrupt) as stopped:
            update(errors.WorkerError("rank 1 died"))
        assert mentions(stopped.value.__notes__[0], "rank 1 died")
        with pytest.raises(errors.WorkerError, match="a bug"):  # of which no restart comes
            update(errors.WorkerError("a bug", is_final=True))
    assert received == [signal.SIGTERM]


@pytest.mark.slow
def test_without_time_and_number_nothing_is_saved(inputs, tmp_path):
    options = options_of(inputs, tmp_path, "trainer.save_minutes=null")
    done = forked.run(command_struck, "train", options, "generate", 4, signal.SIGINT)
    assert done.returncode == 130, done.stderr[-3000:]
    assert mentions(done.stderr.splitlines()[-1], "stopped after step 2", "nothing is saved")


def test_a_run_stopped_after_its_end_names_its_model(inputs, tmp_path):
    options = options_of(inputs, tmp_path, "trainer.total_training_steps=1")
    done = forked.run(command_struck, "train", options, "draw", 1, signal.SIGINT)
    assert mentions(done.stderr.splitlines()[-1], "stopped after step 1", str(tmp_path / "final_model"))
    assert any((tmp_path / "final_model").glob("*.safetensors"))


@pytest.mark.slow
def test_a_run_from_an_earlier_checkpoint_saves_what_it_has_though_an_abandoned_one_has_its_name(
    inputs, tmp_path
):
    options = options_of(inputs, tmp_path)
    train([*options, "trainer.save_freq=1", "trainer.total_training_steps=4"])
    earlier = f"trainer.resume_mode={tmp_path / 'global_step_2'}"
    done = forked.run(command_struck, "train", [*options, earlier], "update", 1, signal.SIGINT)
    assert mentions(done.stderr.splitlines()[-1], "stopped at step 3, saved")
    assert latest_step(tmp_path) == 3


def test_checkpoints_by_time_are_the_last_two_and_the_best_validated_one(inputs, tmp_path):
    often = "trainer.save_minutes=1e-9", "trainer.save_freq=3", "trainer.max_ckpt_to_keep=1"
    options = overrides(
        inputs, tmp_path, *SETTINGS, *often, "trainer.total_training_steps=7", "trainer.test_freq=1"
    )
    train(options)
    found = metrics(tmp_path)
    by_time = [line for line in found if line["step"] in (1, 2, 4, 5)]
    (score,) = (name for name in by_time[0] if name.startswith("val/test_score/"))
    best = max(by_time, key=lambda line: (line[score], line["step"]))["step"]
    # of save_freq: the last, which is the run's end
    assert saved_steps(tmp_path) == sorted({best, 4, 5, 7})
    last = tmp_path / "global_step_7" / "actor" / "huggingface"
    assert (tmp_path / "final_model" / "model.safetensors").samefile(last / "model.safetensors")

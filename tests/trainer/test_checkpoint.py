"""Checkpoints on disk: saved at once or in the background, through failures, interrupts and deaths."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from saving_groups import STATE, Group
from torch.distributed.checkpoint import state_dict_saver

from strop.checkpoint import folder as checkpoint_folder
from strop.checkpoint import store as checkpoint
from strop.checkpoint.folder import newest_model, verify
from strop.checkpoint.hub import model_of
from strop.checkpoint.store import Checkpoints
from strop.engines.torch.engine import TorchEngine
from strop.engines.torch.state import load as restore
from strop.engines.torch.state import materialize, save
from strop.errors import CheckpointError, TrainingError, WorkerError
from strop.models.policy import PolicyModel
from strop.results import Run as Results
from strop.trainer.loop import Run

import forked
import tiny_model
from messages import mentions, naming

LATEST = "latest_checkpointed_iteration.txt"
NO_ROOM = OSError(28, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def load(checkpoints: Checkpoints, found: Path | None = None) -> int:
    """Return the number that a group loads, by default from the latest checkpoint."""
    group = Group(0)
    checkpoints.load(found or checkpoints.find("auto"), {"actor": group})
    return group.number


def test_saved_state_is_loaded_and_the_reference_is_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(7), "critic": Group(8), "ref": Group(9)}, STATE)
    groups = {"actor": Group(0), "critic": Group(0), "ref": Group(0)}
    found = checkpoints.find("auto")
    assert found == tmp_path / "global_step_3"
    assert checkpoints.load(found, groups) == STATE
    assert [group.number for group in groups.values()] == [7, 8, 0]
    assert not (found / "ref").exists()


def test_the_global_random_generators_go_on_where_they_were(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    checkpoints.save(1, {"actor": Group(1)}, STATE)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    checkpoints.load(tmp_path / "global_step_1", {"actor": Group(1)})
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_the_background_save_of_one_rank_beside_vllms_group(tmp_path, monkeypatch):
    """On a GPU that group has no CPU backend, and torch looks at it although there are no other ranks."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    of_a_gpu = SimpleNamespace(_device_types=[torch.device("cuda")])
    monkeypatch.setattr(state_dict_saver, "_get_default_group", lambda: of_a_gpu)
    model, again = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    try:
        save(model, None, tmp_path / "actor", background=True).result()
        restore(again, None, tmp_path / "actor")
    finally:
        if alone:
            dist.destroy_process_group()
    assert torch.equal(again.weight, model.weight)


def test_a_driver_that_has_not_used_gpus_leaves_them_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_rng_state_all", Mock(side_effect=RuntimeError("CUDA is initialized"))
    )
    assert checkpoint.random_state()["cuda"] == []


def test_a_machine_with_fewer_gpus_goes_on(monkeypatch):
    state, restored = checkpoint.random_state(), []
    state["cuda"] = [torch.tensor([1]), torch.tensor([2])]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", lambda state, device: restored.append(device))
    checkpoint.restore_random_state(state)
    assert restored == [0]


def test_checkpoints_after_that_of_a_resume_are_pruned_when_a_new_one_is_whole(tmp_path):
    def kept() -> list[int]:
        return sorted(int(path.name.removeprefix("global_step_")) for path in tmp_path.glob("global_step_*"))

    checkpoints = Checkpoints(tmp_path, max_to_keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, {"actor": Group(step)}, STATE)
    checkpoints = Checkpoints(tmp_path, max_to_keep=2)
    checkpoints.load(checkpoints.find(str(tmp_path / "global_step_20")), {"actor": Group(0)})
    with pytest.raises(CheckpointError):
        checkpoints.save(22, {"actor": Group(22, failure=NO_ROOM)}, STATE)
    assert kept() == [20, 30]
    checkpoints.save(22, {"actor": Group(22)}, STATE)
    assert kept() == [20, 22]
    assert checkpoints.find("auto") == tmp_path / "global_step_22"
    for step in (24, 26):
        checkpoints.save(step, {"actor": Group(step)}, STATE)
    assert kept() == [24, 26]


def test_a_kill_amid_a_removal_leaves_no_damaged_checkpoint(tmp_path, monkeypatch):
    def kill(name: str, step: int) -> None:
        if name == "prune":
            raise KeyboardInterrupt

    checkpoints = Checkpoints(tmp_path, max_to_keep=1)
    checkpoints.save(1, {"actor": Group(1)}, STATE)
    monkeypatch.setattr(checkpoint, "crash_point", kill)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, {"actor": Group(2)}, STATE)
    assert checkpoint_folder.saved_steps(tmp_path) == [2]
    monkeypatch.undo()
    Checkpoints(tmp_path, max_to_keep=1).save(3, {"actor": Group(3)}, STATE)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_3"]


@pytest.mark.parametrize("fails_in", ["save_is_done", "finish_save"])
def test_an_error_of_what_a_save_waits_for_is_not_one_of_the_save(tmp_path, fails_in):
    error = RuntimeError("no more samples")

    class Part:
        def save_is_done(self) -> bool:
            self.step("save_is_done")
            return True

        def finish_save(self) -> None:
            self.step("finish_save")

        def step(self, name: str) -> None:
            with checkpoint.awaiting():
                if name == fails_in:
                    raise error

    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(RuntimeError) as raised:
        checkpoints.save(3, {"actor": Group(1)}, STATE, later=lambda folder: Part())
    assert raised.value is error
    assert names(tmp_path) == []


def test_saving_an_iteration_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    checkpoints.save(3, {"actor": Group(2)}, STATE)
    assert load(checkpoints) == 2
    assert names(tmp_path) == ["global_step_3", LATEST]


def test_a_death_between_the_two_renames_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    (tmp_path / "global_step_3").rename(tmp_path / "global_step_3.old")
    assert load(checkpoints) == 1


def test_a_run_of_which_only_checkpoints_were_copied_goes_on_from_the_newest_whole_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (9, 10, 11):
        checkpoints.save(step, {"actor": Group(step)}, STATE)
    (tmp_path / LATEST).unlink()
    (tmp_path / "global_step_11" / "manifest.json").unlink()
    assert checkpoints.find("auto") == tmp_path / "global_step_10"
    assert load(checkpoints) == 10


def test_the_newest_model_of_a_run_is_that_of_the_latest_iteration_whatever_the_clock_says(tmp_path):
    def final(iteration):
        return write_model(tmp_path / "final_model", iteration)

    def write_model(folder, iteration):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()
        (folder / "config.json").touch()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": iteration}))
        return folder

    checkpoints, run = Checkpoints(tmp_path), Results(tmp_path)
    assert newest_model(tmp_path) is None
    with pytest.raises(CheckpointError, match=naming("no trained model")):
        run.model_path  # noqa: B018
    found = final(5)
    assert newest_model(tmp_path) == found == run.model_path
    for step in (4, 6, 10):
        exported = write_model(checkpoints.save(step, {"actor": Group(1)}, STATE) / "actor/huggingface", step)
    os.utime(found, (2e9, 2e9))
    assert run.model_path == exported
    with model_of(newest_model(tmp_path), role="actor") as uploaded:
        assert uploaded == (exported, 10)
    final(10)
    assert newest_model(tmp_path) == found
    checkpoints.go_on_from(6, "auto")
    assert newest_model(tmp_path) == found
    (found / "trainer_state.json").unlink()
    assert run.model_path == tmp_path / "global_step_6" / "actor" / "huggingface"
    (run.model_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=naming("strop export", "global_step_6")):
        run.model_path  # noqa: B018


def test_remains_of_a_death_are_removed_by_the_next_save(tmp_path):
    """After the two renames, and while writing."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    shutil.copytree(tmp_path / "global_step_3", tmp_path / "global_step_3.old")
    (tmp_path / "global_step_2.tmp" / "actor").mkdir(parents=True)
    checkpoints.save(4, {"actor": Group(2)}, STATE)
    assert names(tmp_path) == ["global_step_3", "global_step_4", LATEST]


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("actor/state", None, "actor/state"),
        ("trainer.pt", "", "0 bytes"),
        ("manifest.json", None, "checkpoint"),
        ("manifest.json", '["trainer.pt"]', "checkpoint"),
        ("manifest.json", "7", "checkpoint"),
        ("manifest.json", '{"a": "b"}', "checkpoint"),
        ("manifest.json", '{"a": tr', "checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named_before_anything_is_loaded(tmp_path, file, content, part):
    folder = Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=naming(tmp_path, part)):
        verify(folder)


def test_a_folder_that_is_no_checkpoint_or_lacks_a_role_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="folder"):
        verify(tmp_path / "nothing")
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(3, {"actor": Group(1)}, STATE)
    with pytest.raises(CheckpointError, match=naming("critic")):
        checkpoints.load(folder, {"actor": Group(1), "critic": Group(1)})


def test_a_state_of_the_driver_that_holds_code_is_not_run(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(3, {"actor": Group(1)}, STATE)

    class Runs:
        def __reduce__(self):
            return (tmp_path / "run").touch, ()

    torch.save({"random": Runs()}, folder / "trainer.pt")
    checkpoint_folder.seal(folder)
    with pytest.raises(CheckpointError, match=naming("trainer.pt")):
        checkpoints.load(folder, {"actor": Group(1)})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda state: state.pop("random"), "random"),
        (lambda state: state.pop("global_step"), "global_step"),
        (lambda state: state.update(global_step="third"), "third"),
        (lambda state: state["random"].pop("numpy"), "numpy"),
        (lambda state: state["random"].update(python=[1, 2]), "unpack"),
        (lambda state: state.pop("loader"), "loader"),
        (lambda state: state.update(seconds=None), "None"),
    ],
)
def test_a_state_of_the_driver_with_other_values_is_named(tmp_path, monkeypatch, change, part):
    monkeypatch.setattr(Run, "__abstractmethods__", frozenset())
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(3, {}, {**STATE, "loader": {}})
    state = torch.load(folder / "trainer.pt")
    change(state)
    torch.save(state, folder / "trainer.pt")
    checkpoint_folder.seal(folder)
    run = object.__new__(Run)
    run.checkpoints, run.settings = checkpoints, SimpleNamespace(val_only=False, resume_mode="auto")
    run.trainer = SimpleNamespace(groups={}, train_loader=Mock(), total_steps=9, image_processor=None)
    with pytest.raises(CheckpointError, match=naming("trainer.pt", part)):
        run.resume(folder, goes_on=True)


def test_workers_are_given_absolute_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []

    class Noting(Group):
        def save_checkpoint(self, folder: Path, background: bool = False) -> None:
            seen.append(folder)
            super().save_checkpoint(folder, background)

    Checkpoints(Path("run")).save(3, {"actor": Noting(1)}, STATE)
    assert seen == [tmp_path / "run" / "global_step_3.tmp" / "actor"]


# -------------------------------------------------------------------------------------- in the background


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_background_save_has_the_state_of_its_iteration_byte_for_byte(tmp_path):
    actor, critic = Group(7), Group(8)
    now = Checkpoints(tmp_path / "now").save(3, {"actor": actor, "critic": critic}, STATE)
    checkpoints = Checkpoints(tmp_path / "later", background=True)
    later = checkpoints.save(3, {"actor": actor, "critic": critic}, STATE)
    actor.number = critic.number = 99  # training goes on
    assert names(tmp_path / "later") == ["global_step_3.tmp"]
    assert (tmp_path / "later" / "global_step_3.tmp" / "trainer.pt").is_file()

    actor.let_it_write()
    checkpoints.poll()
    assert names(tmp_path / "later") == ["global_step_3.tmp"]  # the critic still writes
    critic.let_it_write()
    checkpoints.poll()
    assert names(tmp_path / "later") == ["global_step_3", LATEST]
    verify(later)
    assert files(later) == files(now)


def test_the_next_save_waits_for_the_one_in_flight_and_the_oldest_is_pruned(tmp_path):
    group, before = Group(0), None
    with Checkpoints(tmp_path, background=True, max_to_keep=2) as checkpoints:
        for step in (2, 4, 10, 12):
            group.number = step
            saved = checkpoints.save(step, {"actor": group}, STATE)
            group.number = -1
            assert checkpoints.find("auto") == before
            before = saved
    assert names(tmp_path) == ["global_step_10", "global_step_12", LATEST]
    assert (tmp_path / LATEST).read_text() == "12\n"
    assert load(checkpoints) == 12


# ---------------------------------------------------------------------------------------------- failures


def run_until(error: BaseException, checkpoints: Checkpoints, *groups: Group) -> None:
    """Save iterations 3, 4, ... and then raise ``error``, all within the run's context."""
    with checkpoints:
        for step, group in enumerate(groups, start=3):
            checkpoints.save(step, {"actor": group}, STATE)
        raise error


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("failure", "raised", "parts"),
    [
        (NO_ROOM, CheckpointError, ("iteration 4", "No space left", "is 3")),
        (CheckpointError("rank 1: full"), CheckpointError, ("iteration 4", "rank 1: full", "is 3")),
        (WorkerError("rank 1 on a: full", is_final=True), CheckpointError, ("iteration 4", "rank 1 on a")),
        (WorkerError("rank 1 on node a died"), WorkerError, ("rank 1 on node a",)),
    ],
)
def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, background, failure, raised, parts):
    checkpoints = Checkpoints(tmp_path, background=background)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    checkpoints.finish()
    groups = {"actor": Group(1), "critic": Group(2, failure=failure)}

    def save() -> None:
        checkpoints.save(4, groups, STATE)
        for group in groups.values():
            group.let_it_write()
        checkpoints.poll()

    with pytest.raises(raised, match=naming(*parts)):
        save()
    assert names(tmp_path) == ["global_step_3", LATEST]
    checkpoints.save(5, {"actor": Group(1)}, STATE)
    checkpoints.finish()
    verify(tmp_path / "global_step_5")


def test_the_error_that_ended_the_run_is_the_one_that_is_raised(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, background=True)
    full = Group(2, failure=NO_ROOM)
    with pytest.raises(TrainingError, match="rewards"):
        run_until(TrainingError("the rewards are not numbers"), checkpoints, full)
    assert mentions(caplog.text, "iteration 3")
    assert names(tmp_path) == []


def test_when_the_second_group_cannot_begin_the_first_one_is_waited_for(tmp_path):
    class Refusing(Group):
        def save_checkpoint(self, folder: Path, background: bool = False) -> None:
            raise NO_ROOM

    actor = Group(1)
    with pytest.raises(CheckpointError, match=naming("No space left")):
        Checkpoints(tmp_path, background=True).save(3, {"actor": actor, "critic": Refusing(2)}, STATE)
    assert actor.save_is_done()
    assert names(tmp_path) == []


def _save_state(folder: Path) -> None:
    module = torch.nn.Linear(400, 400)
    optimizer = torch.optim.AdamW(module.parameters())
    materialize(optimizer)
    save(module, optimizer, folder)


def _export_model(folder: Path) -> None:
    """safetensors has an error class of its own for a full disk."""
    tokenizer = tiny_model.build_tokenizer()
    engine = TorchEngine(PolicyModel(tiny_model.build_model(tokenizer)), device=torch.device("cpu"))
    engine.export(folder, tokenizer)


def _write_with_limit(write, folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write(folder)
    except CheckpointError as error:
        print("refused:", error)


@pytest.mark.parametrize(
    ("write", "part"),
    [(_save_state, "cannot write the checkpoint"), (_export_model, "cannot write the model")],
)
def test_a_file_that_the_system_refuses_to_grow_is_one_clear_error(tmp_path, write, part):
    """The real refusal, a limit on file sizes, met by torch's and safetensors' own writers."""
    run = forked.run(_write_with_limit, write, tmp_path / "folder")
    assert f"refused: {part}" in run.stdout, run.stderr


# --------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_a_run_that_ends_by_an_exception_keeps_what_was_in_flight(tmp_path, error):
    group = Group(5)
    group.may_write.set()
    checkpoints = Checkpoints(tmp_path, background=True)
    with pytest.raises(type(error)):
        run_until(error, checkpoints, group)
    verify(tmp_path / "global_step_3")
    assert checkpoints.find("auto") == tmp_path / "global_step_3"


def test_an_interrupt_while_a_save_is_waited_for_does_not_drop_it(tmp_path):
    class Interrupted(Group):
        def finish_save(self) -> None:
            if self.save_is_done():
                return super().finish_save()
            self.may_write.set()
            raise KeyboardInterrupt

    group = Interrupted(5)
    with pytest.raises(KeyboardInterrupt):
        run_until(ValueError("not reached"), Checkpoints(tmp_path, background=True), group, group)
    verify(tmp_path / "global_step_3")
    assert names(tmp_path) == ["global_step_3", LATEST]


@pytest.mark.parametrize("step", ["seal", "rename", "latest"])
def test_an_interrupt_while_a_save_gets_its_name_does_not_drop_it(tmp_path, monkeypatch, step):
    owner, name = {
        "seal": (checkpoint, "seal"),
        "rename": (Path, "rename"),
        "latest": (checkpoint_folder, "atomic_write_text"),
    }[step]
    original, interrupts = getattr(owner, name), iter([KeyboardInterrupt])

    def interrupted(*args):
        for interrupt in interrupts:
            raise interrupt
        return original(*args)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_until(ValueError("not reached"), Checkpoints(tmp_path, background=True), Group(5), Group(6))
    verify(tmp_path / "global_step_3")
    assert names(tmp_path) == ["global_step_3", LATEST]


def test_after_an_interrupt_a_save_that_hangs_is_dropped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "AFTER_AN_INTERRUPT_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        run_until(KeyboardInterrupt(), Checkpoints(tmp_path, background=True), Group(5), Group(6))
    assert mentions(caplog.text, "iteration 4", "0 s", "3")
    assert names(tmp_path) == ["global_step_3", LATEST]


def test_a_second_interrupt_drops_the_save_in_flight(tmp_path):
    class Interrupted(Group):
        def save_is_done(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_until(KeyboardInterrupt(), Checkpoints(tmp_path, background=True), Interrupted(5))
    assert names(tmp_path) == []

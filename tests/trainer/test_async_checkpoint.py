from __future__ import annotations

from pathlib import Path

import pytest
from saving_groups import STATE, Group

from strop.checkpoint import folder as checkpoint_folder
from strop.checkpoint import store as checkpoint
from strop.checkpoint.folder import verify
from strop.checkpoint.store import Checkpoints
from strop.errors import CheckpointError, TrainingError, WorkerError

from messages import mentions, naming


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_until(error: BaseException, checkpoints: Checkpoints, *groups: Group) -> None:
    """A run that saves iteration 3, 4, ... and then ends by ``error``."""
    with checkpoints:
        for step, group in enumerate(groups, start=3):
            checkpoints.save(step, {"actor": group}, STATE)
        raise error


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
    assert names(tmp_path / "later") == ["global_step_3", "latest_checkpointed_iteration.txt"]
    verify(later)
    assert files(later) == files(now)


def test_the_next_save_waits_for_the_one_in_flight_and_the_oldest_is_pruned(tmp_path):
    group = Group(0)
    with Checkpoints(tmp_path, background=True, max_to_keep=2) as checkpoints:
        for step in (1, 2, 3, 4):
            group.number = step
            checkpoints.save(step, {"actor": group}, STATE)
            group.number = -1
            assert checkpoints.find("auto") == (tmp_path / f"global_step_{step - 1}" if step > 1 else None)
    assert names(tmp_path) == ["global_step_3", "global_step_4", "latest_checkpointed_iteration.txt"]
    checkpoints.load(checkpoints.find("auto"), {"actor": group})
    assert group.number == 4


def test_a_rank_that_could_not_write_is_a_checkpoint_error(tmp_path):
    failure = WorkerError("Actor: rank 1 on node a: No space left on device", is_final=True)
    checkpoints = Checkpoints(tmp_path, background=True)
    checkpoints.save(4, {"actor": Group(2, failure=failure)}, STATE)
    with pytest.raises(CheckpointError, match=naming("iteration 4", "rank 1 on node a", "none")):
        checkpoints.finish()


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
    assert names(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]


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
    assert names(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]


def test_after_an_interrupt_a_save_that_hangs_is_dropped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "AFTER_AN_INTERRUPT_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        run_until(KeyboardInterrupt(), Checkpoints(tmp_path, background=True), Group(5), Group(6))
    assert mentions(caplog.text, "iteration 4", "0 s", "3")
    assert names(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]


def test_a_second_interrupt_drops_the_save_in_flight(tmp_path):
    class Interrupted(Group):
        def save_is_done(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_until(KeyboardInterrupt(), Checkpoints(tmp_path, background=True), Interrupted(5))
    assert names(tmp_path) == []


def test_a_failure_in_the_background_names_the_iteration_and_the_last_whole_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, background=True)
    good, full = Group(1), Group(2, failure=CheckpointError("rank 1: No space left on device"))
    checkpoints.save(3, {"actor": good}, STATE)
    checkpoints.finish()
    checkpoints.save(4, {"actor": good, "critic": full}, STATE)
    good.let_it_write(), full.let_it_write()
    with pytest.raises(CheckpointError, match=naming("iteration 4", "No space left", "rank 1", "3")):
        checkpoints.poll()
    assert names(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]
    checkpoints.save(5, {"actor": good}, STATE)  # nothing of the failure is left
    checkpoints.finish()
    verify(tmp_path / "global_step_5")


def test_a_dead_worker_is_told_as_what_it_is_and_its_save_is_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, background=True)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    checkpoints.save(4, {"actor": Group(2, failure=WorkerError("rank 1 on node a died"))}, STATE)
    with pytest.raises(WorkerError, match=naming("rank 1 on node a")):
        checkpoints.finish()
    assert names(tmp_path) == ["global_step_3", "latest_checkpointed_iteration.txt"]


def test_the_error_that_ended_the_run_is_the_one_that_is_raised(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, background=True)
    full = Group(2, failure=OSError(28, "No space left on device"))
    with pytest.raises(TrainingError, match="rewards"):
        run_until(TrainingError("the rewards are not numbers"), checkpoints, full)
    assert mentions(caplog.text, "iteration 3")
    assert names(tmp_path) == []


def test_when_the_second_group_cannot_begin_the_first_one_is_waited_for(tmp_path):
    class Refusing(Group):
        def save_checkpoint(self, folder: Path, background: bool = False) -> None:
            raise OSError(28, "No space left on device")

    actor = Group(1)
    with pytest.raises(CheckpointError, match=naming("No space left")):
        Checkpoints(tmp_path, background=True).save(3, {"actor": actor, "critic": Refusing(2)}, STATE)
    assert actor.save_is_done()
    assert names(tmp_path) == []


def test_what_a_killed_run_was_writing_is_removed_by_the_next_save(tmp_path):
    (tmp_path / "global_step_2.tmp" / "actor").mkdir(parents=True)
    Checkpoints(tmp_path).save(5, {"actor": Group(1)}, STATE)
    assert names(tmp_path) == ["global_step_5", "latest_checkpointed_iteration.txt"]


def test_workers_are_given_absolute_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []

    class Noting(Group):
        def save_checkpoint(self, folder: Path, background: bool = False) -> None:
            seen.append(folder)
            super().save_checkpoint(folder, background)

    Checkpoints(Path("run")).save(3, {"actor": Noting(1)}, STATE)
    assert seen == [tmp_path / "run" / "global_step_3.tmp" / "actor"]

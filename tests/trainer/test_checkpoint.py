from __future__ import annotations

import random
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from saving_groups import STATE, Group

from strop.checkpoint.export import export
from strop.checkpoint.folder import verify
from strop.checkpoint.store import Checkpoints
from strop.errors import CheckpointError

from messages import naming


def test_what_was_saved_is_loaded_and_the_reference_is_not_saved(tmp_path):
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


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, max_to_keep=2)
    for step in (2, 4, 10, 12):
        checkpoints.save(step, {"actor": Group(step)}, STATE)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_10",
        "global_step_12",
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12\n"


def test_what_came_after_the_checkpoint_of_a_resume_goes_when_a_new_one_is_whole(tmp_path):
    def kept() -> list[int]:
        return sorted(int(path.name.removeprefix("global_step_")) for path in tmp_path.glob("global_step_*"))

    checkpoints = Checkpoints(tmp_path, max_to_keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, {"actor": Group(step)}, STATE)
    checkpoints = Checkpoints(tmp_path, max_to_keep=2)
    checkpoints.load(checkpoints.find(str(tmp_path / "global_step_20")), {"actor": Group(0)})
    with pytest.raises(CheckpointError):
        checkpoints.save(22, {"actor": Group(22, failure=OSError(28, "No space left"))}, STATE)
    assert kept() == [20, 30]
    checkpoints.save(22, {"actor": Group(22)}, STATE)
    assert kept() == [20, 22]
    assert checkpoints.find("auto") == tmp_path / "global_step_22"
    for step in (24, 26):
        checkpoints.save(step, {"actor": Group(step)}, STATE)
    assert kept() == [24, 26]


def test_saving_an_iteration_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    checkpoints.save(3, {"actor": Group(2)}, STATE)
    group = Group(0)
    checkpoints.load(checkpoints.find("auto"), {"actor": group})
    assert group.number == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step_3",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_death_between_the_two_renames_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    (tmp_path / "global_step_3").rename(tmp_path / "global_step_3.old")
    group = Group(0)
    checkpoints.load(checkpoints.find("auto"), {"actor": group})
    assert group.number == 1


def test_a_death_after_the_two_renames_leaves_nothing_for_ever(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    shutil.copytree(tmp_path / "global_step_3", tmp_path / "global_step_3.old")
    checkpoints.save(4, {"actor": Group(2)}, STATE)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_3", "global_step_4"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "actor" / "state").unlink(), "actor/state"),
        (lambda folder: (folder / "trainer.pt").write_bytes(b""), "trainer.pt .*0 bytes"),
        (lambda folder: (folder / "manifest.json").unlink(), "checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text('["trainer.pt"]'), "checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text("7"), "checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text('{"a": "b"}'), "checkpoint"),
        (lambda folder: (folder / "manifest.json").write_text('{"a": tr'), "checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named_before_anything_is_loaded(tmp_path, damage, message):
    folder = Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        verify(folder)


def test_a_folder_that_is_no_checkpoint_or_lacks_a_role_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="folder"):
        verify(tmp_path / "nothing")
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(3, {"actor": Group(1)}, STATE)
    with pytest.raises(CheckpointError, match=naming("critic")):
        checkpoints.load(folder, {"actor": Group(1), "critic": Group(1)})


def test_a_failing_save_leaves_the_earlier_checkpoint_and_no_rubbish(tmp_path):
    class Full(Group):
        def save_checkpoint(self, folder: Path, background: bool = False) -> None:
            super().save_checkpoint(folder, background)
            raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"actor": Group(1)}, STATE)
    with pytest.raises(CheckpointError, match=naming("No space left", "is 3")):
        checkpoints.save(4, {"actor": Full(2)}, STATE)
    assert checkpoints.find("auto") == tmp_path / "global_step_3"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_the_system_refuses_to_grow_is_one_clear_error(tmp_path):
    """The real refusal: a limit on file sizes, met by torch's own writer."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        import torch
        from strop.engines.torch.state import materialize, save
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        module = torch.nn.Linear(400, 400)
        optimizer = torch.optim.AdamW(module.parameters())
        materialize(optimizer)
        from strop.errors import CheckpointError
        try:
            save(module, optimizer, Path(sys.argv[1]))
        except CheckpointError as error:
            print("refused:", error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "state")], capture_output=True, text=True
    )
    assert "refused: cannot write the checkpoint" in run.stdout, run.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_an_export_that_the_system_refuses_is_one_clear_error(tmp_path):
    """safetensors has an error class of its own for a disk that is full."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import tiny_model, torch
        from strop.engines.torch.engine import TorchEngine
        from strop.errors import CheckpointError
        from strop.models.policy import PolicyModel
        tokenizer = tiny_model.build_tokenizer()
        engine = TorchEngine(PolicyModel(tiny_model.build_model(tokenizer)), device=torch.device("cpu"))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            engine.export(Path(sys.argv[1]), tokenizer)
        except CheckpointError as error:
            print("refused:", error)
    """
    examples = Path(__file__).parents[2] / "examples"
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "model"), str(examples)],
        capture_output=True,
        text=True,
    )
    assert "refused: cannot write the model" in run.stdout, run.stderr


def test_export_copies_the_model_of_a_whole_checkpoint_once(tmp_path):
    folder = Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    out = export(folder, tmp_path / "model")
    assert (out / "config.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match="exists"):
        export(folder, out)
    with pytest.raises(CheckpointError, match=naming("critic", "actor")):
        export(folder, tmp_path / "other", role="critic")

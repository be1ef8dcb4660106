"""SIGTERM and Ctrl-C in the middle of a save: the exit status, the cause, and what is saved."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint import filesystem, staging
from transformers import PreTrainedConfig

from strop.checkpoint.folder import verify
from strop.cli.main import main

import forked
from runs import make_inputs, overrides

QUICK = ("algorithm.adv_estimator=grpo", "trainer.test_freq=-1", "trainer.val_before_train=false")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def train_interrupted(options: list[str], run: Path, where: str, number: int) -> None:
    """``strop train``, whose process gets a signal in the middle of what it writes in iteration 2."""

    strikes = iter([number])  # a second one would drop the save at once

    def strike(folder: Path) -> None:
        if folder.exists():
            for signal_number in strikes:
                os.kill(os.getpid(), signal_number)

    second = run / "global_step_2.tmp"

    def before(owner, name: str, folder: Path) -> None:
        original = getattr(owner, name)

        def disturbed(*arguments, **options):
            strike(folder)
            return original(*arguments, **options)

        setattr(owner, name, disturbed)

    if where == "shard":  # inside torch's writer, which calls this from C++

        class Stream:
            def __init__(self, stream) -> None:
                self.stream = stream

            def write(self, data):
                if self.stream.tell() > 100:
                    strike(second)
                return self.stream.write(data)

            def __getattr__(self, name: str):
                return getattr(self.stream, name)

        original = filesystem._write_item
        filesystem._write_item = lambda transforms, stream, *rest: original(transforms, Stream(stream), *rest)
    elif where == "staging":
        before(staging.DefaultStager, "stage", second)
    elif where == "seal":
        before(os, "fsync", second / "trainer.pt")
    elif where == "final model":
        before(PreTrainedConfig, "save_pretrained", run)
    sys.exit(main(["train", *options]))


def slow(*values):
    """A neighbour of the other cases."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.fast("shard-SIGTERM-143-extra0")
@pytest.mark.parametrize(
    ("where", "name", "status", "extra"),
    [
        ("shard", "SIGTERM", 143, ("trainer.save_freq=1",)),
        slow("shard", "SIGINT", 130, ("trainer.save_freq=1",)),
        ("seal", "SIGTERM", 143, ("trainer.save_freq=1",)),
        slow("staging", "SIGTERM", 143, ("trainer.save_freq=1", "trainer.async_save=true")),
        slow("final model", "SIGTERM", 143, ("trainer.save_freq=-1",)),
    ],
)
def test_an_interrupt_in_a_save_is_told_and_the_iteration_is_saved_all_the_same(
    inputs, tmp_path, where, name, status, extra
):
    run = tmp_path / "run"
    done = forked.run(
        train_interrupted, overrides(inputs, run, *QUICK, *extra), run, where, getattr(signal, name)
    )
    assert done.returncode == status, done.stderr[-2000:]
    cause = {"SIGINT": "Ctrl-C"}.get(name, name)
    assert done.stderr.splitlines()[-1].startswith(f"{cause}: stopped at step 2, saved"), done.stderr[-2000:]
    assert "Error" not in done.stderr
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2\n"  # saved again, or completed
    verify(run / "global_step_2")
    if where != "final model":
        verify(run / "global_step_1")
    assert not list(run.glob("*.tmp/actor"))

"""Resuming runs of strategy=megatron after kill -9."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from strop.checkpoint.export import export

import forked
from killing import ROWS, SETTINGS, copy_until, kill
from runs import make_inputs, metrics, overrides, train

if find_spec("megatron") is None:  # found, not imported: its import takes 2 s of every worker
    pytest.skip("needs megatron-core: pip install 'strop[megatron]'", allow_module_level=True)
pytestmark = pytest.mark.slow

MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.model.external_lib=engines.megatron_shim",
)
LAYOUTS = {
    "one process": ("trainer.worker_group=local",),
    "tp2 on Ray": (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    ),
}


def weights_of(run: Path) -> list[bytes]:
    """Exported weights of the last checkpoint: a background save has shards only."""
    roles = ("actor", "critic")
    folders = [export(run / "global_step_4", run / f"exported_{role}", role=role) for role in roles]
    return [(folder / "model.safetensors").read_bytes() for folder in folders]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("background", [False, True], ids=["", "background saves"])
def test_a_killed_run_continues_to_the_same_numbers(tmp_path, layout, background):
    inputs = make_inputs(tmp_path, rows=ROWS)
    settings = (*SETTINGS, *MEGATRON, *LAYOUTS[layout], f"trainer.async_save={background}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = forked.run(train, overrides(inputs, whole, *settings))  # the shim would stay in this process
    assert done.returncode == 0, done.stderr[-2000:]
    options = overrides(inputs, killed, *settings)
    copy_until(whole, 2, killed)
    kill("update", 4, options)
    done = forked.run(train, options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert metrics(killed) == metrics(whole)
    assert weights_of(killed) == weights_of(whole)

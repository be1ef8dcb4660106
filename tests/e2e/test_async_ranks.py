"""Saving in the background by two ranks on Ray, against the synchronous save of the same run."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from strop.checkpoint.export import export
from strop.checkpoint.folder import verify

from runs import hashes, make_inputs, metrics, overrides, saved_state, train

TWO_RANKS = ("trainer.n_gpus_per_node=2", "trainer.save_freq=1", "trainer.async_save=true")


def finished(options) -> dict[str, str]:
    trainer = train(options)
    try:
        return hashes(trainer)
    finally:
        trainer.shutdown()


def test_two_ranks_write_in_the_background_what_they_write_at_once(ray_session, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    now, later, remote = tmp_path / "now", tmp_path / "later", tmp_path / "remote"
    expected = finished(overrides(inputs, now, *TWO_RANKS, "trainer.async_save=false"))
    options = overrides(inputs, later, *TWO_RANKS, f"trainer.default_hdfs_dir={remote}")
    assert finished(options) == expected
    for step in (1, 2):
        checkpoint = later / f"global_step_{step}"
        verify(checkpoint)
        verify(remote / checkpoint.name)
        for role in ("actor", "critic"):
            assert len(list((checkpoint / role).glob("*.distcp"))) == 2  # one of each rank
            found, wanted = saved_state(checkpoint / role), saved_state(now / checkpoint.name / role)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in found)

    # No rank is needed to make a model of it; the synchronous save wrote the same one.
    model = load_file(export(later / "global_step_1", tmp_path / "model") / "model.safetensors")
    wanted = load_file(now / "global_step_1" / "actor" / "huggingface" / "model.safetensors")
    assert model.keys() == wanted.keys()
    assert all(torch.equal(model[name], wanted[name]) for name in model)

    (later / "latest_checkpointed_iteration.txt").write_text("1\n")
    assert finished(options) == expected
    assert metrics(later) == metrics(now)

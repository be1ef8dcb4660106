"""Saving in the background by two ranks on Ray, and a resume from it."""

from __future__ import annotations

from strop.checkpoint.folder import verify

from runs import hashes, make_inputs, metrics, overrides, train

TWO_RANKS = ("trainer.n_gpus_per_node=2", "trainer.save_freq=1", "trainer.async_save=true")


def finished(options) -> dict[str, str]:
    trainer = train(options)
    try:
        return hashes(trainer)
    finally:
        trainer.shutdown()


def test_two_ranks_save_in_the_background_what_a_resume_needs(ray_session, tmp_path):
    run, remote = tmp_path / "run", tmp_path / "remote"
    options = overrides(
        make_inputs(tmp_path / "inputs"), run, *TWO_RANKS, f"trainer.default_hdfs_dir={remote}"
    )
    expected, record = finished(options), metrics(run)
    for step in (1, 2):
        checkpoint = run / f"global_step_{step}"
        verify(checkpoint)
        verify(remote / checkpoint.name)
        for role in ("actor", "critic"):
            assert len(list((checkpoint / role).glob("*.distcp"))) == 2  # one of each rank
    (run / "latest_checkpointed_iteration.txt").write_text("1\n")
    assert finished(options) == expected
    assert metrics(run) == record

"""Generation ahead of training: one result whatever is slow, and exact resume with samples in flight."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop import ActorRolloutRefWorker
from strop.checkpoint.folder import verify
from strop.rewards.worker.pool import RewardProcess

from killing import kill
from runs import hashes, make_inputs, metrics, overrides, train

ROWS = 16  # two iterations per epoch
SETTINGS = (
    "actor_rollout_ref.hybrid_engine=false",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
    "trainer.worker_group=local",
    "actor_rollout_ref.actor.rollout_is=token",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=200",
    "data.max_response_length=12",
    "trainer.total_training_steps=6",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"), rows=ROWS)


@pytest.fixture(scope="module")
def undisturbed(inputs) -> Any:
    """The runs that all others must equal, by ``async_steps``."""

    @functools.cache
    def run(steps: int) -> tuple[Path, dict[str, str]]:
        folder = inputs / f"undisturbed_{steps}"
        return folder, trained(overrides(inputs, folder, *SETTINGS, f"trainer.async_steps={steps}"))

    return run


def trained(options: list[str]) -> dict[str, str]:
    """Train; return the hashes."""
    trainer = train(options)
    try:
        return hashes(trainer)
    finally:
        trainer.shutdown()


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("steps", "owner", "method"),
    [
        slow(1, ActorRolloutRefWorker, "generate_sequences"),
        slow(4, ActorRolloutRefWorker, "generate_sequences"),
        (4, ActorRolloutRefWorker, "update_actor"),
        slow(4, RewardProcess, "evaluate_all"),
    ],
)
def test_the_result_does_not_depend_on_what_is_slow(
    inputs, undisturbed, tmp_path, monkeypatch, steps, owner, method
):
    plain = getattr(owner, method)

    @functools.wraps(plain)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return plain(*args, **kwargs)

    other, expected = undisturbed(steps)
    monkeypatch.setattr(owner, method, delayed)
    assert trained(overrides(inputs, tmp_path, *SETTINGS, f"trainer.async_steps={steps}")) == expected
    assert metrics(tmp_path) == metrics(other)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_threads_give_the_numbers_of_ray(ray_session, inputs, undisturbed, tmp_path, steps):
    other, expected = undisturbed(steps)
    options = overrides(inputs, tmp_path, *SETTINGS, f"trainer.async_steps={steps}")
    assert trained([*options, "trainer.worker_group=ray"]) == expected
    assert metrics(tmp_path) == metrics(other)


POINTS = [
    ("update", 3),
    ("log", 3),
    ("save actor", 3),
    ("in_flight", 4),
    ("seal", 3),
    ("rename", 3),
    ("latest", 2),
]


@pytest.mark.parametrize(
    ("steps", "point", "iteration"),
    [
        (4, "in_flight", 3),
        slow(1, "in_flight", 3),
        slow(2, "rename", 3),
        slow(4, "seal", 2),
        *(slow(4, point, iteration) for point, iteration in POINTS),
    ],
)
def test_a_killed_run_resumes_with_its_samples_in_flight(
    inputs, undisturbed, tmp_path, steps, point, iteration
):
    other, expected = undisturbed(steps)
    options = overrides(inputs, tmp_path, *SETTINGS, f"trainer.async_steps={steps}")
    kill(point, iteration, options)
    assert trained(options) == expected
    assert metrics(tmp_path) == metrics(other)
    for checkpoint in tmp_path.glob("global_step_*"):
        verify(checkpoint)


@pytest.mark.fast("2-data.max_response_length=5")
@pytest.mark.parametrize(
    ("before", "change"),
    [
        (2, "trainer.async_steps=0"),
        slow(0, "trainer.async_steps=1"),
        slow(1, "actor_rollout_ref.rollout.n=3"),
        (2, "data.max_response_length=5"),
        slow(1, "data.max_prompt_length=9"),
    ],
)
def test_a_run_resumes_with_other_samples_and_says_what_is_lost(inputs, tmp_path, caplog, before, change):
    options = overrides(inputs, tmp_path, *SETTINGS, f"trainer.async_steps={before}")
    kill("update", 4, options)
    trained([*options, change])
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert ("samples in flight are not used" in caplog.text) == (before > 0)


@pytest.mark.slow
def test_rows_that_a_resume_leaves_out_are_not_paired_with_samples_in_flight(inputs, tmp_path, caplog):
    """No key names other data: the same file has fewer rows now."""
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    longer = [
        {**row, "prompt": [{"role": "user", "content": f"1{number}+1="}]}
        for number, row in enumerate(rows[:8])
    ]
    pq.write_table(pa.Table.from_pylist([*longer, *rows]), tmp_path / "train.parquet")
    cut = (
        f"data.train_files={tmp_path / 'train.parquet'}",
        "data.max_prompt_length=6",
        "data.truncation=left",
    )
    options = overrides(inputs, tmp_path / "run", *SETTINGS, "trainer.async_steps=1", *cut)
    kill("update", 4, options)
    latest = (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip()
    named = f"trainer.resume_mode={tmp_path / 'run' / f'global_step_{latest}'}"
    trained([*options, named, "data.filter_overlong_prompts=True"])
    assert "samples in flight are not used" in caplog.text
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(6, 8), (8, 6)])
def test_the_number_of_iterations_may_change_at_a_resume(inputs, tmp_path, before, after):
    options = overrides(inputs, tmp_path, *SETTINGS, "trainer.async_steps=2")
    kill("save actor", 6, [*options, f"trainer.total_training_steps={before}"])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() in ("4\n", "5\n")
    trained([*options, f"trainer.total_training_steps={after}"])
    assert [line["step"] for line in metrics(tmp_path)] == [*range(after + 1)]

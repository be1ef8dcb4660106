"""Whole training runs on a tiny model, in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from strop.config.load import load_config
from strop.engines.torch.state import stored_shapes
from strop.trainer.build import build_trainer

import tiny_model
from builders import write_prompts

TIMES = (
    "timing_",
    "images/processed",
    "perf/",
    "time/",
    "async/learner_idle",
    "async/rollout_idle",
    "async/ready_batches",
)


def make_inputs(folder: Path, *, rows: int = 24) -> Path:
    """Write a model and prompts for ``overrides``; return ``folder``."""
    tiny_model.save(folder / "model", hidden=32)
    write_prompts(folder / "train.parquet", rows)
    write_prompts(folder / "val.parquet", 6)
    return folder


def overrides(inputs: Path, run: Path, *extra: str) -> list[str]:
    """Return the configuration of a run with 8 prompts x 2 samples per iteration, 3 iterations per epoch."""
    return [
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        f"data.train_files={inputs / 'train.parquet'}",
        f"data.val_files={inputs / 'val.parquet'}",
        f"data.cache_dir={inputs / 'cache'}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "critic.optim.lr=1e-2",
        "trainer.logger=[console]",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={run}",
        *extra,
    ]


@contextlib.contextmanager
def undrawn() -> Generator[None]:
    """Draw no pictures in the body: they take longer than the runs of tests."""
    with contextlib.ExitStack() as stack:
        for name in ("draw_curves", "draw_lengths", "draw_timeline"):
            stack.enter_context(mock.patch(f"strop.trainer.loop.{name}"))
        yield


def fit(trainer: Any) -> None:
    """Train without drawing pictures."""
    with undrawn():
        trainer.fit()


def train(options: Sequence[str]) -> Any:
    """Train and return the trainer."""
    trainer = build_trainer(load_config(options))
    try:
        trainer.init_workers()
        fit(trainer)
    except BaseException:
        trainer.shutdown()  # else the Ray session of the next tests lacks its places
        raise
    return trainer


def hashes(trainer: Any) -> dict[str, str]:
    """Return the parameter hashes of the trained models."""
    return {
        name: trainer.groups[name].weights_hash() for name in ("actor", "critic") if name in trainer.groups
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without timings."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a role's folder in a checkpoint."""
    shapes = stored_shapes(folder)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)
    return tensors

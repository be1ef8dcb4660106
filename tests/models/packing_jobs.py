"""What the ranks do in the tests of packed passes: functions that a spawned process can import."""

from __future__ import annotations

from pathlib import Path

import sharded_jobs
import torch
import worker_jobs

from strop.controller.pools import Role
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.sharding import whole


def gradient(
    folder: Path, role: Role, rows: int, micro: MicroBatching, *keys: str
) -> dict[str, torch.Tensor]:
    """The whole gradient of one mini-batch, by a worker with these ``keys``, and its norm as ``norm``."""
    built = worker_jobs.worker(folder, role, *keys)
    assert built.engine.module.packed == any("use_remove_padding=true" in key for key in keys)
    name, options = ("critic", {}) if role is Role.Critic else ("actor", {"temperature": 0.9})
    batch = sharded_jobs.samples(rows)
    objective = sharded_jobs.objective(name, batch)
    built.engine.forward_backward(sharded_jobs.mine(batch), objective, micro, **options)
    weights = built.engine.module.named_parameters()
    found = {name: whole(weight.grad).clone() for name, weight in weights}
    return {**found, "norm": torch.tensor(built.engine.optimizer_step(0.0).grad_norm)}

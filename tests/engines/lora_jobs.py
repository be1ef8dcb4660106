"""Engines with LoRA adapters, in this process or on the ranks of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sharded_jobs as jobs
import torch

from strop import ranks
from strop.config.load import load_config
from strop.engines.base import EngineSpec, ModelSpec, weights_hash
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.errors import CheckpointError
from strop.models.loader import load_tokenizer
from strop.models.lora import LoraSettings

MICRO = MicroBatching(rows=4)


def build(model: Path, kind: str = "policy", *, lora: bool = True, trained: bool = True, **settings: Any):
    """An engine; ``settings`` are those of the adapters."""
    settings = {"base": str(model), "rank": 4, "alpha": 8, "seed": 1, **settings}
    spec = ModelSpec(
        kind=kind,
        path=model,
        head_seed=1,
        packed=settings.pop("packed", False),
        gradient_checkpointing=settings.pop("checkpointing", False),
        compute_dtype=settings.pop("compute_dtype", "float32"),
        lora=LoraSettings(**settings) if lora else None,
    )
    return TorchEngine.build(
        spec,
        EngineSpec(
            device=torch.device("cpu"),
            world_size=jobs.world_size(),
            section=load_config([]).actor_rollout_ref.actor.fsdp_config,
            optimizer=jobs.SETTINGS if trained else None,
        ),
    )


def role(kind: str) -> str:
    return {"policy": "actor", "value": "critic"}[kind]


def update(engine: TorchEngine, kind: str, steps: int = jobs.STEPS, first: int = 0) -> None:
    for seed in range(first, first + steps):
        jobs.step(engine, role(kind), MICRO, seed=seed)


def train(folder: Path, kind: str, settings: dict[str, Any]):
    """Weights, merged, at the start and after some updates, and those without adapters."""
    engine = build(folder, kind, **settings)
    start = jobs.weights(engine)
    update(engine, kind)
    with engine.base_model():
        base = jobs.weights(engine)
    return start, jobs.weights(engine), base


def save_everything(folder: Path, out: Path, kind: str, **settings: Any) -> str:
    """Train, write the state and both exports; the hash of the weights one step later."""
    engine = build(folder, kind, **settings)
    update(engine, kind)
    engine.save(out / "state", background=True)
    update(engine, kind, steps=1, first=9)
    engine.finish_save()
    engine.load(out / "state")
    tokenizer = load_tokenizer(folder)
    engine.export(out / "adapter", tokenizer)
    engine.export(out / "merged", tokenizer, merged=True)
    update(engine, kind, steps=1, first=9)
    return weights_hash(engine.named_weights())


def resume(folder: Path, out: Path, kind: str, **settings: Any) -> str:
    """The same step from the saved state, by an engine whose adapters began with other values."""
    engine = build(folder, kind, seed=2, **settings)
    engine.load(out / "state")
    update(engine, kind, steps=1, first=9)
    return weights_hash(engine.named_weights())


def export_to_a_file(folder: Path, out: Path, *, lora: bool, merged: bool) -> list[str]:
    """Each rank's error of an export into a file's folder; the ranks are then still in step."""
    out.touch()
    engine, error = build(folder, lora=lora), ""
    try:
        engine.export(out / "model", load_tokenizer(folder), merged=merged)
    except CheckpointError as found:
        error = str(found)
    return ranks.gathered(error)

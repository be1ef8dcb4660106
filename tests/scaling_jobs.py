"""Functions that ranks run for ``test_scaling.py``: what an engine really sends."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from traffic import Traffic

from strop.engines.base import EngineSpec, ModelSpec, OptimizerSettings
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.protocol import DataProto

sys.path.insert(0, str(Path(__file__).parent / "engines"))
sharded_jobs = importlib.import_module("sharded_jobs")

SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8, grad_clip=1.0)


def batch_of(rows: int, width: int, words: int, seed: int) -> Any:
    """Samples without padding, half prompt and half response."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, words, (rows, 2 * width), generator=generator)
    return DataProto(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(2 * width).expand(rows, -1),
            "prompts": ids[:, :width],
            "responses": ids[:, width:],
            "response_mask": torch.ones(rows, width),
        }
    )


def sent(folder: Path, layout: dict[str, Any] | None, rows: int, width: int) -> dict[str, Any]:
    """What this rank sends in one micro-batch of each pass (with recomputed layers), a step and an export.

    ``layout``: of the engine ``megatron``; None: the engine ``fsdp``.
    """
    model = ModelSpec(
        kind="policy", path=folder, packed=True, compute_dtype="bfloat16", gradient_checkpointing=True
    )
    spec: dict[str, Any] = {
        "device": torch.device("cpu"),
        "optimizer": SETTINGS,
        "world_size": sharded_jobs.world_size(),
    }
    if layout is None:
        section = SimpleNamespace(param_offload=False, model_dump=dict)
        engine: Any = TorchEngine.build(model, EngineSpec(section=section, **spec))
        part = sharded_jobs.rank()
    else:
        import megatron_jobs
        import megatron_shim  # noqa: F401

        from strop.engines.megatron.engine import MegatronEngine

        section = megatron_jobs.section(**layout)
        engine = MegatronEngine.build(model, EngineSpec(section=section, **spec))
        part, _ = megatron_jobs.place(layout)
    batch = batch_of(rows, width, engine.module.hugging_face_model.config.vocab_size, seed=part)
    micro = MicroBatching(rows=rows)

    def loss(outputs: Any, columns: Any) -> Any:
        return outputs["log_prob"].mean(), {}

    found = {name: Traffic() for name in ("pass", "update", "step", "weights")}
    with found["pass"]:
        engine.infer(batch, micro, temperature=1.0)
    with found["update"]:
        engine.forward_backward(batch, loss, micro, temperature=1.0)
    with found["step"]:
        engine.optimizer_step(1e-3)
    with found["weights"]:
        for _ in engine.named_weights(dtype=torch.bfloat16):
            pass
    return {name: traffic.sent for name, traffic in found.items()}


def save(folder: Path, out: Path) -> None:
    """Write a training state."""
    model = ModelSpec(kind="policy", path=folder)
    section = SimpleNamespace(param_offload=False, model_dump=dict)
    spec = EngineSpec(
        section=section, device=torch.device("cpu"), optimizer=SETTINGS, world_size=sharded_jobs.world_size()
    )
    TorchEngine.build(model, spec).save(out)

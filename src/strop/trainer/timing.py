"""The time of a run, measured before it: some tokens of all samples, and a micro-batch of ``PPO.learn``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from strop.config.batch_plan import resolve_micro_batch
from strop.config.schema import Config
from strop.protocol import DataProto
from strop.trainer.commands import build
from strop.trainer.metrics import PhaseTimer
from strop.trainer.progress import duration, long_run
from strop.trainer.scores import Samples


def measured(config: Config) -> Iterator[str]:
    """Load the models of ``config`` and yield the time of its run in words; its folder is not written."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"default_local_dir": folder, "resume_mode": "disable", "push_to_hub": None}
        run = build(config.model_copy(update={"trainer": config.trainer.model_copy(update=own)}))
        try:
            run.init_workers()
            seconds, batch = _generate(run)
            lengths = batch.batch["response_mask"].sum(1)
            yield f"generation: {int(lengths.sum()) / seconds:,.0f} tok/s of {len(batch):,} samples at once"
            generation = seconds * config.data.max_response_length / int(lengths.max())
            step = generation + _learn(run, batch)
        finally:
            run.shutdown()
    yield f"a step:     {duration(step)} with the longest answers, {duration(generation)} of it generation"
    steps = run.total_steps
    yield f"the run:    at most {duration(step * steps)} for {steps:,} steps, and rewards and validations"
    if words := long_run(config, step, steps):
        yield f"warning: {words}"


def _generate(run: Any) -> tuple[float, DataProto]:
    """Return the seconds, about two, and the samples of a generation that is cut short."""
    prompts, seconds, batch = run.ppo.named(next(iter(run.train_loader)), 1), 2.0, DataProto()
    for fixed in (1, 8, None):  # the first call transfers weights, and compiles
        tokens = min(fixed or max(int(16 / seconds), 1), run.config.data.max_response_length)
        request = DataProto(prompts.batch, prompts.non_tensor_batch, {"max_tokens": tokens})
        begun = time.perf_counter()
        batch = run.ppo.generate(request, run.ppo.seeds(1, len(prompts)), PhaseTimer(), mode="train")
        seconds = time.perf_counter() - begun
    return seconds, batch


def _learn(run: Any, batch: DataProto) -> float:
    """Return the seconds of passes and updates of an iteration, by those of a micro-batch on each rank."""
    config, ranks = run.config, run.actor.world_size
    size = resolve_micro_batch(config, "actor", ranks)
    rows = size.rows or max((size.max_tokens or 0) // batch.batch["input_ids"].shape[1], 1)
    part = batch[: rows * ranks]
    scores_BT = torch.zeros_like(part.batch["response_mask"])
    scores_BT[::2, 0] = 1.0  # equal ones have no gradient
    columns = {"token_level_scores": scores_BT, "baseline_scores": torch.zeros(len(part))}
    part = part.union(DataProto(columns, {}, {"reward_metrics": {}}))
    run.weights.release()
    begun = 0.0
    for _ in range(2):  # the first call compiles
        begun = time.perf_counter()
        run.ppo.learn(Samples(part), config.trainer.critic_warmup + 1)
    whole = len(batch) * (config.data.max_prompt_length + config.data.max_response_length)
    return (time.perf_counter() - begun) * whole / int(part.batch["attention_mask"].sum())

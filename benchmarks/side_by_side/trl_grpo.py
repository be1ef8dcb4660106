"""Run of TRL's ``GRPOTrainer``: ``python -m side_by_side.trl_grpo SETTING.json RECORD.json [key=value]``.

The fastest settings found on a CPU: one process, all samples of an iteration generated at once, no reference
model (beta=0), no old log-probs (one step per generation), fused AdamW, no gradient checkpointing and minimal
logging. ``key=value`` are overrides of fields of ``GRPOConfig``, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from side_by_side.record import Record
from side_by_side.reward import compute_score
from side_by_side.setting import Setting

MICRO_BATCH = 8
"""Samples per forward and backward pass; the fastest of 8, 16, 32 and 64."""


def config(setting: Setting, folder: str, changes: dict[str, Any]) -> GRPOConfig:
    fields = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": setting.precision == "bfloat16",
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": setting.samples // MICRO_BATCH,
        "num_generations": setting.n,
        "max_completion_length": setting.limit,
        "generation_kwargs": {"min_new_tokens": setting.limit} if setting.lengths == "limit" else None,
        "max_steps": setting.total_iterations,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "num_iterations": 1,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **changes,
    }
    return GRPOConfig(**fields)


class PlannedEnds(LogitsProcessor):
    """Force the end token as token ``lengths[r]`` of row r, and mask it before."""

    def __init__(self, lengths: list[int], prompt_width: int, end_token: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.prompt_width = prompt_width
        self.end_token = end_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = self.lengths == input_ids.shape[1] - self.prompt_width + 1
        scores[:, self.end_token] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, self.end_token] = 0.0
        return scores


def plan_ends(setting: Setting, end_token: int) -> None:
    """Patch ``generate`` to end rows as ``setting`` plans."""
    generate, calls = GenerationMixin.generate, iter(range(setting.total_iterations))

    def generate_with_ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = setting.planned_lengths(next(calls))
        ends = PlannedEnds(lengths, kwargs["input_ids"].shape[1], end_token)
        return generate(self, *args, logits_processor=LogitsProcessorList([ends]), **kwargs)

    GenerationMixin.generate = generate_with_ends


class RecordedTrainer(GRPOTrainer):
    """GRPO trainer that records the seconds of each phase."""

    record: Record

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.record.phase("generation"):
            found = super()._generate_single_turn(*args, **kwargs)
        self.record.responses([len(ids) for ids in found[0]])
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        self.update_began = time.perf_counter()
        return found

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.record.phase("log-probs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class EndOfIteration(TrainerCallback):
    """Records the update: from the end of scoring to the end of the optimizer step."""

    trainer: RecordedTrainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.record = Record()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        record = self.trainer.record
        record.add("update", time.perf_counter() - self.trainer.update_began)
        record.end_iteration()


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [compute_score("", completion[0]["content"], "") for completion in completions]


def main() -> None:
    setting = Setting.read(sys.argv[1])
    changes = {key: json.loads(value) for key, value in (text.split("=", 1) for text in sys.argv[3:])}
    with tempfile.TemporaryDirectory() as folder:
        callback = EndOfIteration()
        trainer = RecordedTrainer(
            model=str(setting.model_folder),
            reward_funcs=reward,
            args=config(setting, folder, changes),
            train_dataset=Dataset.from_parquet(str(setting.prompts), cache_dir=folder),
            processing_class=AutoTokenizer.from_pretrained(setting.tokenizer_folder),
            callbacks=[callback],
        )
        callback.trainer = trainer
        if setting.lengths == "uneven":
            plan_ends(setting, trainer.processing_class.eos_token_id)
        trainer.train()
    trainer.record.write(sys.argv[2])


if __name__ == "__main__":
    main()

"""Run of TRL's ``PPOTrainer``: ``python -m side_by_side.trl_ppo SETTING.json RECORD.json [key=value]``.

TRL 1.12.0 is the last release with this trainer. It always has a reference model, and ``bf16`` has no effect.
The reward model consists of two operations, because strop's reward is a function. ``key=value`` are overrides
of fields of ``PPOConfig``, as JSON.
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
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from transformers.modeling_outputs import BaseModelOutput
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from side_by_side.record import Record
from side_by_side.setting import Setting

MICRO_BATCH = 8
"""Samples per forward and backward pass; the fastest of 8, 16, 32 and 64."""


class Parity(torch.nn.Module):
    """Hidden states [B, L, 1]: 1 for an even token id, 0 for an odd one."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> BaseModelOutput:
        return BaseModelOutput(hidden_states=((input_ids % 2 == 0).float()[..., None],))


class ParityReward(torch.nn.Module):
    """Reward model with the attributes that ``get_reward`` requires."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = Parity()
        self.score = torch.nn.Identity()


def config(setting: Setting, folder: str, changes: dict[str, Any]) -> PPOConfig:
    fields = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": setting.samples // MICRO_BATCH,
        "local_rollout_forward_batch_size": setting.samples,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "total_episodes": setting.samples * setting.total_iterations,
        "response_length": setting.limit,
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "kl_coef": setting.kl_coef,
        "num_sample_generations": 0,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }
    return PPOConfig(**fields)


def dataset(setting: Setting, tokenizer: Any) -> Dataset:
    """Return the token ids of the prompts, with the chat template applied."""
    return Dataset.from_list(
        [
            {
                "input_ids": tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)[
                    "input_ids"
                ]
            }
            for row in Dataset.from_parquet(str(setting.prompts))
            for _ in range(setting.n)
        ]
    )


class Phases(TrainerCallback):
    """Records phases by wrapping the module functions that ``PPOTrainer.train`` calls in sequence."""

    def __init__(self) -> None:
        self.rollout_ended = self.update_began = 0.0
        self._wrap("batch_generation", self._after_generation)
        self._wrap("get_reward", self._after_log_probs)
        self._wrap("masked_whiten", self._after_advantages)

    def _wrap(self, name: str, after: Any) -> None:
        inner = getattr(ppo_trainer, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = inner(*args, **kwargs)
            after(began, found)
            return found

        setattr(ppo_trainer, name, outer)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.record = Record()

    def _after_generation(self, began: float, found: Any) -> None:
        self.rollout_ended = time.perf_counter()
        self.record.add("generation", self.rollout_ended - began)
        sequences, logits = found
        self.record.responses([logits.shape[1]] * len(sequences))

    def _after_log_probs(self, began: float, found: Any) -> None:
        now = time.perf_counter()  # log-probs of policy and reference, values and rewards
        self.record.add("log-probs", now - self.rollout_ended)
        self.rollout_ended = now

    def _after_advantages(self, began: float, found: Any) -> None:
        self.update_began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.record.add("update", time.perf_counter() - self.update_began)
        self.record.end_iteration()


def main() -> None:
    setting = Setting.read(sys.argv[1])
    changes = {key: json.loads(value) for key, value in (text.split("=", 1) for text in sys.argv[3:])}
    tokenizer = AutoTokenizer.from_pretrained(setting.tokenizer_folder)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(setting.model_folder, dtype="float32") for _ in range(2)
    )
    value = AutoModelForSequenceClassification.from_pretrained(
        setting.model_folder, num_labels=1, dtype="float32"
    )
    phases = Phases()
    with tempfile.TemporaryDirectory() as folder:
        PPOTrainer(
            args=config(setting, folder, changes),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=ParityReward(),
            value_model=value,
            train_dataset=dataset(setting, tokenizer),
            callbacks=[phases],
        ).train()
    phases.record.write(sys.argv[2])


if __name__ == "__main__":
    main()

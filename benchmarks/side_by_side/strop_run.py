"""Run of strop: ``python -m side_by_side.strop_run SETTING.json RECORD.json [key=value ...]``.

The same program as ``strop train``; ``key=value`` are overrides of the configuration below.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from side_by_side.inputs import LONGEST
from side_by_side.planned_ends import planned_ends
from side_by_side.record import Record, peak_mb
from side_by_side.setting import Setting
from strop.config.load import load_config
from strop.trainer.build import build_trainer
from strop.trainer.ray_trainer import RayPPOTrainer

_PHASES = {
    "generation": ("gen", "sync_weights"),
    "log-probs": ("old_log_prob", "ref", "values"),
    "update": ("update_actor", "update_critic"),
}


def overrides(setting: Setting, run: Path) -> list[str]:
    """Return the configuration of a setting."""
    prompts = setting.samples // setting.n
    shared = [
        f"data.train_files={setting.prompts}",
        f"data.val_files={setting.prompts}",
        f"data.tokenizer={setting.tokenizer_folder}",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={LONGEST}",
        f"data.max_response_length={setting.limit}",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={setting.model_folder}",
        f"actor_rollout_ref.model.compute_dtype={setting.precision}",
        f"actor_rollout_ref.rollout.name={setting.rollout}",
        f"actor_rollout_ref.rollout.max_num_seqs={setting.samples}",
        "actor_rollout_ref.rollout.dtype=auto",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.n={setting.n}",
        f"actor_rollout_ref.rollout.ignore_eos={setting.lengths == 'limit'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.entropy_coeff=0",
        f"custom_reward_function.path={Path(__file__).with_name('reward.py')}",
        "reward_model.val_num_examine=0",
        "trainer.logger=[]",
        "trainer.log_rollouts=False",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={setting.total_iterations}",
        f"trainer.default_local_dir={run}",
    ]
    if setting.algorithm == "grpo":
        return [*shared, "algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0"]
    return [
        *shared,
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        f"algorithm.kl_ctrl.kl_coef={setting.kl_coef}",
    ]


def record_lengths(trainer: RayPPOTrainer) -> list[list[int]]:
    """Return a list that the trainer's steps extend with their response lengths."""
    step, lengths = trainer.step, []

    def step_and_count(prompts: Any) -> Any:
        batch, metrics = step(prompts)
        lengths.append(batch.batch["response_mask"].sum(1).int().tolist())
        return batch, metrics

    trainer.step = step_and_count
    return lengths


def main() -> None:
    setting = Setting.read(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, planned_ends(setting):
        run = Path(folder) / "run"
        trainer = build_trainer(load_config([*overrides(setting, run), *sys.argv[3:]]))
        lengths = record_lengths(trainer)
        trainer.init_workers()
        trainer.fit()
        memory = peak_mb()
        trainer.shutdown()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    record, before = Record(), 0.0
    for line, responses in zip(lines, lengths, strict=True):
        for phase, names in _PHASES.items():
            record.add(phase, sum(line.get(f"timing_s/{name}", 0.0) for name in names))
        record.responses(responses)
        record.end_iteration(line["time/from_scratch"] - before)
        before = line["time/from_scratch"]
    record.write(sys.argv[2], memory)


if __name__ == "__main__":
    main()

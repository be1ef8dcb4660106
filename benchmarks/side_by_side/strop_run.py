"""A run of strop: ``python -m side_by_side.strop_run SETTING.json RECORD.json [key=value ...]``.

The whole program as ``strop train`` runs it, with settings for this size; more keys are laid over them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from side_by_side.inputs import LONGEST
from side_by_side.record import Record
from side_by_side.setting import Setting
from strop.config.load import load_config
from strop.rollout import decoding, hf
from strop.rollout.base import SamplingParams
from strop.trainer.build import build_trainer
from strop.trainer.ppo import RayPPOTrainer

_PHASES = {
    "generation": ("gen", "sync_weights"),
    "log-probs": ("old_log_prob", "ref", "values"),
    "update": ("update_actor", "update_critic"),
}
_END = 2.0  # no uniform number is that large: it marks the step at which a row ends


def overrides(setting: Setting, run: Path) -> list[str]:
    """The configuration of one setting."""
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
        "actor_rollout_ref.model.use_remove_padding=True",
        f"actor_rollout_ref.rollout.name={setting.rollout}",
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


@contextlib.contextmanager
def planned_ends(setting: Setting) -> Generator[None]:
    """Inside, the hf rollout ends its rows where ``setting`` plans it: the marks travel with the uniforms."""
    if setting.lengths == "limit":
        yield
        return
    draw, sample = hf.draw_uniforms, decoding.next_tokens
    iteration = -1

    def draw_with_ends(seeds: Iterable[int], tokens: int) -> Tensor:
        nonlocal iteration
        uniforms_RT = draw(seeds, tokens)
        iteration += 1
        lengths = setting.planned_lengths(iteration)
        if lengths is not None and len(uniforms_RT) == len(lengths):
            uniforms_RT[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = _END
        else:  # the check that the rollout makes of itself at the start
            iteration -= 1
        return uniforms_RT

    def sample_with_ends(
        logits_RV: Tensor, uniforms_R: Tensor | None, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        if uniforms_R is None:
            return sample(logits_RV, uniforms_R, params)
        logits_RV[:, end_token] = -torch.inf
        tokens_R, log_probs_R = sample(logits_RV, uniforms_R, params)
        return torch.where(uniforms_R == _END, end_token, tokens_R), log_probs_R

    end_token = json.loads((setting.model_folder / "config.json").read_text())["eos_token_id"]
    hf.draw_uniforms, decoding.next_tokens = draw_with_ends, sample_with_ends
    try:
        yield
    finally:
        hf.draw_uniforms, decoding.next_tokens = draw, sample


def record_lengths(trainer: RayPPOTrainer) -> list[list[int]]:
    """The lengths of all responses, a list for each iteration, filled while the trainer runs."""
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
        trainer.shutdown()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    record, before = Record(), 0.0
    for line, responses in zip(lines, lengths, strict=True):
        for phase, names in _PHASES.items():
            record.add(phase, sum(line.get(f"timing_s/{name}", 0.0) for name in names))
        record.responses(responses)
        record.end_iteration(line["time/from_scratch"] - before)
        before = line["time/from_scratch"]
    record.write(sys.argv[2])


if __name__ == "__main__":
    main()

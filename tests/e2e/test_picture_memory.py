"""Memory and traffic of 512 prompts x 8 samples with pictures of a megapixel, without passes of models."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from strop import RayPPOTrainer, ResourcePoolManager, Role
from strop.config.load import load_config
from strop.config.names import PIXELS_REMEMBERED
from strop.trainer.build import fetch_tokenizer

import picture_models
import runs

PROMPTS, ITERATIONS, SIDE = 512, 2, 1024


def files(count: int) -> list[bytes]:
    """JPEGs of about 200 KB."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(256, size=(128, 128, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    found = []
    for number in range(count):
        turned = Image.fromarray(np.roll(pixels, (number, number // 7), axis=(0, 1)))
        turned.save(file := io.BytesIO(), "JPEG", quality=85)
        found.append(file.getvalue())
    return found


@pytest.mark.slow
def test_a_process_holds_the_pictures_of_an_iteration_once(tmp_path, ray_session):
    from picture_stubs import Stub

    from strop.controller.ray.group import RayWorkerGroup

    folder = picture_models.make("qwen2_5_vl", tmp_path / "model")
    settings: dict[str, Any] = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"]["size"] = {"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE}
    (folder / "processor_config.json").write_text(json.dumps(settings, default=str))
    pictures = files(PROMPTS * ITERATIONS)
    rows = [{"prompt": "colour?", "images": [{"bytes": one}], "answer": "a"} for one in pictures]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = load_config(
        runs.overrides(
            tmp_path,
            tmp_path / "run",
            "data.val_files=[]",
            "data.answer_key=answer",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=1500",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.verify_weights_every=0",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
            "actor_rollout_ref.actor.old_log_prob_from_update=false",
            "algorithm.kl_ctrl.kl_coef=0",
            f"trainer.total_training_steps={ITERATIONS}",
            "trainer.resource_pools={main: [1], other: [1]}",
            "trainer.placement={Critic: other}",
            "trainer.worker_group=ray",
            "trainer.save_freq=-1",
            "trainer.log_rollouts=False",
        )
    )
    model = config.actor_rollout_ref.model
    tokenizer = fetch_tokenizer(config, model, models=[model.path], tokenizers=[], weights=True)
    roles = {Role.ActorRollout: "main", Role.Critic: "other"}
    trainer = RayPPOTrainer(
        config,
        tokenizer,
        dict.fromkeys(roles, Stub),
        ResourcePoolManager({"main": [1], "other": [1]}, roles),
        RayWorkerGroup,
        lambda batch: torch.zeros(batch.batch["responses"].shape),
    )
    trainer.init_workers()
    try:
        runs.fit(trainer)
        for group in trainer.groups.values():  # the last call of forget_pictures is not waited for
            group.settle()
    finally:
        trainer.shutdown()
    own = sum(sorted(map(len, pictures))[-PROMPTS:])  # an iteration draws any of them
    found = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("stub-*.json")]
    assert len(found) == 2
    for process in found:
        grown = max(process["memory"]) - process["memory"][0]
        assert process["columns"] < 1e6
        assert len(process["sent"]) == len(set(process["sent"])) == PROMPTS * ITERATIONS
        assert process["held"] == 0
        assert process["most"]["pictures"] == PROMPTS
        assert process["most"]["bytes"] <= own
        assert 0 < process["most"]["pixels"] <= PIXELS_REMEMBERED
        assert grown < own + 1e9  # of pages that the system has not taken back, and of what was imported

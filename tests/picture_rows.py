"""Rows with random pictures, and runs on them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

import picture_models
import runs

REWARD = "def score(response): return len(set(response)) / 4\n"


def picture(seed: int, width: int = 56, height: int = 56) -> bytes:
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def write_rows(file: Path, count: int, *, every: int = 1, seed: int = 0) -> Path:
    """Rows of which one in ``every`` has a picture, or two; paths and data URLs take turns."""
    rows = []
    for row in range(count):
        images = []
        for place in range(0 if row % every else 1 + row % 2):
            name = f"{file.stem}-{row}-{place}.png"
            content = picture(seed + 2 * row + place, 56 + 28 * (row % 2))
            (file.parent / name).write_bytes(content)
            url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
            images.append(url if row % 3 == 0 else name)
        rows.append({"prompt": f"what is {row % 4}?", "images": images, "answer": "red"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def inputs(folder: Path) -> Path:
    """Write two models, rows and a reward for ``options``; return ``folder``."""
    for kind in ("smolvlm", "qwen2_5_vl"):
        picture_models.make(kind, folder / kind)
    write_rows(folder / "train.jsonl", 24)
    write_rows(folder / "sparse.jsonl", 24, every=12)
    write_rows(folder / "val.jsonl", 6, seed=100)
    (folder / "reward.py").write_text(REWARD)
    return folder


def options(inputs: Path, run: Path, *extra: str, kind: str = "smolvlm", rows: str = "train") -> list[str]:
    return runs.overrides(
        inputs,
        run,
        f"actor_rollout_ref.model.path={inputs / kind}",
        f"critic.model.path={inputs / kind}",
        f"data.train_files={inputs / rows}.jsonl",
        f"data.val_files={inputs / 'val.jsonl'}",
        "data.answer_key=answer",
        "data.max_prompt_length=48",
        f"custom_reward_function.path={inputs / 'reward.py'}",
        "custom_reward_function.name=score",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "algorithm.kl_ctrl.kl_coef=0.01",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.logger=[jsonl]",
        *extra,
    )

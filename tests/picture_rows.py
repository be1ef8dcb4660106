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
APART = (
    "actor_rollout_ref.hybrid_engine=false",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
    "trainer.worker_group=local",
)
SEES = """
class Sees:
    def reset(self, images, seed):
        self.images = images
        return f"{sum(picture.width for picture in images)} wide, {seed % 10}"

    def respond(self, response, turn):
        return None if turn == 2 else f"go on, {self.images[turn % len(self.images)].size[0]}"
"""
ANSWERS = """
import base64, io
import openai
from PIL import Image

def drawn(seed):
    file = io.BytesIO()
    size = 56 + 28 * (seed % 2), 56
    Image.linear_gradient("L").rotate(7 * seed).resize(size).convert("RGB").save(file, "PNG")
    return file.getvalue()

class Words:
    def reset(self, extra_info=None):
        pass

    def respond(self, response, turn):
        return None if turn == 2 else f"go on, {turn}"

async def words(prompt, base_url, api_key):
    return await talk(prompt, base_url, api_key, lambda turn: f"go on, {turn}")

def place(uid, turn):
    return 3 * int(uid.split("-")[-1]) + turn

class Pictures:
    def reset(self, uid):
        self.uid = uid

    def respond(self, response, turn):
        image = {"type": "image", "image": drawn(place(self.uid, turn))}
        content = [{"type": "text", "text": f"go on, {turn}"}, image][: 2 - turn % 2]
        return None if turn == 2 else {"role": "user", "content": content}

class Damaged(Words):
    def respond(self, response, turn):
        return {"role": "user", "content": [{"type": "image", "image": drawn(0)[:150]}]}

async def pictures(prompt, uid, base_url, api_key):
    def content(turn):
        url = "data:image/png;base64," + base64.b64encode(drawn(place(uid, turn))).decode()
        return [{"type": "text", "text": f"go on, {turn}"}, {"type": "image_url", "image_url": {"url": url}}][
            : 2 - turn % 2]
    return await talk(prompt, base_url, api_key, content)

async def others(prompt, uid, base_url, api_key):
    url = "data:image/png;base64," + base64.b64encode(drawn(place(uid, 5))).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    return await talk([{"role": "user", "content": content}], base_url, api_key, lambda turn: f"{turn}")

async def talk(prompt, base_url, api_key, content):
    client = openai.AsyncOpenAI(api_key=api_key, base_url=base_url, max_retries=0, timeout=60)
    messages = [*prompt]
    for turn in range(3):
        try:
            found = await client.chat.completions.create(model="policy", messages=messages)
        except openai.BadRequestError as error:
            assert "context_length_exceeded" in str(error), error
            break
        messages.append(found.choices[0].message.model_dump(exclude_none=True))
        if found.choices[0].finish_reason == "length":
            break
        messages.append({"role": "user", "content": content(turn)})
    await client.close()
    return None
"""
TURNS = (
    "data.max_prompt_length=96",
    "data.max_response_length=160",
    f"actor_rollout_ref.rollout.stop_token_ids={[*range(10, 60)]}",  # a random policy seldom ends a turn
)


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


def turns(folder: Path) -> tuple[str, ...]:
    """Return the options of an environment that sees the pictures of prompts."""
    (folder / "sees.py").write_text(SEES)
    return (f"environment.path={folder / 'sees.py'}:Sees", "environment.turn_length=12", *TURNS)


def answers(folder: Path, name: str) -> tuple[str, ...]:
    """Return the options of an environment, or in lower case of the program that says the same."""
    (folder / "answers.py").write_text(ANSWERS)
    found = f"{folder / 'answers.py'}:{name}"
    return (f"environment.path={found}" if name[0].isupper() else f"agent.path={found}", *TURNS)

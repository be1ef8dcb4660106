"""Compare strop with TRL on pictures: GRPO of a tiny Qwen2.5-VL that has to name the colour of a square.

    python benchmarks/pictures_against_trl.py [--steps 150] [--rounds 2] [--out FILE]

The model of ``tests/picture_models.py`` is fine-tuned to name any colour, and both systems train it from
there on the rows of ``examples/picture_demo.py``: 32 pictures x 8 samples, learning rate 1e-3, no KL, one
thread. Each run is a process of its own, and the systems alternate. CPU seconds of a step are those of a run
of 12 steps less those of a run of 2 steps; the curve and the peak of resident memory are of a run of
``--steps``.
TRL reads pictures with torchvision: its environment is ``.venv-pictures`` with ``pip install --constraint
benchmarks/requirements-trl.lock trl==1.16.0 accelerate datasets``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "examples"), str(HERE.parent / "tests")]

from alone import measure  # noqa: E402
from picture_demo import COLOURS, rows  # noqa: E402

PROMPTS, SAMPLES, LR, SHORT = 32, 8, 1e-3, 12
QUESTION = "colour?"


def right(response: str, ground_truth: str) -> float:
    """Reward the right colour."""
    return float(response.strip() == ground_truth)


def warm_up(folder: Path) -> None:
    """Save a Qwen2.5-VL that names colours at random, with its processor."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    import picture_models

    tokenizer = picture_models.qwen("qwen2_5_vl", False)[0]
    picture_models.make("qwen2_5_vl", folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    examples, draw = rows(480, 1), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        chosen = draw.sample(examples, 32)
        pixels = images([row["images"] for row in chosen], return_tensors="pt")
        count = int(pixels["image_grid_thw"][0].prod()) // 4
        text = prompt.replace("<|image_pad|>", "<|image_pad|>" * count)
        answers = [f"{draw.choice([*COLOURS])}<|im_end|>" for _ in chosen]
        ids = tokenizer([text + answer for answer in answers], return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, :-2] = -100
        kinds = (ids == model.config.image_token_id).int()
        loss = model(input_ids=ids, mm_token_type_ids=kinds, labels=labels, **pixels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def run_trl(folder: Path, steps: int) -> list[float]:
    """Train with TRL; return the mean reward of each step."""
    from datasets import Dataset
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
    from trl import GRPOConfig, GRPOTrainer

    images, tokenizer = (
        kind.from_pretrained(folder, use_fast=True) for kind in (AutoImageProcessor, AutoTokenizer)
    )
    given = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "image": row["images"][0],
            "answer": row["answer"],
        }
        for row in rows(640, 2)
    ]
    trainer = GRPOTrainer(
        model=str(folder),
        processing_class=Qwen2_5_VLProcessor(
            images, tokenizer, Qwen2VLVideoProcessor(), chat_template=tokenizer.chat_template
        ),
        reward_funcs=lambda completions, answer, **_: [
            right(completion[0]["content"], truth)
            for completion, truth in zip(completions, answer, strict=True)
        ],
        train_dataset=Dataset.from_list(given),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            num_generations=SAMPLES,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            max_completion_length=4,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def run_strop(folder: Path, steps: int) -> list[float]:
    """Train with strop; return the mean reward of each step."""
    import strop

    run = strop.train(
        folder,
        {
            "train_files": rows(640, 2),
            "train_batch_size": PROMPTS,
            "max_prompt_length": 40,
            "max_response_length": 4,
            "answer_key": "answer",
        },
        right,
        lr=LR,
        n=SAMPLES,
        steps=steps,
        out=folder / "strop",
        **{
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
            "actor_rollout_ref.actor.entropy_coeff": 0,
            "trainer.resume_mode": "disable",
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.val_before_train": False,
            "trainer.device": "cpu",
            "trainer.logger": [],
        },
    )
    return run.metrics["critic/score/mean"]


def main() -> None:
    """Compare, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--trl", type=Path, default=HERE.parent / ".venv-pictures" / "bin" / "python")
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--system", choices=["strop", "trl"])
    arguments.add_argument("--folder", type=Path)
    given = arguments.parse_args()
    if given.system:
        curve = (run_trl if given.system == "trl" else run_strop)(given.folder, given.steps)
        (given.folder / "curve.json").write_text(json.dumps(list(curve)))
        return
    folder = Path(tempfile.mkdtemp())
    warm_up(folder)
    pythons = {"strop": Path(sys.executable), "TRL 1.16": given.trl}
    seconds = {name: [] for name in pythons}
    for _ in range(given.rounds):
        for name, python in pythons.items():
            short, long = (
                measure(__file__, python, name.split()[0].lower(), folder, n)[1].cpu_seconds
                for n in (2, SHORT)
            )
            seconds[name].append((long - short) / (SHORT - 2))
    shown = [number for number in (1, 15, 30, 45, 60, 75, 90, 120, 150, 200, 300) if number <= given.steps]
    table = [
        "| system | CPU s a step (each round) | peak MB | "
        + " | ".join(f"step {number}" for number in shown)
        + " |",
        "| --- | ---: | ---: | " + " | ".join("---:" for _ in shown) + " |",
    ]
    for name, python in pythons.items():
        curve, used = measure(__file__, python, name.split()[0].lower(), folder, given.steps)
        costs = f"{statistics.median(seconds[name]):.2f} ({', '.join(f'{one:.2f}' for one in seconds[name])})"
        values = " | ".join(f"{curve[number - 1]:.2f}" for number in shown)
        table.append(f"| {name} | {costs} | {used.peak_mb:.0f} | {values} |")
    print("\n".join(table))
    if given.out:
        given.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()

"""Compare strop with TRL's ``DistillationTrainer``: the model of ``make demo`` teaches a warm-up checkpoint.

    make demo && python benchmarks/distillation_against_trl.py [--steps 40 80 160 400] [--out FILE]

128 prompts a step with one answer each, one optimizer step on them, reverse KL over the whole vocabulary,
learning rate 1e-3, constant, AdamW without decay, gradients of norm 1 at most, temperature 1. Each run is a
process of its own with one thread; the systems alternate. The score is the share of held-out problems that a
sampled answer of the trained model solves (``examples/evaluate.py`` for both). CPU seconds of a step are
those of a run less those of a run of 2 steps, so that the start does not count.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from statistics import mean

from alone import Used, run_alone

HERE = Path(__file__).parent
PROMPTS, LR = 128, 1e-3


def strop_run(start: Path, teacher: Path, data: Path, out: Path, steps: int, seed: int) -> None:
    from strop.config.load import load_tree
    from strop.config.trees import PPO
    from strop.trainer.build import build_trainer

    keys = {
        "actor_rollout_ref.model.path": start,
        "teacher.model.path": teacher,
        "data.train_files": data / "train.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 8,
        "data.max_response_length": 4,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.optim.lr": LR,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
        "actor_rollout_ref.actor.optim.warmup_style": "constant",
        "actor_rollout_ref.actor.optim.weight_decay": 0,
        "trainer.total_training_steps": steps,
        "trainer.seed": seed,
        "trainer.device": "cpu",
        "trainer.default_local_dir": out,
        "trainer.log_rollouts": False,
    }
    trainer = build_trainer(load_tree(PPO, [f"{k}={v}" for k, v in keys.items()], recipe="distill"))
    trainer.init_workers()
    trainer.fit()


def trl_run(start: Path, teacher: Path, data: Path, out: Path, steps: int, seed: int) -> None:
    from datasets import Dataset
    from pyarrow import parquet
    from transformers import PreTrainedTokenizerFast
    from trl import DistillationConfig, DistillationTrainer

    rows = [{"prompt": row["prompt"]} for row in parquet.read_table(data / "train.parquet").to_pylist()]
    config = DistillationConfig(
        output_dir=str(out),
        beta=1.0,  # reverse
        temperature=1.0,
        max_completion_length=4,
        per_device_train_batch_size=PROMPTS,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        seed=seed,
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        gradient_checkpointing=False,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    trainer = DistillationTrainer(
        model=str(start),
        teacher_model=str(teacher),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(out / "final_model"))
    tokenizer.save_pretrained(str(out / "final_model"))


def score(model: Path, start: Path, data: Path) -> float:
    """Return the share of held-out problems that a sampled answer solves."""
    sys.path.append(str(HERE.parent / "examples"))
    import pyarrow.parquet as pq

    from strop.models.loader import load_causal_lm, load_tokenizer

    from evaluate import evaluate

    problems = pq.read_table(data / "test.parquet").to_pylist()
    return evaluate(load_causal_lm(model), load_tokenizer(start), problems).sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="folder of `make demo`")
    parser.add_argument("--trl", default=str(HERE / ".venv-trl/bin/python"), help="a Python that has TRL")
    parser.add_argument("--steps", type=int, nargs="+", default=[40, 80, 160, 400])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        system, *paths, steps, seed = options.run
        {"strop": strop_run, "trl": trl_run}[system](*map(Path, paths), int(steps), int(seed))
        return
    data = options.demo / "data"
    start = min((options.demo / "warm_up").glob("global_step_*")) / "actor" / "huggingface"
    teacher = next(options.demo.glob("*-seed*/final_model"))
    lines = [
        f"Teacher {score(teacher, teacher, data):.3f}, student at the start {score(start, start, data):.3f}.",
        "",
        "| system | samples | accuracy, mean | by seed | CPU s a step | peak MB |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as folder:

        def run(system: str, steps: int, seed: int) -> tuple[float, Used]:
            out = Path(folder) / f"{system}-{steps}-{seed}"
            python = sys.executable if system == "strop" else options.trl
            given = [system, *map(str, (start, teacher, data, out, steps, seed))]
            used = run_alone([python, __file__, "--run", *given], Path(folder) / "log")
            return score(out / "final_model", start, data), used

        systems = ("strop", "trl")
        started = {system: run(system, 2, 1)[1].cpu_seconds for system in systems}
        for steps, system in itertools.product(options.steps, systems):
            found = [run(system, steps, seed) for seed in options.seeds]
            scores = [score for score, _ in found]
            seconds = mean(used.cpu_seconds - started[system] for _, used in found) / (steps - 2)
            lines.append(
                f"| {system} | {steps * PROMPTS:,} | {mean(scores):.3f} "
                f"| {', '.join(f'{one:.3f}' for one in scores)} | {seconds:.3f} "
                f"| {max(used.peak_mb for _, used in found):.0f} |"
            )
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

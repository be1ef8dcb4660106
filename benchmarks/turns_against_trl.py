"""Compare strop with TRL on an environment of several turns: TRL's own example class, unchanged in both.

    python benchmarks/turns_against_trl.py [--steps 20] [--rounds 2] [--out FILE]

A prompt is a number; the policy calls ``increment(step)`` and is right if the counter is at that number
(``tests/turns/trl_environments.py`` has the class). A tiny model is warmed up on calls of which two fifths
are right, and both systems train it by GRPO from there: 16 prompts x 8 samples, learning rate 5e-4, no KL.
Each run is a process of its own, and the systems alternate. CPU seconds of a step are those of a run of some
steps, less those of a run of 2 steps, with all child processes, so that the start does not count.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "examples"), str(HERE.parent / "tests" / "turns")]

from alone import measure  # noqa: E402

from trl_environments import IncrementEnv  # noqa: E402

PROMPTS, SAMPLES, LR = 16, 8, 5e-4
SPECIAL = [
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) }}"
    "{{ '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "repeats": True,
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "$", "content": "text"},
    },
}
"""How TRL reads calls; strop finds the notation itself."""


def rows() -> list[dict]:
    """Return one row for each target."""
    return [{"prompt": [{"role": "user", "content": str(n)}], "target": n} for n in range(1, 10)] * PROMPTS


def warm_up(folder: Path) -> None:
    """Save a model that writes calls with any number."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tiny_model import build_model

    words = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
    made = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<|pad|>")
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model, draw = build_model(tokenizer), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        texts = []
        for _ in range(32):
            target = draw.randrange(1, 10)
            step = target if draw.random() < 0.3 else draw.randrange(1, 10)
            call = {"function": {"name": "increment", "arguments": {"step": step}}}
            chat = [
                {"role": "user", "content": str(target)},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": str(step)},
                {"role": "assistant", "content": "ok"},
            ]
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
        batch = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_trl(folder: Path, steps: int) -> list[float]:
    """Train with TRL; return the mean reward of each step."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # AutoTokenizer takes that of Qwen2
    tokenizer.response_template = RESPONSES
    # system: begin
    trainer = GRPOTrainer(
        model=str(folder),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows()),
        environment_factory=IncrementEnv,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            num_generations=SAMPLES,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            max_completion_length=120,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    # system: end
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def run_strop(folder: Path, steps: int) -> list[float]:
    """Train with strop; return the mean reward of each step."""
    import strop

    # system: begin
    run = strop.train(
        folder,
        {
            "train_files": rows(),
            "train_batch_size": PROMPTS,
            "max_prompt_length": 20,
            "max_response_length": 120,
        },
        environment=IncrementEnv,
        lr=LR,
        n=SAMPLES,
        steps=steps,
        out=folder / "strop",
        **{
            "trainer.resume_mode": "disable",
            "trainer.save_freq": -1,
            "trainer.device": "cpu",
            "trainer.logger": [],
            "actor_rollout_ref.rollout.name": "hf",
            "actor_rollout_ref.actor.entropy_coeff": 0,
        },
    )
    # system: end
    return [line["reward/environment/mean"] for line in run.metrics if "reward/environment/mean" in line]


def lines_of(function) -> int:
    """Return the number of lines that the system's own call takes."""
    source = inspect.getsource(function)
    return source[source.index("# system: begin") : source.index("# system: end")].count("\n") - 1


def main() -> None:
    """Compare, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--trl", type=Path, default=HERE / ".venv-trl" / "bin" / "python")
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--system", choices=["strop", "trl"])
    arguments.add_argument("--folder", type=Path)
    given = arguments.parse_args()
    if given.system:
        curve = (run_trl if given.system == "trl" else run_strop)(given.folder, given.steps)
        (given.folder / "curve.json").write_text(json.dumps(curve))
        return
    folder = Path(tempfile.mkdtemp())
    warm_up(folder)
    pythons = {"strop": Path(sys.executable), "trl": given.trl}
    seconds, curves = {name: [] for name in pythons}, {}
    for _ in range(given.rounds):
        for name, python in pythons.items():
            _, short = measure(__file__, python, name, folder, 2)
            curves[name], long = measure(__file__, python, name, folder, given.steps)
            seconds[name].append((long.cpu_seconds - short.cpu_seconds) / (given.steps - 2))
    shown = [number for number in (1, 2, 3, 5, 8, 12, 16, 20, 30, 40) if number <= given.steps]
    table = [
        "| system | lines | CPU s a step (each round) | " + " | ".join(f"step {n}" for n in shown) + " |",
        "| --- | ---: | ---: | " + " | ".join("---:" for _ in shown) + " |",
    ]
    for name, function in (("strop", run_strop), ("trl", run_trl)):
        costs = f"{statistics.median(seconds[name]):.2f} ({', '.join(f'{one:.2f}' for one in seconds[name])})"
        values = " | ".join(f"{curves[name][n - 1]:.2f}" for n in shown)
        table.append(f"| {name} | {lines_of(function)} | {costs} | {values} |")
    print("\n".join(table))
    if given.out:
        given.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()

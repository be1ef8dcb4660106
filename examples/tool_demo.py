"""Teach a tiny model to use a tool, on a CPU in about two minutes: `make tool-demo`.

A prompt is a number, and the right answer is another one that only the tool knows. The model of 100,000
parameters is warmed up on turns of which most are wrong: half of them guess, and many calls ask for another
number. GRPO then teaches it to ask for the number of the prompt, and to repeat what the tool says.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import strop

from tiny_model import CHARACTERS, CHAT_TEMPLATE, build_model

SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<tool>")


class Lookup:
    """The number behind the prompt's number."""

    def reset(self, key: str, secret: str) -> None:
        self.key, self.secret = key, secret

    def look_up(self, word: str) -> str:
        """Return the number behind a number.

        Args:
            word: The number.
        """
        return self.secret if word == self.key else "-"


class Nothing(Lookup):
    """The same with the tool off."""

    def look_up(self, word: str) -> str:
        """Return nothing.

        Args:
            word: The number.
        """
        return "-"


def calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """Read the calls of a turn: the tiny model writes `*12` for look_up(word="12")."""
    return [("look_up", {"word": text[1:]})] if text.startswith("*") else []


def right(last_turn: str, secret: str) -> float:
    """Score a sample: the last turn is `=` and the secret."""
    return float(last_turn == f"={secret}")


def rows(n: int, seed: int) -> list[dict[str, str]]:
    """Return prompts with their secrets."""
    draw = random.Random(seed)
    numbers = [(str(draw.randint(10, 99)), str(draw.randint(10, 99))) for _ in range(n)]
    return [{"prompt": key, "key": key, "secret": secret} for key, secret in numbers]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters with a role for tools."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=list(SPECIAL[2:]),
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def warm_up(folder: Path, *, steps: int, seed: int) -> None:
    """Save a model that has seen the notation of calls, and mostly wrong turns."""
    own = tokenizer()
    model = build_model(own, seed=seed)
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        ids, sampled = [], []
        for _ in range(160):
            key, secret, other = (str(draw.randint(10, 99)) for _ in range(3))
            if draw.random() < 0.5:  # a guess
                parts = [f"<user>{key}<assistant>", f"={other}<end>"]
            else:
                hit = draw.random() < 0.6
                answer = secret if hit else "-"
                last = secret if hit and draw.random() < 0.6 else other
                parts = [
                    f"<user>{key}<assistant>", f"*{key if hit else other}<end>", f"<tool>{answer}<assistant>",
                    f"={last}<end>",
                ]  # fmt: skip
            encoded = [own(part, add_special_tokens=False)["input_ids"] for part in parts]
            flat = [token for part in encoded for token in part]
            mask = [float(number % 2) for number, part in enumerate(encoded) for _ in part]
            ids.append(flat + [0] * (24 - len(flat)))
            sampled.append(mask + [0.0] * (24 - len(mask)))
        ids_BT, sampled_BT = torch.tensor(ids), torch.tensor(sampled).bool()
        logits = model(input_ids=ids_BT, attention_mask=(ids_BT != 0).long()).logits[:, :-1]
        chosen = sampled_BT[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[chosen], ids_BT[:, 1:][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 70 == 0:
            print(f"warm-up: step {step} of {steps}, loss {loss.item():.2f}", flush=True)
    model.save_pretrained(folder)
    own.save_pretrained(folder)


def accuracy(model: str | Path, **play: Any) -> float:
    """Return the greedy accuracy on prompts that were not trained on."""
    found = strop.evaluate(
        model, rows(300, seed=2), right, max_prompt_length=8, max_response_length=20, **play
    )
    return next(iter(found.scores.values()))


def demo(name: str, play: dict[str, Any], off: dict[str, Any]) -> None:
    """Warm up, train, and print the accuracies; ``play`` gives the tool, and ``off`` the same without it."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--out", type=Path, default=Path("runs", name))
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    start = given.out / "start"
    warm_up(start, steps=420, seed=given.seed)
    before = accuracy(start, **play)
    keys = {
        "data.train_batch_size": 64,
        "data.max_prompt_length": 8,
        "data.max_response_length": 20,
        "trainer.device": "cpu",
        "trainer.seed": given.seed,
        "trainer.logger": ["console"],
        "trainer.resume_mode": "disable",
    }
    run = strop.train(
        start, rows(40_000, seed=1), right, steps=given.steps, n=4, lr=1e-3, out=given.out / "run",
        config=keys, **play,
    )  # fmt: skip
    after = accuracy(run.model_path, **play)
    without = accuracy(run.model_path, **off)
    print(f"accuracy on 300 prompts: before {before:.2f}, after {after:.2f}, with the tool off {without:.2f}")


def main() -> None:
    """Let an environment have the tool."""
    keys = {"environment.parser": f"{Path(__file__).resolve()}:calls", "environment.max_turns": 3}
    demo("tool_demo", {"environment": Lookup, **keys}, {"environment": Nothing, **keys})


if __name__ == "__main__":
    main()

"""`make picture-demo`: a model that reads pictures learns the colour of a square from a reward.

A SmolVLM of 130,000 random parameters is fine-tuned to answer with the name of a colour, any colour. GRPO
then rewards the right one. At the end it answers about new pictures, and about blank ones, where the best
that it can do is to guess: one of six.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.utils import logging

import strop

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (230, 220, 30),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}
QUESTION, SIDE = "colour?", 56
PICTURE = "<fake_token_around_image><global-img>{}<fake_token_around_image>"
"""Text of a picture in a prompt of SmolVLM, around its tokens."""
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
console = Console()


def picture(colour: str, random_numbers: random.Random) -> Image.Image:
    """Draw a square at a random place on a grey ground."""
    image = Image.new("RGB", (SIDE, SIDE), (random_numbers.randint(90, 160),) * 3)
    x, y, size = (random_numbers.randint(*bounds) for bounds in ((0, 28), (0, 28), (18, 28)))
    ImageDraw.Draw(image).rectangle((x, y, x + size, y + size), fill=COLOURS[colour])
    return image


def rows(count: int, seed: int, *, blank: bool = False) -> list[dict[str, Any]]:
    """Return questions about pictures, with the colours in equal numbers."""
    random_numbers, found = random.Random(seed), []
    for number in range(count):
        colour = [*COLOURS][number % len(COLOURS)]
        image = picture(colour, random_numbers)
        image = Image.new("RGB", (SIDE, SIDE), (128,) * 3) if blank else image
        found.append({"prompt": QUESTION, "images": [image], "answer": colour})
    random_numbers.shuffle(found)
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each character, colour and role."""
    words = [*COLOURS, "user", "assistant", "colour"]
    characters = [*map(chr, range(32, 127)), "\n"]
    names = ["<pad>", "<|im_start|>", "<|im_end|>", *SPECIAL]
    vocabulary = {token: number for number, token in enumerate([*names, *characters, *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*words, r"[\s\S]"])), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *SPECIAL],
        chat_template=TEMPLATE,
    )


def build(folder: Path, seed: int) -> None:
    """Write a SmolVLM that names colours at random, with its processor."""
    torch.manual_seed(seed)
    random_numbers, tokens = random.Random(seed), tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama",
            **sizes,
            "num_key_value_heads": 2,
            "vocab_size": len(tokens),
            "bos_token_id": None,
            "eos_token_id": tokens.eos_token_id,
            "pad_token_id": tokens.pad_token_id,
        },
        vision_config={**vision, "image_size": SIDE, "patch_size": 14},
        scale_factor=2,
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
        pad_token_id=tokens.pad_token_id,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = tokens.eos_token_id
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    count = (SIDE // 14 // 2) ** 2  # tokens of a picture
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    prompt = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = prompt.replace("<image>", PICTURE.format("<image>" * count))
    examples = rows(480, seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        chosen = random_numbers.sample(examples, 32)
        pixels = images([row["images"] for row in chosen], return_tensors="pt")
        answers = [f"{random_numbers.choice([*COLOURS])}<|im_end|>" for _ in chosen]
        ids = tokens([prompt + answer for answer in answers], return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, :-2] = -100
        loss = model(input_ids=ids, labels=labels, **pixels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    processor = {"processor_class": SmolVLMProcessor.__name__, "image_seq_len": count}
    processor["image_processor"] = images.to_dict()
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=1, default=str))


def right(response: str, ground_truth: str) -> float:
    """Reward the right colour."""
    return float(response.strip() == ground_truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pictures"))
    parser.add_argument("--steps", type=int, default=250, help="iterations of 32 questions with 8 answers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blank", action="store_true", help="train on blank pictures: it stays at a guess")
    options = parser.parse_args()
    logging.disable_progress_bar()  # transformers draws one even for half a megabyte
    torch.set_num_threads(1)  # a model this small is no faster with more threads
    start = options.out / "start"
    build(start, options.seed)
    keys = {
        "data.answer_key": "answer",
        "data.max_prompt_length": 24,
        "data.max_response_length": 4,
        "trainer.device": "cpu",
    }
    strop.train(
        str(start),
        rows(640, options.seed + 2, blank=options.blank),
        right,
        lr=2e-3,
        steps=options.steps,
        out=options.out / "run",
        **keys,
        **{
            "data.train_batch_size": 32,
            "actor_rollout_ref.rollout.n": 8,
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.seed": options.seed,
        },
    )
    table = Table("model", "new pictures", "blank pictures", title="right answers, greedy, of 240")
    for name, model in {"before": start, "after": options.out / "run" / "final_model"}.items():
        scores = []
        for blank in (False, True):
            questions = rows(240, options.seed + 3, blank=blank)
            report = strop.evaluate(
                str(model),
                questions,
                right,
                out=options.out / f"{name}-{'blank' if blank else 'new'}",
                **keys,
            )
            scores += report.scores.values()
        table.add_row(name, *(f"{score:.3f}" for score in scores))
    console.print(table)


if __name__ == "__main__":
    main()

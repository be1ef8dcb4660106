"""strop sft, dpo and train-rm on prompts with pictures, and reinforcement learning from the reward model."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import picture_rows
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from strop.data.loader import EpochSampler
from strop.errors import StropError
from strop.models.heads import part_of
from strop.models.loader import load_scorer

import picture_models
import runs
from supervised_runs import metrics, overrides, train

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'"
)
KINDS = ("sft", "dpo", "train-rm")
FAMILIES = ("smolvlm", "qwen2_5_vl")
STEPS = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Two models whose pictures matter, and 24 rows with 0 to 2 pictures of two sizes."""
    folder = tmp_path_factory.mktemp("answers")
    for kind in FAMILIES:
        picture_models.make(kind, folder / kind)
        model = AutoModelForImageTextToText.from_pretrained(folder / kind)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2 if weight.dim() > 1 else 1)
        model.save_pretrained(folder / kind)
    write(folder / "train.jsonl")
    return folder


def write(file: Path, seed: int = 0) -> Path:
    rows = []
    for row in range(24):
        names = [f"{file.stem}-{row}-{place}.png" for place in range(row % 3)]
        for place, name in enumerate(names):
            (file.parent / name).write_bytes(
                picture_rows.picture(seed + 3 * row + place, 56 + 28 * (row % 2))
            )
        answers = {"response": "red", "chosen": "blue!", "rejected": "green" if row % 2 else "b"}
        rows.append({"prompt": f"what is {row % 4}?", "images": names, **answers})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def options(inputs: Path, run: Path, *extra: str, model: str = "smolvlm") -> list[str]:
    return overrides(
        inputs,
        run,
        f"model.path={inputs / model}",
        f"data.train_files={inputs / 'train.jsonl'}",
        "data.val_files=[]",
        "data.max_prompt_length=48",
        "data.shuffle=False",
        f"trainer.total_training_steps={STEPS}",
        "update.optim.lr=1e-3",
        "update.optim.lr_warmup_steps_ratio=0",
        "update.optim.warmup_style=constant",
        "trainer.test_freq=-1",
        "trainer.logger=[jsonl]",
        *extra,
    )


def arguments(model: Any, folder: Path, images: list[Path], ids: Tensor, prompt: int) -> dict[str, Tensor]:
    """Return transformers' arguments for the pictures of one row."""
    if not images:
        return {}
    processor = AutoImageProcessor.from_pretrained(folder)
    found = processor([[Image.open(path).convert("RGB") for path in images]], return_tensors="pt")
    columns = {name: found[name] for name in processor.model_input_names if name in found}
    if hasattr(model.base_model, "get_rope_index"):
        types = (ids == model.config.image_token_id) & (torch.arange(ids.shape[1]) < prompt)
        columns["mm_token_type_ids"] = types.int()
    return {name: x.double() if x.is_floating_point() else x for name, x in columns.items()}


class Oracle:
    """transformers' own passes in float64, a row and an answer at a time."""

    def __init__(self, kind: str, folder: Path, dataset: Any, images: list[list[Path]]) -> None:
        self.kind, self.folder, self.dataset, self.images = kind, folder, dataset, images
        self.model = self.load(folder).double()
        self.reference = copy.deepcopy(self.model)

    def load(self, folder: Path) -> Any:
        if self.kind == "train-rm":
            return load_scorer(folder, fresh_head_seed=1)
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)

    def figure(self, model: Any, row: int, name: str) -> Tensor:
        """The log-prob of an answer, or its score."""
        prompt, answer = self.dataset[row]["input_ids"], self.dataset[row][name]
        ids = torch.cat([prompt, answer])[None]
        more = arguments(model, self.folder, self.images[row], ids, len(prompt))
        if self.kind == "train-rm":
            return model.score(model.base_model(input_ids=ids, **more).last_hidden_state[0, -1])[0]
        logits = model(input_ids=ids, **more).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, answer[:, None]).sum()

    def loss(self, rows: list[int]) -> Tensor:
        if self.kind == "sft":
            tokens = sum(len(self.dataset[row]["response"]) for row in rows)
            return -sum(self.figure(self.model, row, "response") for row in rows) / tokens
        losses = []
        for row in rows:
            chosen, rejected = (self.figure(self.model, row, name) for name in ("chosen", "rejected"))
            if self.kind == "dpo":
                with torch.no_grad():
                    before = [self.figure(self.reference, row, name) for name in ("chosen", "rejected")]
                chosen, rejected = 0.1 * (chosen - before[0]), 0.1 * (rejected - before[1])
            losses.append(-logsigmoid(chosen - rejected))
        return torch.stack(losses).mean()

    def train(self) -> None:
        weights = [*self.model.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.01)
        for step in range(STEPS):
            self.loss([*range(8 * step, 8 * step + 8)]).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()


def moved(model: Any, before: Any) -> dict[str, dict[str, Tensor]]:
    """Changes of the weights by name, of each part."""
    found: dict[str, dict[str, Tensor]] = {}
    for (name, weight), old in zip(model.named_parameters(), before.parameters(), strict=True):
        found.setdefault(part_of(name) or "language", {})[name] = weight.detach().double() - old.detach()
    return found


@pytest.mark.fast("sft-smolvlm-packed", "dpo-smolvlm-packed")
@pytest.mark.parametrize(
    "packed", ["True", pytest.param("False", marks=pytest.mark.slow)], ids=["packed", "padded"]
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_transformers_in_float64(inputs, tmp_path, kind, family, packed):
    extra = (f"model.use_remove_padding={packed}", "update.micro_batch_size_per_gpu=3")
    trainer = train(kind, options(inputs, tmp_path, *extra, model=family))
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    images = [[inputs / name for name in row["images"]] for row in rows]
    oracle = Oracle(kind, inputs / family, trainer.train_loader.dataset, images)
    oracle.train()
    expected = moved(oracle.model, oracle.reference)
    found = moved(oracle.load(tmp_path / "final_model"), oracle.reference)
    for part, changes in expected.items():
        norm = sum(change.square().sum() for change in changes.values())
        assert norm > 0, part
        difference = sum((found[part][name] - change).square().sum() for name, change in changes.items())
        assert (difference / norm).sqrt() < 5e-5, part


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_frozen_parts_keep_every_bit(inputs, tmp_path, kind):
    train(kind, options(inputs, tmp_path, "model.freeze=[encoder]"))
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder)
        for folder in (inputs / "smolvlm", tmp_path / "final_model")
    )
    for part, changes in moved(after, before).items():
        assert any(change.any() for change in changes.values()) == (part != "encoder"), part


@pytest.mark.fast("dpo")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_is_exact_and_needs_the_same_pictures(inputs, tmp_path, kind):
    rows = write(tmp_path / "own.jsonl")
    keys = (f"data.train_files={rows}", f"data.val_files={rows}", "trainer.test_freq=2", "data.shuffle=True")
    whole = train(kind, options(inputs, tmp_path / "whole", *keys))
    run = options(inputs, tmp_path / "run", *keys, "trainer.save_freq=1")
    train(kind, run)
    (tmp_path / "run" / f"global_step_{STEPS}").rename(tmp_path / "lost")  # as if it had died before
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(f"{STEPS - 1}\n")
    assert train(kind, run).group.weights_hash() == whole.group.weights_hash()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    (tmp_path / "own-2-0.png").write_bytes(picture_rows.picture(999, 84))
    with pytest.raises(StropError, match="pictures"):
        train(kind, [*run, f"trainer.total_training_steps={STEPS + 1}"])


def test_the_references_log_probs_are_of_their_pictures(inputs, tmp_path, monkeypatch):
    """Pictures of equal size give equal tokens, and other log-probs."""
    rows = write(tmp_path / "own.jsonl")
    run = options(inputs, tmp_path / "run", f"data.train_files={rows}", "trainer.save_freq=-1")
    cached = tmp_path / "run" / "reference_log_probs" / "train.safetensors"
    train("dpo", run)
    before = cached.read_bytes()
    write(tmp_path / "own.jsonl", seed=500)
    monkeypatch.setattr(EpochSampler, "load_state_dict", lambda self, state: None)
    train("dpo", [*run, "trainer.resume_mode=auto", f"trainer.total_training_steps={STEPS + 1}"])
    assert cached.read_bytes() != before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(inputs, tmp_path, kind):
    """A rank whose micro-batch has no picture does not hang, and other processes get the pictures."""
    keys = ("update.micro_batch_size_per_gpu=1", "trainer.n_gpus_per_node=2", "trainer.worker_group=ray")
    train(kind, options(inputs, tmp_path / "one", keys[0]))
    train(kind, options(inputs, tmp_path / "two", *keys)).shutdown()
    oracle = Oracle(kind, inputs / "smolvlm", None, [])
    one, two = (moved(oracle.load(tmp_path / run / "final_model"), oracle.model) for run in ("one", "two"))
    for part, changes in one.items():
        norm = sum(change.square().sum() for change in changes.values())
        difference = sum((two[part][name] - change).square().sum() for name, change in changes.items())
        assert (difference / norm).sqrt() < 1e-4, part


@pytest.mark.fast("sft")
@needs_peft
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_an_adapter_is_what_peft_loads_on_the_base_model(inputs, tmp_path, kind):
    from peft import PeftModel

    lora = ("model.lora_rank=2", f"data.val_files={inputs / 'train.jsonl'}", "trainer.test_freq=3")
    trainer = train(kind, options(inputs, tmp_path, *lora, "update.optim.lr=1e-2"))
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    images = [[inputs / name for name in row["images"]] for row in rows]
    oracle = Oracle(kind, inputs / "smolvlm", trainer.train_loader.dataset, images)
    oracle.model = PeftModel.from_pretrained(oracle.model, tmp_path / "final_model").double().base_model.model
    with torch.no_grad():
        expected, base = float(oracle.loss([*range(24)])), Oracle.loss
        oracle.model = oracle.reference
        start = float(base(oracle, [*range(24)]))
    found = metrics(tmp_path)[-1]["val/loss"]
    assert found == pytest.approx(expected, abs=2e-6)
    assert abs(found - start) > 1e-3


def test_ppo_with_a_trained_reward_model_that_sees(inputs, tmp_path, caplog):
    caplog.set_level("INFO")
    train("train-rm", options(inputs, tmp_path / "rm", f"data.val_files={inputs / 'train.jsonl'}"))
    used = next(text for text in caplog.messages if text.startswith("use: "))
    task = picture_rows.inputs(tmp_path)
    keys = (
        f"actor_rollout_ref.model.path={inputs / 'smolvlm'}",
        f"critic.model.path={tmp_path / 'rm' / 'final_model'}",
        *used.split()[1:],
        "custom_reward_function.path=null",
        "data.answer_key=null",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.temperature=0.01",
    )
    found = []
    for name, seed in (("a", 0), ("b", 300)):
        rows = picture_rows.write_rows(tmp_path / f"{name}.jsonl", 24, seed=seed)
        runs.train(picture_rows.options(task, tmp_path / name, *keys, f"data.train_files={rows}"))
        found += runs.metrics(tmp_path / name)
    assert abs(found[0]["critic/score/mean"] - found[1]["critic/score/mean"]) > 1e-3  # of other pictures
    assert all(line["critic/vf_loss"] > 0 for line in found)


@pytest.mark.parametrize("kind", ["chosen", "rejected", "response"])
def test_pictures_in_answers_are_refused(inputs, tmp_path, kind):
    part = {"type": "image", "image": str(inputs / "train-1-0.png")}
    row = {"prompt": "a", "response": "b", "chosen": "b", "rejected": "c"}
    row[kind] = [{"role": "assistant", "content": [part]}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(StropError, match=f"row 0, field {kind}: found a part of the type image"):
        train("sft" if kind == "response" else "dpo", options(inputs, tmp_path, f"data.train_files={file}"))

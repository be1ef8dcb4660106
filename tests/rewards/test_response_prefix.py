"""What a prompt wrote of the response: the form of an answer is that of both together."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from strop.cli.main import main
from strop.protocol import DataProto
from strop.rewards.arguments import Row, tail_of
from strop.rewards.manager import RewardManager

THINKS = "<|user|>Use <answer> tags: 1+2<assistant>\n<think>\n"


@pytest.fixture(scope="module")
def thinker() -> PreTrainedTokenizerFast:
    """One id a character, two special tokens, of which one looks like a tag, and the tags of thoughts."""
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(string.printable)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<|user|>", "<assistant>"])
    backend.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="\x0c", eos_token="\x0b")


@pytest.mark.parametrize(
    ("prompt", "prefix"),
    [
        (THINKS, "<think>\n"),
        ("<|user|>1+2<assistant><think>", "<think>"),
        ("<|user|>1+2<assistant>\n<reasoning>\n", "<reasoning>\n"),
        ("<|user|>1+2<assistant>\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("A text. Assistant: Let me solve this step by step.\n<think>", "<think>"),
        ("<|user|>1+2<assistant>", ""),
        ("<|user|>1+2<assistant>\n", ""),
        ("<|user|>write <think> first<assistant>", ""),
        ("<|user|>begin with <think><assistant>", ""),
        ("<|user|>begin with <think><assistant>\n", ""),
        ("Write the answer in <answer></answer>", ""),
        ("Write the answer in <answer></answer>\n", ""),
        ("", ""),
    ],
)
def test_the_prefix_is_the_tag_with_which_a_prompt_ends(thinker: Any, prompt: str, prefix: str):
    ids = thinker(prompt, add_special_tokens=False)["input_ids"]
    assert Row({}, None, ids=lambda: ids, tail=lambda: tail_of(ids, thinker)).response_prefix() == prefix


def test_the_prefix_is_the_message_that_is_continued():
    chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "<think>Well, "}]
    assert Row({}, chat, tail=lambda: "<think>Well, ").response_prefix() == "<think>Well, "
    parts = [{"type": "text", "text": "<think>"}, {"type": "text", "text": "Well, "}]
    assert Row({}, [chat[0], {"role": "assistant", "content": parts}]).response_prefix() == "<think>Well, "
    assert Row({}, chat[:1]).response_prefix() == ""
    assert Row({}, None).response_prefix() == ""


RESPONSES = ["so</think><answer>3</answer>", "<think>so</think><answer>3</answer>", "3"]


def rows_of(thinker: Any, prompt: str) -> DataProto:
    """A batch of responses to one prompt."""
    texts = [thinker(text)["input_ids"] for text in RESPONSES]
    width = max(map(len, texts))
    ids = torch.tensor([text + [thinker.pad_token_id] * (width - len(text)) for text in texts])
    mask = torch.tensor([[1.0] * len(text) + [0.0] * (width - len(text)) for text in texts])
    prompts = torch.tensor([thinker(prompt)["input_ids"]] * len(texts))
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": ids,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones_like(prompts), mask.long()], dim=1),
        },
        {"data_source": ["x"] * len(texts), "reward_model": [{"ground_truth": "3"}] * len(texts)},
    )


@pytest.mark.parametrize(("prompt", "forms"), [(THINKS, [1, 0, 0]), ("<|user|>1+2<assistant>\n", [0, 1, 0])])
def test_the_format_is_that_of_prompt_and_response_together(thinker: Any, prompt: str, forms: list[int]):
    manager = RewardManager(thinker, 0, parts={"rule": 0, "form": {"scorer": "format"}})
    try:
        output = manager(rows_of(thinker, prompt))
    finally:
        manager.close()
    assert output.parts["form"].tolist() == forms
    assert output.token_level_scores.sum(dim=1).tolist() == forms


def test_a_function_can_take_the_prefix(thinker: Any):
    manager = RewardManager(thinker, 0, lambda response, response_prefix: float(len(response_prefix)))
    try:
        assert manager(rows_of(thinker, THINKS)).parts["rule"].tolist() == [8.0] * 3
    finally:
        manager.close()


def test_strop_score_reads_the_prompts_of_samples_files(
    thinker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    thinker.save_pretrained(tmp_path / "model")
    rows = {"response": RESPONSES, "prompt": [THINKS] * 3}
    ids = thinker(THINKS)["input_ids"]
    pq.write_table(pa.table(rows), tmp_path / "texts.parquet")
    pq.write_table(pa.table({**rows, "prompt_ids": [ids] * 3}), tmp_path / "samples.parquet")
    for name in ("texts", "samples"):
        for options in ([], ["--tokenizer", str(tmp_path / "model")]):
            assert main(["score", str(tmp_path / f"{name}.parquet"), "--scorer", "format", *options]) == 0
            assert "0.3333" in capsys.readouterr().out
    other = {"response": RESPONSES[:1], "prompt": ["<|user|>1+2<assistant>\n"]}
    pq.write_table(pa.table(other), tmp_path / "other.parquet")
    assert main(["score", str(tmp_path / "other.parquet"), "--scorer", "format"]) == 0
    assert "0.0000" in capsys.readouterr().out

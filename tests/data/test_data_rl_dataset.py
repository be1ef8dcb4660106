from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from strop.data.loader import PromptLoader, collate, one_pass
from strop.data.prompt_table import source_of
from strop.data.rl_dataset import RLHFDataset, create_rl_dataset, data_sources_of, first_of_each_source
from strop.errors import DataError
from strop.prepare import prepare

from messages import mentions, naming


def chat(text: str):
    return [{"role": "user", "content": text}]


def full_row(text: str, index: int | None = None, **fields):
    return {
        "data_source": "openai/gsm8k",
        "prompt": chat(text),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": index, "tags": ["a", "b"]},
        **fields,
    }


@pytest.fixture
def build(write, tokenizer):
    """build(rows, **arguments) -> RLHFDataset on one file data.parquet."""

    def make(rows, **arguments):
        return RLHFDataset(write("data.parquet", rows), tokenizer, **{"max_prompt_length": 8, **arguments})

    return make


def test_a_row_has_its_ids_and_its_columns_as_plain_python(build):
    dataset = build([full_row("w1 w2", index=5, level="hard")])
    row = dataset[0]
    assert row.pop("input_ids").tolist() == [3, 11, 12, 5]
    assert row == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 5, "tags": ["a", "b"]},
        "index": 5,
        "level": "hard",
        "prompt": [{"role": "user", "content": "w1 w2"}],
    }
    assert type(row["extra_info"]["tags"]) is list
    assert dataset[0]["input_ids"].dtype == torch.int64


def test_raw_chat_and_raw_ids_come_on_request(build):
    row = build([full_row("w1 w2")], return_raw_chat=True, return_raw_input_ids=True)[0]
    assert row["raw_prompt"] == chat("w1 w2")
    assert row["raw_prompt_ids"] == [11, 12]
    plain = build([{"prompt": "w3"}], return_raw_chat=True, return_raw_input_ids=True)[0]
    assert plain["input_ids"].tolist() == [3, 13, 5]
    assert plain["raw_prompt"] == chat("w3")
    assert plain["raw_prompt_ids"] == [13]


def test_the_index_is_extra_infos_or_a_column_or_the_row_number(build):
    assert [row["index"] for row in build([full_row("w1", index=9), full_row("w2")])] == [9, 1]
    assert [row["index"] for row in build([{"prompt": "w1", "index": 40}])] == [40]
    assert [row["index"] for row in build([{"prompt": "w1", "extra_info": None}])] == [0]


def test_the_only_column_that_is_needed_is_the_prompt(build):
    dataset = build([{"question": chat("w1")}], prompt_key="question")
    assert dataset[0]["input_ids"].tolist() == [3, 11, 5]
    assert dataset[0].keys() == {"input_ids", "index", "data_source", "question"}
    assert {dataset[0]["data_source"]} == dataset.data_sources() == {"data"}  # data.parquet
    row = build([{"prompt": "w1", "task": "my/task"}], reward_fn_key="task")[0]
    assert row["data_source"] == row["task"] == "my/task"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("data/sums.csv", "sums"),
        ("rows:train-0a1b", "rows"),
        ("data/train-00001-of-00008.parquet", "train"),
        ("owner/sums:train", "sums"),
        ("hdfs://host/a/sums.parquet", "sums"),
    ],
)
def test_rows_without_a_source_have_their_files_name(file, source):
    assert source_of(file) == source


def test_overlong_prompts_are_dropped_with_their_number(build, caplog):
    rows = [full_row("w1 w2 w3 w4 w5 w6 w7"), full_row("w1"), full_row("w1 w2 w3 w4 w5 w6")]
    with caplog.at_level(logging.WARNING, "strop.data"):
        dataset = build(
            rows, truncation="left", filter_overlong_prompts=True
        )  # 9, 3 and 8 tokens: dropped before they could be cut
    assert [len(row["input_ids"]) for row in dataset] == [3, 8]
    assert [row["index"] for row in dataset] == [1, 2]
    assert dataset[-1]["index"] == 2
    assert mentions(caplog.text, "1 of 3", "data.max_prompt_length=8")
    caplog.clear()
    build([full_row("w1")])
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("left", 4, [13, 14, 15, 5]),
        ("right", 4, [3, 11, 12, 13]),
        ("middle", 4, [3, 11, 15, 5]),
        ("middle", 5, [3, 11, 14, 15, 5]),
        ("middle", 1, [5]),
        ("left", 7, [3, 11, 12, 13, 14, 15, 5]),
    ],
)
def test_truncation_keeps_the_named_part(build, side, limit, kept):
    rows = [full_row("w1 w2 w3 w4 w5")]  # 3 11 12 13 14 15 5
    dataset = build(rows, max_prompt_length=limit, truncation=side)
    assert dataset[0]["input_ids"].tolist() == kept


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ({}, {"data_source": None}, ["row 1", "data_source", "null"]),
        ({}, {"reward_model": None}, ["row 1", "reward_model", "null"]),
        ({"data_source": 7}, None, ["row 0", "data_source", "int 7"]),
        ({"reward_model": "72"}, None, ["row 0", "reward_model", "str '72'"]),
        ({"extra_info": "none"}, None, ["row 0", "extra_info", "str 'none'"]),
        ({"extra_info": None}, {"extra_info": 3}, ["row 1", "field extra_info", "3"]),
        ({"input_ids": [1, 2]}, None, ["'input_ids'"]),  # a batch makes it itself
    ],
)
def test_a_column_of_another_type_or_without_a_value_is_named(build, first, second, parts):
    with pytest.raises(DataError, match=naming(*parts)):
        build([full_row("w1", **fields) for fields in (first, second) if fields is not None])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"max_prompt_length": 2, "filter_overlong_prompts": True},
            ["2 rows", "=2", "3 tokens", "data.max_prompt_length=4"],
        ),
        ({"truncation": "center"}, ["data.truncation='center'", "error", "left", "right", "middle"]),
        (
            {"max_prompt_length": 3},
            [
                *("data.parquet", "row 1", "4 tokens", "data.max_prompt_length is 3", "1 of 2"),
                *("data.max_prompt_length=4", "data.filter_overlong_prompts=True"),
            ],
        ),
    ],
)
def test_lengths_and_truncations_that_leave_no_data_set_are_errors(build, options, parts):
    with pytest.raises(DataError, match=naming(*parts)):
        build([full_row("w1"), full_row("w1 w2")], **options)


def test_dictionary_encoded_strings_are_strings(write, tokenizer):
    path = write("d.parquet", prompt=["w1"], data_source=pa.array(["a/b"]).dictionary_encode())
    assert RLHFDataset(path, tokenizer, max_prompt_length=8)[0]["data_source"] == "a/b"


def config(**changes):
    values = {
        "prompt_key": "prompt",
        "tools_key": "tools",
        "max_prompt_length": 4,
        "truncation": "right",
        "filter_overlong_prompts": False,
        "return_raw_chat": True,
        "return_raw_input_ids": True,
        "reward_fn_key": "data_source",
        "answer_key": None,
        "data_source": None,
        "apply_chat_template": "auto",
        "system_prompt": None,
        "apply_chat_template_kwargs": {},
        "allow_special_tokens": False,
        "num_workers": None,
        "cache_dir": None,
        **{"image_key": "auto", "min_pixels": None, "max_pixels": None, "max_images": None},
    }
    return SimpleNamespace(**(values | changes))


def test_create_rl_dataset_follows_the_configuration(write, tokenizer, tmp_path):
    path = write("data.parquet", [full_row("w1 w2 w3")])
    dataset = create_rl_dataset([path], config(cache_dir=tmp_path / "cache"), tokenizer)
    row = dataset[0]
    assert row["input_ids"].tolist() == [3, 11, 12, 13]
    assert row["raw_prompt"] == chat("w1 w2 w3")
    assert row["raw_prompt_ids"] == [11, 12, 13]
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
    assert create_rl_dataset([path], config(), tokenizer, object()).pictures is None


def test_gsm8k_goes_from_jsonl_to_batches(real_data, tmp_path):
    """The whole way on real rows with a byte-level BPE trained on them: decoding gives the prompts back."""
    prepared = prepare("gsm8k", real_data / "gsm8k", tmp_path / "out")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<pad>", "<user>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (real_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    backend.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    dataset = RLHFDataset(
        prepared["test"].path,
        tokenizer,
        max_prompt_length=400,
        return_raw_chat=True,
        cache_dir=tmp_path / "cache",
    )
    assert len(dataset) == 1319
    pad = partial(collate, pad_token_id=0, max_prompt_length=400)
    batches = PromptLoader(dataset, one_pass(len(dataset), 500), pad)
    sizes = []
    for batch in batches:
        sizes.append(len(batch))
        ids = batch.batch["input_ids"][batch.batch["attention_mask"].bool()].tolist()
        texts = [messages[0]["content"] for messages in batch.non_tensor_batch["raw_prompt"]]
        assert tokenizer.decode(ids) == "".join(f"<user>{text}<assistant>" for text in texts)
        assert (batch.batch["input_ids"][:, -1] == tokenizer.convert_tokens_to_ids("<assistant>")).all()
    assert sizes == [500, 500, 319]


def test_the_data_sources_of_a_data_set_of_the_user():
    rows = [{"source": "a"}, {"source": "b"}]
    assert data_sources_of(rows, "source") == {"a", "b"}
    assert data_sources_of(rows, "data_source") == {"unnamed"}
    assert first_of_each_source(rows, 1, "source").rows == [0, 1]
    assert first_of_each_source(rows, 1, "data_source").rows == [0]

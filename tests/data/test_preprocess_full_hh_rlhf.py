"""The real text is offensive in places: tests on it compare numbers and flags, so no failure quotes it."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter

import pyarrow.parquet as pq
import pytest

from strop.errors import DataError
from strop.prepare import prepare
from strop.prepare.full_hh_rlhf import read_pair

from messages import mentions, naming

PROMPT = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: How: are you?\nWell?"


def transcripts(chosen=" Fine.", rejected=" Bad.", prompt=PROMPT, other=None):
    return {
        "chosen": f"{prompt}\n\nAssistant:{chosen}",
        "rejected": f"{other or prompt}\n\nAssistant:{rejected}",
    }


MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "How: are you?\nWell?"},
]


COLUMNS = {
    "sft": {"response": "Fine."},
    "rm": {"chosen": "Fine.", "rejected": "Bad."},
    "rl": {"ability": "alignment", "reward_model": {"style": "model", "ground_truth": "Fine."}},
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_each_kind_has_its_columns(kind, tmp_path):
    source = tmp_path / "harmless-base.test.jsonl.gz"
    source.write_bytes(gzip.compress(json.dumps(transcripts()).encode()))
    written = prepare("full_hh_rlhf", source, tmp_path / "out", split_kind=kind)
    base = {"data_source": "Dahoas/full-hh-rlhf", "prompt": MESSAGES}
    row = {**base, "extra_info": {"split": "test", "index": 0}, **COLUMNS[kind]}
    assert pq.read_table(written["test"].path).to_pylist() == [row]


def test_an_unknown_kind_is_an_error(tmp_path):
    with pytest.raises(DataError, match=naming("split_kind='dpo'", "sft", "rm", "rl")):
        prepare("full_hh_rlhf", tmp_path, tmp_path / "out", split_kind="dpo")


def test_a_file_of_another_kind_is_not_overwritten(tmp_path):
    source = tmp_path / "harmless-base.test.jsonl"
    source.write_text(json.dumps(transcripts()))
    for _ in range(2):  # the same kind may be prepared again
        prepare("full_hh_rlhf", source, tmp_path / "out", split_kind="rl")
    before = (tmp_path / "out" / "test.parquet").read_bytes()
    with pytest.raises(DataError, match=naming("test.parquet", "ability", "chosen", "rejected")):
        prepare("full_hh_rlhf", source, tmp_path / "out", split_kind="rm")
    assert (tmp_path / "out" / "test.parquet").read_bytes() == before


def test_a_record_with_a_separate_prompt_gives_the_same_pair():
    own = {"prompt": f"{PROMPT}\n\nAssistant:", "response": " Fine.", "chosen": " Fine.", "rejected": " Bad."}
    assert read_pair(own) == read_pair(transcripts()) == (MESSAGES, "Fine.", "Bad.")
    one_turn = [{"role": "user", "content": "Hi"}]
    assert read_pair(transcripts(prompt="\n\nHuman: Hi")) == (one_turn, "Fine.", "Bad.")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (transcripts(other="\n\nHuman: Bye"), "prompts .*differ"),
        (transcripts(chosen=" "), "chosen .*empty"),
        (transcripts(rejected=""), "rejected .*empty"),
        (transcripts(rejected="Fine. "), "same"),
        (transcripts(prompt="\n\nHuman: a\n\nHuman: b"), "alternate"),
        (transcripts(prompt="\n\nAssistant: a\n\nHuman: b"), "alternate"),
        (transcripts(prompt="\n\nHuman: a\n\nAssistant: b"), "end"),
        (transcripts(prompt="\n\nHuman: \n\nAssistant: b\n\nHuman: c"), "empty"),
        (transcripts(prompt="secret\n\nHuman: a"), "start"),
        (transcripts(prompt=" "), "start"),
        ({"chosen": "secret", "rejected": "secret"}, "chosen"),
        ({"chosen": ["secret"], "rejected": ""}, "chosen.* list"),
    ],
)
def test_a_record_that_is_not_a_pair_is_refused_without_its_text(record, reason):
    with pytest.raises(DataError, match=reason) as error:
        read_pair(record)
    assert "secret" not in str(error.value)


@pytest.fixture
def raw_pairs(real_data):
    path = real_data / "hh_rlhf" / "harmless-base.test.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", ["sft", "rm", "rl"])
def test_every_real_pair_is_used_or_counted_out(kind, real_data, raw_pairs, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "strop.data"):
        written = prepare("full_hh_rlhf", real_data / "hh_rlhf", tmp_path, split_kind=kind)
    assert {split: made.rows for split, made in written.items()} == {"test": 2299}
    lines = (tmp_path / "test.rejected.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert Counter(entry["reason"] for entry in listed) == {
        "the prompts of chosen and rejected differ": 5,
        "the answer of chosen is empty": 4,
        "the turns of the prompt do not alternate": 4,
    }
    assert mentions(caplog.text, "5 times", "row 1254", "chosen", "rejected")
    rows = pq.read_table(written["test"].path).to_pylist()
    used = [row["extra_info"]["index"] for row in rows]
    assert (
        sorted(used + [entry["row"] for entry in listed]) == list(range(len(raw_pairs))) == list(range(2312))
    )
    damaged = [row["extra_info"]["index"] for row in rows if not has_the_same_text(row, raw_pairs)]
    assert damaged == []


def has_the_same_text(row, raw_pairs) -> bool:
    """Return True if turns and answers, joined, are the transcripts (white space aside)."""
    speakers = {"user": "Human", "assistant": "Assistant"}
    turns = [f"{speakers[turn['role']]}: {turn['content']}" for turn in row["prompt"]]
    answers = {"chosen": row.get("chosen") or row.get("response"), "rejected": row.get("rejected")}
    if "reward_model" in row:
        answers["chosen"] = row["reward_model"]["ground_truth"]
    raw = raw_pairs[row["extra_info"]["index"]]
    return answers["chosen"] is not None and all(
        " ".join([*turns, f"Assistant: {answer}"]).split() == raw[name].split()
        for name, answer in answers.items()
        if answer is not None
    )

from __future__ import annotations

import json
import logging

import pyarrow.parquet as pq
import pytest

from strop.errors import DataError
from strop.prepare import prepare
from strop.prepare.hellaswag import readable
from strop.rewards.router import default_compute_score

from messages import Message, mentions, naming


def record(**changes):
    fields = {
        "activity_label": "Canoeing",
        "ctx": "A man sits in a canoe. he",
        "endings": ["paddles.", "flies.", "melts.", "sings."],
        "label": "2",
        "split_type": "indomain",
    }
    return fields | changes


def write(path, records):
    path.write_text("\n".join(json.dumps(entry) for entry in records), encoding="utf-8")
    return path


def test_a_row_has_the_choices_and_the_letter_of_the_right_one(tmp_path):
    source = write(tmp_path / "val.jsonl", [record()])
    written = prepare("hellaswag", source, tmp_path / "out", instruction="Which?")["validation"]
    assert pq.read_table(written.path).to_pylist() == [
        {
            "data_source": "Rowan/hellaswag",
            "prompt": [
                {
                    "role": "user",
                    "content": "Canoeing: A man sits in a canoe. he\n\n"
                    "A. paddles.\nB. flies.\nC. melts.\nD. sings.\n\nWhich?",
                }
            ],
            "ability": "commonsense",
            "reward_model": {"style": "rule", "ground_truth": "C"},
            "extra_info": {"split": "validation", "index": 0, "answer": "melts.", "type": "indomain"},
        }
    ]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("How to knit [title] Buy wool. [step] Red  is nice.", "How to knit. Buy wool. Red is nice."),
        ("[header] How to knit [title] Buy wool", "How to knit. Buy wool"),
        ("[substeps] He sings.", "He sings."),
        ("he sings (loudly) [1, 2]", "he sings (loudly) [1, 2]"),
    ],
)
def test_the_marks_of_wikihow_go(raw, text):
    assert readable(raw) == text


def test_records_that_are_no_choice_of_four_are_listed(tmp_path):
    broken = [
        (record(label="4"), "field label"),
        (record(label=""), "field label"),
        (record(endings=["one", "two", "three"]), "field endings"),
        (record(endings=["one", "two", " ", "four"]), "field endings"),
        (record(endings="four"), "field endings"),
        (record(ctx=" "), "field ctx"),
    ]
    source = write(tmp_path / "train.jsonl", [record(), *(entry for entry, _ in broken), record(label=1)])
    written = prepare("hellaswag", source, tmp_path / "out")["train"]
    assert [row["extra_info"]["index"] for row in pq.read_table(written.path).to_pylist()] == [0, 7]
    listed = (tmp_path / "out" / "train.rejected.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in listed]
    assert reasons == [Message(field) for _, field in broken]


def test_a_split_without_labels_is_left_out_with_a_warning(tmp_path, caplog):
    write(tmp_path / "test.jsonl", [record(label=""), record(label="")])
    write(tmp_path / "validation.jsonl", [record()])
    with caplog.at_level(logging.WARNING, "strop.data"):
        assert set(prepare("hellaswag", tmp_path, tmp_path / "out")) == {"validation"}
    assert mentions(caplog.text, "test", "2 records")
    with pytest.raises(DataError, match=naming("test.jsonl")):
        prepare("hellaswag", tmp_path / "test.jsonl", tmp_path / "out")


def test_all_of_the_real_file_is_used_and_its_answers_score(real_data, tmp_path):
    written = prepare("hellaswag", real_data / "hellaswag", tmp_path)
    assert {split: made.rows for split, made in written.items()} == {"validation": 5000}
    assert list(tmp_path.glob("*rejected*")) == []
    path = real_data / "hellaswag" / "validation.first5000.jsonl"
    raw = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for source, row in zip(raw, pq.read_table(written["validation"].path).to_pylist(), strict=True):
        prompt, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        assert not any(mark in prompt for mark in ("[title]", "[step]", "[header]", "[substeps]"))
        choices = [line for line in prompt.splitlines() if line[:2] in ("A.", "B.", "C.", "D.")]
        assert len(set(choices)) == 4
        right = source["endings"][int(source["label"])]
        assert " ".join(right.split())[:8] in choices["ABCD".index(truth)] or "[" in right
        assert default_compute_score("Rowan/hellaswag", f"I think so.\nAnswer: {truth}", truth) == 1.0
        wrong = "ABCD"[("ABCD".index(truth) + 1) % 4]
        assert default_compute_score("Rowan/hellaswag", f"Answer: {wrong}", truth) == 0.0

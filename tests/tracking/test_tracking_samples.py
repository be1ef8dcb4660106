"""The parquet files of samples."""

from __future__ import annotations

import math

import pyarrow.parquet as pq
import pytest
import torch

from strop.protocol import DataProto
from strop.tracking.samples import HiddenTokensWarning, samples_table, write_table

from messages import mentions


class Letters:
    """Token 4 is "a", 5 is "b", ...; 1 is the stop token."""

    def batch_decode(self, sequences, *, skip_special_tokens):
        special = "" if skip_special_tokens else "."
        return ["".join(special if i == 1 else chr(ord("a") + i - 4) for i in ids) for ids in sequences]

    def decode(self, ids):
        return self.batch_decode([ids], skip_special_tokens=False)[0]


def two_samples() -> DataProto:
    """P = 3, T = 4. The first response has a tool's token in it (mask 0), the second is cut at its limit."""
    nan = math.nan
    return DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 1, 4], [4, 5, 6]]),
            "responses": torch.tensor([[7, 9, 1, 0], [4, 4, 5, 5]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]),
            "response_mask": torch.tensor([[1.0, 0, 1, 0], [1, 1, 1, 1]]),
            "truncated": torch.tensor([False, True]),
            "token_level_scores": torch.tensor([[0.5, 0, 1.0, nan], [0, 0, 0, 0.25]]),
            "rollout_versions": torch.tensor([[7, -1, 8, -1], [7, 7, 7, 8]], dtype=torch.int32),
            "old_log_probs": torch.tensor([[-1.0, -2, -3, nan], [-4, -5, -6, -7]]),
            "values": torch.tensor([[0.5, 0.25, 0.125, nan], [1, 2, 3, 4]], dtype=torch.bfloat16),
            "reward/rule": torch.tensor([1.0, nan]),
        },
        {
            "uid": ["1-0", "1-1"],
            "data_source": ["strop/arithmetic", "other"],
            "reward_model": [
                {"style": "rule", "ground_truth": "7"},
                {"style": "rule", "ground_truth": {"tests": ["x == 1"]}},
            ],
            "extra_info": [{"index": 0}, None],
        },
    )


def test_a_row_holds_the_sample_without_padding(tmp_path):
    path = tmp_path / "rollouts" / "step_000001.parquet"
    batch = two_samples()
    batch.batch["reward/format"] = torch.tensor([0.5, -0.5])
    write_table(path, samples_table(batch, Letters()))
    first, second = pq.read_table(path).to_pylist()
    assert first == {
        "uid": "1-0",
        "data_source": "strop/arithmetic",
        "ground_truth": "7",
        "prompt": ".a",
        "response": "df",
        "truncated": False,
        "score": 1.5,
        "reward/rule": 1.0,
        "reward/format": 0.5,
        "response_length": 2,
        "prompt_ids": [1, 4],
        "response_ids": [7, 9, 1],
        "response_mask": [1, 0, 1],
        "rollout_versions": [7, -1, 8],
        "old_log_probs": [-1.0, -2.0, -3.0],
        "values": [0.5, 0.25, 0.125],
    }
    assert second["ground_truth"] == '{"tests": ["x == 1"]}'
    assert (second["truncated"], second["score"], second["reward/rule"]) == (True, 0.25, None)
    assert second["old_log_probs"] == [-4.0, -5.0, -6.0, -7.0]
    assert list(tmp_path.rglob("*")) == [path.parent, path]


def test_numbers_keep_the_bits_that_their_column_needs(tmp_path):
    """11 bits, as float16, but of any magnitude; 16 of log-probs, which are compared with one another."""
    batch = two_samples()
    numbers = torch.tensor([[1 / 3, -1e6 / 7, 1e-9 / 7, math.nan], [math.inf, -math.inf, 1e38 / 7, 0.0]])
    for name in ("values", "old_log_probs"):
        batch.batch[name] = numbers
    batch.batch["attention_mask"] = torch.ones(2, 7, dtype=torch.int64)
    write_table(tmp_path / "s.parquet", samples_table(batch, Letters()))
    table = pq.read_table(tmp_path / "s.parquet")
    for name, bits in (("values", 11), ("old_log_probs", 16)):
        found = torch.tensor(table[name].to_pylist())
        finite = numbers.isfinite()
        torch.testing.assert_close(found[~finite], numbers[~finite], equal_nan=True)
        error = ((found - numbers) / numbers)[finite & (numbers != 0)].abs().max().item()
        assert 0 < error <= 2**-bits
        scaled = torch.frexp(found[finite]).mantissa * 2**bits
        assert torch.equal(scaled, scaled.round())


def with_hidden_tokens() -> DataProto:
    """Two stop tokens in the middle of the second response."""
    batch = two_samples()
    batch.batch["responses"] = torch.tensor([[7, 9, 1, 0], [4, 1, 1, 5]])
    batch.batch["hidden_tokens"] = torch.tensor([0, 2])
    return batch


def test_a_response_with_hidden_tokens_has_a_second_text_with_them(tmp_path):
    write_table(tmp_path / "s.parquet", samples_table(with_hidden_tokens(), Letters()))
    first, second = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert (first["response"], first["hidden_tokens"], first["response_with_special_tokens"]) == (
        "df",
        0,
        None,
    )
    assert (second["response"], second["hidden_tokens"]) == ("ab", 2)
    assert second["response_with_special_tokens"] == "a..b"


def test_hidden_tokens_are_warned_of_once_with_the_text_of_a_response(caplog):
    warn = HiddenTokensWarning(Letters())
    warn(two_samples())
    nothing_hidden = with_hidden_tokens()
    nothing_hidden.batch["hidden_tokens"] = torch.tensor([0, 0])
    warn(nothing_hidden)
    assert not caplog.records
    warn(with_hidden_tokens())
    warn(with_hidden_tokens())
    (record,) = caplog.records
    assert mentions(record.getMessage(), "1 of 2", "a..b", "response/hidden_tokens")


def test_missing_columns_are_left_out(tmp_path):
    keep = ("prompts", "responses", "attention_mask", "response_mask")
    write_table(tmp_path / "s.parquet", samples_table(two_samples().select(*keep), Letters()))
    table = pq.read_table(tmp_path / "s.parquet")
    assert table.column_names == [
        "prompt",
        "response",
        "response_length",
        "prompt_ids",
        "response_ids",
        "response_mask",
    ]
    assert table["prompt"].to_pylist() == [".a", "abc"]


@pytest.mark.parametrize("failure", ["a text that UTF-8 lacks", "a full disk"])
def test_a_failed_write_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch, failure):
    path, batch = tmp_path / "s.parquet", two_samples()
    write_table(path, samples_table(batch, Letters()))
    before = path.read_bytes()

    def full(writer, table, **options):
        raise OSError(28, "No space left on device")

    if failure == "a full disk":
        monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    else:
        batch.non_tensor_batch["uid"][0] = "\ud800"
    with pytest.raises((OSError, UnicodeEncodeError)):
        write_table(path, samples_table(batch, Letters()))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_no_samples_are_an_empty_file_with_its_columns(tmp_path):
    write_table(tmp_path / "s.parquet", samples_table(two_samples()[:0], Letters()))
    table = pq.read_table(tmp_path / "s.parquet")
    assert table.num_rows == 0
    assert "old_log_probs" in table.column_names

"""A real tokenizer whose ids can be computed by hand, parquet writers, and the real data sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

REAL_DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"

# One id per word: "w3" is 13, "w12" is 22.
VOCABULARY = {"<pad>": 0, "<s>": 1, "<unk>": 2, "[user]": 3, "[system]": 4, "[assistant]": 5}
VOCABULARY |= {f"w{number}": 10 + number for number in range(40)}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }} "
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write("train.parquet", rows) -> the path; or columns={name: values}."""

    def write_rows(name: str, rows: list[dict[str, Any]] | None = None, **columns: Any) -> Path:
        path = tmp_path / name
        table = pa.Table.from_pylist(rows) if rows is not None else pa.table(columns)
        pq.write_table(table, path)
        return path

    return write_rows


@pytest.fixture
def memory_fs() -> Any:
    """fsspec's in-memory file system, which is one for the whole process, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


@pytest.fixture
def real_data() -> Path:
    if not REAL_DATA.is_dir():
        pytest.skip(f"the real data sets are not at {REAL_DATA.resolve()}")
    return REAL_DATA

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

import strop.data.tokenize as tokenize_module
from strop.data.prompt_table import read_prompt_table
from strop.data.prompts import (
    PromptError,
    PromptFormat,
    as_messages,
    encode_prompts,
    encode_raw,
    prompt_problem,
)
from strop.data.tokenize import tokenize_table, tokenizer_fingerprint
from strop.errors import DataError, ModelError

import forked
from messages import mentions, naming


def chat(text: str, role: str = "user"):
    return [{"role": role, "content": text}]


def as_lists(tokens) -> list[list[int]]:
    return [tokens[row].tolist() for row in range(len(tokens))]


def test_messages_are_rendered_with_the_template_and_a_generation_prompt(tokenizer):
    prompt = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2 w3"}]
    # [system] w1 [user] w2 w3 [assistant], and no <s>: the template is the whole truth about special tokens.
    assert encode_prompts([prompt, chat("w9")], tokenizer) == [[4, 11, 3, 12, 13, 5], [3, 19, 5]]


def test_a_plain_string_is_a_user_message_where_there_is_a_template(tokenizer, make_tokenizer):
    assert encode_prompts(["w1 w2", "w3"], tokenizer) == [[3, 11, 12, 5], [3, 13, 5]]
    # <s> is what this tokenizer adds to any text by itself.
    as_it_stands = PromptFormat(apply_chat_template=False)
    assert encode_prompts(["w1 w2", "w3"], tokenizer, as_it_stands) == [[1, 11, 12], [1, 13]]
    assert encode_prompts(["w1"], make_tokenizer(chat_template=None)) == [[1, 11]]
    assert as_messages("hello") == as_messages([{"role": "user", "content": "hello", "name": None}])
    with pytest.raises(ModelError, match=naming("chat template")):
        encode_prompts([chat("w1")], make_tokenizer(chat_template=None))


def test_raw_ids_are_the_text_alone(tokenizer):
    assert encode_raw("w1 w2", tokenizer) == [11, 12]
    assert encode_raw([*chat("w1", "system"), *chat("w2")], tokenizer) == [11, 12]


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        (None, ("null",)),
        (5, ("int 5",)),
        ("", ("empty string",)),
        ([], ("list []",)),
        (["hello"], ("str 'hello'", "message 0")),
        ([{"role": "user"}], ("{'role': 'user'}", "message 0")),
        ([*chat("x"), {"role": None, "content": "x"}], ("'role': None", "message 1")),
        ([{"from": "human", "value": "1"}], ("'value': '1'", "message 0", "'human' is 'user'")),
        ([{"role": "user", "content": ["image"]}], ("found one 'image'", "message 0", "images")),
    ],
)
def test_what_is_not_a_prompt_is_described(prompt, parts, tokenizer):
    with pytest.raises(PromptError, match=naming(*parts)) as caught:
        encode_prompts([prompt], tokenizer)
    assert mentions(caught.value.reason, "{role, content}")
    assert prompt_problem(chat("fine")) is None


def test_a_prompt_that_the_template_refuses_or_leaves_empty_is_found_among_many(tokenizer, make_tokenizer):
    with pytest.raises(PromptError, match=naming("no tools here")) as caught:
        encode_prompts([chat("w1"), chat("w2"), chat("w3", "tool")], tokenizer)
    assert caught.value.offset == 2
    silent = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(PromptError, match=naming("no tokens")) as caught:
        encode_prompts([chat("w1"), chat(" ")], silent)
    assert caught.value.offset == 1


def test_the_cache_spares_the_second_tokenization(write, tokenizer, tmp_path, monkeypatch):
    table = read_prompt_table(write("a.parquet", [{"prompt": "w1 w2"}, {"prompt": "w3"}]))
    first = tokenize_table(table, tokenizer, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(tokenize_module, "encode_prompts", lambda *_: pytest.fail("tokenized again"))
    again = tokenize_table(table, tokenizer, cache_dir=tmp_path / "cache")
    assert as_lists(first) == as_lists(again) == [[3, 11, 12, 5], [3, 13, 5]]
    assert again.lengths.tolist() == [4, 3]


def test_the_cache_distinguishes_content_column_and_tokenizer(write, make_tokenizer, tmp_path):
    cache = tmp_path / "cache"

    def ids(rows, tokenizer=None, prompt_key="prompt"):
        table = read_prompt_table(write("a.parquet", rows), prompt_key=prompt_key)
        return as_lists(
            tokenize_table(table, tokenizer or make_tokenizer(), prompt_key=prompt_key, cache_dir=cache)
        )

    rows = [{"prompt": chat("w1"), "other": chat("w2")}]
    assert ids(rows) == [[3, 11, 5]]
    assert ids(rows, prompt_key="other") == [[3, 12, 5]]
    assert ids([{"prompt": chat("w7"), "other": chat("w2")}]) == [[3, 17, 5]]
    assert ids(rows, make_tokenizer("{{ messages[0].content }}")) == [[11]]
    assert len(list((cache / "tokens").glob("*.npz"))) == 4


def test_the_fingerprint_ignores_the_padding_of_the_last_call(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["w1", "w2 w3"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["w99"])
    assert tokenizer_fingerprint(tokenizer) != before


def test_a_template_that_writes_the_date_is_not_served_from_yesterday(
    make_tokenizer, monkeypatch, write, tmp_path
):
    dated = make_tokenizer("{{ strftime_now('%d') }}{{ messages[0].content }}")
    plain = make_tokenizer()
    table, cache = (
        read_prompt_table(write("a.parquet", prompt=[[{"role": "user", "content": "w1"}]])),
        tmp_path,
    )

    def counted():
        for tokenizer in (dated, plain):
            tokenize_table(table, tokenizer, cache_dir=cache)
        return len(list((cache / "tokens").glob("*.npz")))

    class Today(tokenize_module.date):
        @classmethod
        def today(cls):
            return cls(2100, 12, 31)

    monkeypatch.setattr(tokenize_module, "date", Today)
    names = tokenizer_fingerprint(dated), tokenizer_fingerprint(plain)
    assert counted() == counted() == 2

    class Tomorrow(tokenize_module.date):
        @classmethod
        def today(cls):
            return cls(2101, 1, 1)

    monkeypatch.setattr(tokenize_module, "date", Tomorrow)
    assert counted() == 3
    # a model that is given as an object is saved under a name with it, where a resume looks on another day
    assert (tokenizer_fingerprint(dated), tokenizer_fingerprint(plain)) == names


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "rows", "other", "dtype", "offsets"])
def test_a_damaged_cache_is_replaced(damage, write, tokenizer, tmp_path, caplog):
    table = read_prompt_table(write("a.parquet", prompt=[f"w{i}" for i in range(30)]))
    cache = tmp_path / "cache"
    whole = as_lists(tokenize_table(table, tokenizer, cache_dir=cache))
    (stored,) = (cache / "tokens").iterdir()
    content = stored.read_bytes()
    if damage in ("dtype", "offsets"):  # valid archives
        arrays = dict(np.load(stored))
        if damage == "dtype":
            arrays["ids"] = arrays["ids"].astype(np.float64)
        else:
            arrays["offsets"][1] += 1
        np.savez(stored, **arrays)
    elif damage in ("rows", "other"):
        prompts = ["w1"] if damage == "rows" else [f"w{i + 1}" for i in range(30)]
        other = read_prompt_table(write("b.parquet", prompt=prompts))
        tokenize_table(other, tokenizer, cache_dir=tmp_path / "other")
        (donor,) = (tmp_path / "other" / "tokens").iterdir()
        stored.write_bytes(donor.read_bytes())
    else:
        middle = len(content) // 4
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        stored.write_bytes({"cut": content[: len(content) // 2], "flip": flipped, "text": b"no zip"}[damage])
    with caplog.at_level(logging.WARNING, "strop.data"):
        assert as_lists(tokenize_table(table, tokenizer, cache_dir=cache)) == whole
    assert str(stored) in caplog.text
    assert stored.read_bytes() == content


def test_a_cache_that_cannot_be_written_only_warns(write, tokenizer, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    table = read_prompt_table(write("a.parquet", [{"prompt": "w1"}]))
    with caplog.at_level(logging.WARNING, "strop.data"):
        assert as_lists(tokenize_table(table, tokenizer, cache_dir=tmp_path / "cache")) == [[3, 11, 5]]
    assert str(tmp_path / "cache") in caplog.text


def test_worker_processes_give_the_same_ids_and_the_same_errors(write, tokenizer, monkeypatch, caplog):
    monkeypatch.setitem(tokenize_module.MIN_ROWS_FOR_PROCESSES, "fast", 10)
    monkeypatch.setattr(tokenize_module, "CHUNK_ROWS", 7)
    # Tokenizers are pickled for these processes too, which do not import transformers again.
    monkeypatch.setattr(tokenize_module.multiprocessing, "get_context", lambda _: forked.CONTEXT)
    rows = [{"prompt": chat(f"w{number % 40} w{number % 7}")} for number in range(40)]
    table = read_prompt_table(write("a.parquet", rows))
    in_process = tokenize_table(table, tokenizer, num_workers=1)
    in_workers = tokenize_table(table, tokenizer, num_workers=2)
    assert as_lists(in_workers) == as_lists(in_process)
    assert as_lists(in_workers)[8] == [3, 18, 11, 5]

    broken = read_prompt_table(write("b.parquet", [*rows[:20], {"prompt": chat("w1", "tool")}, *rows]))
    with pytest.raises(DataError, match=naming("b.parquet", "row 20", "field prompt")):
        tokenize_table(broken, tokenizer, num_workers=2)
    assert not caplog.records


def test_a_tokenizer_that_cannot_be_pickled_is_used_in_this_process(write, tokenizer, monkeypatch, caplog):
    monkeypatch.setitem(tokenize_module.MIN_ROWS_FOR_PROCESSES, "fast", 1)
    tokenizer.lock = threading.Lock()
    table = read_prompt_table(write("a.parquet", [{"prompt": "w1"}, {"prompt": "w2"}]))
    with caplog.at_level(logging.WARNING, "strop.data"):
        assert as_lists(tokenize_table(table, tokenizer, num_workers=2)) == [[3, 11, 5], [3, 12, 5]]
    assert "one process" in caplog.text

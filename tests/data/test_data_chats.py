"""Tools, chats that are stored as text, turns that only call tools, and columns of images."""

from __future__ import annotations

import csv
import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from strop.data.answers import AnsweredDataset
from strop.data.control_tokens import PromptError
from strop.data.prompt_table import read_prompt_table
from strop.data.prompts import (
    AUTO,
    PromptFormat,
    as_messages,
    encode_prompts,
    encode_raw,
    encode_responses,
    texts_before_answers,
)
from strop.data.rewriting import Rewriter
from strop.data.rl_dataset import RLHFDataset
from strop.data.sources import Rows
from strop.errors import DataError
from strop.prepare import prepare
from strop.protocol import DataProto

from chat_tokenizers import QWEN3, mistral, phi3, qwen3, unigram
from messages import mentions, naming

TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.name }} {{ tool.default | default('') }} {% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ '' + m.content }} "
    "{% for call in m.tool_calls or [] %}w4 {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "w1"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
ANSWER = {"role": "assistant", "content": "w2"}


@pytest.fixture
def with_tools(make_tokenizer):
    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    tokenizer.eos_token = "<pad>"
    return tokenizer


def ids(dataset):
    return [row["input_ids"].tolist() for row in dataset]


W5, W6 = {"name": "w5", "default": 3}, {"name": "w6", "default": "w7"}


@pytest.mark.parametrize("form", ["list", "text", "texts", "python"])
@pytest.mark.parametrize("key", ["tools", "functions", "extra.tools"])
def test_the_tools_of_each_row_are_rendered(form, key, with_tools, tmp_path):
    def stored(tools):
        tools = [json.dumps(tool) for tool in tools] if form == "texts" else tools
        return {"text": json.dumps, "python": repr}.get(form, list)(tools)

    def row(*tools):
        value = stored(list(tools))
        return {"prompt": "w1", "extra": {"tools": value}} if "." in key else {"prompt": "w1", key: value}

    rows = [row(W6), row(W5, W6), row(), row(W6), {"prompt": [USER][0]["content"]}]
    expected = [[16, 17, 3, 11, 5], [15, 2, 16, 17, 3, 11, 5], [3, 11, 5], [16, 17, 3, 11, 5], [3, 11, 5]]
    for _ in range(2):  # the second time from the cache
        dataset = RLHFDataset(
            Rows("rows", rows), with_tools, max_prompt_length=9, tools_key=key, cache_dir=tmp_path
        )
        assert ids(dataset) == expected
    assert mentions(dataset.prompts_in_words, "3 of them with tools")
    without = RLHFDataset(
        Rows("rows", rows), with_tools, max_prompt_length=9, tools_key=None, cache_dir=tmp_path
    )
    assert ids(without) == [[3, 11, 5]] * 5
    chosen = [{**row, "response": "w2"} for row in rows]
    options = {"answer_keys": {"response": "response"}, "max_prompt_length": 9, "max_response_length": 9}
    assert ids(
        AnsweredDataset(Rows("sft", chosen), with_tools, prompt_key="prompt", tools_key=key, **options)
    ) == (expected)


def test_tools_that_would_be_left_out_are_an_error(tokenizer, with_tools):
    rows = [{"prompt": [USER]}, {"prompt": [USER], "tools": [W5]}]
    with pytest.raises(
        DataError, match=naming("row 1", "field tools", "data.chat_template", "tools_key=null")
    ):
        RLHFDataset(Rows("rows", rows), tokenizer, max_prompt_length=9)
    plain = Rows("rows", [{"prompt": "w1"}, {"prompt": "w1", "tools": [W5]}])
    with pytest.raises(DataError, match=naming("row 1", "data.tools_key")):
        RLHFDataset(plain, with_tools, max_prompt_length=9, how=PromptFormat(apply_chat_template=False))
    for wrong in ("w5", [["w5"]], 3, {"name": "w5"}):
        with pytest.raises(DataError, match=naming("row 0", "field tools", "JSON schemas", "tools_key=null")):
            RLHFDataset(Rows("rows", [{"prompt": "w1", "tools": wrong}]), with_tools, max_prompt_length=9)
    with pytest.raises(DataError, match=naming("'functions'", "data.tools_key")):
        RLHFDataset(Rows("rows", rows[:1]), with_tools, max_prompt_length=9, tools_key="functions")


def test_a_control_token_in_a_tool_is_text(with_tools):
    with pytest.raises(PromptError, match=naming("control token")):  # words of this tokenizer have no parts
        encode_prompts(["w1"], with_tools, tools=['[{"name": "<s>"}]'])


def test_tools_reach_the_template_of_a_reward_model(with_tools):
    with_tools.pad_token_id = 0
    batch = DataProto(
        {"responses": torch.tensor([[12, 0]]), "response_mask": torch.tensor([[1.0, 1.0]])}
        | {"truncated": torch.tensor([False])},
        {name: np.empty(1, object) for name in ("raw_prompt", "raw_tools")},
    )
    batch.non_tensor_batch["raw_prompt"][0], batch.non_tensor_batch["raw_tools"][0] = [USER], [W6]
    assert Rewriter(with_tools, with_tools)(batch).batch["input_ids"].tolist() == [[16, 17, 3, 11, 5, 12]]


def test_a_turn_that_only_calls_tools_is_read(with_tools, tmp_path):
    chat = [USER, CALL, {"role": "tool", "content": "w3"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": chat}]), tmp_path / "t.parquet")
    assert read_prompt_table(tmp_path / "t.parquet").row(0) == {"prompt": chat}
    missing = [USER, {name: value for name, value in CALL.items() if name != "content"}, chat[2]]
    for prompt in (chat, missing):
        assert as_messages(prompt)[1]["content"] == ""
        assert encode_prompts([prompt], with_tools) == [[3, 11, 5, 14, 2, 13, 5]]
        assert encode_raw(prompt, with_tools) == [11, 13]
    with_tools.chat_template = TOOLS_TEMPLATE.replace("w4", "")
    with pytest.raises(PromptError, match=r"leaves out the tool calls .*data\.chat_template"):
        encode_prompts([[USER], chat], with_tools)
    with pytest.raises(PromptError, match=naming("message 0", "{role, content}")):
        encode_prompts([[{"role": "assistant", "content": None}]], with_tools)


@pytest.mark.parametrize("form", ["json", "python"])
def test_a_chat_that_is_stored_as_text_becomes_messages(form, tmp_path, with_tools, caplog):
    written = json.dumps if form == "json" else repr  # as pandas writes it
    with (tmp_path / "t.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows(
            [
                ["prompt", "answer"],
                [written([ANSWER, USER]), "1"],
                ["w3 [1, 2]", "2"],
                [written([CALL, USER]), "3"],
            ]
        )
    with caplog.at_level(logging.INFO, "strop.data"):
        dataset = RLHFDataset(tmp_path / "t.csv", with_tools, max_prompt_length=20, answer_key="answer")
    assert mentions(caplog.text, "2 of 3", "prompt")
    assert dataset[0]["prompt"] == [ANSWER, USER]
    assert dataset[0]["input_ids"].tolist() == [5, 12, 3, 11, 5]
    assert dataset[1]["prompt"] == [{"role": "user", "content": "w3 [1, 2]"}]
    assert dataset[2]["prompt"] == [CALL, USER]
    written = prepare("table", tmp_path / "t.csv", tmp_path / "out", data_source="a/b")["train"]
    assert RLHFDataset(written.path, with_tools, max_prompt_length=20)[2]["prompt"] == [CALL, USER]


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[", "[]", '["a"]', '[{"a": 1}]', '[{"role": "user"}]', "[" * 9999]
)
def test_other_texts_stay_texts(text, tokenizer):
    dataset = RLHFDataset(Rows("rows", [{"prompt": f"{text}"}]), tokenizer, max_prompt_length=9)
    assert dataset[0]["prompt"] == text


@pytest.mark.parametrize("store", [json.dumps, list])
def test_answers_that_are_chats_are_the_text_of_the_assistant(store, with_tools):
    def pairs(*rejected):
        row = {"prompt": "w1", "chosen": store([USER, ANSWER]), "rejected": store(list(rejected))}
        return AnsweredDataset(
            Rows("pairs", [row]),
            with_tools,
            prompt_key="prompt",
            answer_keys={"chosen": "chosen", "rejected": "rejected"},
            max_prompt_length=9,
            max_response_length=9,
        )

    row = pairs({"role": "assistant", "content": "w4"})[0]
    assert (row["chosen"].tolist(), row["rejected"].tolist()) == ([12, 0], [14, 0])
    bare = {"role": "assistant", "content": "w4", "tool_calls": [], "thinking": None}
    assert pairs(bare)[0]["rejected"].tolist() == [14, 0]
    for wrong in ([USER], [{"role": "user", "content": "w9"}, ANSWER]):
        with pytest.raises(DataError, match=naming("row 0", "field rejected", "assistant")):
            pairs(*wrong)
    for field, wrong in {"tool_calls": CALL, "thinking": {**ANSWER, "thinking": "w5"}}.items():
        with pytest.raises(DataError, match=naming("row 0", "field rejected", field, "left out")):
            pairs(wrong)


@pytest.mark.parametrize("family", [mistral, phi3, unigram])
def test_answers_begin_without_a_space_of_the_tokenizer(family, tmp_path):
    """These add one to the beginning of a text; ids are those of prompt and answer in one text."""
    tokenizer = family()
    options = {"prompt_key": "prompt", "answer_keys": {"response": "response"}, "cache_dir": tmp_path}
    options |= {"max_prompt_length": 99, "max_response_length": 99}

    def ids(answer, **more):
        prompt = "the cat is"
        rows = Rows("rows", [{"prompt": prompt, "response": answer}])
        row = AnsweredDataset(rows, tokenizer, **options, **more)[0]
        return prompt, [*row["input_ids"].tolist(), *row["response"].tolist()]

    for answer in (" in the hat", "in the hat", "\nthe hat"):
        prompt, found = ids(answer, how=PromptFormat(apply_chat_template=False))
        assert found == [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
    prompt, found = ids("in the hat")
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "in the hat"}]
    end = len(found) - 1
    assert found[:end] == tokenizer.apply_chat_template(chat, return_dict=False)[:end]


def test_an_answer_has_no_second_tag_where_the_chat_template_begins_its_thinking(caplog):
    """As Qwen3-Thinking, Qwen 3.5 and DeepSeek-R1's; ids are those of the template for the whole chat."""
    begun = "add_generation_prompt %}{{- '<|im_start|>assistant\n"
    assert begun in QWEN3
    options = {"prompt_key": "prompt", "answer_keys": {"response": "response"}}
    options |= {"max_prompt_length": 199, "max_response_length": 199}
    tokenizer, rest = qwen3(), "first, add\n</think>\n\n42."

    def ids(answer, prompt="6 7", **more):
        rows = Rows("sft", [{"prompt": prompt, "response": answer}])
        row = AnsweredDataset(rows, tokenizer, **options, **more)[0]
        return row["input_ids"].tolist(), row["response"].tolist()

    def end(text):
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    whole = f"<think>\n{rest}"
    assert ids(whole)[1] == end(whole)
    tokenizer.chat_template = QWEN3.replace(begun, f"{begun}<think>\n")
    chat = [{"role": "user", "content": "6 7"}, {"role": "assistant", "content": whole}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    for answer in (whole, f" {whole}", f"<think>{rest}", rest):
        prompt, response = ids(answer)
        assert response == end(rest)
    assert rendered == tokenizer.decode(prompt) + rest + "<|im_end|>\n"
    begun_turn = [{"role": "user", "content": "6 7"}, {"role": "assistant", "content": "Let me see: "}]
    for answer in (whole, "42."):  # a turn that is continued has no tag before the answer
        assert ids(answer, begun_turn)[1] == end(answer)
    silent = f"{begun}' + ('' if messages[0].role == 'system' else '<think>\\n') + '"
    template, tokenizer.chat_template = tokenizer.chat_template, QWEN3.replace(begun, silent)
    assert ids(whole)[1] == end(rest)
    assert ids(whole, how=PromptFormat(system_prompt="no thinking"))[1] == end(whole)
    tokenizer.chat_template = template
    assert "enable_thinking" not in caplog.text
    assert ids("42.")[1] == end("42.")
    assert mentions(caplog.text, "1 of 1", "response", "</think>", "enable_thinking")


def test_prompts_that_are_in_both_answers_need_no_column(with_tools, tmp_path):
    before = [{"role": "system", "content": "w3"}, USER]

    def pairs(chosen, rejected):
        pq.write_table(
            pa.Table.from_pylist([{"chosen": chosen, "rejected": rejected}] * 2), tmp_path / "p.parquet"
        )
        return AnsweredDataset(
            [tmp_path / "p.parquet"],
            with_tools,
            prompt_key="prompt",
            answer_keys={"chosen": "chosen", "rejected": "rejected"},
            max_prompt_length=9,
            max_response_length=9,
        )

    other = {"role": "assistant", "content": "w4"}
    found = pairs([*before, ANSWER], [*before, other])
    expected = encode_prompts([before], with_tools)[0]
    assert [found[1][name].tolist() for name in ("input_ids", "chosen", "rejected")] == [
        expected,
        [12, 0],
        [14, 0],
    ]
    with pytest.raises(DataError, match=naming("row 0", "field rejected", "after the row's prompt")):
        pairs([*before, ANSWER], [USER, other])


def test_a_ground_truth_that_looks_like_a_chat_stays_as_it_is(tokenizer):
    text = json.dumps([ANSWER])
    rows = Rows("rows", [{"prompt": "w1", "answer": text}])
    dataset = RLHFDataset(rows, tokenizer, max_prompt_length=9, answer_key="answer")
    assert dataset[0]["reward_model"]["ground_truth"] == text


@pytest.mark.parametrize("column", ["videos", "audio"])
def test_other_media_are_an_error_that_says_so(column, tmp_path):
    image = [{"bytes": b"x", "path": None}]
    for value in (image, image[0], "a.png", [None, "b.png"]):
        pq.write_table(pa.table({"prompt": ["w1", "w2"], column: [value, None]}), tmp_path / "t.parquet")
        with pytest.raises(DataError, match=naming(f"'{column}'", "images")):
            read_prompt_table(tmp_path / "t.parquet")
    for value in ([], None):
        pq.write_table(pa.table({"prompt": ["w1"], column: [value]}), tmp_path / "t.parquet")
        assert len(read_prompt_table(tmp_path / "t.parquet")) == 1


def test_after_a_prompt_that_ends_in_a_control_token_an_answer_has_the_space_of_its_tokenizer():
    """As both in one text: Llama 2's tokenizer and this one begin a text anew after a control token."""
    tokenizer = phi3()
    prompt, answer = "<|user|>\n6 7<|end|>\n<|assistant|>", "42<|end|>"
    how = PromptFormat(apply_chat_template=False, allow_special_tokens=True)
    whole = tokenizer.encode(prompt + answer, add_special_tokens=False)
    before = texts_before_answers(tokenizer, how, is_chat=False)
    (found,) = encode_responses([answer], tokenizer, how, before=before)
    assert found[:-1] == whole[len(tokenizer.encode(prompt, add_special_tokens=False)) :]


def test_a_tokenizer_of_words_keeps_the_first_word_of_an_answer():
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "the": 2, "hat": 3, "</s>": 4}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    before = texts_before_answers(tokenizer, AUTO, is_chat=False)
    assert encode_responses(["the hat"], tokenizer, before=before) == [[2, 3, 4]]
    # nor where the text before is unknown to it
    assert encode_responses(["the hat"], tokenizer, before=("0",)) == [[2, 3, 4]]


@pytest.mark.parametrize("role", ["human", "User", "developer", "function"])
def test_a_role_that_the_template_does_not_render_is_an_error(make_tokenizer, role):
    tokenizer = make_tokenizer(
        "{% for m in messages %}{% if m.role in ['user', 'system', 'assistant', 'tool'] %}"
        "{{ '[' + m.role + '] ' + m.content + ' ' }}{% endif %}{% endfor %}{{ '[assistant]' }}"
    )
    message = {"role": role, "content": "w2"}
    chats = [[{"role": "system", "content": "w3"}, USER], [USER, message, USER], [message]]
    assert len(encode_prompts(chats[:1], tokenizer)) == 1
    for chat in chats[1:]:
        with pytest.raises(
            PromptError, match=rf"leaves out messages of the role '{role}'.*data\.chat_template"
        ):
            encode_prompts([[USER], chat], tokenizer)


def test_answers_have_the_control_tokens_that_the_template_writes_around_them(make_tokenizer, tmp_path):
    """As those of gpt-oss and Command; a model generates them, so that its prompts end before them."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ '[' + m.role + '] ' }}{% if m.role == 'assistant' %}{{ '<s> w9 <s> ' + "
        "m.content + ' w8 <s> <e> ' }}{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<e>"], "eos_token": "<e>"})
    rows = [
        {"prompt": [USER], "response": "w2 w3", "truncated": None},
        {"prompt": [USER, ANSWER], "response": "w4"},  # is continued
        {"prompt": [USER], "response": "w5 w6", "truncated": True},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    options = {"prompt_key": "prompt", "answer_keys": {"response": "response"}}
    limits = {"max_prompt_length": 20, "max_response_length": 20}

    def answers(**more):
        found = AnsweredDataset(tmp_path / "t.parquet", tokenizer, **options, **limits, **more)
        return [tokenizer.decode(row["response"]) for row in found]

    header, end = "<s> w9 <s>", "w8 <s> <e>"
    assert answers() == [f"{header} w2 w3 {end}", "w4 <e>", f"{header} w5 w6"]
    texts = [f"{header} w2 {end}", f"<s> w7 <s> w2 {end}", "w3"]  # the second one is of another channel
    rows = [{"prompt": [USER], "response": text} for text in texts]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    written = answers(how=PromptFormat(allow_special_tokens=True))
    assert written == [*texts[:2], f"{header} w3 {end}"]


@pytest.mark.parametrize("text", ["[{{1, 2}, {3}}]", "[{[1, 2]: 3}]"])
def test_a_text_in_pythons_notation_that_has_no_value_is_text(text, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    assert read_prompt_table(tmp_path / "t.jsonl").row(0) == {"prompt": text}

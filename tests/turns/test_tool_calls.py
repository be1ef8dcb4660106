"""Calls from text: what templates write for a call is read back, and thinking is no call."""

from __future__ import annotations

import time

import pytest

from strop.data.tool_calls import NOTATIONS, PYTHONIC, find_parser
from strop.errors import ConfigError, ModelError

from byte_tokenizer import byte_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "a": {"type": "integer"}},
            },
        },
    }
]
_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_EACH = "{% for k, v in c.function.arguments.items() %}"
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n</tool_call>',
    "qwen_coder": f"<tool_call>\n<function={_NAME}>\n{_EACH}<parameter={{{{ k }}}}>\n{{{{ v }}}}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": f"\n<tool_call>{_NAME}\n{_EACH}<arg_key>{{{{ k }}}}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "llama": f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}",
    "mistral_list": f'[TOOL_CALLS] [{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}]',
    "harmony": f" to=functions.{_NAME}<|channel|>commentary json<|message|>{_ARGUMENTS}",
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    PYTHONIC: f"<|tool_call_start|>[{_NAME}({_EACH}{{{{ k }}}}='{{{{ v }}}}'"
    "{% endfor %})]<|tool_call_end|>",
}


def _tokenizer(written: str):
    return byte_tokenizer(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}" + written + "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_the_parser_follows_from_what_the_template_writes(name):
    tokenizer = _tokenizer(WRITTEN[name])
    parse = find_parser("auto", tokenizer, {}, ["<|im_end|>"], pytest.fail)
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look_up", "arguments": {"word": "é x"}}}],
    }
    text = tokenizer.apply_chat_template([message], tokenize=False)
    said = text.partition("assistant\n")[2].partition("<|im_end|>")[0]
    turn = parse(said, "", TOOLS)
    assert [(call.name, call.arguments) for call in turn.calls] == [("look_up", {"word": "é x"})]
    assert turn.malformed == ""
    assert find_parser(name, tokenizer, {}, [], pytest.fail)(said, "", TOOLS).calls == turn.calls


TYPES = {
    "word": {"type": "string"},
    "a": {"type": "integer"},
    "xs": {"type": "array"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "flag": {"type": "boolean"},
    "any": {},
    "unit": {"type": "string", "enum": ["C", "F"], "nullable": True},
}
TYPED = [{"type": "function", "function": {"name": "f", "parameters": {"properties": TYPES}}}]


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("word", "17", "17"),
        ("word", "null", "null"),
        ("word", '{"a": 1}', '{"a": 1}'),
        ("word", '"q"', '"q"'),
        ("word", "    return x\n\n", "    return x\n\n"),
        ("a", "17", 17),
        ("xs", "[1, 2]", [1, 2]),
        ("maybe", "null", None),
        ("maybe", "17", "17"),
        ("id", "007", "007"),
        ("flag", "True", True),
        ("flag", "1", True),
        ("flag", "false", False),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "x y", "x y"),
        ("unit", "null", None),
        ("unit", "\nC\n", "C"),
    ],
)
def test_the_schema_types_what_stands_between_tags(key, written, read):
    for name, text in {
        "qwen_coder": f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
    }.items():
        turn = find_parser(name, None, {}, [], pytest.fail)(text, "", TYPED)
        assert turn.malformed == ""
        assert turn.calls[0].arguments == {key: read}
        assert type(turn.calls[0].arguments[key]) is type(read)


def test_null_is_one_of_an_enumeration_that_may_be_null():
    said = '<tool_call>{"name": "f", "arguments": {"unit": null}}</tool_call>'
    parse = find_parser("hermes", None, {}, [], pytest.fail)
    assert parse(said, "", TYPED).calls[0].arguments == {"unit": None}
    assert "'C' or 'F' or None" in parse(said.replace("null", '"K"'), "", TYPED).malformed


@pytest.mark.parametrize(("value", "read"), [('"007"', "007"), ("7", 7)])
def test_a_json_string_that_fits_stays_a_string(value, read):
    said = f'<tool_call>{{"name": "f", "arguments": {{"id": {value}, "a": "5"}}}}</tool_call>'
    turn = find_parser("hermes", None, {}, [], pytest.fail)(said, "", TYPED)
    assert turn.calls[0].arguments == {"id": read, "a": 5}


def test_an_argument_without_its_end_makes_a_turn_malformed():
    parse = find_parser("qwen_coder", None, {}, [], pytest.fail)
    for rest in ("5\n", "5\n<parameter=a>\n1\n</parameter>\n", "<parameter=a>\n1\n</parameter>\n"):
        turn = parse(
            f"<tool_call>\n<function=f>\n<parameter=word>\n{rest}</function>\n</tool_call>", "", TYPED
        )
        assert not turn.calls
        assert "'word' has no end" in turn.malformed
    parse = find_parser("glm", None, {}, [], pytest.fail)
    turn = parse("<tool_call>f\n<arg_key>word</arg_key>\n<arg_value>5\n</tool_call>", "", TYPED)
    assert "'word' has no end" in turn.malformed


@pytest.mark.parametrize("rest", [{"additionalProperties": {"type": "string"}}, {"oneOf": [{"$ref": "#/x"}]}])
def test_a_tool_may_take_arguments_that_its_schema_does_not_name(rest):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **rest}}}]
    said = '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>'
    assert find_parser("hermes", None, {}, [], pytest.fail)(said, "", tools).calls[0].arguments == {"x": "1"}


def test_calls_of_a_list_may_have_lists_of_named_things():
    people = '{"name": "f", "arguments": {"xs": [{"name": "a"}, {"name": "b"}]}}'
    parse = find_parser("mistral_list", None, {}, [], pytest.fail)
    for count in (1, 2):
        turn = parse(f"[TOOL_CALLS] [{', '.join([people] * count)}]", "", TYPED)
        assert turn.malformed == ""
        assert [call.arguments["xs"][1]["name"] for call in turn.calls] == ["b"] * count


def test_a_template_without_calls_names_the_parsers():
    with pytest.raises(ModelError, match=r"environment\.parser to one of hermes"):
        find_parser("auto", _tokenizer(""), {}, ["<|im_end|>"], pytest.fail)
    with pytest.raises(ConfigError, match=r"environment\.parser='hermis'"):
        find_parser("hermis", _tokenizer(""), {}, [], pytest.fail)


CALL = '<tool_call>{"name": "look_up", "arguments": {"a": %d}}</tool_call>'
LIST = "<|tool_call_start|>[look_up(a=%d)]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("parser", "prompt_end", "said", "arguments", "content"),
    [
        ("hermes", "", f"<think>I could say {CALL % 0} here</think>{CALL % 1}", [1], ""),
        ("hermes", "<think>", f"maybe {CALL % 0}</think>No tool is needed.", [], "No tool is needed."),
        ("hermes", "<think>\n\n</think>\n\n", CALL % 1, [1], ""),
        ("hermes", "", f"{CALL % 1}\n{CALL % 2}", [1, 2], ""),
        ("hermes", "", "no call", [], "no call"),
        (
            "glm",
            "<think>",
            "I need it<tool_call>look_up\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            [1],
            "",
        ),
        (PYTHONIC, "", f"<think>maybe {LIST % 0}</think>{LIST % 1}", [1], ""),
        (PYTHONIC, "<think>", f"maybe {LIST % 0}</think>No tool is needed.", [], "No tool is needed."),
        (PYTHONIC, "", f"Both: {LIST % 1}\n{LIST % 2}", [1, 2], "Both:"),
        (PYTHONIC, "<think>", "hm</think>[look_up(a=1), look_up(a=2)]", [1, 2], ""),
        (PYTHONIC, "", "[1, 2]", [], "[1, 2]"),
        (PYTHONIC, "<think>", "hm</think>[0, 1) or (2, 3]", [], "[0, 1) or (2, 3]"),
    ],
)
def test_a_call_in_thinking_is_none_unless_it_ends_the_thinking(parser, prompt_end, said, arguments, content):
    turn = find_parser(parser, None, {}, [], pytest.fail)(said, prompt_end, TOOLS)
    assert [call.arguments["a"] for call in turn.calls] == arguments
    assert (turn.content, turn.malformed) == (content, "")


def test_an_argument_without_a_name_is_not_dropped():
    turn = find_parser(PYTHONIC, None, {}, [], pytest.fail)('[look_up("tree", a=1)]', "", TOOLS)
    assert not turn.calls
    assert "arguments are given by name" in turn.malformed


@pytest.mark.parametrize("said", ["look_up(a=1)<|tool_call_end|>", "[look_up(a=1)", "[]<|tool_call_end|>"])
def test_what_stands_between_the_tokens_of_calls_and_is_no_list_of_them_is_malformed(said):
    turn = find_parser(PYTHONIC, None, {}, [], pytest.fail)(f"<|tool_call_start|>{said}", "", TOOLS)
    assert not turn.calls
    assert "the call cannot be read" in turn.malformed


def test_a_parser_of_the_user_gives_calls_and_malformed_ones():
    def own(text):
        if text == "?":
            raise ValueError("no call")
        if text == "!":
            raise KeyError("end")
        return [("look_up", {"word": text[1:]})] if text.startswith("*") else None

    parse = find_parser("own.py:own", None, {}, [], lambda given: own)
    assert parse("*12", "", TOOLS).calls[0].arguments == {"word": "12"}
    assert parse("?", "", TOOLS).malformed.endswith("no call")
    assert parse("=1", "", TOOLS).calls == ()
    with pytest.raises(ConfigError, match=r"environment\.parser: KeyError: 'end' for the turn '!'"):
        parse("!", "", TOOLS)
    assert set(WRITTEN) == {*NOTATIONS, PYTHONIC}


BABBLE = {
    "hermes": ("<tool_call>", '{"name": ', "</tool_call>"),
    "qwen_coder": ("<tool_call><function=f>", "<function=", "<parameter=x>", "<parameter=", "</function>"),
    "glm": ("<tool_call>f<arg_key>", "<arg_key>a</arg_key>", "<arg_key>a</arg_key><arg_value>", "<arg_key>"),
    "llama": ('{"name": "f", "parameters": ', '{"name": ', "{", "}"),
    "mistral": ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f", "[TOOL_CALLS]", "[ARGS]"),
    "mistral_list": ("[TOOL_CALLS] [{", '{"name', "}, ", "]"),
    "harmony": (" to=functions.f", "<|channel|>commentary", "json<|message|>", "<|constrain|>", "<|call|>"),
    "deepseek": ("<｜tool▁call▁begin｜>f", "<｜tool▁sep｜>", "function", "<｜tool▁call▁end｜>", "```"),
    PYTHONIC: ("<|tool_call_start|>[f(", "[f(x=", "<|tool_call_end|>", "f(x=-"),
}


@pytest.mark.parametrize("name", BABBLE)
def test_the_time_for_a_babbling_turn_is_linear_in_its_length(name):
    parse, pieces = find_parser(name, None, {}, [], pytest.fail), (*BABBLE[name], "<think>", "</think>")
    for first in pieces:
        for piece in (first, f"{first}x", *(f"{first}{other}" for other in pieces), " ", "\n", "x"):
            texts = [first + piece * (n // len(piece)) for n in (20_000, 40_000)]
            # on a shared machine the same work takes longer at times, so the least of several times counts
            assert _is_linear(parse, *texts, tries=1) or _is_linear(parse, *texts, tries=5), (first, piece)


def _is_linear(parse, *texts: str, tries: int) -> bool:
    half, whole = (min(_seconds(parse, text) for _ in range(tries)) for text in texts)
    return whole < 0.2 or whole < 3 * half


def _seconds(parse, text: str) -> float:
    started = time.thread_time()
    parse(text, "", TOOLS)
    return time.thread_time() - started

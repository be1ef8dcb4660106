"""The tool and the chat template of ``examples/story.sh``, whose run takes minutes."""

from __future__ import annotations

from pathlib import Path

from calculator import TOOL, calculate, warm_up
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATE = Path(__file__).parents[2] / "examples/tools.jinja"


def test_tool_is_the_schema_of_its_function():
    schema = get_json_schema(calculate)["function"]
    assert schema == TOOL | {"return": {"type": "string"}}


def test_template_shows_tools_and_writes_calls_as_the_model_was_shown_them():
    called = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "82 + 27"}}}
    messages = [
        {"role": "user", "content": "What is 82 plus 27?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "109"},
    ]
    (text,), _ = render_jinja_template(
        conversations=[messages],
        tools=[{"type": "function", "function": TOOL}],
        chat_template=TEMPLATE.read_text(),
        add_generation_prompt=True,
    )
    response = '<tool_call>{"name": "calculate", "arguments": {"expression": "82 + 27"}}</tool_call>'
    assert warm_up(1, seed=1)[0]["response"] == response
    assert text == (
        "<|im_start|>system\ncalculate(expression): Calculate with numbers.<|im_end|>\n"
        "<|im_start|>user\nWhat is 82 plus 27?<|im_end|>\n"
        f"<|im_start|>assistant\n{response}<|im_end|>\n"
        "<|im_start|>tool\n109<|im_end|>\n<|im_start|>assistant\n"
    )

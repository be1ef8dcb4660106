"""What chat templates do to earlier turns, and what ``strop check`` shows of two turns."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from strop.data.bridge import Bridge, Call, tool_message
from strop.data.prompts import PromptFormat
from strop.errors import ModelError

from byte_tokenizer import byte_tokenizer
from chat_templates import STOPS, TEMPLATES
from scripted import Script, environments_of

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    fast = byte_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": list(STOPS)})
    return fast


def _bridge(tokenizer, template, **options) -> Bridge:
    tokenizer.chat_template = template.text
    how = PromptFormat(apply_chat_template_kwargs=dict(template.variables))
    return Bridge(tokenizer, tokenizer.convert_tokens_to_ids(list(template.stops)), how, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_does_to_earlier_turns_and_to_answers(tokenizer, name):
    template = TEMPLATES[name]
    if not template.shows_answers:
        with pytest.raises(ModelError, match=r"environment\.answer_role=user"):
            _bridge(tokenizer, template, tools=[TOOL])
        assert _bridge(tokenizer, template, tools=[TOOL], answer_role="user").history == template.history
        return
    bridge = _bridge(tokenizer, template, tools=[TOOL])
    assert (bridge.history, bridge.one_call) == (template.history, template.one_call)
    call = Call("look_up", {"word": "x"})
    said = bridge.said(call)
    assert said.count("look_up") == template.writes_calls
    assert not any(stop in said for stop in template.stops)
    text = tokenizer.decode(bridge.ids([tool_message(call, "17")], [call]))
    assert text.count("17") == 1


def test_the_token_in_the_place_of_a_sampled_stop_token_is_not_doubled(tokenizer):
    bridge = _bridge(tokenizer, TEMPLATES["gpt-oss"])
    sampled, shown = tokenizer.convert_tokens_to_ids(["<|return|>", "<|end|>"])
    assert (bridge.stop_id, bridge.end_id) == (sampled, shown)
    assert "<|end|>" not in bridge.stops
    text = tokenizer.decode(bridge.ids([{"role": "user", "content": "12"}]))
    assert text == "<|im_start|>user<|message|>12<|end|><|im_start|>assistant"


def f(word: str) -> str:
    """Do.

    Args:
        word: A word.
    """
    return word


def test_two_turns_are_those_of_a_rollout():
    script = Script(
        environments_of(f), [['<tool_call>{"name": "f", "arguments": {"word": "..."}}</tool_call>', "z"]]
    )
    tools = script.episodes._environments.schemas[""]
    form = script.form
    (_, first), (_, inserted), (_, last) = form.two_turns(tools)
    result = script.play()
    ids, mask = result.batch["responses"][0], result.batch["response_mask"][0].bool()
    text = script.tokenizer.decode(ids[: int(mask.nonzero().max()) + 1])
    assert text == first + inserted.replace("(the answer)", "...") + last.replace("(the next turn)", "z")
    assert form.history() == "history: the chat template only appends to it"

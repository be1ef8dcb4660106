"""What programs do to their histories, on templates that append, drop thinking, and end otherwise."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from scripted_agents import call, new_session

from strop.agents.chat import read_request
from strop.agents.session import Node, Session
from strop.algorithms.token_tree import NOTHING, PROMPT

from byte_tokenizer import byte_tokenizer
from chat_templates import TEMPLATES

FAMILIES = ("Qwen2.5", "Qwen3", "QwQ", "DeepSeek-V3.1")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
SAID = '<tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call>'
THOUGHT = f"<think>\nlet me\n</think>\n\n{SAID}"
SURE = {"role": "user", "content": "Sure?"}


def _tool(text: str, identity: str) -> dict:
    return {"role": "tool", "tool_call_id": identity, "content": text}


def _begun(family: str) -> tuple[Session, Node, dict]:
    """Return a session with a call, and the message of it."""
    opens = TEMPLATES[family].text.endswith("<think>\n' }}{% endif %}")
    said = THOUGHT.removeprefix("<think>\n") if opens else THOUGHT
    session = new_session(TEMPLATES[family].text, seed=3)
    node = call(session, said, [SYSTEM, USER], tools=[TOOL])
    assert [one.name for one in node.answer.calls] == ["look_up"]
    assert node.answer.thinking == "let me"
    return session, node, node.message()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_further_turn_continues_its_own_tokens_with_their_thinking(family):
    session, first, message = _begun(family)
    identity = message["tool_calls"][0]["id"]
    messages = [SYSTEM, USER, message, _tool("42", identity)]
    second = call(session, "It is 42.", messages, tools=[TOOL])
    third = call(session, "Yes.", [*messages, second.message(), SURE], tools=[TOOL])
    assert (second.parent, third.parent) == (first, second)
    own = [*first.context, *first.ids]
    assert third.context[: len(own)] == own
    assert "let me" in byte_tokenizer().decode(third.context)
    assert session.row().follows == [*range(-1, len(session.row().ids) - 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_answer_of_the_tool_is_a_branch_after_the_first_turn(family):
    session, first, message = _begun(family)
    for text in ("42", "43"):
        node = call(session, f"It is {text}.", [SYSTEM, USER, message, _tool(text, "x")], tools=[TOOL])
        assert node.parent is first
    row = session.row()
    ends = [place for place, before in enumerate(row.follows) if before == len(first.ids) - 1]
    assert len(ends) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_answer_is_context_after_the_turn_before_it(family):
    session, first, message = _begun(family)
    tool = _tool("42", message["tool_calls"][0]["id"])
    call(session, "It is 42.", [SYSTEM, USER, message, tool], tools=[TOOL])
    edited = {"role": "assistant", "content": "It is forty-two."}
    node = session.submit(
        read_request({"messages": [SYSTEM, USER, message, tool, edited, SURE], "tools": [TOOL]})
    )
    assert node.parent is first
    assert "forty-two" in byte_tokenizer().decode(node.inserted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be long."}, USER],
        [SYSTEM, {"role": "user", "content": "Summary: 42. Go on"}],
        [{"role": "user", "content": "a sub-agent's task"}],
    ],
    ids=["system prompt", "compacted", "sub-agent"],
)
def test_another_beginning_is_a_sequence_from_nothing(family, messages):
    session, first, message = _begun(family)
    node = call(session, "ok", messages)
    assert node.parent is None
    further = call(session, "4", [SYSTEM, USER, message, _tool("42", "x")], tools=[TOOL])
    assert further.parent is first
    row = session.row()
    assert (row.follows.count(PROMPT), row.follows.count(NOTHING)) == (1, 1)
    assert sum(row.sampled) == sum(len(node.ids) for node in session.nodes)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_request_again_is_a_sibling_that_shares_its_context(family):
    session, first, _ = _begun(family)
    again = call(session, THOUGHT, [SYSTEM, USER], tools=[TOOL])
    assert again.parent is None
    assert again.context == first.context
    assert again.seed != first.seed
    assert session.row().follows.count(PROMPT) == 2
    assert len(session.row().ids) == len(first.ids) + len(again.ids)


def test_parallel_calls_and_their_answers_are_one_turn_each():
    session = new_session(TEMPLATES["Qwen2.5"].text)
    node = call(session, f"{SAID}\n{SAID}", [SYSTEM, USER], tools=[TOOL])
    message = node.message()
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    answers = [_tool(str(number), one["id"]) for number, one in enumerate(message["tool_calls"])]
    further = call(session, "ok", [SYSTEM, USER, message, *answers], tools=[TOOL])
    assert further.parent is node
    assert byte_tokenizer().decode(further.inserted).count("<tool_response>") == 2


def test_branches_do_not_depend_on_the_order_in_which_requests_arrive():
    rows = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        session = new_session()
        bodies = [{"messages": [{"role": "user", "content": text}]} for text in "abc"]
        nodes = {number: session.submit(read_request(bodies[number])) for number in order}
        for node in session.begin([*nodes.values()]):
            node.ids, node.log_probs, node.versions = [129 + (node.seed % 20), 3], [-1.0] * 2, [0] * 2
            node.is_stopped = True
            session.n_sampled += 2
            session.answer(node)
        rows.append((session.prompt.ids, session.row()))
    assert rows[0] == rows[1] == rows[2]


def test_malformed_calls_are_text_for_the_program():
    session = new_session()
    node = call(session, "<tool_call>{broken</tool_call>", [USER], tools=[TOOL])
    assert node.answer.calls == ()
    assert node.answer.malformed
    assert node.answer.content == "<tool_call>{broken</tool_call>"


def test_a_session_keeps_what_a_request_adds_to_the_one_before():
    def held(calls: int) -> int:
        session, messages = new_session(room=200_000), [{"role": "user", "content": "long " * 600}]
        tracemalloc.start()
        for number in range(calls):
            node = call(session, f"{number}", json.loads(json.dumps(messages)), tools=[TOOL])
            messages += [node.message(), {"role": "user", "content": "and then?"}]
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(session.nodes[-1].context) > 3_000
        return size

    assert held(32) < held(8) + 300_000  # whole contexts are 24 kB and as much text each


def test_an_answer_is_cut_behind_the_token_that_completes_a_stop_text():
    session = new_session()
    node = call(session, "one two END three", [USER], stop=["END"])
    assert byte_tokenizer().decode(node.ids) == "one two END"
    assert (node.answer.content, node.is_stopped, session.n_dropped) == ("one two ", False, len(" three") + 1)
    further = session.submit(read_request({"messages": [USER, node.message(), SURE]}))
    assert further.parent is node
    assert further.inserted[0] == 3

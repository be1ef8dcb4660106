"""Parameters of requests."""

from __future__ import annotations

import pytest
from scripted_agents import call, new_session

from strop.agents.chat import Refusal, read_request

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stop", [5, {"a": 1}, True, ["a", ""], [None]])
def test_a_stop_that_is_no_text_is_refused(stop):
    with pytest.raises(Refusal, match="expected texts") as refused:
        read_request({"messages": HI, "stop": stop})
    assert refused.value.status == 400


@pytest.mark.parametrize("calls", [5, True, {"id": "a"}, "f()"])
def test_calls_that_are_no_list_are_refused(calls):
    with pytest.raises(Refusal, match=r"messages\[0\]: tool_calls is .*, expected a list"):
        read_request({"messages": [{"role": "assistant", "tool_calls": calls}, *HI]})


def test_a_limit_that_is_null_leaves_the_other_one():
    assert read_request({"messages": HI, "max_completion_tokens": None, "max_tokens": 5}).max_tokens == 5
    assert read_request({"messages": HI, "max_completion_tokens": 3, "max_tokens": 5}).max_tokens == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("top_k", 5),
        ("min_p", 0.1),
        ("reasoning_effort", "low"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("prediction", {"type": "content", "content": "x"}),
        ("function_call", "auto"),
        ("guided_json", {}),
        ("stop_token_ids", [5]),
        ("anything", 1),
    ],
)
def test_a_parameter_that_would_change_nothing_is_refused_by_its_name(name, value):
    with pytest.raises(Refusal, match=f"^{name}=") as refused:
        read_request({"messages": HI, name: value})
    assert refused.value.status == 400


def test_parameters_that_ask_for_what_is_done_anyway_are_taken():
    plain = {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "top_k": -1, "logprobs": False}
    read_request(
        {"messages": HI, "user": "me", "store": False, "metadata": {}, "reasoning_effort": None, **plain}
    )


def test_one_call_of_several_is_answered_where_a_request_wants_no_parallel_ones():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    for wish, count in ((None, 2), (True, 2), (False, 1)):
        session = new_session()
        node = call(session, said, HI, tools=[tool], parallel_tool_calls=wish)
        messages = [*HI, node.message(), {"role": "tool", "tool_call_id": node.call_ids[0], "content": "1"}]
        assert len(messages[1]["tool_calls"]) == count
        assert session.submit(read_request({"messages": messages, "tools": [tool]})).parent is node


def test_a_seed_is_the_runs_unless_it_may_be_named():
    with pytest.raises(Refusal, match="seed=1 is not served"):
        read_request({"messages": HI, "seed": 1})
    read_request({"messages": HI, "seed": 1}, seeded=True)

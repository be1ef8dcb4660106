"""Faults that users of other endpoints reported, case by case: ``reported/endpoint.jsonl``.

The folder of cases is ``../shared/cases`` or that of STROP_CASES; without it each case is skipped by name.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from scripted_agents import HI, agents, answer, call, ids_of, new_session

from strop.agents.chat import Refusal, read_request
from strop.agents.session import Session
from strop.algorithms.advantages import grpo
from strop.algorithms.token_tree import NOTHING, PROMPT
from strop.trainer.metrics import turn_metrics

from byte_tokenizer import byte_tokenizer

FOLDER = Path(os.environ.get("STROP_CASES", Path(__file__).parents[2] / "../shared/cases")) / "reported"
NAMES = [
    *("e01a", "e01b", "e02", "e03", "e04", "e05", "e06", "e07", "e08", "e09", "e10"),
    *("e11", "e12", "e13", "e14", "e15", "e16", "e17"),
]
CASES: dict[str, dict[str, Any]] = {}
if FOLDER.is_dir():
    lines = (FOLDER / "endpoint.jsonl").read_text().splitlines()
    CASES = {case["case"]: case for case in map(json.loads, lines)}
else:
    warnings.warn(f"the reported cases are skipped: there is no {FOLDER} (STROP_CASES)", stacklevel=1)
CHECKS: dict[str, Callable[[Any, Any], None]] = {}


def check(*names: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """Register the check (given, right) of some cases."""

    def registered(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return registered


@pytest.mark.parametrize("name", NAMES)
def test_reported_case(name):
    if name not in CASES:
        pytest.skip(f"no file of cases in {FOLDER}")
    CHECKS[name](CASES[name]["given"], CASES[name]["right"])


def test_every_case_has_a_check():
    assert CASES.keys() <= CHECKS.keys()


def texts(session: Session) -> list[str]:
    """Return the text of each sequence of a session, from its root to a leaf."""
    tokenizer, row, found = byte_tokenizer(), session.row(), []
    followed = {before for before in row.follows if before >= 0}
    for place in range(len(row.ids)):
        if place in followed:
            continue
        path = [place]
        while row.follows[path[-1]] >= 0:
            path.append(row.follows[path[-1]])
        head = session.prompt.ids if row.follows[path[-1]] == PROMPT else []
        found.append(tokenizer.decode([*head, *(row.ids[one] for one in reversed(path))]))
    return found


@check("e01a")
def _(given, right):
    session = new_session()
    body = {"messages": given["calls"][0]["messages"]}
    with agents(_gives_up, lambda context, seed: _slowly("A")) as played:
        result = played.play()
    assert result.batch["n_turns"].item() == right["nodes"]
    assert result.batch["response_mask"].sum().item() == len(ids_of("A"))
    assert len([context for wave in played.engine.contexts for context in wave]) == right["sampled_answers"]
    assert json.loads(result.non_tensor_batch["conversation"][0])["response"] == "A"
    assert session.submit(read_request(body)).answer is None


def _slowly(said: str) -> str:
    time.sleep(1.2)
    return said


def _gives_up(base_url):
    """Give up after half a second, and send the request again, marked as the official client does."""
    import http.client
    import json
    import time
    from urllib.parse import urlsplit

    url = urlsplit(base_url)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    first = http.client.HTTPConnection(url.hostname, url.port)
    first.request("POST", f"{url.path}/chat/completions", body, {"x-stainless-retry-count": "0"})
    time.sleep(0.5)
    first.close()
    time.sleep(0.2)
    second = http.client.HTTPConnection(url.hostname, url.port)
    second.request("POST", f"{url.path}/chat/completions", body, {"x-stainless-retry-count": "1"})
    return json.loads(second.getresponse().read())["choices"][0]["message"]["content"]


@check("e01b")
def _(given, right):
    session = new_session()
    nodes = [session.submit(read_request({"messages": one["messages"]})) for one in given["calls"]]
    answer(session, "A", *nodes)
    assert len(session.nodes) == right["nodes"] == right["sampled_answers"]
    assert nodes[0].seed != nodes[1].seed
    assert session.is_overlapping


@check("e02")
def _(given, right):
    """Of a session that has ended, as the case has it, and of none: one request, and no wait."""
    with agents(_asks) as played:
        batch = played.rollout._begun(played.batch(), played.params)
        played.rollout._complete([batch], 0)
        url, key = batch.plays[0].values["base_url"], batch.plays[0].key
        for base_url, status in ((url, 403), (url.replace(key, "0" * 32), 404)):
            requests, seconds = [], []
            with httpx.Client(event_hooks={"request": [requests.append]}) as own:
                client = openai.OpenAI(base_url=base_url, api_key="x", http_client=own)  # its defaults
                for _ in range(3):  # a busy machine may disturb one
                    begun = time.monotonic()
                    with pytest.raises(openai.APIStatusError) as refused:
                        client.chat.completions.create(model="m", messages=HI)
                    seconds.append(time.monotonic() - begun)
            assert min(seconds) < right["seconds_below"]
            assert refused.value.status_code == status
            assert status not in right["status_not_in"]
            assert refused.value.response.headers["x-should-retry"] == "false"
            assert len(requests) == 3 * right["requests_seen"]


def _asks(base_url):
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="x")
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    return "end"


@check("e03")
def _(given, right):
    session = new_session()
    nodes = [call(session, one["policy"], one["messages"]) for one in given["calls"]]
    assert nodes[2].parent is nodes[1]
    found = sorted(">".join(_said(text)) for text in texts(session))
    assert found == sorted(right["sequences"])


def _said(text: str) -> list[str]:
    parts = text.split("<|im_start|>")[1:]
    return [said for part in parts if (said := part.partition("\n")[2].partition("<|im_end|>")[0])]


@check("e04")
def _(given, right):
    for messages in given["then_each_of"]:
        session = new_session()
        node = call(session, given["policy"], HI)
        assert node.answer.thinking == right["message"]["reasoning_content"]
        assert node.answer.content.strip() == "Hello"
        further = session.submit(read_request({"messages": messages}))
        assert further.parent is node
        own = right["its_ids_in_the_context"]
        assert further.context[len(node.context) :][: len(own)] == own


@check("e05")
def _(given, right):
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    tools = [{"type": "function", "function": function}]
    for messages in given["then_each_of"]:
        session = new_session()
        node = call(session, given["policy"], HI, tools=tools)
        assert [one.name for one in node.answer.calls] == ["f"]
        assert session.submit(read_request({"messages": messages, "tools": tools})).parent is node


@check("e06")
def _(given, right):
    for messages in given["then_each_of"]:
        session = new_session()
        node = call(session, given["policy"], given["first"])
        assert session.submit(read_request({"messages": messages})).parent is node


@check("e07")
def _(given, right):
    policy = given["policy"]
    with agents(_streams, lambda context, seed: policy) as played:
        result = played.play()
    chunks, whole = json.loads(json.loads(result.non_tensor_batch["conversation"][0])["response"])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    expected = right["deltas"]
    assert deltas[0] == expected[0]
    (named,) = deltas[1]["tool_calls"]
    identity = named.pop("id")
    wanted = dict(expected[1]["tool_calls"][0])
    assert len(identity) == 9
    wanted.pop("id")
    assert named == wanted
    assert deltas[2:] == expected[2:]
    assert chunks[-2]["choices"][0]["finish_reason"] == right["finish_reason_in_last_delta"]
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [whole["usage"]]
    assert chunks[-1]["choices"] == right["usage_chunk"]["choices"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    (message,) = [choice["message"] for choice in whole["choices"]]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def _streams(base_url):
    """Return the chunks of a stream, and the same answer without one."""
    import json
    import urllib.request

    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": tool}],
    }

    def sent(more):
        data = json.dumps({**body, **more}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", data)
        return urllib.request.urlopen(request).read().decode()

    stream = sent({"stream": True, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return json.dumps([[json.loads(line) for line in lines], json.loads(sent({}))])


def _advantages(rewards: list[float], mask: torch.Tensor) -> torch.Tensor:
    scores = torch.tensor(rewards)[:, None] * torch.nn.functional.one_hot(
        mask.sum(1).long() - 1, mask.shape[1]
    )
    found, _ = grpo(scores * mask, mask, ["u"] * len(rewards), norm_by_std=False)
    return found


@check("e08")
def _(given, right):
    rows = []
    for branches in given["branches"]:
        session = new_session()
        for number in range(branches):
            call(session, "A", [{"role": "user", "content": str(number)}])
        rows.append(session.row())
    assert [row.follows.count(NOTHING) + row.follows.count(PROMPT) for row in rows] == given["branches"]
    width = max(len(row.ids) for row in rows)
    mask = torch.tensor([[*map(float, row.sampled), *[0.0] * (width - len(row.ids))] for row in rows])
    found = _advantages(given["rewards"], mask)
    for row, expected in enumerate(right["advantages"]):
        assert set(found[row][mask[row] > 0].tolist()) == {expected}


@check("e09")
def _(given, right):
    session = new_session()
    for messages, said in zip(given["calls"], given["policy"], strict=True):
        call(session, said, messages)
    assert [" ".join(_said(text)) for text in texts(session)] == right["sequences"]
    assert sum(session.row().sampled) == sum(len(ids_of(said)) for said in given["policy"])


@check("e10")
def _(given, right):
    continued = []
    for order in (given["policy"], given["policy"][::-1]):
        session = new_session()
        nodes = [session.submit(read_request({"messages": messages})) for messages in given["calls"]]
        for node, ids in zip(nodes, order, strict=True):
            answer(session, ids, node)
        parent = session.submit(read_request({"messages": given["then"]})).parent
        continued.append(parent.ids)
    assert continued[0] == continued[1]


@check("e11")
def _(given, right):
    calls = given["calls"]
    with agents(_calls_by_number, prompts=len(calls)) as played:
        result = played.play(calls=calls, score=given["rewards"])
    assert result.batch["n_turns"].tolist() == calls
    mask = result.batch["response_mask"]
    assert mask[2].sum() == right["tokens_of_3_in_the_loss"]
    scores = result.batch["environment_scores"].nan_to_num() * mask
    found, _ = grpo(
        scores.masked_fill(~mask.bool().any(1)[:, None], float("nan")), mask, ["u"] * 4, norm_by_std=False
    )
    for row, expected in enumerate(right["advantages"]):
        if mask[row].any():
            assert found[row][mask[row] > 0].tolist() == pytest.approx([expected] * int(mask[row].sum()))
    assert turn_metrics(result)[right["counted"]] == 1


def _calls_by_number(base_url, calls, score):
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="x")
    messages = [{"role": "user", "content": "Hi"}]
    for _ in range(calls):
        client.chat.completions.create(model="m", messages=messages)
    return score


@check("e12")
def _(given, right):
    from strop.rewards.manager import RewardManager

    with agents(_ends_with_status, prompts=3, n=1) as played:
        result = played.play(status=[0, 0, 3])
    manager = RewardManager(byte_tokenizer(), 0, by_environment=True, max_error_rate=1.0)
    result.non_tensor_batch["data_source"] = result.non_tensor_batch["uid"]
    result.meta_info["mode"] = "validate"
    rewards = manager(result)
    manager.close()
    scores = rewards.token_level_scores.sum(1)
    assert scores.mean().item() == pytest.approx(right["mean"])
    assert rewards.metrics["reward/error_rate"] == pytest.approx(right["error_rate"])


def _ends_with_status(base_url, status):
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="x")
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    if status:
        raise SystemExit(status)
    return 1.0


@check("e13")
def _(given, right):
    bodies = {name: [{"role": "user", "content": name}] for name in ("c1", "c2", "c3")}
    before = new_session()
    for name in given["recorded"]:
        call(before, name, bodies[name])
    session = new_session()
    session.restore(before.state())
    first, second = given["program_after_resume_calls"]
    known = session.submit(read_request({"messages": bodies[first]}))
    assert known.answer is not None
    call(session, second, bodies[second])
    session.end("stop")
    names = [byte_tokenizer().decode(node.ids[:-1]) for node in session.nodes]
    assert names == right["nodes_of_row"]
    assert sum(session.row().sampled) == len(ids_of("c1")) + len(ids_of("c3"))


@check("e14")
def _(given, right):
    session = new_session()
    for one in given["calls"]:
        more = {"max_tokens": one["max_tokens"]} if "max_tokens" in one else {}
        call(session, one["policy"], one["messages"], **more)
    row, sequence = session.row(), right["sequence"]
    assert [*session.prompt.ids, *row.ids] == sequence["ids"]
    assert [0] * len(session.prompt.ids) + [*map(int, row.sampled)] == sequence["mask"]
    assert [node.is_stopped for node in session.nodes] == [False, True]


@check("e15")
def _(given, right):
    session = new_session()
    nodes = [call(session, one["policy"], one["messages"], tools=one["tools"]) for one in given["calls"]]
    shown = byte_tokenizer().decode(nodes[1].context)
    assert all(f'"name": "{name}"' in shown for name in right["second_context_shows"])
    assert nodes[1].parent is None
    row = session.row()
    assert row.follows.count(NOTHING) + row.follows.count(PROMPT) == right["agent/branches"]


@check("e16")
def _(given, right):
    with agents(_waits_a_second, prompts=2) as played:
        result = played.play(sleeps=[0.0, given["other_session_sleeps_s"]])
    assert result.batch["n_turns"].tolist() == [1, 1]
    assert [context for wave in played.engine.contexts for context in wave].__len__() == 2
    assert result.batch["ended_by"].tolist() == [1, 1]
    assert result.batch["n_abandoned"].tolist() == [0, 0]


def _waits_a_second(base_url, sleeps):
    import time

    import openai

    time.sleep(sleeps)
    limits = {"timeout": 300, "max_retries": 0} if sleeps else {"timeout": 1, "max_retries": 20}
    client = openai.OpenAI(base_url=base_url, api_key="x", **limits)
    found = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    return found.choices[0].message.content


@check("e17")
def _(given, right):
    code = (
        "import openai, os; c = openai.OpenAI(); "
        "m = [{'role': 'user', 'content': 'Hi'}]; "
        "c.chat.completions.create(model='m', messages=m); print(os.environ['HTTP_PROXY'])"
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in given["env"].items():
            environment.setenv(name, value)
        for name in given["unset"]:
            environment.delenv(name, raising=False)
        with agents(f'{sys.executable} -c "{code}"', prompts=3) as played:
            result = played.play()
    assert result.batch["n_turns"].tolist() == [1, 1, 1]
    for text in result.non_tensor_batch["conversation"]:
        assert json.loads(text)["response"] == given["env"]["HTTP_PROXY"]


def test_a_request_that_ends_with_an_answer_is_refused():
    with pytest.raises(Refusal, match="the last message is an assistant's"):
        read_request({"messages": [*HI, {"role": "assistant", "content": "A"}]})

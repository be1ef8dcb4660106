"""What becomes the row of a session: limits, retries and texts at its edges."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import socket
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import ClientConnectionResetError, web
from scripted_agents import HI, KEYS, agents, answer, call, ids_of, new_session
from test_limits import _asks, _asks_plainly, _ended, _error, _Open

from strop.agents import server
from strop.agents import session as session_module
from strop.agents.chat import ChatFormat, Refusal, read_request, split_thinking
from strop.agents.session import Node, Session
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.errors import ConfigError, ModelError, TrainingError
from strop.protocol import DataProto
from strop.rewards.manager import RewardManager
from strop.rollout.agents import _Handler
from strop.tracking.samples import samples_table
from strop.trainer.build import chat_format
from strop.trainer.group_filter import differing_groups

import tiny_model
from byte_tokenizer import STOP, byte_tokenizer
from chat_templates import TEMPLATES
from messages import mentions


def test_requests_at_the_same_time_share_the_room_that_is_left():
    session = new_session(room=2)
    nodes = session.begin([session.submit(read_request({"messages": HI})) for _ in range(3)])
    limits = session.limits(nodes)
    assert limits == [1, 1, 0]
    for node, limit in zip(nodes, limits, strict=True):
        node.ids = [129] * limit
        session.answer(node)
    assert len(session.row().ids) == 2
    assert nodes[2].answer.content == ""


def _asks_while_the_first_is_sampled(base_url):
    import json
    import threading
    import time
    import urllib.error
    import urllib.request

    found = {}

    def ask(text):
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        try:
            urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
            found[text] = "answered"
        except urllib.error.HTTPError as error:
            found[text] = error.read().decode()

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("Hi", "then")]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    return json.dumps(found)


def test_a_request_that_finds_the_room_taken_when_it_is_sampled_is_refused():
    def slowly(context: list[int], seed: int | None) -> str:
        time.sleep(0.8)
        return "y" * 95

    with agents(_asks_while_the_first_is_sampled, slowly, max_tokens=100) as played:
        result = played.play()
    found = json.loads(json.loads(result.non_tensor_batch["conversation"][0])["response"])
    assert found["Hi"] == "answered"
    assert "context_length_exceeded" in found["then"]
    assert (_ended(result), result.batch["response_mask"].sum().item()) == (["length"], 96)


def test_the_analysis_of_harmony_is_thinking():
    said = "<|channel|>analysis<|message|>A sum.<|end|><|start|>assistant<|channel|>final<|message|>Three"
    assert split_thinking(said) == ("A sum.", "Three")
    assert split_thinking("<|channel|>final<|message|>Three") == ("", "Three")
    assert split_thinking("<|channel|>analysis<|message|>A su") == ("A su", "")
    assert split_thinking("<think>x</think>y") == ("x", "y")


def test_of_first_contexts_at_once_the_longest_that_fits_is_the_prompt_whichever_came_first():
    bodies = [{"messages": [{"role": "user", "content": text}]} for text in ("b" * 120, "a", "c" * 300)]
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        session = new_session(room=100)
        nodes = {}
        for number in order:
            with contextlib.nullcontext() if number < 2 else pytest.raises(Refusal, match="exceeded"):
                nodes[number] = session.submit(read_request(bodies[number]))
        answer(session, "A", *nodes.values())
        assert session.prompt.ids == nodes[0].context
        assert len(session.row().ids) == len(nodes[1].context) + 4


def test_a_recorded_answer_that_no_longer_fits_is_sampled_again():
    before = new_session(room=100)
    call(before, "y" * 90, HI)
    session = new_session(room=100)
    session.restore(before.state())
    call(session, "A", [{"role": "user", "content": "before"}])
    known = session.submit(read_request({"messages": HI}))
    assert (known.answer, session.limits([known])) == (None, [100 - len(session.row().ids)])


def test_only_the_longest_beginnings_of_a_request_are_compared_with_each_other(monkeypatch):
    session, messages, compared = new_session(), [*HI], []
    order = session_module._order
    monkeypatch.setattr(session_module, "_order", lambda node: compared.append(node) or order(node))
    for _ in range(4):
        node = call(session, "A", messages)
        messages += [node.message(), {"role": "user", "content": "b"}]
    compared.clear()
    session.submit(read_request({"messages": messages}))
    assert compared == [node]


def test_errors_of_the_parser_name_the_key_of_agents(tmp_path):
    (tmp_path / "own.py").write_text("def own(text): return text[5000]\n")
    tool = {"type": "function", "function": {"name": "f"}}
    form = ChatFormat(load_config(KEYS), byte_tokenizer(), [STOP], f"{tmp_path / 'own.py'}:own")
    request = read_request({"messages": HI, "tools": [tool]})
    with pytest.raises(ConfigError, match=r"^agent\.parser: IndexError"):
        form.read(request, [], ids_of("A"))
    model = tiny_model.save(tmp_path / "model", hidden=32)
    config = load_config([f"actor_rollout_ref.model.path={model}", *KEYS[1:], "agent.parser=hermis"])
    with pytest.raises(ModelError, match=r"agent\.parser='hermis'"):  # before a program asks
        chat_format(config, tiny_model.build_tokenizer())


def test_a_number_that_another_language_writes_otherwise_continues_its_call():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
    said = '<tool_call>{"name": "f", "arguments": {"a": [1.0, 1e2, 0.5]}}</tool_call>'
    session = new_session(TEMPLATES["Qwen2.5"].text)
    node = call(session, said, HI, tools=[tool])
    message = node.message()
    message["tool_calls"][0]["function"]["arguments"] = '{"a":[1,100,0.5]}'  # JSON.stringify(JSON.parse())
    messages = [*HI, message, {"role": "tool", "tool_call_id": "x", "content": "1"}]
    assert session.submit(read_request({"messages": messages, "tools": [tool]})).parent is node


def test_a_client_that_leaves_a_stream_logs_no_error(monkeypatch, caplog):
    async def gone(*_: object) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", gone)
    with _Open() as session:
        url = f"{session.url}/s/{session.key}/v1/chat/completions"
        with contextlib.suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(
                url, json.dumps({"messages": HI, "stream": True}).encode(), timeout=2
            ).read()
    assert [record for record in caplog.records if "handling request" in record.getMessage()] == []


def test_a_session_whose_last_answer_fills_the_row_ends_by_its_length():
    with agents(_asks_plainly, lambda context, seed: "long", max_tokens=3) as played:
        result = played.play()
    assert _ended(result) == ["length"]
    assert result.batch["truncated"].tolist() == [True]
    with agents(_asks_plainly, lambda context, seed: "lo", max_tokens=3) as played:
        assert _ended(played.play()) == ["stop"]


def test_a_client_that_leaves_after_its_retry_has_come_leaves_no_request_unclaimed():
    with _Open() as session:
        rollout = session.agents.rollout
        play, node, *_ = rollout.submit(session.key, read_request({"messages": HI}), "m", False)
        assert rollout.submit(session.key, read_request({"messages": HI}), "m", True)[1] is node
        rollout.leave(play, node, may_retry=False)
        assert node.is_claimed
        rollout.leave(play, node, may_retry=False)
        assert not node.is_claimed


def test_a_session_that_ends_while_its_request_comes_refuses_it():
    with _Open() as session:
        rollout = session.agents.rollout
        ask = rollout.submit

        def ends(*given: Any) -> Any:
            found = ask(*given)
            with rollout._changed:
                rollout._end(found[0], "error", "late")
            return found

        rollout.submit = ends
        answer = _Handler(rollout).answer(session.key, {"messages": HI}, False, None)
        with pytest.raises(Refusal, match="the session has ended"):
            asyncio.run_coroutine_threadsafe(answer, rollout._server.loop).result(60)


def _sends_a_lone_surrogate(base_url):
    import json
    import urllib.request

    said = {"role": "assistant", "content": "", "reasoning_content": "\ud800"}
    one = {"id": "a", "type": "function", "function": {"name": "f\ud800", "arguments": "{\ud800"}}
    said["tool_calls"] = [one]
    told = {"role": "tool", "tool_call_id": "a\ud800", "name": "\udfff", "content": "\ud800"}
    for messages in ([], [said, told]):
        body = {"messages": [{"role": "user", "content": "Hi\ud800"}, *messages]}
        data = json.dumps(body).encode()
        urllib.request.urlopen(f"{base_url}/chat/completions", data).read()


def test_lone_surrogates_in_any_field_reach_no_file():
    with agents(_sends_a_lone_surrogate) as played:
        result = played.play()
    assert _ended(result) == ["stop"], _error(result)
    result.non_tensor_batch["conversation"][0].encode()


def test_a_row_with_other_tokens_than_were_sampled_for_it_stops_the_run(monkeypatch):
    row = Session.row

    def lacking(session: Session) -> Any:
        found = row(session)
        return found._replace(sampled=[False, *found.sampled[1:]])

    monkeypatch.setattr(Session, "row", lacking)
    with agents(_asks) as played, pytest.raises(TrainingError, match=r"1 sampled tokens .* gave it 2"):
        played.play()


def _sends_a_key(base_url):
    """Send one body three times: twice with an idempotency key, as a client that does not count retries."""
    import json
    import urllib.request

    body, names = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode(), []
    for headers in ({"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}, {}):
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        names.append(json.loads(urllib.request.urlopen(request).read())["id"])
    return json.dumps(names)


def test_an_equal_request_with_the_idempotency_key_of_one_before_gets_its_answer():
    with agents(_sends_a_key) as played:
        result = played.play()
    first, again, another = json.loads(json.loads(result.non_tensor_batch["conversation"][0])["response"])
    assert first == again != another
    assert result.batch["n_turns"].tolist() == [2]


def _asks_with_the_key_of_another(base_url, number, folder):
    import pathlib
    import time
    import urllib.request

    body, leaked = b'{"messages": [{"role": "user", "content": "Hi"}]}', pathlib.Path(folder, "key")
    if number == 0:
        urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
        leaked.write_text(base_url)
        while leaked.exists():
            time.sleep(0.02)
        return "ok"
    while not leaked.exists() or not leaked.read_text():
        time.sleep(0.02)
    urllib.request.urlopen(f"{leaked.read_text()}/chat/completions", body).read()
    leaked.unlink()
    return "ok"


def test_what_is_asked_with_a_leaked_key_is_of_the_session_that_leaks_it(tmp_path):
    with agents(_asks_with_the_key_of_another, prompts=2, lockstep=False) as played:
        result = played.play(folder=[str(tmp_path)] * 2)
    assert _ended(result) == ["stop", "stop"]
    assert result.batch["n_turns"].tolist() == [2, 0]
    assert result.batch["response_mask"].sum(1).tolist() == [4, 0]


def test_a_body_that_does_not_arrive_is_refused(monkeypatch):
    monkeypatch.setattr(server, "_BODY_S", 0.3)
    with _Open() as session:
        url = urlsplit(session.url)
        with socket.create_connection((url.hostname, url.port), timeout=120) as slow:
            head = f"POST /s/{session.key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            slow.sendall(f"{head}\r\n{{".encode())
            answer = http.client.HTTPResponse(slow)
            answer.begin()
            refused = json.loads(answer.read())["error"]["message"]
    assert (answer.status, answer.headers["x-should-retry"]) == (400, "false")
    assert refused == "the body did not arrive within 0.3 s"


def test_path_of_a_long_session_needs_no_recursion():
    node, request = None, read_request({"messages": HI})
    for _ in range(2000):
        node = Node(node, request, [], [], "", None)
    assert len(node.path) == 2000


def _fails(base_url):
    raise ConnectionError("service away")


def test_a_validation_whose_programs_all_fail_has_an_error_rate():
    with agents(_fails) as played:
        prompts = played.batch()
        prompts.meta_info["mode"] = "validate"
        result = played.rollout.generate(prompts, played.params)
    assert _ended(result) == ["error"]
    assert "service away" in _error(result)


def _returns(base_url, returned):
    import urllib.request

    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
    return {
        "text": {"score": 1, "answer": "42", "steps": [1], "tries": 2, "none": None},
        "large": 1e300,
        "reserved": {"score": 1, "rule": 1.0},
        "plain": "42",
        "flag": True,
    }[returned]


def _scored(result: Any, **options: Any) -> Any:
    manager = RewardManager(
        byte_tokenizer(), 0, by_environment=True, max_error_rate=1.0, num_workers=1, **options
    )
    result.non_tensor_batch["data_source"] = result.non_tensor_batch["uid"]
    try:
        return manager(result)
    finally:
        manager.close()


def test_a_program_returns_what_a_reward_function_may():
    with agents(_returns, prompts=4) as played:
        result = played.play(returned=["text", "large", "reserved", "flag"])
    assert _ended(result) == ["stop", "error", "error", "stop"]
    assert "finite and below 3e38" in _error(result, 1)
    assert "reserved" in _error(result, 2)
    rewards = _scored(result)
    assert rewards.token_level_scores.sum(1).tolist() == [1, 0, 0, 1]
    assert rewards.parts["tries"][0] == 2
    assert rewards.texts["answer"] == ["42", None, None, None]
    assert rewards.texts["steps"][0] == "[1]"


def _asks_briefly(base_url):
    import urllib.request

    body = b'{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}'
    urllib.request.urlopen(f"{base_url}/chat/completions", body).read()
    return "A"


def test_rewards_get_the_tokens_of_the_first_request():
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = byte_tokenizer()(chat)["input_ids"]
    with agents(_asks_briefly) as played:
        prompts = played.batch(data_source=["d"])
        result = played.rollout.generate(prompts, played.params)

    def score(prompt, prompt_ids, n_prompt_tokens):
        return float((prompt, prompt_ids, n_prompt_tokens) == (chat, ids, len(ids)))

    manager = RewardManager(byte_tokenizer(), 0, score, by_environment=True)
    pending = manager.expect(prompts)
    pending.complete(result)
    found = pending.get().parts["rule"].tolist()
    manager.close()
    assert found == [1]


def _length_of(solution_str):
    return float(len(solution_str))


def test_a_text_is_scored_by_parts_where_the_rule_has_no_weight():
    with agents(_returns) as played:
        result = played.play(returned=["plain"])
    parts = {"rule": 0.0, "length": {"weight": 1.0, "scorer": _length_of}}
    rewards = _scored(result, parts=parts)
    assert rewards.errors == [""]
    assert rewards.token_level_scores.sum(1).tolist() == [2.0]
    del parts["rule"]  # which then has a weight, and no function
    assert "no function scores the text" in _scored(result, parts=parts).errors[0]


def test_a_lost_session_counts_with_the_error_score_in_validations():
    with agents(_returns, prompts=2) as played:
        result = played.play(returned=["flag", "unknown"])
    assert _ended(result) == ["stop", "error"]
    result.meta_info["mode"] = "validate"
    result.batch["token_level_scores"] = _scored(result, error_score=-1.0).token_level_scores
    assert samples_table(result, byte_tokenizer())["score"].to_pylist() == [1.0, -1.0]


def test_a_session_without_requests_does_not_make_its_group_differ():
    columns = {
        "token_level_scores": torch.tensor([[1.0], [0.0]]),
        "response_mask": torch.tensor([[1.0], [0]]),
    }
    assert not differing_groups(DataProto(columns), 2, "score").any()


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SERVED = ("teacher.servers=[http://127.0.0.1:1]", "teacher.kl=sampled")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("agent.path and agent.command", ["agent.path=a.py:run"]),
        ("agent and environment are both set", ["environment.path=e.py:Own"]),
        ("algorithm.adv_estimator=remax with agent", ["algorithm.adv_estimator=remax"]),
        (
            "trainer.async_steps=2 with agent.lockstep=False",
            ["trainer.async_steps=2", "agent.lockstep=false"],
        ),
        ("name=http and agent: set 0 or 1", ["trainer.async_steps=2", f"{ROLLOUT}.name=http"]),
        ("reward_model.enable=True with agent", ["reward_model.enable=true"]),
        *(
            (
                f"{name}.ulysses_sequence_parallel_size=2 with agent",
                [f"{name}.ulysses_sequence_parallel_size=2"],
            )
            for name in (ACTOR, "actor_rollout_ref.ref", "critic")
        ),
        (
            f"{ACTOR}.strategy=megatron with agent",
            [f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=2"],
        ),
        ("teacher.servers with agent", SERVED),
        (
            "tensor_model_parallel_size=2 with agent",
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
        ),
    ],
)
def test_what_sessions_cannot_be_combined_with_is_refused_before_a_model_loads(words, keys):
    config = load_config([*KEYS, "agent.command=x", "reward_model.model.path=r", *keys])
    assert any(words in line for line in check(config).errors), check(config).errors


def test_the_endpoint_is_reached_without_a_proxy_at_any_address(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with agents(_asks, host="127.0.0.2") as played:
        assert _ended(played.play()) == ["stop"]


def test_a_port_is_free_once_its_rollout_is_closed():
    with agents(_asks_plainly) as played:
        rollout, port = played.rollout, played.rollout._address.port
        played.play()
        socket.create_connection(("127.0.0.1", port)).close()
        gc.disable()
        try:
            rollout.close()
            with agents(_asks_plainly, port=port) as again:
                assert _ended(again.play()) == ["stop"]
        finally:
            gc.enable()
        again.rollout.close()


@pytest.mark.parametrize(
    "parameters",
    [
        "x",
        {"properties": [1]},
        {"properties": {"a": True}},
        {"properties": {"a": {}}, "required": None},
        {"properties": {"a": {"anyOf": None}}},
        {"properties": {"a": {"enum": 5}}},
        None,
    ],
)
def test_a_schema_that_cannot_be_read_is_refused_before_a_call_is(parameters):
    body = {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    }
    session = new_session(TEMPLATES["Qwen2.5"].text)
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    # as of a client that writes null for what is left out; true is the schema of any value
    if parameters in (None, {"properties": {"a": True}}):
        assert call(session, said, **body).answer.calls
    else:
        with pytest.raises(Refusal, match=r"the schema of 'f' cannot be read") as refused:
            call(session, said, **body)
        assert refused.value.status == 400


@pytest.mark.parametrize("family", ["Gemma, Mistral's first", "Phi-3"])
def test_tools_that_a_template_cannot_answer_are_refused_with_what_agents_can_do(family):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    session = new_session(TEMPLATES[family].text)
    with pytest.raises(Refusal) as refused:
        session.submit(read_request({"messages": HI, "tools": [tool]}))
    assert refused.value.status == 400
    assert mentions(refused.value, "shows no answer of the role 'tool'", "data.chat_template")
    assert "environment." not in str(refused.value)


def test_the_figures_of_the_servers_are_those_of_the_engine():
    with agents(_asks) as played:
        played.engine.columns_of = lambda batch: DataProto(
            {}, {}, {"rollout_metrics": {"rows": len(batch.prompts)}}
        )
        assert played.play().meta_info["rollout_metrics"] == {"rows": 1}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_call_whose_arguments_other_languages_cannot_read_is_malformed(number):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
    said = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
    node = call(new_session(TEMPLATES["Qwen2.5"].text), said, HI, tools=[tool])
    assert node.answer.calls == ()
    assert "no JSON" in node.answer.malformed


def test_a_first_context_that_is_too_long_names_both_keys():
    messages = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(Refusal, match=r"data\.max_response_length=50 .*data\.max_prompt_length=40"):
        new_session(room=50, widest=40).submit(read_request({"messages": messages}))

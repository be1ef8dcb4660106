"""``strop serve`` with the official client, and answers equal to those of transformers."""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from picture_rows import picture
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from strop.agents.chat import ChatFormat
from strop.cli import serve as command
from strop.data.pictures.expand import load_processor
from strop.errors import ConfigError
from strop.listening import Address
from strop.rollout.base import Samples
from strop.trainer.serve import _Handler, _texts_of, serving

import picture_models
import tiny_model
from byte_tokenizer import STOP, byte_tokenizer
from messages import naming

HI = [{"role": "user", "content": "Hi 42"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a word.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "The word."}},
                "required": ["word"],
            },
        },
    }
]


def save(folder):
    tokenizer = byte_tokenizer()
    model = tiny_model.build_model(tokenizer, seed=3)
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(model, *more):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.config_from(parser.parse_args([str(model), *more]))


@contextlib.contextmanager
def client_of(config, serve=None, token="right"):
    """Serve in a thread, which ends with the process."""
    with serving(config, host="127.0.0.1", port=0, token=token) as (address, own):
        threading.Thread(target=serve or own, daemon=True).start()
        with openai.OpenAI(
            base_url=f"{address.url}/v1", api_key="right", max_retries=0, timeout=60
        ) as client:
            yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(model):
    with client_of(settings(model)) as client:
        yield client


def ask(client, text="Hi 42", **more):
    reply = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": text}], **{"max_tokens": 100, **more}
    )
    return reply.choices[0].message.content, reply.choices[0].finish_reason, reply.usage.completion_tokens


def generated(model, messages, most, **template):
    """The greedy answer of transformers."""
    tokenizer, own = byte_tokenizer(), AutoModelForCausalLM.from_pretrained(model)
    given = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **template
    )
    ids = own.generate(**given, do_sample=False, max_new_tokens=most)[0, given["input_ids"].shape[1] :]
    count = len(ids)
    if ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return tokenizer.decode(ids), count


def test_greedy_answers_are_those_of_transformers(model, client):
    expected, count = generated(model, HI, 100)
    said, reason, tokens = ask(client, temperature=0)
    assert (said, tokens) == (expected, count)
    assert reason == ("length" if count == 100 else "stop")
    assert ask(client, temperature=1, top_p=1e-6)[0] == expected
    assert ask(client, temperature=1)[0] != expected


def test_a_conversation_with_calls_is_rendered_by_the_template(model, client):
    call = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
    messages = [
        {"role": "system", "content": "S"},
        *HI,
        {"role": "assistant", "content": "one moment", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    parsed = {"function": {"name": "look_up", "arguments": {"word": "x"}}}
    shown = [*messages[:2], {**messages[2], "tool_calls": [parsed]}, messages[3]]
    reply = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, temperature=0, max_tokens=40
    )
    assert reply.choices[0].message.content == generated(model, shown, 40, tools=TOOLS)[0]


def test_chats_at_once_are_those_one_at_a_time(client):
    lengths = [3, 40, 90, 7] * 4
    asked = [
        {"text": f"Hi {number}", "seed": number, "max_tokens": length, "temperature": 1 + number % 2 / 2}
        for number, length in enumerate(lengths)
    ]
    alone = [ask(client, **one) for one in asked]
    with ThreadPoolExecutor(16) as pool:
        together = [*pool.map(lambda one: ask(client, **one), asked)]
    assert together == alone
    assert len(set(alone)) == 16
    assert ask(client, seed=-1) == ask(client, seed=-1)
    assert ask(client) != ask(client)


def test_a_text_ends_an_answer(client):
    whole, _, _ = ask(client, seed=5)
    stop = whole[40:44]
    said, reason, tokens = ask(client, seed=5, stop=[stop, "never there"])
    assert (said, reason) == (whole.partition(stop)[0], "stop")
    assert tokens < 100


def test_a_stream_has_the_same_answer(client):
    chunks = [
        *client.chat.completions.create(
            model="m", messages=HI, seed=1, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
    ]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == ask(client, seed=1, max_tokens=50)[0]
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].usage.completion_tokens <= 50


def test_models_are_listed_and_found_by_name(model, client):
    assert [one.id for one in client.models.list()] == [model.name]
    assert client.models.retrieve(model.name).id == model.name
    with pytest.raises(openai.NotFoundError, match=f"no model 'a/b'; the models are {model.name}") as unknown:
        client.models.retrieve("a/b")
    assert unknown.value.code == "model_not_found"


def test_requests_without_the_key_are_refused(model, client):
    requests = (
        lambda c, **more: c.models.list(**more),
        lambda c, **more: c.models.retrieve(model.name, **more),
        lambda c, **more: ask(c, **more),
    )
    for key in ("wrong", "", "rightly"):
        stranger = client.with_options(api_key=key) if key else client
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {"Authorization": openai.omit}
        for request in requests:
            with pytest.raises(openai.AuthenticationError, match="missing or wrong") as refused:
                request(stranger, extra_headers=headers)
            assert refused.value.response.headers["x-should-retry"] == "false"
            assert refused.value.code == "invalid_api_key"


def test_a_name_that_another_site_lets_resolve_to_this_machine_is_refused_without_a_token(model):
    hosts = {"localhost:1": 200, "127.0.0.1": 200, "evil.example:8000": 403, "[": 403}
    with client_of(settings(model), token=None) as client:
        for host, status in hosts.items():
            headers = {"Host": host}
            found = [
                httpx.get(f"{client.base_url}models", headers=headers),
                httpx.post(
                    f"{client.base_url}chat/completions",
                    json={"messages": HI, "max_tokens": 1},
                    headers=headers,
                ),
            ]
            assert [one.status_code for one in found] == [status] * 2


def test_a_port_that_is_taken_is_an_error_before_the_model_is_loaded(model, monkeypatch):
    monkeypatch.setattr("strop.trainer.serve.fetch_tokenizer", None)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot listen on host"),
        serving(settings(model), host="127.0.0.1", port=taken.getsockname()[1], token="right"),
    ):
        raise AssertionError


def test_what_is_not_served_is_refused(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")
    for wrong in (
        {"n": 2},
        {"temperature": 3},
        {"top_p": 0},
        {"seed": 1.5},
        {"stop": 5},
        {"logprobs": True},
        {"text": "x" * 1024},
    ):
        with pytest.raises(
            openai.BadRequestError, match="|".join((*wrong, "context_length_exceeded"))
        ) as found:
            ask(client, **wrong)
        assert found.value.code == ("context_length_exceeded" if "text" in wrong else None)


def test_a_client_that_hangs_up_leaves_the_others_alone(client):
    alone = ask(client, seed=3)
    body = json.dumps({"messages": HI, "max_tokens": 200, "temperature": 0}).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", "Authorization: Bearer right")
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, client, seed=3) for _ in range(4)]
        for _ in range(4):
            with socket.create_connection((client.base_url.host, client.base_url.port)) as gone:
                gone.sendall(head.encode() + body)
                time.sleep(0.02)
        assert [answer.result() for answer in answers] == [alone] * 4
    assert ask(client, seed=3) == alone


def url_of(encoded):
    return {"url": f"data:image/png;base64,{base64.b64encode(encoded).decode()}"}


def parts_of(*content):
    shown = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image_url", "image_url": url_of(one)}
        for one in content
    ]
    return {"role": "user", "content": shown}


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl"])
def seeing(request, tmp_path_factory):
    """The folder of a model that reads pictures, with weights large enough for them to matter."""
    return picture_models.louder(picture_models.make(request.param, tmp_path_factory.mktemp("seeing")), 4)


def test_greedy_answers_to_pictures_are_those_of_transformers(seeing):
    tokenizer = AutoTokenizer.from_pretrained(seeing)
    own, processor = AutoModelForImageTextToText.from_pretrained(seeing), load_processor(seeing, tokenizer)
    files = [picture(seed, 56 + 28 * seed) for seed in range(3)]
    chats = [
        [parts_of("what is ", files[0], "?")],
        [parts_of("what is ", files[1], "?")],
        [parts_of(files[1], files[2], "blue"), {"role": "assistant", "content": "red"}, parts_of(files[0])],
        [{"role": "user", "content": "what is it?"}],
    ]
    expected = []
    for chat in chats:
        given = [files[:1], files[1:2], [*files[1:], files[0]], None][len(expected)]
        text = tokenizer.apply_chat_template(
            json.loads(json.dumps(chat).replace('"image_url"', '"image"')),
            tokenize=False,
            add_generation_prompt=True,
        )
        images = given and [[Image.open(io.BytesIO(one)) for one in given]]
        inputs = processor(text=[text], images=images, return_tensors="pt")
        ids = own.generate(**inputs, do_sample=False, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
        expected.append((tokenizer.decode(ids[:-1] if ids[-1] == 2 else ids), len(ids)))
    assert len(set(expected)) == 4

    def said(client, chat):
        reply = client.chat.completions.create(model="m", messages=chat, temperature=0, max_tokens=40)
        return reply.choices[0].message.content, reply.usage.completion_tokens

    with client_of(settings(seeing, "--rollout", "hf")) as client, ThreadPoolExecutor(4) as pool:
        assert [said(client, chat) for chat in chats] == expected
        assert [*pool.map(lambda chat: said(client, chat), chats)] == expected
        for content, words in {
            "http://example.com/a.png": "pictures are not downloaded in a run",
            "data:image/png;base64,iVBORw0K": "the picture cannot be used|expected a picture",
        }.items():
            wrong = {"type": "image_url", "image_url": {"url": content}}
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                said(client, [{"role": "user", "content": [wrong]}])
            assert "messages[0]" in str(refused.value)


def test_a_model_of_text_refuses_pictures(client):
    with pytest.raises(openai.BadRequestError, match="expected text"):
        client.chat.completions.create(model="m", messages=[parts_of("what is ", picture(0), "?")])


def test_a_model_whose_pictures_cannot_be_read_is_one_of_text(model, tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n"}))
    picture_models.image_processor("siglip", "SiglipImageProcessorPil").save_pretrained(tmp_path)
    assert _texts_of(settings(model, "--rollout", "hf"), byte_tokenizer(), tmp_path) is None
    assert "messages with pictures are refused: " in caplog.text
    assert "Gemma3nProcessor cannot be built" in caplog.text


class Scripted:
    """An engine that says its texts, some tokens at a time."""

    eos_token_ids = (STOP,)

    def __init__(self, texts):
        self.texts, self.prompts = [*texts], []

    @contextlib.contextmanager
    def waves(self, params, *, keeps):
        def wave(flights, version):
            (flight,) = flights
            if not flight.lengths[0]:
                self.prompts.append(flight.prompt_ids[0].tolist())
                if (text := self.texts.pop(0)) is None:
                    raise RuntimeError("no memory is left")
                self.said = [*byte_tokenizer()(text, add_special_tokens=False)["input_ids"], STOP]
            done = int(flight.lengths[0])
            new = self.said[done : int(flight.limits[0])]
            stopped = len(self.said) == done + len(new)
            columns = torch.tensor([new]), torch.zeros(1, len(new)), torch.tensor([len(new)])
            flight.add(torch.tensor([0]), Samples(*columns, torch.tensor([not stopped])), version)

        yield wave


@pytest.fixture
def scripted(model, monkeypatch):
    """A client, and the engine that the test gives texts."""
    engine, serve = Scripted([]), _Handler.serve
    monkeypatch.setattr(_Handler, "serve", lambda desk, real: serve(desk, engine))
    with client_of(settings(model)) as client:
        yield client, engine


def test_calls_make_a_round_trip(scripted):
    client, engine = scripted
    call = '{"name": "look_up", "arguments": {"word": "x"}}'
    engine.texts += [f"one moment <tool_call>{call}</tool_call>", "it is 12", "<tool_call>{</tool_call>"]
    messages = [*HI]
    first = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    (made,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert (made.function.name, json.loads(made.function.arguments)) == ("look_up", {"word": "x"})
    assert first.choices[0].message.content.strip() == "one moment"
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "12"}]
    second = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("it is 12", "stop")
    assert second.choices[0].message.tool_calls is None
    shown = byte_tokenizer().decode(engine.prompts[1])
    assert f"one moment<tool_call>{call}</tool_call><|im_end|>" in shown.replace("moment ", "moment")
    assert "<tool_response>12</tool_response>" in shown
    malformed = client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    assert malformed.choices[0].message.content == "<tool_call>{</tool_call>"


def test_an_error_of_the_engine_is_that_of_its_requests(scripted):
    client, engine = scripted
    engine.texts += [None, "well"]
    with pytest.raises(openai.InternalServerError, match="no memory is left"):
        ask(client)
    assert ask(client)[0] == "well"


def test_an_answer_that_has_no_text_is_an_error_of_its_request(scripted, monkeypatch):
    client, engine = scripted
    engine.texts += ["lost", "well"]

    def unreadable(*_):
        raise TypeError("no text of this token")

    with monkeypatch.context() as broken:
        broken.setattr(ChatFormat, "cut_at_stop", unreadable)
        with pytest.raises(openai.InternalServerError, match="no text of this token"):
            ask(client.with_options(timeout=60))
    assert ask(client)[0] == "well"


def served(*arguments, **environment):
    """The command's process, its address, and the line after it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "strop", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    return process, process.stdout.readline().split()[0], process.stdout.readline()


def test_the_command_prints_address_and_key_and_ends_by_ctrl_c(model):
    process, url, line = served(str(model), STROP_SERVE_TOKEN="")
    key = line.removeprefix("key: ").strip()
    with openai.OpenAI(base_url=url, api_key=key, timeout=60) as client:
        assert ask(client, max_tokens=3, temperature=0)[2] == 3
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=300)
    assert (process.returncode, len(key)) == (130, 32)
    assert printed.startswith("strop ")
    assert printed.endswith("stopped by Ctrl-C\n")
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("options", "variable", "token", "said"),
    [
        ([], "mine", "mine", "key: that of STROP_SERVE_TOKEN\n"),
        (
            ["--no-token"],
            "mine",
            None,
            "Everyone who reaches this address can use the model: it has no token.\n",
        ),
        ([], "", None, "key: "),
    ],
    ids=["of the environment", "none", "new"],
)
def test_the_key_is_that_of_the_environment_else_a_new_one(
    model, monkeypatch, capsys, options, variable, token, said
):
    found = []

    @contextlib.contextmanager
    def instead(config, *, host, port, token):
        found.append(token)
        yield Address(host, port, token), lambda: None

    monkeypatch.setenv("STROP_SERVE_TOKEN", variable)
    monkeypatch.setattr("strop.trainer.serve.serving", instead)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args([str(model), "--port", "0", *options]))
    expected = said + (f"{found[0]}\n" if said == "key: " else "")
    assert capsys.readouterr().out.endswith(f"(Ctrl-C ends)\n{expected}")
    assert found == [token] or len(found[0]) == 32


def test_warnings_are_logged_before_the_model_is_loaded(model, monkeypatch, caplog):
    def instead(*_, **__):
        raise ConfigError("; ".join(caplog.messages))

    monkeypatch.setattr("strop.trainer.serve.serving", instead)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    val = "actor_rollout_ref.rollout.val_kwargs"
    arguments = parser.parse_args([str(model), f"{val}.n=2", f"{val}.temperature=0"])
    with caplog.at_level("INFO", "strop"), pytest.raises(ConfigError, match=naming("warning:", f"{val}.n=2")):
        command.run(arguments)


def test_the_iteration_of_a_run_folder_is_that_of_the_options(model, monkeypatch):
    found, own = [], command.settings

    def instead(*, step, best, **given):
        found.append((step, best))
        return own(**given)

    monkeypatch.setattr(command, "settings", instead)
    for options in ([], ["--best"], ["--step", "3"]):
        settings(model, *options)
    assert found == [(None, False), (None, True), (3, False)]


SMOLLM2 = os.environ.get("STROP_SMOLLM2", "")


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="STROP_SMOLLM2 names no folder of SmolLM2-135M-Instruct")
def test_a_language_model_answers():
    with client_of(settings(SMOLLM2, "--rollout", "hf")) as client:
        said = ask(client, "What is the capital of France? Answer in one word.", temperature=0)
        assert "Paris" in said[0]
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda _: ask(client, "Tell me a joke.", seed=2, max_tokens=30), range(4))]
        assert found == [ask(client, "Tell me a joke.", seed=2, max_tokens=30)] * 4

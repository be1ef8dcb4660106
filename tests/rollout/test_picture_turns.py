"""Answers with pictures: from what a tool returns to the tokens that are inserted."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from types import SimpleNamespace

import pytest
import torch
from picture_rows import picture
from PIL import Image
from transformers import AutoTokenizer

from strop import pictures
from strop.data.bridge import Bridge, Call, tool_message
from strop.data.pictures.expand import PromptPictures, load_processor
from strop.data.pictures.parts import digests_of, named
from strop.data.pictures.read import alive_parts
from strop.environments.episode import Blueprint, Episode
from strop.errors import DataError, ModelError
from strop.protocol import DataProto
from strop.rollout.base import SamplingParams
from strop.rollout.in_flight import InFlight
from strop.rollout.turn_format import TurnFormat

import picture_models

CALL = Call("look", {})


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl", "llava", "gemma3"])
def processor(request, tmp_path_factory):
    folder = picture_models.make(request.param, tmp_path_factory.mktemp("model"))
    return load_processor(folder, AutoTokenizer.from_pretrained(folder))


def alive(*encoded: bytes) -> list[pictures.Picture]:
    return [pictures.alive(one, "a tool") for one in encoded]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_inserted_tokens_are_those_of_the_processor(processor, role):
    tokenizer = processor.tokenizer
    bridge = Bridge(tokenizer, [2], pictures=PromptPictures(processor))
    files = [picture(7), picture(8, 112, 84)]
    found = alive(*files)
    escaped = f"see {processor.image_token}:"  # text, as it stands in a user's text
    content = [{"type": "text", "text": "see :"}, *(named(one.digest) for one in found)]
    answer = {"role": "user", "content": content} if role == "user" else tool_message(CALL, content)
    shown = bridge.shown([answer], [CALL] if role == "tool" else [])
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "red"}, answer]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    opened = [Image.open(io.BytesIO(one)) for one in files]
    whole = processor(text=[text], images=[opened])["input_ids"][0]
    assert list(whole)[-len(shown.ids) :] == shown.ids
    assert whole[-len(shown.ids) - 1] == 2
    assert digests_of(shown.images_at) == [one.digest for one in found]
    mark = tokenizer.convert_tokens_to_ids(processor.image_token)
    marks = {mark, tokenizer.convert_tokens_to_ids(getattr(tokenizer, "image_token", processor.image_token))}
    assert all(at for token, at in zip(shown.ids, shown.images_at, strict=True) if token in marks)
    content[0]["text"] = escaped
    again = bridge.shown([answer], [CALL] if role == "tool" else [])
    assert again.ids.count(mark) == shown.ids.count(mark)
    assert len(again.ids) > len(shown.ids)


def test_a_run_of_text_refuses_a_picture(processor):
    bridge = Bridge(processor.tokenizer, [2])
    (found,) = alive(picture(7))
    with pytest.raises(ModelError, match=r"set data\.max_images"):
        bridge.shown([{"role": "user", "content": [named(found.digest)]}])


def returned(value: object) -> object:
    """What a tool's process sends for its result."""

    def look():
        return value

    async def run(function, **arguments):
        return function(**arguments)

    async def played():
        episode = Episode(Blueprint({}, [look]), {})
        await episode.begin(0, run)
        return await episode.turn(
            {"calls": [{"name": "look", "arguments": {}}], "text": "", "number": 0}, run
        )

    return json.loads(json.dumps(asyncio.run(played())))["texts"][0]


def test_a_tool_returns_pictures_in_any_form(tmp_path):
    encoded = picture(9)
    (tmp_path / "a.png").write_bytes(encoded)
    url = f"data:image/png;base64,{base64.b64encode(encoded).decode()}"
    opened = Image.open(io.BytesIO(encoded))
    digest = pictures.hold(encoded)
    for form in (encoded, tmp_path / "a.png", str(tmp_path / "a.png"), url):
        for part in ({"type": "image", "image": form}, {"type": "image_url", "image_url": {"url": form}}):
            assert alive_parts(returned(part), "x")[0] == [named(digest)]
    parts, (found,) = alive_parts(returned(["here", opened]), "x")
    assert parts == [{"type": "text", "text": "here"}, named(found.digest)]
    assert alive_parts(returned(opened), "x")[1] == [found]
    assert pictures.opened(found.digest).tobytes() == opened.convert("RGB").tobytes()
    for value in ([1, {"type": "image"}], {"type": "text", "text": "a"}, {"a": [2]}):
        assert json.loads(returned(value)) == value
    assert "FileNotFoundError" in returned({"type": "image", "image": "missing.png"})


@pytest.mark.parametrize("encoded", [picture(3)[:200], b"no picture", b""])
def test_a_damaged_picture_names_its_tool(encoded):
    settings = SimpleNamespace(_settings=SimpleNamespace(answer_length=9))
    answer = (
        {"texts": [returned({"type": "image", "image": encoded})]}
        if encoded
        else {"texts": [[{"type": "image"}]]}
    )
    with pytest.raises(DataError, match=r"^the answer of look: "):
        TurnFormat.messages(settings, SimpleNamespace(answers=None), [CALL], answer)


def in_flight() -> InFlight:
    ids = torch.tensor([[4, 5], [4, 6]])
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": torch.tensor([[1], [2]])}
    columns["position_ids"] = torch.arange(2).expand(2, 2)
    return InFlight(DataProto(columns), SamplingParams(max_tokens=12), turn_length=9, shows_pictures=True)


def test_samples_in_flight_keep_pictures_of_their_turns():
    flight = in_flight()
    (found,) = alive(encoded := picture(11))
    digest = found.digest
    flight.insert(1, [5, 6, 7], [0, digest, -1], {digest: found})
    state = flight.state()
    del found, flight
    with pytest.raises(DataError, match="holds no such picture"):
        pictures.held(digest)
    again = in_flight()
    again.restore(state)
    assert pictures.held(digest) == encoded
    assert again.images_at_of(1) == [0, digest, -1]
    columns = again.result(pad_token_id=0)
    assert columns.batch["images_at"][1, :3].tolist() == [0, digest, -1]
    assert [[*files] for files in columns.non_tensor_batch["image_files"]] == [[], [digest]]
    assert torch.equal(columns.batch["images_at"][0], torch.zeros(12, dtype=torch.long))

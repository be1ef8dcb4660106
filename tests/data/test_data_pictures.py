"""Prompts with pictures: forms of rows, token ids, damaged pictures, batches."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from strop import pictures
from strop.config.load import load_config
from strop.config.names import SEEN_BOTH_WAYS
from strop.data.answers import AnsweredDataset, pair_batch
from strop.data.build import build_loaders
from strop.data.loader import EpochSampler, collate
from strop.data.pictures import expand
from strop.data.pictures.expand import load_image_processor, load_processor
from strop.data.rl_dataset import RLHFDataset, max_pictures, pictures_digest
from strop.data.sources import Rows, fingerprint
from strop.errors import CheckpointError, DataError, ModelError
from strop.models.folder import load_tokenizer

import picture_models
import tiny_model
from messages import mentions, naming
from picture_models import FAMILIES


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return the folder of a family's model, made once."""
    known: dict[str, Path] = {}

    def made(kind: str) -> Path:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            known[kind] = picture_models.make(kind, folder, split=True)
        return known[kind]

    return made


@pytest.fixture(scope="module")
def tokenizer_of(folder_of):
    return lambda kind: load_tokenizer(folder_of(kind))


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("qwen2_5_vl")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def dataset(source: Any, tokenizer: Any, **options: Any) -> RLHFDataset:
    source = source if isinstance(source, str | Path | Rows) else Rows("rows", source)
    return RLHFDataset(source, tokenizer, **{"max_prompt_length": 2000, "data_source": "x", **options})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def processors_ids(folder: Path, tokenizer: Any, chat: list[dict[str, Any]], images: list[Any]) -> list[int]:
    """Return the ids of a chat by the processor's own call on the real pictures."""
    processor = load_processor(folder, tokenizer)
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return [*processor(images=[images] if images else None, text=[rendered])["input_ids"][0]]


def check_ids(folder: Path, tokenizer: Any, n_rows: int, largest: int) -> None:
    """Compare ids of rows with 0 to 3 pictures of random sizes, in three forms, with the processor's."""
    draw = np.random.default_rng(0)
    rows, expected = [], []
    for number in range(n_rows):
        sizes = draw.integers(8, largest, (number % 4, 2))
        images = [picture(*size, seed) for seed, size in enumerate(sizes)]
        parts = [text(f"red {number} \n")]
        for image in range(len(images)):
            parts += [{"type": "image"}, text(f"\n blue{image}")]
        form = number // 4 % 3
        if form == 1:  # marks
            given: Any = "".join("<image>" if part["type"] == "image" else part["text"] for part in parts)
        elif form == 2:  # before the first user's text
            given = "red\n"
            parts = [{"type": "image"}] * len(images) + [text(given)]
        else:
            given = parts
        system = {"role": "system", "content": "colour"}
        rows.append({"prompt": [system, *user(given)], "images": images})
        chat = [{**system, "content": [text("colour")]}, *user(parts)]
        expected.append(processors_ids(folder, tokenizer, chat, images))
    found = dataset(rows, tokenizer)
    assert [row["input_ids"].tolist() for row in map(found.__getitem__, range(n_rows))] == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_ids_are_those_of_the_processors_own_call(kind, folder_of, tokenizer_of):
    check_ids(folder_of(kind), tokenizer_of(kind), n_rows=24, largest=120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_ids_of_many_sizes_are_those_of_the_processors_own_call(kind, folder_of, tokenizer_of):
    check_ids(folder_of(kind), tokenizer_of(kind), n_rows=134, largest=600)  # 200 pictures


@pytest.mark.parametrize("kind", FAMILIES)
def test_pixels_are_those_of_the_processors_own_call(kind, folder_of, tokenizer_of):
    folder, image = folder_of(kind), picture(112, 56)
    images, processor = load_image_processor(folder), load_processor(folder, tokenizer_of(kind))
    expected = processor(images=[[image]], text=[processor.image_token], return_tensors="pt")["pixel_values"]
    assert torch.equal(images([[image]], return_tensors="pt")["pixel_values"], expected)


def test_defaults_of_the_whole_processor_hold_for_pixels_and_tokens(folder_of, tokenizer):
    folder = folder_of("internvl")
    own = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    assert own["crop_to_patches"] is False  # InternVLProcessor passes True
    made = load_image_processor(folder)([[picture(112, 56)]], return_tensors="pt")["pixel_values"]
    assert made.shape == (3, 3, 56, 56)  # two tiles, and the whole
    found = dataset([{"prompt": "red", "images": [picture(112, 56)]}], load_tokenizer(folder))
    assert found.pictures.tokens_of_rows().tolist() == [3 * 4]


@pytest.mark.parametrize("family", ["paligemma", "gemma4", "gemma4_unified"])
def test_families_seen_both_ways_whose_passes_are_causal_are_refused(family, tmp_path):
    """transformers raises nothing without the types of tokens, and computes a causal pass."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ModelError, match=naming(f"pictures of {family}", "attend to each other", "gemma3")):
        load_image_processor(tmp_path)


def test_all_families_that_transformers_sees_both_ways_are_known():
    """Their module passes groups of tokens to the mask; that of DeepSeek-OCR 2 in its encoder alone."""
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    groups = {path.parent.name for path in files if "block_sequence_ids" in path.read_text()}
    found = (groups & MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()) - {"deepseek_ocr2"}
    assert found | {"shieldgemma2"} == SEEN_BOTH_WAYS.keys()  # this one has the class of Gemma 3
    assert [family for family, is_marked in SEEN_BOTH_WAYS.items() if is_marked] == ["gemma3"]


@pytest.mark.parametrize(
    ("module", "name", "settings", "shapes"),
    [
        (
            "llava_next",
            "LlavaNextImageProcessorPil",
            {
                "size": {"shortest_edge": 56},
                "crop_size": {"height": 56, "width": 56},
                "image_grid_pinpoints": [[56, 112], [112, 56]],
            },
            "[(1, 3, 3, 56, 56), (1, 3, 3, 56, 56)]",  # larger pictures may have more tiles
        ),
        (  # of Mistral 3
            "pixtral",
            "PixtralImageProcessorPil",
            {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
            "[(1, 3, 56, 56), (1, 3, 84, 112)]",
        ),
    ],
)
def test_families_that_pad_pictures_to_each_other_are_refused(
    module, name, settings, shapes, tmp_path, monkeypatch
):
    monkeypatch.setattr(expand, "_processor_class", lambda _: None)  # Mistral 3's needs torchvision
    picture_models.image_processor(module, name, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=naming(name, shapes, "joined with padding")):
        load_image_processor(tmp_path)


def test_a_processor_that_needs_a_part_for_sound_is_refused(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n"}))
    picture_models.image_processor("siglip", "SiglipImageProcessorPil").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=naming("Gemma3nProcessor", "feature_extractor", "not supported")):
        load_processor(tmp_path, tokenizer)


@pytest.mark.parametrize("with_picture", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_placeholders_in_a_users_text_are_text(kind, with_picture, tokenizer_of):
    tokenizer = tokenizer_of(kind)
    names = [name for name in tokenizer.get_added_vocab() if name not in tokenizer.chat_template]
    words = "".join(["<image>", "<|image_pad|>", "<image_soft_token>", *names])
    own = [{"prompt": user([{"type": "image"}, text("red")]), "images": [picture(30, 30)]}]
    typed = [{"prompt": user([{"type": "image"}, text(f"red{words}")]), "images": [picture(30, 30)]}]
    if not with_picture:
        own = [*own, {"prompt": user("red"), "images": []}]
        typed = [*own[:1], {"prompt": user(f"red{words}"), "images": []}]
    before, after = (dataset(rows, tokenizer)[len(rows) - 1]["input_ids"].tolist() for rows in (own, typed))
    special = set(tokenizer.added_tokens_decoder)
    assert [token for token in after if token in special] == [token for token in before if token in special]
    assert words in tokenizer.decode(after)


def test_marks_of_places_are_no_warning_where_they_are_a_control_token(tokenizer_of, caplog):
    rows = [{"prompt": "<image>red", "images": [picture(30, 30)]}]
    dataset(rows, tokenizer_of("smolvlm"))
    assert not caplog.records
    dataset([{"prompt": "<image>red"}], tokenizer_of("smolvlm"))
    assert mentions(caplog.text, "'<image>', a control token")


def test_text_about_the_mark_stays_text_without_pictures(tokenizer):
    found = dataset([{"prompt": user("the tag <image>")}], tokenizer)
    assert "<image>" in tokenizer.decode(found[0]["input_ids"])
    assert "images" not in found[0]


def test_a_batch_has_the_digests_in_the_order_of_the_places(tokenizer):
    images = [picture(30, 30, seed) for seed in range(3)]
    rows = [
        {"prompt": user("<image>red<image>"), "images": images[:2]},
        {"prompt": user("red"), "images": None},
        {"prompt": user("red"), "images": images[2:]},
    ]
    digests = [pictures.hold(encoded(image, compress_level=1)) for image in images]
    for options, width in (({}, 2), ({"max_images": 3}, 3)):
        found = dataset(rows, tokenizer, **options)
        batch = collate([found[row] for row in range(3)], pad_token_id=0, max_prompt_length=100)
        expected = torch.zeros(3, width, dtype=torch.int64)
        expected[0, :2], expected[2, 0] = torch.tensor(digests[:2]), digests[2]
        assert torch.equal(batch.batch["images"], expected)
        assert "images" not in batch.non_tensor_batch
    with pytest.raises(
        DataError, match=r"rows:rows, row 0, field images: .* 2 pictures, data.max_images is 1"
    ):
        dataset(rows, tokenizer, max_images=1)


def shortened(texts, ids, digests):
    return texts.unexpanded(ids, texts.images_at(ids, digests))


def test_ids_for_vllm_have_one_placeholder_for_each_picture(tokenizer):
    rows = [{"prompt": user("<image>red<image><image>blue"), "images": [picture(60, 40)] * 3}]
    found = dataset(rows, tokenizer)
    ids = found[0]["input_ids"].tolist()
    short = shortened(found.pictures, ids, found[0]["images"].tolist())
    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    chat = user([{"type": "image"}, text("red"), {"type": "image"}, {"type": "image"}, text("blue")])
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert short == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert short.count(placeholder) == 3
    with pytest.raises(ValueError, match="not in the prompt"):
        shortened(found.pictures, short, found[0]["images"].tolist())


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_prompt_in_words_has_the_tokens_of_each_picture(kind, tokenizer_of, tmp_path):
    tokenizer = tokenizer_of(kind)
    (tmp_path / "a.png").write_bytes(encoded(picture(300, 90)))
    images = [str(tmp_path / "a.png"), picture(40, 60)]
    found = dataset([{"prompt": "two", "images": images}, {"prompt": "one", "images": images[:1]}], tokenizer)
    counts, texts = [], []
    feature = getattr(tokenizer, "image_token", None) or found.pictures.placeholder  # Gemma's are two tokens
    for row in (0, 1):
        ids, digests = found[row]["input_ids"].tolist(), found[row]["images"].tolist()
        counts.append(ids.count(tokenizer.convert_tokens_to_ids(feature)))
        texts.append(found.pictures.in_words(tokenizer.decode(ids), [digest for digest in digests if digest]))
    first, second = counts[1], counts[0] - counts[1]
    assert f"[picture 1: a.png, 300 x 90, {first} tokens]" in texts[1]
    assert re.findall(r"\[picture.*?\]", texts[0]) == [
        f"[picture 1: a.png, 300 x 90, {first} tokens]", f"[picture 2: 40 x 60, {second} tokens]"
    ]  # fmt: skip
    assert feature not in "".join(texts)
    assert found.pictures.tokens_of_rows().tolist() == counts
    typed = tokenizer.decode(ids) + feature
    assert found.pictures.in_words(typed, [digests[0]]) == typed


class Forms:
    """The same two rows in forms of others' data; pixels are those of lossless files."""

    words = ("red", "blue")
    images = (picture(40, 30, 1), picture(30, 50, 2))

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [encoded(image, compress_level=1) for image in self.images]

    def verl(self) -> Path:
        """Return the parquet file of verl's and EasyR1's scripts: marks, and records of bytes and path."""
        rows = [
            {"prompt": user(f"<image>{word}"), "images": [{"bytes": file, "path": None}], "data_source": "x"}
            for word, file in zip(self.words, self.files, strict=True)
        ]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / "verl.parquet")
        return self.folder / "verl.parquet"

    def trl(self) -> pa.Table:
        """Return what a data set of TRL stores for a column of the feature Image."""
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        images = pa.array([{"bytes": file, "path": "a.png"} for file in self.files], kind)
        return pa.table({"prompt": [user(word) for word in self.words], "image": images})

    def objects(self) -> list[dict[str, Any]]:
        """Return rows in memory: an image of Pillow, and an array in a part."""
        array = np.asarray(self.images[1])
        return [
            {"prompt": user(self.words[0]), "images": [self.images[0]]},
            {"prompt": user([{"type": "image", "image": array}, text(self.words[1])]), "images": []},
        ]

    def openai(self) -> Path:
        """Return JSON lines of chats with data URLs, one of them in the plain form."""
        parts = ({"type": "image_url", "image_url": {"url": url(self.files[0])}}, {"type": "image_url"})
        parts[1]["image_url"] = url(self.files[1])
        chats = (user([part, text(word)]) for part, word in zip(parts, self.words, strict=True))
        return write_jsonl(self.folder / "openai.jsonl", [{"prompt": chat} for chat in chats])

    def paths(self) -> Path:
        """Return JSON lines with paths relative to their folder, one of them in a part."""
        for number, file in enumerate(self.files):
            (self.folder / f"{number}.png").write_bytes(file)
        rows = [
            {"prompt": user(self.words[0]), "images": ["0.png"]},
            {"prompt": user([{"type": "image", "image": "1.png"}, text(self.words[1])])},
        ]
        return write_jsonl(self.folder / "paths.jsonl", rows)


def test_equal_rows_of_other_forms_are_equal_batches(tokenizer, tmp_path):
    forms = Forms(tmp_path)
    batches = {}
    for name in ("verl", "trl", "objects", "openai", "paths"):
        found = dataset(getattr(forms, name)(), tokenizer)
        rows = [found[row] for row in range(2)]
        assert all(set(row) & {"image", "images"} == {"images"} for row in rows)
        batches[name] = collate(
            [{key: row[key] for key in ("input_ids", "images")} for row in rows],
            pad_token_id=0,
            max_prompt_length=64,
        ).batch
    assert batches["verl"]["images"].shape == (2, 1)
    for name, batch in batches.items():
        for key in ("input_ids", "attention_mask", "images"):
            assert torch.equal(batch[key], batches["verl"][key]), (name, key)


def test_rows_in_memory_have_pictures_of_several_forms(tokenizer, tmp_path):
    """Bytes and texts, which Arrow would join as bytes, in columns, in records and in parts."""
    path, own = tmp_path / "a.png", picture(30, 31)
    path.write_bytes(content := encoded(own, compress_level=1))
    digest, record = pictures.hold(content), {"bytes": content, "path": None}
    forms = [content, record, {"bytes": None, "path": str(path)}, str(path), path, own, np.asarray(own)]
    for first, second in itertools.permutations(forms, 2):
        for rows in (
            [{"prompt": "red", "images": [first, second]}],
            [{"prompt": "red", "images": [form]} for form in (first, second)],
            [{"prompt": "red", "image": form} for form in (first, second)],
            [{"prompt": user([{"type": "image", "image": form}, text("red")])} for form in (first, second)],
        ):
            assert set(np.ravel(dataset(rows, tokenizer).pictures.columns)) == {digest}, (first, second)


def test_arrays_in_other_columns_stay_numbers(tokenizer):
    own = {"board": np.zeros((2, 2), np.uint8), "vector": np.ones(2)}
    row = dataset([{"prompt": "red", "image": picture(9, 9), **own}, {"prompt": "red"}], tokenizer)[0]
    assert (row["board"], row["vector"]) == ([[0, 0], [0, 0]], [1, 1])


def test_paths_of_plain_prompts(tokenizer, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(picture(30, 30)))
    source = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "red", "image": "a.png"}, {"prompt": "blue"}])
    found = dataset(source, tokenizer)
    assert (found[0]["images"] > 0).tolist() == [True]
    assert found[1]["images"].tolist() == [0]
    content = [{"type": "image"}, text("red")]
    expected = processors_ids(Path(tokenizer.name_or_path), tokenizer, user(content), [picture(30, 30)])
    assert found[0]["input_ids"].tolist() == expected
    own = dataset(source, tokenizer, return_raw_chat=True, return_raw_input_ids=True)[0]
    assert own["raw_prompt"] == user("red")
    assert tokenizer.decode(own["raw_prompt_ids"]) == "red"


def test_a_table_of_texts_names_its_pictures_by_paths_or_not(tokenizer, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(picture(30, 30)))
    (tmp_path / "r.csv").write_text(f"prompt,image\nred,a.png\nred,\nred,file://{tmp_path}/a.png\n")
    first, none, other = dataset(tmp_path / "r.csv", tokenizer).pictures.columns.ravel()
    assert first == other > none == 0


def test_paths_beside_a_file_that_is_named_from_the_working_folder_hold_elsewhere(
    tokenizer, tmp_path, monkeypatch
):
    (tmp_path / "a.png").write_bytes(encoded(picture(30, 31)))
    write_jsonl(tmp_path / "r.jsonl", [{"prompt": "red", "image": "a.png"}])
    monkeypatch.chdir(tmp_path)
    digest = int(dataset("r.jsonl", tokenizer)[0]["images"][0])
    monkeypatch.chdir("/")
    assert pictures.opened(digest).size == (30, 31)


def test_pictures_in_parts_do_not_stay_in_the_rows(tokenizer):
    rows = [{"prompt": user([{"type": "image", "image": picture(30, 30)}, text("red")])}]
    row = dataset(rows, tokenizer, return_raw_input_ids=True)[0]
    assert row["prompt"] == user([{"type": "image"}, text("red")])
    assert tokenizer.decode(row["raw_prompt_ids"]) == "red"
    content = [{"type": "image", "image": {"bytes": encoded(picture(30, 30)), "path": None}}, text("red")]
    for other in ("red", [text("red")]):
        found = dataset([{"prompt": user(content)}, {"prompt": user(other)}], tokenizer)
        assert [bool(found[row]["images"][0]) for row in range(2)] == [True, False]


def test_files_with_and_without_pictures_are_read_together(tokenizer, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(picture(20, 20)))
    sources = [
        write_jsonl(tmp_path / f"{number}.jsonl", [{"prompt": "red", "images": images}])
        for number, images in enumerate((["a.png"], [], None))
    ]
    found = RLHFDataset(sources, tokenizer, max_prompt_length=99, data_source="x")
    assert [bool(found[row]["images"][0]) for row in range(3)] == [True, False, False]


def test_the_column_of_pictures_has_a_name(tokenizer):
    found = dataset([{"prompt": "red", "photo": picture(20, 20)}], tokenizer, image_key="photo")
    assert (found[0]["images"] > 0).all()
    assert "photo" not in found[0]
    with pytest.raises(DataError, match=naming("'photo' (data.image_key)", "['prompt', 'data_source']")):
        dataset([{"prompt": "red"}], tokenizer, image_key="photo")


def test_pictures_in_parts_and_in_the_column_have_their_own_places(tokenizer):
    first, second = picture(30, 30, 1), picture(30, 30, 2)
    parts = [{"type": "image"}, {"type": "image", "image": second}, text("red")]
    found = dataset([{"prompt": user(parts), "images": [first]}], tokenizer)
    digests = [pictures.hold(encoded(image, compress_level=1)) for image in (first, second)]
    assert found[0]["images"].tolist() == digests


DAMAGED = {
    "no picture": (b"not found", "expected a picture"),
    "0 x 0": (b"", "an empty file"),
    "aspect": (encoded(picture(402, 2)), "402 x 2"),
    "animated": (
        encoded(picture(4, 4), "GIF", save_all=True, append_images=[picture(4, 4, 1)]),
        "several frames",
    ),
    "pixels": (encoded(picture(50, 50)), "exceeds limit of 2400 pixels"),
    "truncated": (encoded(picture(40, 40))[:-1000], "the picture is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("form", ["path", "bytes"])
def test_a_damaged_picture_is_named_with_file_row_and_entry(damage, form, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2400)
    content, found = DAMAGED[damage]
    good = encoded(picture(20, 20))
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "bad.png").write_bytes(content)
    values = ["good.png", "bad.png"] if form == "path" else [url(good), url(content)]
    rows = [{"prompt": "red", "images": [], "data_source": "a"}]
    rows += [{"prompt": "red", "images": values, "data_source": "b"}]
    source = write_jsonl(tmp_path / "r.jsonl", rows)
    with pytest.raises(DataError, match=naming("r.jsonl, row 1, field images, picture 1", found)) as error:
        dataset(source, tokenizer)
    assert form == "bytes" or mentions(str(error.value), "bad.png")


def test_a_picture_that_fails_at_first_use_has_the_same_error(tokenizer):
    rows = [{"prompt": "red", "images": [picture(20, 20)]}]
    rows += [{"prompt": "red", "images": [url(encoded(picture(40, 41))[:-1000])]}]
    digest = int(dataset(rows, tokenizer)[1]["images"][0])
    with pytest.raises(DataError, match=naming("rows:rows, row 1, field images, picture 0", "damaged")):
        pictures.opened(digest)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"images": ["https://example.org/a.png"]}, ("https://example.org", "not downloaded")),
        (
            {"images": [url(encoded(picture(40, 40)))[22:]]},
            ("row 0, field images, picture 0", "too long; base64 needs data:image/png;base64, before it"),
        ),
        (
            {"prompt": user([{"type": "image", "source": {"type": "base64", "data": "iVBO"}}])},
            ("row 0", "message 0", "as 'image' or 'image_url', found 'source'"),
        ),
        ({"images": ["none.png"]}, ("none.png", "No such file", "row 0, field images, picture 0")),
        ({"images": ["a\0.png"]}, ("'a\\x00.png' is no path", "row 0, field images, picture 0")),
        ({"images": ["~nobody-of-this-name/a.png"]}, ("is no path", "row 0, field images, picture 0")),
        (
            {"images": [Image.new("I;16", (4, 4), 3000)]},
            ("rows:rows, row 0", "8 bits, found Pillow's mode I;16"),
        ),
        ({"images": [5]}, ("found int 5",)),
        ({"images": ["data:image/png;base64,%%"]}, ("not base64",)),
        ({"images": ["data:image/png,abc"]}, ("expected data:image/...;base64",)),
        (
            {"images": [np.zeros((4, 4, 7), dtype=np.uint8)]},
            ("rows:rows, row 0", "no picture of a prompt", "found [4, 4, 7] of uint8"),
        ),
        ({"images": [np.zeros((4, 4, 3))]}, ("rows:rows, row 0", "found [4, 4, 3] of float64")),
        ({"images": [torch.zeros(4, 4, 3)]}, ("rows:rows", "do not fit together", "tensor")),
        ({"images": [Image.new("RGB", (0, 0))]}, ("rows:rows, row 0", "no picture of a prompt")),
        (
            {"prompt": user([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}])},
            ("row 0, field prompt, picture 0", "http://a/b.png", "not downloaded"),
        ),
        ({"videos": ["a.mp4"]}, ("'videos'", "only text and images")),
        ({"prompt": user([{"type": "video"}])}, ("message 0", "'video'", "row 0")),
        ({"prompt": user([{"type": "image"}])}, ("row 0", "type image", "no row has pictures")),
        (
            {"prompt": user("<image><image>"), "images": [picture(9, 9)]},
            ("2 marks <image>", "1 pictures", "row 0"),
        ),
        (
            {"prompt": [{"role": "system", "content": "red"}], "images": [picture(9, 9)]},
            ("no message of the user",),
        ),
    ],
    ids=lambda value: None if isinstance(value, tuple) else "row",
)
def test_what_cannot_be_used_is_named(row, found, tokenizer):
    rows = [{"prompt": "red", "images": [picture(20, 20)]}, {"prompt": "red"}]
    with pytest.raises(DataError, match=naming(*found)):
        dataset(
            [{**rows[1], **row}, *rows] if "prompt" not in row else [row, {"prompt": user("x")}], tokenizer
        )


def test_two_columns_of_pictures_need_a_choice(tokenizer):
    one, other = picture(20, 20), picture(30, 20)
    rows = [
        {"prompt": "red", "images": [one], "image": None},
        {"prompt": "red", "images": [], "image": other},
    ]
    with pytest.raises(DataError, match=naming("rows:rows", "images and image", "data.image_key")):
        dataset(rows, tokenizer)
    assert [len(row) for row in dataset(rows, tokenizer, image_key="images").pictures.images] == [1, 0]


def test_pictures_and_a_model_of_text_alone(tmp_path):
    tiny_model.save(tmp_path)
    rows = [{"prompt": "red"}, {"prompt": "red", "images": [picture(20, 20)]}]
    with pytest.raises(DataError, match=naming("rows:rows, row 1", str(tmp_path), "of text alone")):
        dataset(rows, load_tokenizer(tmp_path))


def test_a_model_without_the_files_of_its_processor(folder_of, tmp_path):
    for file in folder_of("llava").iterdir():
        if file.name != "processor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="no processor of pictures can be loaded"):
        dataset([{"prompt": "red", "images": [picture(20, 20)]}], load_tokenizer(tmp_path))


def _processor_of(found: dict[str, Any], token: str | None = "<|image_pad|>") -> Any:
    class Kosmos2Processor:
        image_token = token
        tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _: 5)
        image_processor = None

        def __call__(self, **given: Any) -> Any:
            return found

    return Kosmos2Processor()


def test_processors_that_do_not_write_the_tokens_of_a_picture_are_refused_by_name(tokenizer):
    rows = [{"prompt": "red", "images": [picture(20, 20)]}]
    with pytest.raises(ModelError, match="Kosmos2Processor does not write the tokens of a picture"):
        dataset(rows, tokenizer, processor=_processor_of({}))
    with pytest.raises(ModelError, match="Kosmos2Processor has no token for pictures"):
        dataset(rows, tokenizer, processor=_processor_of({}, token=None))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm"])
def test_a_processor_in_the_files_of_older_models(kind, folder_of, tokenizer_of, tmp_path):
    for file in folder_of(kind).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    images = {**settings.pop("image_processor"), "processor_class": settings.pop("processor_class")}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    template = tmp_path / "chat_template.jinja"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    rows = [{"prompt": "red", "images": [picture(100, 60)]}]
    found = [dataset(rows, tokenizer)[0] for tokenizer in (tokenizer_of(kind), load_tokenizer(tmp_path))]
    assert torch.equal(found[0]["input_ids"], found[1]["input_ids"])


def test_a_prompt_with_pictures_is_not_cut(tokenizer):
    rows = [{"prompt": "red", "images": [picture(100, 100)]}, {"prompt": "red", "images": []}]
    with pytest.raises(DataError, match=naming("data.truncation=left", "filter_overlong_prompts")):
        dataset(rows, tokenizer, truncation="left")
    with pytest.raises(DataError, match=naming("row 0", "1 of 2 rows are too long")):
        dataset(rows, tokenizer, max_prompt_length=20)
    assert len(dataset(rows, tokenizer, max_prompt_length=20, filter_overlong_prompts=True)) == 1


def test_pictures_in_answers_are_refused(tokenizer):
    answer = [{"role": "assistant", "content": [{"type": "image", "image": url(encoded(picture(9, 9)))}]}]
    for rows in (
        [{"prompt": "red", "response": answer}],
        [{"prompt": user([{"type": "image"}]), "response": "red"}],
    ):
        with pytest.raises(DataError, match=r"row 0, .*type image, expected text"):
            answered(rows, tokenizer, "response")


def answered(rows: list[dict[str, Any]], tokenizer: Any, *answers: str, **options: Any) -> AnsweredDataset:
    return AnsweredDataset(
        Rows("rows", rows),
        tokenizer,
        prompt_key="prompt",
        answer_keys={name: name for name in answers},
        **{"max_prompt_length": 99, "max_response_length": 9, **options},
    )


def test_prompts_with_answers_are_those_of_reinforcement_learning(tokenizer):
    """Rows as TRL has them for DPO, with parts in all messages; one without a picture."""
    small = picture(56, 84)
    prompts = [user([{"type": "image"}, text("red?")]), user([text("red?")])]
    rows = [
        {
            "prompt": prompt,
            "images": images,
            "chosen": [{"role": "assistant", "content": [text("red")]}],
            "rejected": [*prompt, {"role": "assistant", "content": [text("blue")]}],
        }
        for prompt, images in zip(prompts, ([small], []), strict=True)
    ]
    found, expected = answered(rows, tokenizer, "chosen", "rejected"), dataset(rows, tokenizer)
    for row in range(2):
        for name in ("input_ids", "images"):
            assert torch.equal(found[row][name], expected[row][name])
    assert tokenizer.decode(found[0]["rejected"]) == "blue<|im_end|>"
    assert pictures_digest(found) == pictures_digest(expected)
    assert pictures_digest(answered(rows[1:], tokenizer, "chosen", "rejected")) is None
    batch = pair_batch([found[0], found[1]], pad_token_id=0, max_prompt_length=99, max_response_length=9)
    assert batch.batch["images"].tolist() == [expected[row]["images"].tolist() for row in range(2)]
    for shown in (small, np.asarray(small), [{"role": "assistant", "content": small}]):
        with pytest.raises(DataError, match=naming("rows:rows, row 1, field rejected", "found a picture")):
            answered([rows[0], {**rows[0], "rejected": shown}], tokenizer, "chosen", "rejected")
    with pytest.raises(DataError, match=naming("data.truncation=left", "data.filter_overlong=True")):
        answered(rows, tokenizer, "chosen", "rejected", truncation="left")


def test_a_users_rows_may_be_of_any_form(tokenizer):
    assert max_pictures([(1, 2)]) == max_pictures([]) == max_pictures([{"images": ["a.png"]}]) == 0
    rows = [{"prompt": "red", "images": [picture(9, 9), picture(9, 8)]}]
    assert max_pictures([dataset(rows, tokenizer)[0]]) == 2


def test_a_template_that_writes_no_placeholder(tokenizer_of):
    tokenizer = tokenizer_of("qwen2_5_vl")
    tokenizer.chat_template = picture_models.TEMPLATE.replace("PLACEHOLDER", "")
    with pytest.raises(DataError, match=naming("<|image_pad|>", "0 times for 1 pictures", "chat_template")):
        dataset([{"prompt": "red", "images": [picture(20, 20)]}], tokenizer)


def test_bounds_of_pixels(tokenizer, tokenizer_of):
    rows = [{"prompt": "red", "images": [picture(100, 100)]}]
    lengths = [
        len(dataset(rows, tokenizer, **options)[0]["input_ids"])
        for options in ({"max_pixels": 28 * 28}, {}, {"min_pixels": 112 * 112, "max_pixels": 112 * 112})
    ]
    rest = lengths[0] - 1
    assert lengths == [rest + 1, rest + 16, rest + 16]
    assert (
        len(
            dataset([{"prompt": "red", "images": [picture(30, 30)]}], tokenizer, min_pixels=112 * 112)[0][
                "input_ids"
            ]
        )
        == rest + 16
    )
    for bounds, limit in (({}, "784"), ({"min_pixels": 3136}, "data.min_pixels=3136")):
        with pytest.raises(DataError, match=naming("data.max_pixels=783", limit)):
            dataset(rows, tokenizer, max_pixels=783, **bounds)
    with pytest.raises(
        DataError, match=naming("data.max_pixels", "SmolVLMImageProcessor", "no bound of pixels")
    ):
        dataset(rows, tokenizer_of("smolvlm"), max_pixels=784)


def test_cached_ids_are_those_of_the_pictures_and_their_processing(tokenizer, tmp_path):
    def lengths(size: int, **options: Any) -> list[int]:
        rows = [{"prompt": "red", "images": [picture(size, size)]}]
        return (
            dataset(rows, tokenizer, cache_dir=tmp_path, **options).token_lengths()["prompt"].lengths.tolist()
        )

    first = lengths(60)
    assert lengths(100) != first == lengths(60) != lengths(60, max_pixels=784)
    assert len(list((tmp_path / "tokens").iterdir())) == 3


def test_with_cached_ids_no_picture_is_processed(tokenizer, tmp_path, monkeypatch):
    rows = [{"prompt": "red", "images": [picture(60, 90)]}]
    first = dataset(rows, tokenizer, cache_dir=tmp_path)
    again = dataset(rows, tokenizer, cache_dir=tmp_path)
    again.pictures.processor = None
    digest = again[0]["images"].tolist()[0]
    assert again.pictures.tokens(digest) == first.pictures.tokens(digest) == 6  # 28 x 28 pixels each
    assert again.pictures.pixels(digest) == 56 * 84 * 3 * 2  # two frames of Qwen-VL
    lengths = again.token_lengths()["prompt"]
    assert (lengths.of_pictures.tolist(), len(again[0]["input_ids"]) > 6) == ([6], True)


def test_a_resume_on_other_pictures_is_an_error(tokenizer, tmp_path):
    def digest(seed: int, **options: Any) -> str | None:
        return pictures_digest(
            dataset([{"prompt": "red", "images": [picture(30, 30, seed)]}], tokenizer, **options)
        )

    first = digest(1)
    assert first == digest(1)
    assert first != digest(2)
    assert first != digest(1, max_pixels=784)
    assert first.startswith("Qwen2VLImageProcessor")
    assert pictures_digest(dataset([{"prompt": "red"}], tokenizer)) is None
    state = EpochSampler(4, 2, 0, pictures=first).state_dict()
    EpochSampler(4, 2, 0, pictures=digest(1)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="pictures: Qwen2VLImageProcessor"):
        EpochSampler(4, 2, 0, pictures=digest(2)).load_state_dict(state)
    assert "pictures" not in EpochSampler(4, 2, 0).state_dict()


def test_loaders_of_a_configuration_have_the_pictures(folder_of, tokenizer):
    rows = [{"prompt": "red", "images": [picture(30, 30)], "answer": "a"}] * 4
    keys = [f"actor_rollout_ref.model.path={folder_of('qwen2_5_vl')}", "data.train_files=[rows:train]"]
    keys += ["data.train_batch_size=2", "data.answer_key=answer", "data.data_source=x", "data.max_images=2"]
    train, _ = build_loaders(load_config(keys), tokenizer, None, None, rows=[Rows("train", rows)])
    assert next(iter(train)).batch["images"].shape == (2, 2)
    assert train.batches.state_dict()["pictures"] == pictures_digest(train.dataset)


def test_rows_in_memory_have_a_digest(tokenizer):
    first, second = ([{"prompt": "red", "images": [picture(9, 9, seed)]}] for seed in (1, 2))
    assert fingerprint(Rows("a", first)) == fingerprint(Rows("b", first)) != fingerprint(Rows("a", second))


TEXTS_IN_PARTS_ALONE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def test_texts_reach_a_template_that_reads_parts_alone(tokenizer_of):
    tokenizer = tokenizer_of("smolvlm")
    tokenizer.chat_template = TEXTS_IN_PARTS_ALONE
    found = dataset([{"prompt": "red"}], tokenizer)
    assert tokenizer.decode(found[0]["input_ids"]) == "user:red"


def test_parts_of_text_are_joined_for_a_model_of_text(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = [{"prompt": user([text("red "), text("blue")])}, {"prompt": user("red")}]
    found = dataset(rows, tokenizer, return_raw_chat=True)
    assert found[0]["raw_prompt"] == user("red blue")
    assert [tokenizer.decode(found[row]["input_ids"]) for row in range(2)] == ["red blue", "red"]


def test_a_begin_token_that_the_template_does_not_write_is_added_as_by_the_processor(folder_of, tokenizer_of):
    from tokenizers.processors import TemplateProcessing

    tokenizer: PreTrainedTokenizerFast = tokenizer_of("llava")
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.bos_token_id)]
    )
    chat = user([{"type": "image"}, text("red")])
    ids = dataset([{"prompt": chat, "images": [picture(30, 30)]}], tokenizer)[0]["input_ids"].tolist()
    assert ids == processors_ids(folder_of("llava"), tokenizer, chat, [picture(30, 30)])
    assert ids[0] == tokenizer.bos_token_id


def test_rows_from_elsewhere_name_no_files_outside_of_their_folder(tokenizer, tmp_path, monkeypatch):
    from strop.data import prompt_table

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(encoded(picture(20, 20)))
    (tmp_path / "b.png").write_bytes(encoded(picture(20, 20)))
    monkeypatch.setattr(prompt_table, "folder_of", lambda *_: (tmp_path / "in", True))
    dataset([{"prompt": "red", "images": ["a.png"]}], tokenizer)
    for name in ("../b.png", str(tmp_path / "b.png")):
        with pytest.raises(DataError, match=naming(name, "may only name files in")):
            dataset([{"prompt": "red", "images": [name]}], tokenizer)


@pytest.mark.parametrize(
    ("value", "options"),
    [([], {}), (None, {}), ("a word", {"image_key": "pictures"}), ("a.png", {"image_key": None})],
    ids=["empty", "null", "of the user", "ignored"],
)
def test_rows_of_text_may_have_a_column_of_that_name(tokenizer, value, options):
    rows = [{"prompt": user("red"), "images": value, "pictures": None} for _ in range(2)]
    found = dataset(rows, tokenizer, **options)
    batch = collate([found[0], found[1]], pad_token_id=0, max_prompt_length=2000)
    assert "images" not in batch.batch
    assert batch.non_tensor_batch["images"].tolist() == [value, value]


def test_rows_of_text_do_not_import_pillow(tmp_path):
    source = write_jsonl(tmp_path / "r.jsonl", [{"prompt": user("red"), "data_source": "x"}])
    code = (
        "import sys; from strop.data.prompt_table import read_prompt_table\n"
        "from strop.data.sources import Rows, read_table\n"
        f"table = read_prompt_table({str(source)!r}, image_key='auto')\n"
        "read_table(Rows('a', table.table.to_pylist())); print('PIL' in sys.modules, table.images)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False None\n"


@pytest.mark.slow
def test_a_data_set_of_many_pictures_is_read_from_their_headers(tokenizer, tmp_path):
    draw = np.random.default_rng(0)
    files = [encoded(picture(*draw.integers(200, 800, 2), seed), "JPEG", quality=50) for seed in range(40)]
    for number in range(4000):
        # a comment behind the end makes the files differ
        (tmp_path / f"{number}.jpg").write_bytes(files[number % 40] + str(number).encode())
    rows = [{"prompt": "<image>red", "images": [f"{number}.jpg"]} for number in range(4000)]
    source, begin = write_jsonl(tmp_path / "r.jsonl", rows), time.process_time()
    found = dataset(source, tokenizer)
    assert time.process_time() - begin < 20
    assert len({int(found[row]["images"][0]) for row in range(4000)}) == 4000

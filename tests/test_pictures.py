"""The registry of pictures of a process."""

from __future__ import annotations

import base64
import io
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from strop import pictures
from strop.errors import DataError


def file_of(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_a_picture_is_held_by_a_digest_of_its_file():
    encoded = file_of(noise(5, 3))
    digest = pictures.hold(encoded)
    assert 0 < digest < 2**63
    assert pictures.hold(encoded) == digest != pictures.hold(file_of(noise(5, 3, seed=1)))
    assert (pictures.held(digest), pictures.size(digest)) == (encoded, (5, 3))
    assert pictures.opened(digest).tobytes() == noise(5, 3).tobytes()


def test_a_path_is_read_at_every_use_and_may_not_change(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(file_of(noise(5, 4)))
    digest = pictures.hold_file(path)
    (found,) = pictures.files([digest, 0]).values()
    assert (found.digest, found.file, found.where, found.size) == (digest, path, str(path), (5, 4))
    assert pictures.held(digest) == path.read_bytes()
    path.write_bytes(file_of(noise(5, 4, seed=1)))
    with pytest.raises(DataError, match=r"a\.png has changed"):
        pictures.held(digest)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read any more"):
        pictures.opened(digest)


def test_pictures_of_another_process_live_with_their_object_and_own_ones_stay():
    encoded = file_of(noise(6, 6, seed=2))
    mine = pictures.alive(encoded, "a tool")
    sent, digest = pickle.dumps(mine), mine.digest
    again = pickle.loads(sent)
    assert again is mine is pictures.alive(encoded, "another tool")
    del mine, again
    with pytest.raises(DataError, match=rf"digest {digest}, and this process holds no such.*hold_pictures"):
        pictures.size(digest)
    theirs = pickle.loads(sent)
    assert (pictures.size(theirs.digest), pictures.held(digest)) == ((6, 6), encoded)
    assert pictures.url(digest) == f"data:image/png;base64,{base64.b64encode(encoded).decode()}"
    assert pictures.hold(encoded) == digest
    del theirs
    assert pictures.size(digest) == (6, 6)


def test_a_picture_that_lives_was_decoded():
    with pytest.raises(DataError, match="the tool look: the picture is damaged"):
        pictures.alive(file_of(noise(40, 40))[:900], "the tool look")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP"])
def test_the_orientation_of_cameras_is_applied(orientation: int, kind: str):
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = file_of(noise(40, 24), kind, exif=exif)
    digest = pictures.hold(encoded)
    expected = load_image(Image.open(io.BytesIO(encoded)))
    assert pictures.size(digest) == expected.size == ((24, 40) if orientation > 4 else (40, 24))
    assert pictures.opened(digest).tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_a_picture_of_any_mode_is_opened_in_rgb(mode: str):
    encoded = file_of(noise(4, 4).convert(mode), "TIFF" if mode == "CMYK" else "PNG")
    assert pictures.opened(pictures.hold(encoded)).mode == "RGB"


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("P", "GIF")])
def test_what_is_transparent_is_white(mode: str, kind: str):
    drawing = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    drawing.putpixel((1, 2), (0, 0, 0, 255))
    encoded = file_of(drawing if mode == "P" else drawing.convert(mode), kind)
    expected = np.full((4, 4, 3), 255)
    expected[2, 1] = 0
    np.testing.assert_array_equal(pictures.opened(pictures.hold(encoded)), expected)


@pytest.mark.parametrize(("values", "kind"), [(np.uint16, "PNG"), (np.float32, "TIFF")])
def test_values_of_more_than_8_bits_are_refused_that_would_be_cut(values: type, kind: str):
    encoded = file_of(Image.fromarray(np.full((4, 4), 3000, values)), kind)
    with pytest.raises(DataError, match=r"^a scan: .*expected values of 8 bits, found Pillow's mode (I|F)"):
        pictures.hold(encoded, "a scan")


def test_a_photograph_with_a_preview_is_one_picture():
    encoded = file_of(noise(8, 8), "MPO", save_all=True, append_images=[noise(4, 4)])
    assert pictures.size(pictures.hold(encoded)) == (8, 8)


def empty_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("encoded", "found"),
    [
        (b"", "an empty file"),
        (b"<html>not found</html>", "22 bytes that begin with b'<html>not fo'"),
        (empty_png(), "expected a picture"),
        (file_of(noise(402, 2)), "402 x 2 pixels"),
        (
            file_of(noise(4, 4), "GIF", save_all=True, append_images=[noise(4, 4, seed=1)]),
            "GIF has several frames",
        ),
    ],
    ids=["empty", "no picture", "0 x 0", "aspect", "animated"],
)
def test_what_cannot_be_a_picture_of_a_prompt_is_named_with_its_place(encoded: bytes, found: str):
    with pytest.raises(DataError, match=found) as error:
        pictures.hold(encoded, "rows.jsonl, row 3, field images, entry 1")
    assert str(error.value).startswith("rows.jsonl, row 3, field images, entry 1: ")


def test_a_picture_with_more_pixels_than_pillow_takes_for_safe(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 99)
    with pytest.raises(DataError, match=r"^here: .*100 pixels\) exceeds limit"):
        pictures.hold(file_of(noise(10, 10, seed=3)), "here")


def test_a_truncated_picture_is_found_where_it_is_decoded():
    digest = pictures.hold(file_of(noise(64, 64))[:-2000], "a.png")
    with pytest.raises(DataError, match=r"^a\.png: the picture is damaged: .*truncated"):
        pictures.opened(digest)

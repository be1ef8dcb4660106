"""Pictures of this process by digest, as they are in their files (PNG, JPEG, ...).

A batch has the column ``images`` [B, I] int64: the digests of a prompt's pictures in the order of their
placeholders, 0 behind the last. So rows are selected, repeated, sent and compared like any others, and a
picture is held once in a process, however many samples have it.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from strop.errors import DataError

_LARGEST_ASPECT = 200  # processors of Qwen-VL refuse more
_THUMBNAIL = 256  # pixels


class Picture(NamedTuple):
    """A picture as a process holds it."""

    file: bytes | Path
    """Content of the file, or its path, which is read at every use."""
    where: str
    """Place in the user's data, for errors."""
    size: tuple[int, int]
    """Width and height in pixels, after the orientation of cameras."""


_own: dict[int, Picture] = {}
_added: dict[int, Picture] = {}


def hold(encoded: bytes, where: str = "a picture") -> int:
    """Keep the content of a file for the life of the process; return its digest, 1 to 2^63 - 1.

    Only the header is decoded. Raises :class:`DataError` with ``where`` for what is no picture, or one that
    no model is given: animated, far longer than wide, or with more pixels than Pillow takes for safe.
    """
    return _keep(encoded, encoded, where)


def hold_file(path: Path, where: str = "") -> int:
    """Keep a path as ``hold`` keeps a content. Raises ``OSError`` if it cannot be read."""
    return _keep(path, path.read_bytes(), where or str(path))


def _keep(file: bytes | Path, encoded: bytes, where: str) -> int:
    digest = _digest(encoded)
    if digest not in _own:
        _own[digest] = Picture(file, where, _size(encoded, where))
    return digest


def held(digest: int) -> bytes:
    """Return the content of a picture's file. Raises :class:`DataError` for a file that has changed."""
    file, where, _ = _picture(digest)
    if isinstance(file, bytes):
        return file
    try:
        encoded = file.read_bytes()
    except OSError as error:
        raise DataError(f"{where}: the picture cannot be read any more: {error}") from error
    if _digest(encoded) != digest:
        raise DataError(f"{where}: the picture {file} has changed since the run began; restore it")
    return encoded


def size(digest: int) -> tuple[int, int]:
    """Return width and height of a picture as ``opened`` returns it."""
    return _picture(digest).size


def name(digest: int) -> str:
    """Return the digest in hexadecimal, as files name a picture."""
    return f"{digest:016x}"


def in_words(digest: int) -> str:
    """Return file name and size, as ``a.png, 640 x 480``; the size alone for a picture without a file."""
    file, _, (width, height) = _picture(digest)
    return f"{f'{file.name}, ' if isinstance(file, Path) else ''}{width} x {height}"


def thumbnail(digest: int) -> bytes:
    """Return a small copy as the content of a JPEG file; raise as ``opened`` does."""
    picture, file = opened(digest), io.BytesIO()
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    picture.save(file, "JPEG")
    return file.getvalue()


def opened(digest: int) -> Any:
    """Return a picture as a ``PIL.Image`` in RGB; the orientation of cameras is applied.

    Raises :class:`DataError` for a picture that cannot be decoded.
    """
    return _decoded(held(digest), _picture(digest).where)


def _decoded(encoded: bytes, where: str) -> Any:
    from PIL import Image, ImageOps

    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    except Exception as error:  # decoders raise many kinds
        raise DataError(f"{where}: the picture is damaged: {error}") from error


class Sent:
    """Pictures by digest that unpickle as a list of what ``opened`` returns, in a process that holds none."""

    def __init__(self, digests: Iterable[int]) -> None:
        self._digests = [digest for digest in digests if digest]

    def __reduce__(self) -> tuple[Any, ...]:
        files = [(held(digest), _picture(digest).where) for digest in self._digests]
        return _all_decoded, (files,)


def _all_decoded(files: list[tuple[bytes, str]]) -> list[Any]:
    return [_decoded(encoded, where) for encoded, where in files]


def files(digests: Iterable[int]) -> dict[int, Picture]:
    """Return what ``add`` takes in another process."""
    return {digest: _picture(digest) for digest in digests if digest}


def add(pictures: Mapping[int, Picture]) -> None:
    """Keep pictures of another process until ``forget``."""
    _added.update(pictures)


def forget(digests: Iterable[int]) -> None:
    """Drop pictures that ``add`` brought; those that this process read itself stay."""
    for digest in digests:
        _added.pop(digest, None)


def _picture(digest: int) -> Picture:
    found = _own.get(digest) or _added.get(digest)
    if found is None:
        raise DataError(
            f"the column images has the digest {digest}, and this process holds no such picture. The trainer "
            "sends those of its data sets (strop.pictures.hold) to its own groups; for another group call "
            "group.hold_pictures(strop.pictures.files(digests))"
        )
    return found


def _digest(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") >> 1 or 1


def _size(encoded: bytes, where: str) -> tuple[int, int]:
    from PIL import ExifTags, Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(encoded))
            # a photograph with a preview (MPO) has two frames
            is_animated = picture.format != "MPO" and getattr(picture, "is_animated", False)
    except UnidentifiedImageError as error:
        found = f"{len(encoded):,} bytes that begin with {encoded[:12]!r}" if encoded else "an empty file"
        raise DataError(f"{where}: expected a picture (PNG, JPEG, WebP, ...), found {found}") from error
    except Exception as error:  # decoders raise many kinds
        raise DataError(f"{where}: the picture cannot be used: {error}") from error
    if is_animated:
        raise DataError(f"{where}: the {picture.format} has several frames, expected one; save the one meant")
    short, long = sorted(picture.size)
    if long > _LARGEST_ASPECT * short:
        raise DataError(
            f"{where}: the picture has {picture.width} x {picture.height} pixels, expected a longer side of "
            f"at most {_LARGEST_ASPECT} times the shorter; cut it"
        )
    # the method of the base class: that of PNG decodes all for what may stand behind the pixels
    is_turned = Image.Image.getexif(picture).get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return picture.size[::-1] if is_turned else picture.size

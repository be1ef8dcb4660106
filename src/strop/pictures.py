"""Pictures of this process by digest, as they are in their files (PNG, JPEG, ...).

A batch has the column ``images`` [B, I] int64: the digests of a prompt's pictures in the order of their
placeholders, 0 behind the last. Where pictures may come in turns, ``images_at`` [B, T] int64 has the digest
of each at its first token, and -1 at its others. So rows are selected, repeated, sent and compared like any
others, and a picture is held once in a process, however many samples have it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from strop.errors import DataError

_LARGEST_ASPECT = 200  # processors of Qwen-VL refuse more
_THUMBNAIL = 256  # pixels


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Picture:
    """A picture as a process holds it. One that is unpickled can be named by its digest while it lives."""

    digest: int
    file: bytes | Path
    """Content of the file, or its path, which is read at every use."""
    where: str
    """Place in the user's data, for errors."""
    size: tuple[int, int]
    """Width and height in pixels, after the orientation of cameras."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _alive, (self.digest, self.file, self.where, self.size)


_own: dict[int, Picture] = {}
_living: WeakValueDictionary[int, Picture] = WeakValueDictionary()


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
        _own[digest] = Picture(digest, file, where, _size(encoded, where))
    return digest


def alive(encoded: bytes, where: str) -> Picture:
    """Return a picture that can be named by its digest while the object lives.

    Raises :class:`DataError` as ``hold`` and ``opened`` do.
    """
    digest = _digest(encoded)
    if (found := _find(digest)) is None:
        found = _alive(digest, encoded, where, _size(encoded, where))
        _decoded(encoded, where)
    return found


def _alive(digest: int, file: bytes | Path, where: str, size: tuple[int, int]) -> Picture:
    return _find(digest) or _living.setdefault(digest, Picture(digest, file, where, size))


def held(digest: int) -> bytes:
    """Return the content of a picture's file. Raises :class:`DataError` for a file that has changed."""
    found = _picture(digest)
    file, where = found.file, found.where
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
    found = _picture(digest)
    name = f"{found.file.name}, " if isinstance(found.file, Path) else ""
    return f"{name}{found.size[0]} x {found.size[1]}"


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
    from PIL import Image

    try:
        return rgb(Image.open(io.BytesIO(encoded)))
    except Exception as error:  # decoders raise many kinds
        raise DataError(f"{where}: the picture is damaged: {error}") from error


def rgb(picture: Any) -> Any:
    """Return a ``PIL.Image`` in RGB, turned as its camera says, and on white where it is transparent.

    So do qwen_vl_utils and vLLM; without the white, a drawing on nothing is black on black. Raises
    ``ValueError`` for values of more than 8 bits, which Pillow cuts to white.
    """
    from PIL import Image, ImageOps

    _require_8_bits(picture)
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def _require_8_bits(picture: Any) -> None:
    if picture.mode[0] in "IF":
        raise ValueError(
            f"expected values of 8 bits, found Pillow's mode {picture.mode}; scale and save it so"
        )


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
    """Return pictures by digest, which may be sent to another process."""
    return {digest: _picture(digest) for digest in digests if digest > 0}


def with_contents(files: Mapping[int, Picture]) -> dict[int, Picture]:
    """Return pictures with the content of their files, for processes that do not see these."""
    return {digest: replace(picture, file=held(digest)) for digest, picture in files.items()}


def url(digest: int) -> str:
    """Return a picture's file as a data URL."""
    from PIL import Image

    encoded = held(digest)
    kind = Image.open(io.BytesIO(encoded)).get_format_mimetype() or "image/png"
    return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"


def _find(digest: int) -> Picture | None:
    return _own.get(digest) or _living.get(digest)


def _picture(digest: int) -> Picture:
    if (found := _find(digest)) is None:
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
            _require_8_bits(picture)
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

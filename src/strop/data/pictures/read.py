"""Pictures of the rows of one source, in any form that users have, as digests of files that are held."""

from __future__ import annotations

import base64
import binascii
import functools
import io
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from strop import pictures
from strop.data.pictures.parts import is_place, named, parts_problem, picture_in, places
from strop.errors import DataError, raised_as
from strop.pictures import Picture

COLUMNS = ("images", "image")
"""Columns of pictures where ``data.image_key`` is ``auto``: the one that has values."""
_OTHER_MEDIA = ("video", "videos", "audio", "audios")


def refuse_media(name: str, table: pa.Table) -> None:
    """Raise :class:`DataError` for columns of video and of sound."""
    for column in _OTHER_MEDIA:
        if column in table.column_names and has_values(table.column(column)):
            raise DataError(
                f"{name}: the column {column!r} has values, but only text and images are supported; use "
                "another data set, or rename the column if it is something else"
            )


def has_values(values: pa.ChunkedArray) -> bool:
    """Return True if a column, or one of its lists, has a value."""
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    # by chunk: together, pictures may be more bytes than 32-bit offsets reach
    parts = [chunk.flatten() for chunk in values.chunks] if is_list else values.chunks
    return any(part.null_count < len(part) for part in parts)


class Reader:
    """Pictures of one source in the columns ``key`` and ``prompt_key``; ``folder``: see ``folder_of``."""

    def __init__(self, name: str, folder: Callable[[], tuple[Path, bool]], prompt_key: str, key: str) -> None:
        self._name, self._prompt_key, self._key = name, prompt_key, key
        self._folder = functools.cache(folder)

    def row(self, row: int, value: Any, messages: Any) -> tuple[list[int], Any]:
        """Return the digests of a row's pictures in the order of their places, and its messages without them.

        ``value`` is that of the column ``key``; messages that hold no picture are returned as they are.
        """
        # a CSV file has an empty text for nothing
        entries = value if isinstance(value, list) else [] if value in (None, "") else [value]
        found = [self._hold(entry, row, self._key, number) for number, entry in enumerate(entries)]
        held = [picture_in(part) for part in places(messages)] if isinstance(messages, list) else []
        if not any(held):
            return found, messages
        column, digests = iter(found), []
        for number, picture in enumerate(held):
            own = (
                next(column, None) if picture is None else self._hold(picture, row, self._prompt_key, number)
            )
            digests += [] if own is None else [own]
        return [*digests, *column], [_without_pictures(message) for message in messages]

    def _hold(self, value: Any, row: int, key: str, entry: int) -> int:
        where = f"{self._name}, row {row}, field {key}, picture {entry}"
        value = _content(value) if _is_record(value) else value
        if isinstance(value, bytes):
            return pictures.hold(value, where)
        if not isinstance(value, str):
            raise DataError(
                f"{where}: expected a path, a data URL, bytes, {{bytes, path}}, or in memory a PIL image or "
                f"an array [height, width, 3] of uint8, found {type(value).__name__} {value!r:.60}"
            )
        if value.startswith("data:"):
            return pictures.hold(_decoded(value, where), where)
        value = value.removeprefix("file://")
        if "://" in value:
            raise DataError(
                f"{where}: {value:.80}: pictures are not downloaded in a run; download them, and name files"
            )
        return self._hold_path(value, where)

    def _hold_path(self, value: str, where: str) -> int:
        folder, is_closed = self._folder()
        with raised_as(DataError, f"{where}: {value!r:.80} is no path"):  # a null byte, the home of nobody
            path = (folder / Path(value).expanduser()).absolute()  # workers have other working directories
            is_inside = path.resolve().is_relative_to(folder.resolve())
        if is_closed and not is_inside:
            raise DataError(f"{where}: {value}: rows from elsewhere may only name files in {folder}")
        try:
            return pictures.hold_file(path, f"{where}, {value}")
        except OSError as error:
            reason = error.strerror or error
            if len(value) > 200:
                reason = f"{reason}; base64 needs data:image/png;base64, before it"
            raise DataError(f"{where}: the file {path!s:.200} cannot be read: {reason}") from error


def _is_record(value: Any) -> bool:
    """Return True for {bytes, path}."""
    return isinstance(value, Mapping) and "type" not in value and not {"bytes", "path"}.isdisjoint(value)


def _content(record: Mapping[str, Any]) -> Any:
    return record.get("path") if record.get("bytes") is None else record["bytes"]


def _decoded(url: str, where: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise DataError(f"{where}: expected data:image/...;base64,..., found {head:.60}")
    try:
        return base64.b64decode("".join(data.split()), validate=True)  # some encoders break lines
    except binascii.Error as error:
        raise DataError(f"{where}: the data URL is not base64: {error}") from error


def sendable(parts: Sequence[Any]) -> list[Any]:
    """Return the parts of an answer with each picture, such as bytes or a path, as a data URL."""
    found = []
    for part in parts:
        picture = picture_in(part) if is_place(part) else part if hasattr(part, "getexif") else None
        if isinstance(picture, Path) or (isinstance(picture, str) and ":" not in picture[:8]):
            picture = Path(picture).expanduser().read_bytes()
        found.append(part if picture is None else _as_urls({"type": "image", "image": picture}))
    return found


def alive_parts(content: Sequence[Any], where: str) -> tuple[str | list[dict[str, Any]], list[Picture]]:
    """Return the content of a message in a turn, its pictures named by digest, and the pictures.

    Texts alone are one text. Raises :class:`DataError` for what is no part, or has no data URL of a picture.
    """
    if problem := parts_problem(content):
        raise DataError(f"{where}: {problem}")
    parts, found = [], []
    for part in content:
        if is_place(part):
            url = picture_in(part)
            if not isinstance(url, str) or not url.startswith("data:"):
                raise DataError(
                    f"{where}: expected the picture as a data URL (data:image/png;base64,...), found "
                    f"{url!r:.60}; pictures are not downloaded in a run"
                )
            found.append(pictures.alive(_decoded(url, where), where))
            parts.append(named(found[-1].digest))
        else:  # no tokenizer takes lone surrogates
            parts.append({"type": "text", "text": part["text"].encode(errors="replace").decode()})
    return (parts, found) if found else ("".join(part["text"] for part in parts), [])


def _without_pictures(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or parts_problem(content):
        return message
    return {**message, "content": [{"type": "image"} if is_place(part) else part for part in content]}


def storable(row: Any, where: str, texts: Collection[str] = ()) -> Any:
    """Return a row with pictures that are objects (of PIL, or arrays of uint8) as data URLs.

    So are bytes in ``COLUMNS`` and in parts of messages, where values of several types become text. Paths are
    texts, and other arrays lists. Other rows are returned as they are. Raises :class:`DataError` for those in
    place of a text in the columns ``texts``.
    """
    if not isinstance(row, Mapping):
        return row
    for key in texts:
        chat = row.get(key)
        messages = [one for one in chat if isinstance(one, Mapping)] if isinstance(chat, list) else []
        contents = [chat, *(message.get("content") for message in messages)]
        if any(_is_image(one) or (isinstance(one, np.ndarray) and one.ndim > 1) for one in contents):
            raise DataError(
                f"{where}, field {key}: expected a text or messages, found a picture; those of a prompt are "
                "in the column images, or in parts {type: image, image: ...} of its messages"
            )
    with raised_as(DataError, f"{where}: an image or array is no picture of a prompt"):
        made = {key: _as_urls(value, key in COLUMNS) for key, value in row.items()}
        return made if any(made[key] is not value for key, value in row.items()) else row


def _is_image(value: Any) -> bool:
    return "PIL.Image" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image)


def _as_urls(value: Any, in_part: bool = False) -> Any:
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        if in_part and _is_record(value):
            return _as_urls(_content(value), in_part)
        in_part = in_part or is_place(value)
        made = {key: _as_urls(item, in_part) for key, item in value.items()}
        return made if any(made[key] is not item for key, item in value.items()) else value
    if isinstance(value, list | tuple):
        items = [_as_urls(item, in_part) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.ndarray):
        colours = ((3,), (4,), ()) if in_part else ((3,), (4,))
        is_picture = value.dtype == np.uint8 and value.shape[2:] in colours
        if value.ndim == 1 or not (is_picture or in_part):
            return _as_urls(value.tolist(), in_part)
        if not is_picture:
            found = f"{list(value.shape)} of {value.dtype}"
            raise ValueError(f"expected an array [height, width, 3] of uint8, found {found}")
        from PIL import Image

        return _url(_encoded(Image.fromarray(value)))
    if _is_image(value):
        return _url(_encoded(value))
    return _url(value) if in_part and isinstance(value, bytes) else value


def _url(encoded: bytes) -> str:
    return f"data:image;base64,{base64.b64encode(encoded).decode()}"


def _encoded(picture: Any) -> bytes:
    file = io.BytesIO()
    pictures.rgb(picture).save(file, "PNG", compress_level=1)
    return file.getvalue()

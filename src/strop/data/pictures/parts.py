"""Contents of messages as lists of parts: texts, and places of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from strop.data.control_tokens import PromptError
from strop.pictures import name

MARK = "<image>"
"""Place of a picture in a text, as in files of verl."""
PLACE = {"type": "image"}
_KINDS = ("image", "image_url")
_OTHER_KEYS = ("source", "base64")
"""Where parts of Anthropic's API and of transformers hold the content of a picture."""


class Expansion(NamedTuple):
    """Texts that the placeholders of a rendered prompt become."""

    placeholder: str
    texts: tuple[str, ...]
    """Text of each picture, in order."""

    def expanded(self, text: str) -> str:
        """Return a rendered prompt with the pictures' texts; ``PromptError`` for too many or few."""
        first, *others = text.split(self.placeholder)
        if len(others) != len(self.texts):
            raise PromptError(
                0,
                f"the chat template writes {self.placeholder!r} {len(others)} times for {len(self.texts)} "
                "pictures; use one that takes parts of the type image (data.chat_template)",
            )
        return first + "".join(map("".join, zip(self.texts, others, strict=True)))


class Shown(NamedTuple):
    """Token ids that a chat template wrote."""

    ids: list[int]
    images_at: tuple[int, ...] = ()
    """The column of this name, of ``strop.pictures``; empty without pictures."""


def joined(*shown: Shown) -> Shown:
    """Return ids and pictures one after another."""
    ids = [token for one in shown for token in one.ids]
    if not any(one.images_at for one in shown):
        return Shown(ids)
    return Shown(ids, tuple(at for one in shown for at in one.images_at or [0] * len(one.ids)))


def is_place(part: Any) -> bool:
    """Return True for a part that stands for a picture."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def picture_in(part: Mapping[str, Any]) -> Any:
    """Return the picture that a part holds: a path, a data URL, bytes or a record; None if it holds none."""
    found = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key)), None)
    return found["url"] if isinstance(found, Mapping) and "url" in found else found


def parts_problem(content: Sequence[Any]) -> str | None:
    """Return the reason why a list is no content of a message, or None if it is one."""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if is_place(part):
            other = next((key for key in _OTHER_KEYS if part.get(key)), None)
            if other and picture_in(part) is None:
                return f"expected the picture of a part as 'image' or 'image_url', found {other!r}"
        elif not (kind == "text" and isinstance(part.get("text"), str)):
            found = f"of type {kind!r}" if kind else f"{part!r:.60}"
            return f"expected parts of text and images, found one {found}"
    return None


def is_of_texts(content: Any) -> bool:
    """Return True for a list of parts that are all texts."""
    return isinstance(content, list) and not parts_problem(content) and not any(map(is_place, content))


def places(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of messages that stand for pictures."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield from filter(is_place, content)


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content; raise ``PromptError`` if it has a picture."""
    if isinstance(content, str):
        return content
    if any(map(is_place, content)):
        raise PromptError(
            0, "found a part of the type image, expected text: no row has pictures, or none is supported here"
        )
    return "".join(part["text"] for part in content)


def as_parts(content: str | list[Any]) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def with_places(messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return messages in parts, with a place for each of ``count`` pictures.

    Pictures have the places of parts; without parts those of marks; without marks they are before the first
    text of the user. Raises ``PromptError`` for another number of places.
    """
    chat = [{**message, "content": as_parts(message["content"])} for message in messages]
    found, kind = sum(1 for _ in places(chat)), "places for pictures"
    if not found and count:
        texts = [part["text"] for message in chat for part in message["content"]]
        found, kind = sum(text.count(MARK) for text in texts), f"marks {MARK}"
        if found == count:
            for message in chat:
                message["content"] = [piece for part in message["content"] for piece in _split(part["text"])]
        elif not found:
            users = [message for message in chat if message["role"] == "user"]
            if not users:
                raise PromptError(0, "no message of the user, in which the row's pictures would stand")
            users[0]["content"] = [PLACE] * count + users[0]["content"]
            found = count
    if found != count:
        raise PromptError(0, f"the messages have {found} {kind}, and the row has {count} pictures")
    return [{**message, "content": [_bare(part) for part in message["content"]]} for message in chat]


def in_words(messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return messages of text, with ``[picture]`` in the place of each of ``count`` pictures."""
    chat = with_places(messages, count) if count else [dict(message) for message in messages]
    for message in chat:
        if isinstance(message["content"], list):
            message["content"] = "".join(part.get("text", "[picture]") for part in message["content"])
    return chat


def with_pictures(
    messages: Sequence[Mapping[str, Any]], pictures: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages as ``with_places`` does, with these parts in the places."""
    left = iter(pictures)
    chat = with_places(messages, len(pictures))
    for message in chat:
        message["content"] = [next(left) if is_place(part) else part for part in message["content"]]
    return chat


def named(digest: int) -> dict[str, str]:
    """Return the part with a picture that is held."""
    return {"type": "image", "image": name(digest)}


def digests_in(messages: Sequence[Any]) -> list[int]:
    """Return the digests of the pictures of messages whose parts ``named`` made."""
    return [int(part["image"], 16) for part in places(messages)]


def digests_of(images_at: Sequence[int]) -> list[int]:
    """Return the digests of the pictures that a column names, in their order."""
    return [digest for digest in images_at if digest > 0]


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return PLACE if is_place(part) else {"type": "text", "text": part["text"]}


def _split(text: str) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(text.split(MARK)):
        if number:
            yield PLACE
        if piece:
            yield {"type": "text", "text": piece}

"""Users' text without control tokens.

Tokenizers turn ``<|im_end|>`` into the control token wherever it stands, so that a user's text could end its
own turn and begin another one. Here every text of a message or an answer is text; only the chat template, and
what the tokenizer itself adds, has control tokens.

A control token in a text is broken by a noncharacter before the template is rendered. The tokenizer's own
search for control tokens then passes it over, and the noncharacter is removed by the normalizer, before the
text is cut into tokens. A text without control tokens never comes here: its ids are the tokenizer's own.
"""

from __future__ import annotations

import copy
import json
import re
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

_BREAK = "\ufdd0"
_MARKER = re.compile(r"<[|｜].+[|｜]>")
"""Form of control tokens; tokenizers declare only some of them special (``<｜User｜>`` of DeepSeek)."""


class PromptError(Exception):
    """Prompt number ``offset`` of a chunk is unusable because of ``reason``. Can be pickled."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and added tokens that look like ``<|name|>``.

    Other added tokens, such as ``<think>`` and ``<tool_call>`` where they are not special, are text.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = set(tokenizer.all_special_tokens)
        # weak: this object is a value of _KNOWN, and would keep its key alive
        self._tokenizer = weakref.ref(tokenizer)
        self._ids = {
            token_id: str(token)
            for token_id, token in added.items()
            # A token of one character cannot be broken; it is a character of the alphabet.
            if len(str(token)) > 1
            and (token.special or str(token) in special or _MARKER.fullmatch(str(token)))
        }
        self.ids = [*self._ids]
        # longest first: a regular expression takes the first alternative that matches
        self.names = sorted(set(self._ids.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        self._beginnings = {name[:end] for name in self.names for end in range(2, len(name))}
        self._ends = {name[start:] for name in self.names for start in range(1, len(name) - 1)}
        self._longest = max(map(len, self.names), default=0)
        self._plain: Any = None

    def escape(self, value: Any) -> Any:
        """Return a text, or the texts of nested lists and mappings, with control tokens broken."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, list):
            return [self.escape(item) for item in value]
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return value

    def _escape_text(self, text: str) -> str:
        while self._pattern.search(text):  # again for a token that overlaps with one already broken
            text = self._pattern.sub(lambda found: f"{found[0][0]}{_BREAK}{found[0][1:]}", text)
        # A part at either end could become whole next to the template's text or another message.
        for size in range(min(self._longest, len(text)), 1, -1):
            if text[:size] in self._ends:
                text = f"{text[0]}{_BREAK}{text[1:]}"
                break
        for size in range(min(self._longest, len(text)), 1, -1):
            if text[-size:] in self._beginnings:
                return f"{text[: 1 - size]}{_BREAK}{text[1 - size :]}"
        return text

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of escaped texts, or of rendered templates that contain some.

        Raises:
            PromptError: a control token that this tokenizer cannot encode as text.
        """
        if not texts:
            return []
        tokenizer: Any = self._tokenizer()
        broken = [number for number, text in enumerate(texts) if is_escaped(text)]
        if broken and self._plain is None:
            self._plain = self._without_breaks(tokenizer, broken[0], texts[broken[0]])
        encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        if not broken:
            return encoded
        plain = self._plain([texts[number] for number in broken], add_special_tokens=add_special_tokens)
        for number, ids in zip(broken, plain["input_ids"], strict=True):
            encoded[number] = ids
        own = self._plain.num_special_tokens_to_add() if add_special_tokens else 0
        for number in broken:
            # a control token in the ids that the text has only without its breaks was meant as text
            held = Counter(self._pattern.findall(texts[number].replace(_BREAK, "")))
            meant = Counter(self._pattern.findall(texts[number]))
            found = Counter(self._ids.get(token_id) for token_id in encoded[number])
            if any(found[name] > meant[name] + own for name in held.keys() - {tokenizer.unk_token}):
                raise _cannot(number, texts[number], tokenizer)
        return encoded

    def _without_breaks(self, tokenizer: Any, number: int, text: str) -> Any:
        """Return a copy of the tokenizer that removes breaks after its search for control tokens."""
        from tokenizers import Tokenizer  # seconds

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # written in Python
            raise _cannot(number, text, tokenizer)
        model = json.loads(backend.to_str())
        remove = {"type": "Replace", "pattern": {"String": _BREAK}, "content": ""}
        steps = [remove, model["normalizer"]] if model["normalizer"] else [remove]
        model["normalizer"] = {"type": "Sequence", "normalizers": steps}
        names = set(self.names)
        for token in model["added_tokens"]:
            if token["content"] in names:
                token["normalized"] = False  # else it is searched for once more, without the breaks
        if model["model"]["type"] == "Unigram":  # its vocabulary has the control tokens, as likely pieces
            vocabulary = model["model"]["vocab"]
            model["model"]["vocab"] = [
                [piece, -1e9 if piece in names else score] for piece, score in vocabulary
            ]
        plain = copy.copy(tokenizer)
        plain._tokenizer = Tokenizer.from_str(json.dumps(model))
        return plain


def is_escaped(value: Any) -> bool:
    """Return True if ``escape`` broke a control token in the text or in one of the nested texts."""
    if isinstance(value, str):
        return _BREAK in value
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return any(map(is_escaped, parts))


_KNOWN: weakref.WeakKeyDictionary[Any, tuple[int, ControlTokens]] = weakref.WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the control tokens of a tokenizer; made once, and again when tokens were added to it."""
    size, known = _KNOWN.get(tokenizer, (-1, None))
    if known is None or size != len(tokenizer):
        known = ControlTokens(tokenizer)
        _KNOWN[tokenizer] = len(tokenizer), known
    return known


def _cannot(number: int, text: str, tokenizer: Any) -> PromptError:
    start = max(text.find(_BREAK) - 20, 0)
    shown = text[start : start + 60].replace(_BREAK, "")
    return PromptError(
        number,
        f"it holds a control token of the tokenizer, near {shown!r}, and {type(tokenizer).__name__} cannot "
        "encode that as text; remove it from the text",
    )

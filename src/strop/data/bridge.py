"""The bridge: the tokens between a turn of the policy and its next one.

A turn ends with a stop token that the policy sampled. The bridge is what the chat template writes from there
to the next generation prompt, with the answer of an environment in it. It is rendered from three messages,
[user, assistant with a marker, answer], never from the history: sampled tokens are never decoded and
tokenized again, and a template that rewrites earlier turns has no influence on them.

The text of a bridge is tokenized together with the stop token before it, whose id is dropped: some tokenizers
strip what follows a special token, or add a space to the first text.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from strop.data.control_tokens import PromptError, control_tokens
from strop.data.pictures.parts import Shown, as_parts, digests_in
from strop.data.prompts import AUTO, PromptFormat, as_taken
from strop.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strop.data.pictures.expand import PromptPictures

_MARK, _PROBE, _THOUGHT = "zqxjkvbp", "wvfqzjkx", "kjwzxqvf"
_THINKING = "<think>\n{}\n</think>\n\n"
_FORMS = ("mapping", "text", "content")
"""Where the marker of a turn stands: the arguments of a call, as a mapping or JSON text, or the content."""
_ROLES = ("user", "tool", "system", "assistant")
_AS_USER = "set environment.answer_role=user, which sends a tool's answer as a user's message"
_HELLO = {"role": "user", "content": "Hi"}
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class Call(NamedTuple):
    """A tool call of a turn."""

    name: str
    arguments: dict[str, Any]
    id: str = "abcdefghi"


class UnwritableText(ModelError):
    """A text has a control token, which a tokenizer written in Python cannot write as text."""


class Bridge:
    """Render the messages that follow a turn, as token ids.

    ``one_call``: the template has room for one tool call in a turn. ``stops``: text of each stop token -> its
    id; ``stop_id``: of the one that the template writes after the last turn; ``end_id``: of the token after
    earlier turns, which is another one for gpt-oss (``<|end|>`` in place of ``<|return|>``). ``history``:
    what the template does to earlier turns, in words; nothing if it only appends.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        how: PromptFormat = AUTO,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answer_role: str = "auto",
        pictures: PromptPictures | None = None,
        remedy: str = _AS_USER,
    ) -> None:
        """Try the template with probes.

        ``stop_ids`` end a turn; ``tools`` are JSON schemas; ``answer_role`` is the role of a tool's answer:
        ``tool``, ``user``, or ``auto`` (``tool``). ``pictures``: their texts; None: messages have none.
        ``remedy``: what to do about a template that shows no answers of tools.

        Raises ``ModelError`` if the template is missing, shows no answer, or writes no stop token.
        """
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template, which an environment's "
                "answers need: use an instruction-tuned model's tokenizer, or set data.chat_template"
            )
        self._tokenizer, self._control = tokenizer, control_tokens(tokenizer)
        self._pictures, self._remedy = pictures, remedy
        own: dict[str, Any] = {"tools": list(tools)} if tools else {}
        self._options: dict[str, Any] = {**how.apply_chat_template_kwargs, **own}
        added = tokenizer.added_tokens_decoder
        texts = {stop: str(added[stop] if stop in added else tokenizer.decode([stop])) for stop in stop_ids}
        # an id beyond the tokenizer has no text, and would be found at any place
        self.stops: dict[str, int] = {text: stop for stop, text in texts.items() if text}
        self._ends = dict(self.stops)  # of earlier turns
        self.answers_as_user = answer_role == "user"
        self._form = "content"
        self._refusals: dict[str, str] = {}
        probe = {"role": "user", "content": _PROBE}
        stop, end = "", ""
        if self._render("content", [probe])[0] is None:
            stop, end = self._replaced(probe)
        if end:
            self._ends[end] = next(number for number, token in added.items() if str(token) == end)
        self._require("user", ("content",), [probe])
        found, _ = self._render("content", [probe])
        assert found is not None
        self.one_call, self.end_id = False, self._ends[found[0]]
        self.stop_id = self.stops[stop] if end else self.end_id
        if tools and not self.answers_as_user:
            name = tools[0]["function"]["name"]
            calls = [Call(name, {}), Call(name, {}, "bcdefghij")]
            self._form = self._require("tool", _FORMS, [tool_message(calls[0], _PROBE)], calls[:1])
            answers = [tool_message(call, _PROBE) for call in calls]
            self.one_call = self._render(self._form, answers, calls)[0] is None
        self.history = self._history(tools)

    def ids(self, messages: Sequence[Mapping[str, Any]], calls: Sequence[Call] = ()) -> list[int]:
        """Return the ids of ``shown``."""
        return self.shown(messages, calls).ids

    def shown(self, messages: Sequence[Mapping[str, Any]], calls: Sequence[Call] = ()) -> Shown:
        """Return the ids of the bridge with ``messages`` in it, which answer ``calls`` or the turn's text.

        Control tokens in the messages are text. Raises ``ModelError`` if the template does not show them.
        """
        digests = digests_in(messages)
        if digests and self._pictures is None:
            raise ModelError(
                "an answer has a picture, and no row has one: set data.max_images and use a model of pictures"
            )
        given = self._control.escape([dict(message) for message in messages])
        found, problem = self._render(self._form if calls else "content", given, calls, probe=False)
        if not calls:
            problem = problem or next(filter(None, (self._refusal(one["role"]) for one in messages)), "")
        if found is None or problem:
            shown = ", ".join(f"{one['role']} {one['content']!r:.80}" for one in messages)
            taken = " or ".join(role for role in _ROLES if not self._refusal(role))
            remedy = f"one message of {taken} is shown"
            if calls and not self.answers_as_user:
                remedy = self._remedy
            raise ModelError(f"the chat template does not show {shown} after a turn: {problem}; {remedy}")
        stop, text = found
        if self._pictures is not None and digests:
            try:
                text = self._pictures.expansion(digests).expanded(text)
            except PromptError as error:
                raise ModelError(f"an answer with pictures: {error.reason}") from error
        ids = self._encoded(stop + text)
        if not ids or ids[0] != self._ends[stop]:
            raise ModelError(f"the stop token {stop!r} is not one token before {text!r:.80}")
        return Shown(ids[1:]) if self._pictures is None else self._pictures.shown(ids[1:], digests)

    def _refusal(self, role: str) -> str:
        """Return why the template does not show a message of this role after a turn; "" if it does."""
        if role not in self._refusals:
            self._refusals[role] = self._render("content", [{"role": role, "content": _PROBE}])[1]
        return self._refusals[role]

    def answers(self, calls: Sequence[Call], texts: Sequence[str | list[Any]]) -> list[dict[str, Any]]:
        """Return the messages with the answers to the calls of a turn, in the order of the calls."""
        if self.answers_as_user and all(isinstance(text, str) for text in texts):
            return [{"role": "user", "content": "\n".join(map(str, texts))}]
        if self.answers_as_user:
            return [{"role": "user", "content": [part for text in texts for part in as_parts(text)]}]
        return [tool_message(call, text) for call, text in zip(calls, texts, strict=True)]

    def said(self, call: Call) -> str:
        """Return a turn with a call as the template writes it, to the stop token; "" if it writes none."""
        prompt = self._text([_HELLO])
        turn = call_message([call], as_text=self._form == "text")
        whole = self._text([_HELLO, turn], prompt=False)
        rest = whole[len(_common(prompt, whole)) :]
        end = min((rest.index(stop) for stop in self.stops if stop in rest), default=len(rest))
        return rest[:end] if call.name in rest[:end] else ""

    def cut(self, text: str, limit: int) -> str:
        """Return a text of at most ``limit`` tokens: its beginning and its end, around a note."""

        def size(piece: str) -> int:
            return len(self._encoded(self._control.escape(piece)))

        longest = 64 * limit  # characters; a flood is not tokenized as a whole
        if len(text) <= longest and size(text) <= limit:
            return text

        def kept(characters: int) -> str:
            note = f"\n[{len(text) - 2 * characters} characters left out]\n"
            return f"{text[:characters]}{note}{text[len(text) - characters :]}"

        low, high = 0, min(len(text), longest) // 2
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if size(kept(middle)) <= limit else (low, middle - 1)
        return kept(low)

    def _encoded(self, text: str) -> list[int]:
        """Return the ids of an escaped text; ``UnwritableText`` for a control token that cannot be text."""
        try:
            return self._control.encode([text], add_special_tokens=False)[0]
        except PromptError as error:
            raise UnwritableText(f"an answer is not shown: {error.reason}") from error

    def _replaced(self, following: Mapping[str, Any]) -> tuple[str, str]:
        """Return a stop token after the last turn, and the control token in its place once a message follows.

        Both are "" if the template replaces none.
        """
        turn = _marked("content", ())
        with contextlib.suppress(Exception):  # templates raise anything
            last = self._text([_HELLO, turn], prompt=False).partition(_MARK)[2]
            earlier = self._text([_HELLO, turn, following]).partition(_MARK)[2]
            stop = next(filter(last.startswith, self.stops), "")
            end = next(filter(earlier.startswith, self._control.names), "")
            return (stop, end) if stop else ("", "")
        return "", ""

    def _require(
        self, role: str, forms: Sequence[str], messages: list[dict[str, Any]], calls: Sequence[Call] = ()
    ) -> str:
        """Return the first of ``forms`` in which the template shows the messages."""
        problems: list[str] = []
        for form in forms:
            found, problem = self._render(form, messages, calls)
            if found is not None:
                return form
            problems.append(problem)
        remedy = (
            self._remedy
            if role == "tool"
            else "use the model's own end token and chat template, or set data.chat_template"
        )
        raise ModelError(
            f"the chat template of {self._tokenizer.name_or_path!r} shows no answer of the role {role!r} "
            f"after a turn: {'; '.join(dict.fromkeys(problems))}; {remedy}"
        )

    def _render(
        self,
        form: str,
        messages: Sequence[Mapping[str, Any]],
        calls: Sequence[Call] = (),
        *,
        probe: bool = True,
    ) -> tuple[tuple[str, str] | None, str]:
        """Return the stop token after the marker and the text behind it, or None and the problem.

        ``probe``: the messages contain a probe, which must be rendered.
        """
        try:
            whole = self._text([_HELLO, _marked(form, calls), *messages])
        # Templates raise anything.
        except Exception as error:  # noqa: BLE001
            return None, f"{type(error).__name__}: {error!s:.120}"
        before, _, rest = whole.partition(_MARK)
        if _MARK in rest or before == whole:
            return None, f"it renders the assistant's turn {whole.count(_MARK)} times"
        if probe and rest.count(_PROBE) != len(messages):
            return None, "the message is not in the text"
        places = [(rest.index(stop), -len(stop), stop) for stop in self._ends if stop in rest]
        if not places:
            return None, f"no stop token ({', '.join(self._ends)}) follows the assistant's text"
        place, _, stop = min(places)
        if probe and _PROBE in rest[:place]:
            return None, f"no stop token ({', '.join(self._ends)}) precedes the message"
        return (stop, rest[place + len(stop) :]), ""

    def _text(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True) -> str:
        rendered: Any = self._tokenizer.apply_chat_template(
            as_taken(messages, self._tokenizer),
            tokenize=False,
            add_generation_prompt=prompt,
            **self._options,
        )
        return rendered

    def _history(self, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return what the template does to earlier turns, in words; nothing if it only appends."""
        user, turn = {"role": "user", "content": _PROBE}, _marked("content", ())
        bridge, _ = self._render("content", [user])
        assert bridge is not None
        prompt, whole = self._text([_HELLO]), self._text([_HELLO, turn, user])
        sampled = [prompt + _MARK + "".join(bridge)]
        last = self._text([_HELLO, turn], prompt=False)
        if last.startswith(prompt):  # the turn as the policy learned to write it, such as with a channel
            said, _, rest = last.partition(_MARK)
            stop = min(filter(rest.__contains__, self.stops), key=rest.index, default=bridge[0])
            sampled.append(said + _MARK + stop + bridge[1])
        found = [] if whole in sampled else [_difference(sampled[-1], whole, tools)]
        dropped = ["a message of the user"] if self._drops(_THINKING, user, ()) else []
        if self._form != "content":
            call = Call(tools[0]["function"]["name"], {})
            answer = tool_message(call, _PROBE)
            if self._drops("{}", answer, [call]):
                found.append("drops the text beside a call")
            elif self._drops(_THINKING, answer, [call]):
                dropped.append("the answer of a tool")
        return (*found, f"drops thinking before {' and '.join(dropped)}") if dropped else tuple(found)

    def _drops(self, form: str, following: Mapping[str, Any], calls: Sequence[Call]) -> bool:
        """Return True if the text ``form`` of a turn is lost once ``following`` answers it."""
        turn, drops = _marked(self._form, calls), False
        given = [{"content": form.format(_THOUGHT) + ("" if calls else _MARK)}]
        if form == _THINKING:  # templates that take it from a field of its own
            given += [{name: _THOUGHT} for name in ("reasoning_content", "thinking")]
        for fields in given:
            with contextlib.suppress(Exception):  # templates raise anything
                last = self._text([_HELLO, {**turn, **fields}], prompt=False)
                whole = self._text([_HELLO, {**turn, **fields}, following])
                drops |= _THOUGHT not in whole and ("content" in fields or _THOUGHT in last)
        return drops


def _difference(sampled: str, whole: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how an earlier turn, as the template shows it, differs from the sampled one."""
    first = len(_common(sampled, whole))
    before, after = sampled[first:], whole[first:]
    last = len(_common(before, after, from_end=True))
    removed, added = before[: len(before) - last], after[: len(after) - last]
    if tools and tools[0]["function"]["name"] in removed:
        return "moves the list of tools to the last message of the user"
    found = f"writes {added!r:.60} in place of {removed!r:.60}" if added else f"drops {removed!r:.60}"
    return f"{found if removed else f'adds {added!r:.60}'} in an earlier turn"


def _common(one: str, other: str, *, from_end: bool = False) -> str:
    """Return the longest common beginning, or end, that cuts no tag such as ``<think>`` in two."""
    step = -1 if from_end else 1
    pieces = [re.findall(r"<[^<>\s]+>|.", text, re.DOTALL)[::step] for text in (one, other)]
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*pieces, strict=False))
    return "".join([same for same, _ in pairs][::step])


def call_id(*of: object) -> str:
    """Return the id of a call: nine characters, which Mistral's template demands."""
    digest = hashlib.blake2b(" ".join(map(str, of)).encode(), digest_size=9).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def tool_message(call: Call, text: str | list[Any]) -> dict[str, Any]:
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}


def call_message(calls: Sequence[Call], content: str = "", *, as_text: bool = False) -> dict[str, Any]:
    """Return an assistant's message with calls; ``as_text``: their arguments as JSON."""

    def arguments(call: Call) -> Any:
        return json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments

    made = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments(call)}}
        for call in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _marked(form: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Return an assistant's turn with the marker, and with ``calls`` where ``form`` has them."""
    if form == "content" or not calls:
        return {"role": "assistant", "content": _MARK}
    marked = [call._replace(arguments={"x": ""}) for call in calls[:-1]]
    return call_message([*marked, calls[-1]._replace(arguments={"x": _MARK})], as_text=form == "text")

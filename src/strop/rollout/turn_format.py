"""Turns as texts and as tokens: reads those of the policy, and writes the answers to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.data.bridge import Bridge, Call
from strop.data.pictures.parts import is_place, with_places
from strop.data.pictures.read import alive_parts
from strop.data.prompts import PromptError, PromptFormat, encode_prompts
from strop.data.rl_dataset import truncate
from strop.data.tool_calls import Turn, find_parser, text_before, text_of_turn
from strop.environments.loading import Environments, load_object
from strop.errors import DataError

if TYPE_CHECKING:
    from strop.config.schema import Config
    from strop.data.pictures.expand import PromptPictures
    from strop.pictures import Picture

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""


class TurnFormat:
    """The format of turns, calls and answers in the chat template."""

    def __init__(
        self,
        config: Config,
        environments: Environments,
        tokenizer: Any,
        stop_ids: Sequence[int],
        pictures: PromptPictures | None = None,
    ) -> None:
        """Try the chat template; ``stop_ids`` end a turn, besides those of the configuration.

        ``pictures``: their texts, where rows have some.

        Raises ``ModelError`` for a template that shows no answers, or from which no parser follows.
        """
        data, self._settings, self._tokenizer = config.data, config.environment, tokenizer
        self._pictures = pictures
        self._prompt_key, self.pad_token_id = data.prompt_key, tokenizer.pad_token_id
        self._truncation = data.truncation
        self._how = PromptFormat.of(data)
        stops = [*stop_ids, *config.actor_rollout_ref.rollout.stop_token_ids]
        self._stop_ids = set(stops)
        role = self._settings.answer_role
        self._bridges = {
            json.dumps(tools): Bridge(
                tokenizer, stops, self._how, tools=tools, answer_role=role, pictures=pictures
            )
            for tools in environments.schemas.values()
        }
        """By the JSON of the tools that the prompt shows."""
        self._parser = None
        if any(environments.schemas.values()):
            texts = [*next(iter(self._bridges.values())).stops]
            options = dict(self._how.apply_chat_template_kwargs)
            load = partial(load_object, key="environment.parser")
            self._parser = find_parser(self._settings.parser, tokenizer, options, texts, load)

    @property
    def reads_pictures(self) -> bool:
        """True if rows, and so turns, may have pictures."""
        return self._pictures is not None

    def history(self) -> str:
        """Return what the template does to earlier turns, in words."""
        found = dict.fromkeys(words for bridge in self._bridges.values() for words in bridge.history)
        if not found:
            return "history: the chat template only appends to it"
        return f"history: the chat template {'; '.join(found)}; the policy goes on from what it sampled"

    def two_turns(self, tools: Tools) -> list[tuple[bool, str]]:
        """Return the texts after a prompt with ``tools``, and whether each is sampled."""
        bridge, calls, said = self.bridge(tools), [], "(a turn)"
        answers = [{"role": "user", "content": "(the answer)"}]
        if tools:
            function = tools[0]["function"]
            names = function.get("parameters", {}).get("properties", {})
            calls = [Call(function["name"], dict.fromkeys(names, "..."))]
            said = bridge.said(calls[0]) or f"(a call of {function['name']}({', '.join(names)}))"
            answers = bridge.answers(calls, ["(the answer)"])
        stop, inserted = map(self._tokenizer.decode, ([bridge.stop_id], bridge.ids(answers, calls)))
        return [(True, said + stop), (False, inserted), (True, f"(the next turn){stop}")]

    def bridge(self, tools: Tools) -> Bridge:
        """Return the bridge of the prompts that show ``tools``."""
        return self._bridges[json.dumps(tools)]

    def ends(self, ids: Sequence[int]) -> bool:
        """Return True if the last id of a turn is a stop token."""
        return ids[-1] in self._stop_ids

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a turn, without its stop token."""
        return text_of_turn(self._tokenizer, ids, self._stop_ids)

    def read(self, ids: Sequence[int], before: Sequence[int], tools: Tools, bridge: Bridge) -> Turn:
        """Return the turn of sampled ids that follow the ids ``before``."""
        text = self.text(ids)
        if self._parser is None or not tools:
            return Turn(text, content=text)
        turn = self._parser(text, text_before(self._tokenizer, before), tools)
        if len(turn.calls) > 1 and bridge.one_call:
            return turn._replace(calls=(), malformed="expected one call in a turn")
        return turn

    def messages(
        self,
        bridge: Bridge,
        calls: Sequence[Call],
        answer: Mapping[str, Any],
        pictures: dict[int, Picture] | None = None,
    ) -> list[dict[str, Any]]:
        """Return an environment's answer as messages, with texts of at most ``answer_length`` tokens.

        Adds its pictures, which the messages name, to ``pictures``. Raises ``DataError`` for a damaged one.
        """

        def content(given: str | list[Any], name: str) -> str | list[Any]:
            if isinstance(given, list):
                given, found = alive_parts(given, f"the answer of {name}")
                if pictures is not None:
                    pictures.update({one.digest: one for one in found})
            if isinstance(given, str):
                return bridge.cut(given, self._settings.answer_length)
            return [
                part if is_place(part) else {**part, "text": content(part["text"], name)} for part in given
            ]

        if calls:
            pairs = zip(answer["texts"], calls, strict=True)
            return bridge.answers(calls, [content(given, call.name) for given, call in pairs])
        return [{**one, "content": content(one["content"], "respond")} for one in answer["messages"] or []]

    def prompt_messages(
        self, row: Mapping[str, Any], text: str = "", images: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Return a row's prompt as messages, with the text of ``reset`` at the end of the user's last one.

        ``images``: digests of its pictures, of which only the places are left; None: as the row has them.
        """
        messages = self._how.messages(row[self._prompt_key])
        if images is not None and self._pictures is not None:
            messages = with_places(messages, len(images))
        last = messages[-1]
        if text and last["role"] == "user":
            return [*messages[:-1], {**last, "content": _joined(last["content"], text)}]
        return [*messages, {"role": "user", "content": text}] if text else messages

    def prompt(
        self, row: Mapping[str, Any], tools: Tools, text: str, images: Sequence[int] = ()
    ) -> list[int]:
        """Return the ids of a row's prompt with the text of ``reset`` at the end of the user's last message.

        ``images``: digests of its pictures.

        Raises ``DataError`` if the samples of a prompt have seeds of their own, its text has been rendered
        already, or the template refuses it.
        """
        if text and self._settings.seed == "sample":
            raise DataError(
                "reset returned a text for the prompt, which the samples of a prompt share, and "
                "environment.seed=sample gives each its own: set environment.seed=prompt"
            )
        require_chat(self._how, self._tokenizer, row[self._prompt_key], text)
        messages, pictures = self.prompt_messages(row, text, images), self._pictures
        shown_pictures = None if pictures is None else [pictures.expansion(images)]
        shown = json.dumps(tools) if tools else None
        try:
            return encode_prompts([messages], self._tokenizer, self._how, [shown], shown_pictures)[0]
        except PromptError as error:
            raise DataError(
                f"a prompt that ends with the text of reset, user {messages[-1]['content']!r:.80}: "
                f"{error.reason}; return no text from reset, or end prompts with a message of the user"
            ) from error

    def fitted(self, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        """Return prompts of at most ``limit`` tokens, cut as the data set cuts those of rows.

        Raises ``DataError`` for a longer one where data.truncation is ``error``.
        """
        overlong = [len(ids) for ids in prompts if len(ids) > limit]
        if overlong and self._truncation == "error":
            raise DataError(
                f"{len(overlong)} of {len(prompts)} prompts have more than data.max_prompt_length={limit} "
                "tokens with the text that the environment's reset returned. Keep them with "
                f"data.max_prompt_length={max(overlong)}, the longest of these, or cut them with "
                "data.truncation=left (data.filter_overlong_prompts drops rows before reset is called)"
            )
        return [truncate(np.array(ids), limit, self._truncation).tolist() for ids in prompts]


def require_chat(how: PromptFormat, tokenizer: Any, prompt: Any, text: str) -> None:
    """Raise ``DataError`` for a text of ``reset`` where the prompt is not rendered by the chat template."""
    if text and not how.is_chat(tokenizer, is_text=isinstance(prompt, str)):
        raise DataError(
            f"reset returned the text {text!r:.80} for a prompt that is tokenized as it stands "
            "(data.apply_chat_template=False), where the user's turn may have ended already: store prompts "
            "as messages, or return no text from reset"
        )


def _joined(content: str | list[Any], text: str) -> str | list[Any]:
    """Return a content with a text after it."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}".strip()

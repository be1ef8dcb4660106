"""The values that a reward function can take by name, and the binding of a function to them.

A function for one sample takes any of ``SAMPLE_NAMES`` and the columns of the data. One with a parameter of
``BATCH_NAMES`` takes a whole batch: every value is a list with an entry for each sample, as for TRL's reward
functions. Scoring processes read this module, so it imports no torch.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from strop.columns import sampled_runs
from strop.errors import ConfigError, RewardError, did_you_mean, nearest
from strop.pictures import Sent

if TYPE_CHECKING:
    from strop.protocol import DataProto  # imports torch

logger = logging.getLogger(__name__)

ScoreFunction = Callable[..., Any]
"""Returns a number, or a dict with one under "score"; its parameters select what it is called with."""

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keywords of verl's reward functions."""


class Sample(NamedTuple):
    """The input of a scorer: one response with its reference."""

    data_source: str
    solution_str: str
    """The response alone, decoded, without special tokens."""
    ground_truth: Any = None
    extra_info: Any = None
    parts: tuple[str, ...] | None = None
    """Parts of the score to compute; None for a function without parts."""
    n_tokens: int | None = None
    """Sampled tokens of the response, with its stop token; None where only its text is known."""
    named: Mapping[str, Any] | None = None
    """Further values by name, those that the functions take."""


SAMPLE_NAMES = {
    "response": "the response's text, without special tokens",
    "solution_str": "the same",
    "prompt": "the prompt's text: the data's own, or that of the messages with the chat template",
    "messages": "the prompt as chat messages; a plain text is one user message",
    "response_prefix": "what the prompt wrote of the response: a tag at its end, as <think>; else empty",
    "ground_truth": "reward_model.ground_truth of the row; without it the column ground_truth",
    "data_source": "the data source of the row",
    "extra_info": "the column extra_info; None without it",
    "n_prompt_tokens": "number of the prompt's tokens",
    "n_response_tokens": "number of the response's tokens, with its stop token",
    "prompt_ids": "the prompt's token ids",
    "response_ids": "the response's token ids",
    "truncated": "True if the response was cut: at the length limit, or by repetition_detection",
    "images": "the prompt's pictures, of PIL in RGB; an empty list without",
}
"""Name -> meaning. A column of the data with such a name is not passed."""
TURN_NAMES = {
    "conversation": "the prompt's messages, those of the policy, and the answers",
    "turns": "the turns of the policy, each with text, calls and answers",
    "last_turn": "the text of the last turn",
    "n_turns": "number of turns",
    "ended_by": "stop, length, turns, environment or error",
}
"""The same, of the turns of a sample; without an environment it has one."""
BATCH_NAMES = {
    "completions": "completions",
    "prompts": "prompts",
    "completion_ids": "response_ids",
    "responses": "response",
    "solution_strs": "response",
    "ground_truths": "ground_truth",
    "data_sources": "data_source",
    "extra_infos": "extra_info",
}
"""Parameters of a batch function -> the value of one sample in the list."""
_ALWAYS_OF_BATCHES = ("prompts", "completions", "completion_ids")
_COLUMNS_OF_TRL = (SAMPLE_NAMES.keys() | BATCH_NAMES.keys()) - {
    *_ALWAYS_OF_BATCHES, "prompt", "ground_truth", "data_source", "extra_info", "images",
}  # fmt: skip
"""Names that are columns, if the data has them, for a function with ``completions``: TRL knows no other name
of the response, and a column ``response`` is its reference there."""
_SHADOWED = ""
"""Key of ``Sample.named`` for these columns by name."""
_OF_THE_RESPONSE = {"response", "solution_str", "completions", "responses", "solution_strs"}
WHEN_COMPLETE = frozenset({"truncated", "ended_by"})
"""Values that are known once the whole batch is generated; ``**kwargs`` of a function for one sample lacks
them, so that it can score while other samples are generated."""
_OF_THE_SAMPLE = {
    "response": "solution_str",
    "solution_str": "solution_str",
    "ground_truth": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
    "n_response_tokens": "n_tokens",
}
"""Values that every ``Sample`` has -> its field; the others are in ``Sample.named`` if they are taken."""


@dataclass
class PlayedTurn:
    """A turn of the policy, as reward functions and environments see it."""

    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Mappings with name and arguments."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """The messages that followed it in the policy's context."""


class Played(NamedTuple):
    """The turns of a sample."""

    turns: list[PlayedTurn]
    ended_by: str
    response: str | None = None
    """The text that an agent program returned; None: that of the turns."""
    messages: list[dict[str, Any]] | None = None
    """All messages of a session's last request, with its answer; None: those of the prompt and the turns."""
    prompt: list[dict[str, Any]] | None = None
    """The prompt's messages with the text of ``reset``; None without one: those of the data."""
    prompt_ids: list[int] | None = None
    """Token ids of the prompt before these turns; None: those of the data."""

    @classmethod
    def of(cls, text: str, ids_T: Any, mask_T: Any, ended_by: str, tokenizer: Any) -> Played:
        """Read the column ``conversation`` of a sample; texts of turns are without special tokens.

        Each turn is decoded by itself: "4" and "2" are never "42".
        """
        found = json.loads(text)
        turns = [PlayedTurn(**turn) for turn in found["turns"]]
        if "messages" in found:  # a session of an agent program, whose turns may be of several branches
            return cls(turns, ended_by, found.get("response"), found["messages"])
        # a lost sample has no sampled tokens
        for turn, ids in zip(turns, sampled_runs(ids_T, mask_T), strict=False):
            turn.text = tokenizer.decode(ids, skip_special_tokens=True)
        return cls(turns, ended_by, prompt=found.get("prompt"))

    @property
    def text(self) -> str:
        """The response: what an agent program returned, or the texts of the turns."""
        return "\n".join(turn.text for turn in self.turns) if self.response is None else self.response

    @property
    def last_turn(self) -> str:
        """The text that an agent program returned, or that of the last turn."""
        if self.response is not None:
            return self.response
        return self.turns[-1].text if self.turns else ""

    def values(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the values of ``TURN_NAMES``; ``messages`` are the prompt's."""
        return {
            "conversation": self.messages or [*messages, *conversation_of(self.turns)],
            "turns": self.turns,
            "last_turn": self.last_turn,
            "n_turns": len(self.turns),
            "ended_by": self.ended_by,
        }


def conversation_of(turns: Sequence[PlayedTurn]) -> list[dict[str, Any]]:
    """Return the messages of turns and their answers."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        calls = [{"type": "function", "function": call} for call in turn.calls]
        messages.append(
            {"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})}
        )
        messages += turn.answers
    return messages


class Function:
    """A reward function with the names that it takes. ``options`` are fixed keyword arguments.

    Raises ``ConfigError`` for an object that is not callable, or that takes positional arguments only;
    ``where`` names the function in errors.
    """

    def __init__(
        self, function: Callable[..., Any], where: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self.function, self.where, self.options = function, where, dict(options or {})
        own = inspect.unwrap(function) if callable(function) else None
        # a class of callable objects, which a call would only make
        if own is None or (inspect.isclass(own) and any("__call__" in vars(base) for base in own.__mro__)):
            raise ConfigError(
                f"{where} is {function if own is None else own!r:.80}: expected a function, as "
                "compute_score(response), or an object that can be called, as Accuracy()"
            )
        while isinstance(own, functools.partial):  # what is bound is no column
            self.options, own = {**own.keywords, **self.options}, own.func
        self.is_async = is_async(function)
        self.takes_all = False
        """True for ``**kwargs``."""
        self.of_any_source: bool = getattr(function, "of_any_source", False)
        """True for a judge: what it scores needs no scorer of its data source."""
        self.ordered: tuple[str, ...] = ()
        """Parameters, in their order."""
        self.defaults: dict[str, Any] = {}
        own: frozenset[str] | None = getattr(function, "argument_names", None)  # of built-in scorers
        self.required: tuple[str, ...] = ()
        if own is None:
            own = self._read_signature()
        self.names = own
        """Parameters without ``options``."""
        self.is_batch = bool(self.names & BATCH_NAMES.keys())

    def _read_signature(self) -> frozenset[str]:
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # written in C, without a signature
            return frozenset(KEYWORDS)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        self.takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        named = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if kinds[name] in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        if unknown := [] if self.takes_all else sorted(self.options.keys() - named.keys()):
            raise ConfigError(
                f"{self.where} has no parameter {unknown[0]!r}, which its kwargs set; it has {signature}"
            )
        required = [name for name, parameter in named.items() if parameter.default is parameter.empty]
        self.required = tuple(name for name in required if name not in self.options)
        self.ordered = tuple(name for name in named if name not in self.options)
        self.defaults = {name: named[name].default for name in self.ordered if name not in required}
        for name, parameter in signature.parameters.items():
            is_all = kinds[name] is parameter.VAR_POSITIONAL and not (named or self.takes_all)
            if is_all or (kinds[name] is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty):
                raise ConfigError(
                    f"{self.where} has the parameters {signature}: {name!r} cannot be passed by name"
                )
        return frozenset(self.ordered)

    @property
    def place(self) -> str:
        """Name, file and line of the function; ``where`` for an object without code."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        if code is None:
            return self.where
        return f"{code.co_name} ({code.co_filename}, line {code.co_firstlineno})"

    def wanted(self) -> frozenset[str]:
        """Return the names of the values of one sample that it names."""
        return frozenset(BATCH_NAMES.get(name, name) for name in self.names)

    def waits(self) -> bool:
        """Return True if it can only be called for a complete batch."""
        return self.is_batch or bool(self.names & WHEN_COMPLETE)

    def require(self, columns: Collection[str]) -> None:
        """Raise ``ConfigError`` if a required parameter is neither a known value nor one of ``columns``.

        Warns of an optional one that is empty and nearly a column, and of a column in place of an option.
        """
        known = {*SAMPLE_NAMES, *TURN_NAMES, *columns, *(BATCH_NAMES if self.is_batch else ()), "uid"}
        for name, default in self.defaults.items():
            is_empty = isinstance(default, str | None) and not default
            if (
                is_empty
                and name not in known
                and (close := nearest(name, known - self.names, similarity=0.82))
            ):
                _warn(
                    f"warning: {self.where} keeps {name}={default!r} for every sample: the data has no such "
                    f"column (did you mean {close!r}?)"
                )
            elif not is_empty and name in columns and "solution_str" in self.names:
                _warn(
                    f"warning: {self.where} gets {name} from the data's column {name!r}, and not its default "
                    f"{default!r} as from verl; rename the parameter, unless it means the column"
                )
        missing = [name for name in self.required if name not in known]
        if not missing:
            return
        close = nearest(missing[0], sorted(known))
        hint = f" (did you mean {close!r}?)" if close else ""
        if close in _OF_THE_RESPONSE:  # `solution` may be meant as the right answer
            hint = (
                f" ({close!r} is the model's response; the right answer is 'ground_truth', from the column "
                "that data.answer_key names, or a column by its own name)"
            )
        if missing[0] in ("completion", "generation", "output", "prediction"):
            hint = " (the model's response is 'response')"
        if "environments" in missing:  # of TRL
            hint = (
                ": environments are in other processes. Give their class a method get_reward(self), which "
                "TRL calls, too"
            )
        named = " and ".join(f"the argument {name!r}" for name in missing)
        raise ConfigError(
            f"{self.where} needs {named}, and there is no such value or column"
            + f"{hint}. It can take the columns {', '.join(sorted(columns))}, and response, prompt, "
            "ground_truth and others (strop docs rewards). Rename the parameter, or give it a default"
        )

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments among ``values``. Raises ``TypeError`` if one is missing."""
        if missing := [name for name in self.required if name not in values]:
            raise TypeError(
                f"{self.where} needs the argument {missing[0]!r}; there are {', '.join(sorted(values))}"
            )
        if self.takes_all:
            return {**values, **self.options}
        return {**{name: values[name] for name in self.names if name in values}, **self.options}

    def numbers(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return a remark about each of its parameters that is a column of numbers, and not of texts."""
        remarks = []
        for name in self.ordered:
            value = arguments.get(name)
            first = value[0] if self.is_batch and isinstance(value, list) and value else value
            if name not in SAMPLE_NAMES and type(first) in (bool, int, float):
                remarks.append(
                    f"{name}={first!r} is of type {type(first).__name__}, as in the data; "
                    f"data.answer_key={name} makes the column text"
                )
        return remarks

    def of_sample(self, sample: Sample) -> dict[str, Any]:
        """Return the keyword arguments for one sample."""
        return self.arguments(values_of(sample))

    def of_batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the keyword arguments for a batch: lists with an entry for each sample."""
        rows = [values_of(sample) for sample in samples]
        names = {name: None for row in rows for name in row}  # rows of JSON may lack some
        lists = {name: [row.get(name) for row in rows] for name in names}
        plural = {name: lists[one] for name, one in BATCH_NAMES.items() if one in lists}
        if self.takes_all:  # as TRL passes them, without the other names of the same lists
            plural = {name: plural[name] for name in plural.keys() & {*_ALWAYS_OF_BATCHES, *self.names}}
        columns = {}
        if "completions" in self.names:
            found = [(sample.named or {}).get(_SHADOWED, {}) for sample in samples]
            names = {name: None for row in found for name in row}
            columns = {name: [row.get(name) for row in found] for name in names}
        return self.arguments({**lists, **plural, **columns})


def require_values(where: str, required: Iterable[str], known: Collection[str]) -> None:
    """Raise ``ConfigError`` if a parameter of ``where`` is neither ``known`` nor a value of every row."""
    known = {*known, "uid", _GROUND_TRUTH}
    for name in required:
        if name not in known:
            raise ConfigError(
                f"{where} needs the argument {name!r}, and there is no such value or column; it can "
                f"take {', '.join(sorted(known))}{did_you_mean(name, known)}"
            )


@functools.cache
def _warn(text: str) -> None:
    logger.warning("%s", text)


def values_of(sample: Sample) -> dict[str, Any]:
    """Return the values of one sample by name: those of ``Sample``, and ``named`` where these are not."""
    fields = sample._asdict()
    named = {name: value for name, value in (sample.named or {}).items() if name != _SHADOWED}
    return {**named, **{name: fields[field] for name, field in _OF_THE_SAMPLE.items()}}


def is_async(function: Any) -> bool:
    """Return True for coroutine functions, also partial ones, and objects with such a ``__call__``."""
    while function is not None:  # a decorator may make a function async, or leave it so
        call = getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is examined
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
            return True
        is_partial = isinstance(function, functools.partial)
        function = function.func if is_partial else getattr(function, "__wrapped__", None)
    return False


@dataclass(frozen=True)
class Row:
    """Prompt of a sample, as far as it is known."""

    columns: Mapping[str, Any]
    given: Any
    """The prompt as the data has it: chat messages, a text, or None where it has none."""
    ids: Callable[[], list[int]] | None = None
    """Its token ids; None if they are not known."""
    text: Callable[[], str] | None = None
    """Its text as the model reads it; None if that is not known."""
    tail: Callable[[], str] | None = None
    """Its text after the last special token (``tail_of``); None if that is not known."""
    images: Sequence[int] | None = None
    """Digests of its pictures; None for a data set of text."""
    shown: Sequence[Mapping[str, Any]] | None = None
    """Its messages with the text of an environment's ``reset``; None without one."""

    @property
    def is_chat(self) -> bool:
        """True for chat messages."""
        return self.given is not None and not isinstance(self.given, str)

    def messages(self) -> list[dict[str, Any]]:
        """Return the prompt as chat messages."""
        if self.shown is not None:
            return [dict(message) for message in self.shown]
        if self.is_chat:  # Arrow gives every message the keys of all others
            return [
                {key: value for key, value in message.items() if value is not None} for message in self.given
            ]
        text = self.text() if self.given is None and self.text is not None else self.given
        return [{"role": "user", "content": text}]

    def plain_text(self) -> str:
        """Return a prompt that is a text in the data, with the text of ``reset``."""
        return self.given if self.shown is None else text_of_content(self.shown[-1]["content"])

    def response_prefix(self) -> str:
        """Return the text of an assistant's last message, else a tag that the prompt ends with, or ""."""
        given = self.given if self.shown is None else self.shown
        last = given[-1] if isinstance(given, list | tuple) and given else None
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            return text_of_content(last.get("content"))
        text = self.tail() if self.tail is not None else self.given
        if not isinstance(text, str):
            return ""
        found = _OPENED.search(text) or _CLOSED.fullmatch(text)
        return found["tags"] if found else ""


def text_of_content(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a message's content, with ``[picture]`` for parts without one."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join("[picture]" if part.get("text") is None else str(part["text"]) for part in content)


_OPENED = re.compile(r"(?P<tags><\w+>\s*)\Z")
# As templates without thinking write; in a text prompt it is part of the instructions.
_CLOSED = re.compile(r"\s*\w*\s*(?P<tags><(\w+)>\s*</\2>\s*)")


def tail_of(prompt_ids: Sequence[int], tokenizer: Any) -> str:
    """Return a prompt's text after its last special token, which may look like a tag: ``<assistant>``."""
    special = _special_ids(tokenizer)
    last = max((place for place, number in enumerate(prompt_ids) if number in special), default=-1)
    return tokenizer.decode(prompt_ids[last + 1 :])


@functools.lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> Collection[int]:
    """Return the ids of added special tokens; Gemma 3 has 6,400, which takes 10 ms."""
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def named_values(
    wanted: Collection[str],
    row: Row,
    response: str,
    *,
    takes_all: bool,
    for_batches: bool,
    response_ids: list[int] | None = None,
    truncated: bool | None = None,
    played: Played | None = None,
) -> dict[str, Any]:
    """Return ``Sample.named``: the ``wanted`` columns of the row and values that are known.

    ``takes_all`` adds all others but the pictures, and ``for_batches`` those that functions for a batch alone
    take. Only what is wanted is computed.
    """
    known: dict[str, Callable[[], Any]] = {}
    if isinstance(row.given, str):
        known["prompt"] = row.plain_text
    elif row.text is not None:
        known["prompt"] = row.text
    if row.given is not None or row.text is not None:
        known["messages"] = row.messages
    if row.given is not None or row.tail is not None:
        known["response_prefix"] = row.response_prefix
    if (ids := row.ids) is not None:
        known |= {"prompt_ids": ids, "n_prompt_tokens": lambda: len(ids())}
    if response_ids is not None:
        known["response_ids"] = lambda: response_ids
    if truncated is not None:
        known["truncated"] = lambda: truncated
    # not for **kwargs alone: files travel with each sample
    if "images" in wanted and (row.images is not None or "images" not in row.columns):
        known["images"] = lambda: Sent(row.images or ())
    if played is not None or not TURN_NAMES.keys().isdisjoint(wanted):
        # a sample without turns has one; there a column of the data may have such a name
        turns = played or Played([PlayedTurn(response)], "length" if truncated else "stop")
        of_turns = turns.values(row.messages() if "messages" in known else [])
        own = {name: functools.partial(of_turns.__getitem__, name) for name in of_turns}
        kept = own if played else own.keys() & {*wanted} - {*row.columns}
        known |= {name: own[name] for name in kept}
    if for_batches:
        answer = [{"role": "assistant", "content": response}]
        if played is not None:
            answer = conversation_of(played.turns)
        known["completions"] = lambda: answer if row.is_chat else response
        if row.is_chat or "prompt" in known:
            known["prompts"] = row.messages if row.is_chat else known["prompt"]
    columns = dict(row.columns)
    if row.is_chat:
        columns.pop("prompt", None)  # the name means a text
    names = {*columns, *known} if takes_all else wanted
    found = {
        name: known[name]() if name in known else columns[name]
        for name in names
        if name in known or name in columns
    }
    if for_batches:
        shadowed = columns.keys() & _COLUMNS_OF_TRL
        found[_SHADOWED] = {name: columns[name] for name in shadowed if columns[name] is not row.given}
    return found


_GROUND_TRUTH = "ground_truth"
GROUND_TRUTHS = {_GROUND_TRUTH, "ground_truths"}
"""Parameters that are the ground truth."""


def ground_truth_of(record: Mapping[str, Any] | None, column: Any) -> Any:
    """Return ``reward_model.ground_truth``, or the column ``ground_truth`` without it."""
    return record["ground_truth"] if record and "ground_truth" in record else column


def row_fields(prompts: DataProto, reward_fn_key: str) -> list[tuple[str, Any, Any]]:
    """Return data source, ground truth and extra info of each row."""
    columns = prompts.non_tensor_batch
    if reward_fn_key not in columns:
        raise RewardError(
            f"the data has no column {reward_fn_key!r} (data.reward_fn_key), which selects a row's "
            f"scorer; it has {sorted(columns)}"
        )
    nothing = [None] * len(prompts)
    return [
        (str(source), ground_truth_of(target, plain), extra)
        for source, target, plain, extra in zip(
            columns[reward_fn_key],
            columns.get("reward_model", nothing),
            columns.get("ground_truth", nothing),
            columns.get("extra_info", nothing),
            strict=True,
        )
    ]


class SampleValues:
    """``Sample.named`` of the samples of a batch of prompts; see ``named_values`` for the first three."""

    def __init__(
        self,
        wanted: Collection[str],
        takes_all: bool,
        for_batches: bool,
        tokenizer: Any,
        prompts: DataProto,
        prompt_key: str,
    ) -> None:
        self._wanted, self._takes_all, self._for_batches = wanted, takes_all, for_batches
        self._tokenizer, self._prompts = tokenizer, prompts
        self._given = prompts.non_tensor_batch.get(prompt_key)
        self._columns = dict(prompts.non_tensor_batch)
        self._images = prompts.batch.get("images")

    def of(
        self,
        prompt: int,
        token_ids: list[int],
        response: str,
        *,
        truncated: bool | None,
        played: Played | None = None,
    ) -> dict[str, Any]:
        """Return the values for a response to the prompt in row ``prompt``, as the policy saw it."""

        def ids() -> list[int]:
            if played is not None and played.prompt_ids is not None:
                return played.prompt_ids
            return ids_of_prompt(self._prompts, prompt)

        row = Row(
            columns={name: column[prompt] for name, column in self._columns.items()},
            given=None if self._given is None else self._given[prompt],
            ids=ids,
            text=lambda: self._tokenizer.decode(ids(), skip_special_tokens=False),
            tail=lambda: tail_of(ids(), self._tokenizer),
            images=None if self._images is None else self._images[prompt].tolist(),
            shown=None if played is None else played.prompt,
        )
        return named_values(
            self._wanted,
            row,
            response,
            takes_all=self._takes_all,
            for_batches=self._for_batches,
            response_ids=token_ids,
            truncated=truncated,
            played=played,
        )


def ids_of_prompt(batch: DataProto, row: int) -> list[int]:
    """Return the token ids of a row's prompt, without padding; none if the batch does not have them."""
    tensors = batch.batch
    name = next((name for name in ("prompts", "input_ids") if name in tensors), None)
    if name is None or "attention_mask" not in tensors:
        return []
    ids_P = tensors[name][row]
    return ids_P[tensors["attention_mask"][row, : len(ids_P)] != 0].tolist()


def warn_without_ground_truths(functions: Iterable[Function], rows: Iterable[Mapping[str, Any]]) -> None:
    """Warn if the functions name the ground truth, and no row has one; or of rows without an answer.

    These have no value in any of the columns that the functions require.
    """
    functions = list(functions)
    taking = [function for function in functions if function.names & GROUND_TRUTHS]
    named = {BATCH_NAMES.get(name, name) for function in functions for name in function.required}
    named -= {*SAMPLE_NAMES, *TURN_NAMES, *BATCH_NAMES, *BATCH_NAMES.values(), "uid"} - {_GROUND_TRUTH}
    columns: set[str] = set()
    n_rows, n_truths, n_empty = 0, 0, 0
    for row in rows:
        n_rows += 1
        columns |= row.keys()
        truth = ground_truth_of(row.get("reward_model"), row.get(_GROUND_TRUTH))
        n_truths += truth is not None
        n_empty += all(
            map(_is_missing, (truth if name == _GROUND_TRUTH else row.get(name) for name in named))
        )
    if taking and not n_truths:
        found = ", ".join(sorted(columns - {"input_ids", "index"}))
        logger.warning(
            "warning: %s gets ground_truth=None for every row: the data has neither "
            "reward_model.ground_truth nor a column ground_truth. Name the column with the answers "
            "(data.answer_key), or take it as a parameter of the function; the columns are %s",
            taking[0].where, found,
        )  # fmt: skip
    elif named and n_empty:
        logger.warning(
            "warning: %d of the first %d rows have no %s, which %s takes, so that no response may be right: "
            "fill them, or remove these rows",
            n_empty, n_rows, " or ".join(sorted(named)), functions[0].where,
        )  # fmt: skip


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str | float) and (value == "" or value != value))  # NaN

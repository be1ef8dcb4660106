"""The schema as a list of keys: path, type in words, documentation, markers."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from strop.config.schema import Config, RootConfig
from strop.config.schema.base import (
    FILES,
    LARGEST_FLOAT,
    LARGEST_INT,
    LARGEST_SIZE,
    MOST_PROCESSES,
    SMALLEST_FLOAT,
    Expected,
    Limit,
    Required,
    Resumes,
    Section,
    last_word,
)
from strop.config.schema.data import RowsConfig
from strop.errors import nearest

_PLAIN_NAMES = {
    str: "string",
    int: "int",
    float: "float",
    bool: "True or False",
    type(None): "null",
    Any: "any",
}

OF_ALL_NUMBERS = (LARGEST_INT, LARGEST_SIZE, MOST_PROCESSES, LARGEST_FLOAT, -LARGEST_FLOAT, SMALLEST_FLOAT)
"""Bounds that are mentioned only where a value exceeds them."""

_CLOSE_ENOUGH = 0.65  # fsdp_size is not fsdp_config
_CLOSE_ENOUGH_ELSEWHERE = 0.8


@dataclass(frozen=True)
class Key:
    """One key of the tree; a section is a key too."""

    path: str
    expected: str
    """The type in words, for example "int > 0 or null"."""
    doc: str
    is_section: bool
    limits: tuple[Limit, ...]
    """Markers of the sections above it, then its own."""
    required: Required | None
    resumes: Resumes | None = None
    """Requirement of a resume on its value; None for a section."""
    names_files: bool = False
    """Its value names files or folders; equal contents are the same value, wherever they are."""


@cache
def all_keys(schema: type[RootConfig] = Config) -> dict[str, Key]:
    """Return every key of a tree by its full path, in the order of the schema."""
    return {key.path: key for key in _walk(schema)}


def value_at(config: RootConfig, path: str) -> Any:
    """Return the value of the key `path`, for example "trainer.total_epochs"."""
    return operator.attrgetter(path)(config)


def nearest_key(path: str, schema: type[RootConfig] = Config) -> str | None:
    """Return the known key that `path` probably means, if there is one in the section that it names.

    Misspelt words are corrected from the left, each by the keys beside it. A key that lacks the last of its
    sections is found below the section given; sections may also be missing in front.
    """
    keys, section, rest = all_keys(schema), "", path
    while rest:
        above = f"{section}." if section else ""
        word, _, behind = rest.partition(".")
        known = [last_word(key) for key in keys if key.rpartition(".")[0] == section]
        below = [key for key in keys if key.startswith(above) and key.endswith(f".{rest}")]
        if word not in known and len(below) == 1 and (section or behind):
            return below[0]
        close = word if word in known else nearest(word, known, similarity=_CLOSE_ENOUGH)
        if close is None:
            return section if section and not known else None
        section, rest = above + close, behind
    return section


def unknown_key(path: str, schema: type[RootConfig] = Config) -> str:
    """Return the message about a key that does not exist."""
    keys = all_keys(schema)
    guess = nearest_key(path, schema)
    guesses = [guess] if guess else _elsewhere(path, list(keys))
    if not guess or last_word(guess) != last_word(path):
        guesses = _by_other_name(last_word(path), list(keys)) or guesses
    if "." not in path:
        guesses = guesses or _by_other_name(nearest(path, _SHORT_NAMES) or "", list(keys))
    if guesses:
        return f"{path}: unknown key; did you mean {' or '.join(guesses)}?"
    sections = {key.path for key in keys.values() if key.is_section}
    section = path.rpartition(".")[0]
    while section and section not in sections:
        section = section.rpartition(".")[0]
    siblings = [last_word(known) for known in keys if known.rpartition(".")[0] == section]
    return f"{path}: unknown key; the keys of {section or 'the configuration'} are {', '.join(siblings)}"


_MOST_GUESSES = 3
_SHORT_NAMES = {
    "model": "model.path",
    "data": "data.train_files",
    "reward": "custom_reward_function.path",
    "algorithm": "algorithm.adv_estimator",
    "lr": "optim.lr",
    "steps": "trainer.total_training_steps",
    "n": "rollout.n",
    "out": "trainer.default_local_dir",
}
"""Arguments of the commands' short forms -> the end of the key that each sets."""
_OTHER_NAMES = {
    **_SHORT_NAMES,
    "advantage_estimator": "algorithm.adv_estimator",
    "batch_size": "data.train_batch_size",
    "best_of": "rollout.n",
    "beta": "actor.kl_loss_coef",
    "bf16": "model.compute_dtype",
    "epochs": "trainer.total_epochs",
    "epsilon": "actor.clip_ratio",
    "eval_dataset": "data.val_files",
    "eval_steps": "trainer.test_freq",
    "generate_max_len": "data.max_response_length",
    "guided_decoding": "rollout.structured_outputs",
    "init_kl_coef": "kl_ctrl.kl_coef",
    "input_key": "data.prompt_key",
    "label_key": "data.answer_key",
    "learning_rate": "optim.lr",
    "loss_type": "actor.loss_agg_mode",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "max_steps": "trainer.total_training_steps",
    "max_tokens": "data.max_response_length",
    "model_name_or_path": "model.path",
    "n_samples_per_prompt": "rollout.n",
    "num_episodes": "trainer.total_epochs",
    "num_generations": "rollout.n",
    "num_iterations": "actor.ppo_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.default_local_dir",
    "per_device_train_batch_size": "data.train_batch_size",
    "pretrain": "model.path",
    "prompt_data": "data.train_files",
    "report_to": "trainer.logger",
    "reward_funcs": "custom_reward_function.path",
    "rollout_batch_size": "data.train_batch_size",
    "save_path": "trainer.default_local_dir",
    "save_steps": "trainer.save_freq",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "seed": "trainer.seed",
    "train_dataset": "data.train_files",
    "truncate_prompt_tokens": "data.truncation",
    "use_vllm": "rollout.name",
}
"""Short names, and those of transformers, TRL, OpenRLHF and vLLM's sampling -> the end of the key here."""


def short_names(schema: type[RootConfig]) -> dict[str, str]:
    """Return the short names of a tree's keys; see ``Tree.short``."""
    found = {name: _by_other_name(name, list(all_keys(schema))) for name in _SHORT_NAMES}
    return {name: keys[0] for name, keys in found.items() if keys}


def _by_other_name(name: str, keys: list[str]) -> list[str]:
    end = _OTHER_NAMES.get(name, "")
    matching = [key for key in keys if end and f".{key}".endswith(f".{end}")]
    return sorted(matching, key=_not_of_the_actor)


def _not_of_the_actor(key: str) -> tuple[bool, bool]:
    """Sort keys of the actor first: it is what most people want to set."""
    return not key.startswith("actor_rollout_ref.actor."), not key.startswith("actor_rollout_ref.")


def _elsewhere(path: str, keys: list[str]) -> list[str]:
    """Return the keys that end with the last word of ``path`` and have its others on their way."""

    def found(last: str) -> list[str]:
        others = path.split(".")[:-1]
        return [key for key in keys if last_word(key) == last and _in_order(others, key.split("."))]

    word = last_word(path)
    close = nearest(word, map(last_word, keys), similarity=_CLOSE_ENOUGH_ELSEWHERE)
    matching = found(word) or (found(close) if close else [])
    return sorted(matching, key=_not_of_the_actor)[:_MOST_GUESSES]


def _in_order(words: list[str], among: list[str]) -> bool:
    rest = iter(among)
    return all(word in rest for word in words)


def _walk(section: type[Section], prefix: str = "", inherited: tuple[Limit, ...] = ()) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path, inner, marks = f"{prefix}{name}", field.annotation, field.metadata
        limits = (*inherited, *(item for item in marks if isinstance(item, Limit)))
        if isinstance(inner, type) and issubclass(inner, Section):
            doc = (inner.__doc__ or "").strip().splitlines()[0]
            yield Key(path, "a section (a mapping of keys)", doc, True, limits, None)
            yield from _walk(inner, f"{path}.", limits)
        else:
            # A section may be composed of several: the one with the field speaks for it.
            owner = next(one for one in section.__mro__ if name in vars(one).get("__annotations__", ()))
            assert issubclass(owner, Section)
            yield Key(
                path,
                _in_words(inner, marks),
                field.description or "",
                False,
                limits,
                next((item for item in marks if isinstance(item, Required)), None),
                next((item for item in marks if isinstance(item, Resumes)), owner.resumes),
                any(item is FILES for item in marks),
            )


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    own_words = [str(item) for item in metadata if isinstance(item, Expected)]
    if own_words:
        return own_words[-1]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(str(arg) for arg in args)}"
    if origin is list:
        return f"list of {_in_words(args[0])}"
    if origin is dict:
        return "mapping"
    return _PLAIN_NAMES[annotation] + _bounds_in_words(metadata)


def _bounds_in_words(metadata: Iterable[Any]) -> str:
    words = []
    for outer in metadata:
        for item in outer.metadata if isinstance(outer, FieldInfo) else [outer]:
            match item:
                case annotated_types.Ge(bound) | annotated_types.Le(bound) if bound in OF_ALL_NUMBERS:
                    continue
                case annotated_types.Gt(bound):
                    words.append(f"> {bound}")
                case annotated_types.Ge(bound):
                    words.append(f">= {bound}")
                case annotated_types.Le(bound):
                    words.append(f"<= {bound}")
                case annotated_types.Lt(bound):
                    words.append(f"< {bound}")
    return f" {' and '.join(words)}" if words else ""


def nearest_in_words(value: int, working: Iterable[int]) -> str:
    """Return `nearest: 64, 128`: the largest of `working` below `value` and the smallest above it."""
    candidates = sorted(working)
    below = [number for number in candidates if number < value][-1:]
    above = [number for number in candidates if number > value][:1]
    return (
        f"nearest: {', '.join(str(number) for number in below + above)}" if candidates else "no value works"
    )


def longest_row(data: RowsConfig) -> tuple[int, str]:
    """Return the tokens of the longest prompt and response together, and the two keys that decide them."""
    prompt, response = data.max_prompt_length, data.max_response_length
    return prompt + response, f"data.max_prompt_length={prompt} + data.max_response_length={response}"


def divisors(number: int) -> list[int]:
    """Return every positive divisor of `number`, in order."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})

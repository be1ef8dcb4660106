"""Types of the keyword arguments of `strop.train` and others; written by generate_config_reference.py."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from strop.config.schema.base import FILES, Section
from strop.config.trees import TREES

KEYWORDS = Path(__file__).parents[1] / "src/strop/keywords.py"
API = KEYWORDS.with_name("api.py")
ARGUMENTS = {
    "train": {
        "Evaluate": (
            *("model", "data", "reward", "algorithm", "environment", "agent"),
            *("lr", "steps", "n", "out"),
        ),
        "Train": ("model", "data", "reward", "algorithm", "environment", "agent"),
    },
    "sft": {"Sft": ("model", "data")},
    "train-rm": {"TrainRm": ("model", "data")},
    "dpo": {"Dpo": ("model", "data")},
}
"""Names that are arguments of the functions, by their command; the next one has the keys of the last."""
OBJECTS = {
    "train_files": "Rows",
    "val_files": "Rows",
    "logger": "str | Sequence[str | Callable[..., Any]]",
    **dict.fromkeys(("adv_estimator", "policy_loss", "reward_manager", "loss"), "str | Callable[..., Any]"),
}
"""Keys whose values may be objects of a program."""

HEAD = '''\
"""Keyword arguments of ``strop.train`` and others, for type checkers and the completion of editors.

Written by docs/generate_config_reference.py from src/strop/config/schema/: edit that, not this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict


class Frame(Protocol):
    """A data frame of pandas or polars."""

    @property
    def columns(self) -> Any: ...


class Table(Protocol):
    """A ``datasets.Dataset``, or a table of pyarrow."""

    @property
    def column_names(self) -> Any: ...


class PretrainedModel(Protocol):
    """A model, or a tokenizer, of transformers."""

    def save_pretrained(self, save_directory: Any, /) -> Any: ...


Rows = str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]] | Frame | Table
'''


class Field(NamedTuple):
    """A field of a class: its name, type and documentation."""

    name: str
    kind: str
    doc: str


def keywords() -> str:
    """Return the module: a class for each section of each tree that a function takes, equal ones once."""
    classes: dict[str, str] = {}
    for command, tree in TREES.items():
        name = "".join(word.capitalize() for word in command.split("-"))
        fields = [*_below(tree.schema, name, classes)]
        for short, path in tree.short.items():
            *sections, last = path.split(".")
            section: Any = tree.schema
            for word in sections:
                section = section.model_fields[word].annotation
            key = next(field for field in _below(section, "", {}) if field.name == last)
            fields.append(Field(short, key.kind, f"Short for {path}.\n\n    {key.doc}"))
        base, known = "TypedDict", list[Field]()
        for function, arguments in ARGUMENTS[command].items():
            own = [field for field in fields if field.name not in (*arguments, *(one.name for one in known))]
            base = _class(f"{function}Keys", f"Further keys of ``strop {command}``.", own, classes, base=base)
            known += own
    bodies = [f"class {name}{body}" for body, name in classes.items()]
    used = set(re.findall(r"\w+", f"{API.read_text()} {' '.join(classes)}"))
    return _formatted("\n\n".join([HEAD, *(body for body in bodies if body.split("(")[0][6:] in used)]))


def _below(section: type[Section], name: str, classes: dict[str, str]) -> list[Field]:
    """Return the fields of a section; add the classes of the sections in it."""
    found = []
    for key, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            doc = _first_line(inner)
            own = name + "".join(word.capitalize() for word in key.split("_"))
            kind = _class(own, doc, _below(inner, own, classes), classes, inner)
        else:
            doc, kind = field.description or "", OBJECTS.get(key) or _kind(inner)
            if FILES in field.metadata or key.endswith(("_dir", "path")):
                kind = kind.replace("str", "str | Path", 1)
        found.append(Field(key, kind, doc))
    return found


def _class(
    name: str,
    doc: str,
    fields: list[Field],
    classes: dict[str, str],
    section: type[Section] = Section,
    base: str = "TypedDict",
) -> str:
    """Add a class unless an equal one is there; return the name of the one that is.

    Its base is that of the ``section`` whose fields it all has, with the same types.
    """
    inherited = list[Field]()
    for parent in section.__mro__[1:]:
        if issubclass(parent, Section) and parent is not Section and len(parent.__subclasses__()) > 1:
            shared = _below(parent, name, dict(classes))
            if {field[:2] for field in shared} <= {field[:2] for field in fields}:
                own = parent.__name__.removesuffix("Config") + "Keys"
                inherited, base = shared, _class(own, _first_line(parent), shared, classes, parent)
                break
    lines = [
        f"    {field.name}: {field.kind}\n    {_quoted(field.doc)}"
        for field in fields
        if field not in inherited
    ]
    body = f"({base}, total=False):\n    " + "\n".join([f"{_quoted(doc)}\n", *lines]) + "\n"
    return classes.setdefault(body, name)


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def _quoted(doc: str) -> str:
    return f'"""{doc}"""'


def _kind(annotation: Any) -> str:
    """Return the type of a value that a program gives, as source text."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(args[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_kind(arg) for arg in args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is list:
        return f"Sequence[{_kind(args[0])}]"  # a text is one, too
    if origin is dict:
        return "Mapping[str, Any]"
    return {type(None): "None", Any: "Any"}.get(annotation) or annotation.__name__


def _formatted(source: str) -> str:
    command = [Path(sys.executable).with_name("ruff"), "format", "-", "--stdin-filename", KEYWORDS]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout

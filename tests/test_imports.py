"""No module imports itself through others, also not inside a function or for a type checker."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import strop

ROOT = Path(strop.__file__).parents[1]


def name_of(file: Path) -> str:
    """Return the module's import path; that of its folder for an ``__init__.py``."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(file: Path, modules: set[str]) -> Iterator[str]:
    """Yield the modules of strop that a module imports by name, wherever in it.

    Their packages, which Python imports with them, do not count.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in names)


def test_there_is_no_circle():
    files = {name_of(file): file for file in (ROOT / "strop").rglob("*.py")}
    graph = {name: set(imports(file, files.keys())) for name, file in files.items()}
    assert "strop.trainer.commands" in graph["strop.api"]  # function-level imports are found
    assert "strop.api" in graph["strop"]  # and those for type checkers
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None

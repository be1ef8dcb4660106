"""The ground truth of a code row: what a scorer needs to run a program (format: ``docs/data.md``)."""

from __future__ import annotations

import json


def assert_tests(tests: list[str], *, entry_point: str, prefix: str = "") -> str:
    """JSON of tests that are Python sources, run in order in one namespace after ``prefix + answer``."""
    return json.dumps({"kind": "assert", "prefix": prefix, "entry_point": entry_point, "tests": tests})


def in_block(code: str) -> str:
    """The code as a block of Markdown."""
    return f"```python\n{code.rstrip()}\n```"

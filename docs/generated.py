"""Pages of which a script writes the part between two marks."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(script: str, text: str, arguments: list[str]) -> int:
    """Write ``text`` between the marks of ``script`` in its page, or compare it; return the exit status.

    ``script`` is the path of docs/generate_NAME.py, and its page is docs/NAME.md.
    """
    name = Path(script).name
    page = Path(script).with_name(f"{Path(script).stem.removeprefix('generate_')}.md")
    begin, end = f"<!-- begin: docs/{name} -->", "<!-- end -->"
    found = page.read_text()
    before, _, rest = found.partition(begin)
    _, _, after = rest.partition(end)
    whole = f"{before}{begin}\n{text}\n{end}{after}"
    if arguments != ["--check"]:
        page.write_text(whole)
    elif found != whole:
        sys.stderr.write(f"{page} is stale: run python docs/{name}\n")
        return 1
    return 0

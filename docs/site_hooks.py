"""Hooks of mkdocs: pages from outside docs/, and links that hold in the repository and on the site alike.

Pages link to one another as files of the repository, so that they can be read there, too. On the site a
link to a page leads to that page, and a link to another file to a copy of the file in the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
KEY = re.compile(r"(?<=<(?:td|li)><code>)[\w.]+(?=</code>)")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/, and the files of the repository that pages link to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    pages = [file for file in files if file.is_documentation_page()]
    for page in pages:  # it grows by pages that are linked
        for link in LINK.findall(Path(page.abs_src_path).read_text()):
            path = _in_repository(link, page)
            if path and (ROOT / path).is_file() and files.get_file_from_path(_address(path)) is None:
                files.append(file := File.generated(config, path, abs_src_path=str(ROOT / path)))
                pages += [file] if file.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page; mkdocs reports those that lead nowhere."""

    def rewrite(link: re.Match[str]) -> str:
        path = _in_repository(link[0], page.file)
        here = os.path.dirname(page.file.src_uri) or "."
        return os.path.relpath(_address(path), here) if path else link[0]

    return LINK.sub(rewrite, markdown)


def _in_repository(link: str, page: File) -> str | None:
    """Return the path in the repository of a file that a page links to; None for other links."""
    target = Path(os.path.normpath(Path(page.abs_src_path).parent / link))
    return target.relative_to(ROOT).as_posix() if target.exists() and target.is_relative_to(ROOT) else None


def _address(path: str) -> str:
    """Return the place of a file of the repository in the site."""
    return PAGES.get(path, path.removeprefix("docs/"))


def on_post_page(output: str, **_: Any) -> str:
    """Let a long key in a table or list break after a dot; the search index has it in one piece."""
    return KEY.sub(lambda key: key[0].replace(".", ".<wbr>"), output)

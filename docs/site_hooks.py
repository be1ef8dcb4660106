"""Hooks of mkdocs: pages from outside docs/, and links that hold in the repository and on the site alike.

Pages link to one another as files of the repository, so that they can be read there, too. On the site a
link to a page becomes a link within the site, and a link to another file one to the repository.
"""

from __future__ import annotations

import os
import re
import tomllib
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


def on_config(config: Any) -> Any:
    """Take the addresses from pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = urls["Documentation"] + "/", urls["Repository"]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page; mkdocs reports those that lead nowhere."""
    here = Path(page.file.abs_src_path).parent

    def rewrite(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / link[0]))
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]
        path = target.relative_to(ROOT).as_posix()
        if path in PAGES or path.startswith("docs/"):
            uri = PAGES.get(path, path.removeprefix("docs/"))
            return os.path.relpath(uri, os.path.dirname(page.file.src_uri) or ".")
        return f"{config.repo_url.rstrip('/')}/blob/main/{path}"

    return LINK.sub(rewrite, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Let a long key in a table or list break after a dot; the search index has it in one piece."""
    return KEY.sub(lambda key: key[0].replace(".", ".<wbr>"), output)

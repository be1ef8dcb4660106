"""``strop docs PAGE`` and ``strop keys WORD``: the documentation in the terminal, from the package itself."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from strop.config.keys import all_keys, unknown_key
from strop.config.trees import TREES
from strop.errors import ConfigError, did_you_mean
from strop.terminal import literal

_FOLDER = Path(__file__).parents[1] / "docs"


def add_docs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("page", nargs="?", metavar="PAGE", help="name of a page (default: list the pages)")


def run_docs(arguments: argparse.Namespace) -> int:
    """Show a page in the terminal's pager, or write its Markdown to a pipe."""
    pages = {file.stem: file.read_text(encoding="utf-8") for file in sorted(_FOLDER.glob("*.md"))}
    page = (arguments.page or "").lower()
    console = Console(soft_wrap=True)  # rich ends quietly where a pipe is closed
    if not page:
        for name, text in pages.items():
            console.print(literal(f"strop docs {name:18} {text.partition('# ')[2].partition(chr(10))[0]}"))
    elif page not in pages:
        found = [name for name, text in pages.items() if page in text.lower()]
        named = f"pages with this word: {', '.join(found)}" if found else "strop docs lists the pages"
        raise ConfigError(f"unknown page {page!r}{did_you_mean(page, pages) or f'; {named}'}")
    elif not console.is_terminal:
        console.print(literal(pages[page]), end="")
    else:
        os.environ.setdefault("LESS", "-FRX")  # show colours, and end at once on a page of one screen
        with console.pager(styles=True):
            width = min(console.width, 110)
            console.print(Markdown(pages[page], hyperlinks=False), width=width, soft_wrap=False)
    return 0


def add_keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="WORD", help="beginning of a word in key or meaning")
    parser.add_argument("--command", choices=TREES, default="train", help="command with these keys (train)")


def run_keys(arguments: argparse.Namespace) -> int:
    """Print the keys that have all the words, those with the words in their names first."""
    tree = TREES[arguments.command]
    pattern = "".join(rf"(?=.*(?<![a-z0-9]){re.escape(word)})" for word in arguments.words)
    has_words = re.compile(pattern, re.IGNORECASE).match
    keys = [key for key in all_keys(tree.schema).values() if not key.is_section]
    found = [key for key in keys if has_words(f"{key.path} {key.doc}")]
    if not found:
        raise ConfigError(unknown_key(arguments.words[-1], tree.schema))
    console = Console(soft_wrap=True)
    for key in sorted(found, key=lambda key: not has_words(key.path)):
        default = tree.raw_default(key.path)
        is_required = key.required is not None and key.required.is_usual and not default
        value = "(required)" if is_required else "null" if default is None else default
        console.print(literal(key.path, "bold"), literal(f"={value}\n    {key.doc} ({key.expected})"), sep="")
    return 0

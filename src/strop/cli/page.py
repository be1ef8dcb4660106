"""The page of runs: ``strop view RUN --web`` serves it, ``strop report RUN`` writes it as one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from strop.cli.options import add_address, print_address
from strop.config.paths import expand
from strop.errors import ConfigError
from strop.listening import Address

_REPORT = "run.html"


def add_web_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``strop view`` for the page."""
    parser.add_argument(
        "--web", action="store_true", help="serve a page with curves, samples and per-token numbers"
    )
    add_address(parser, None, "read the runs", "with --web: ")


def serve_page(folders: Sequence[str], *, host: str, port: int | None, token: str | None) -> int:
    """Serve until Ctrl-C."""
    from strop.page.files import RunFiles
    from strop.page.server import DEFAULT_PORT, PageServer

    runs = [RunFiles(Path(expand(folder)), may_be_new=True) for folder in folders]
    address = Address(host, port, token, usual=DEFAULT_PORT)
    with PageServer(runs, address) as server:
        print_address(address, server.path, "read the runs")
        server.serve_forever()
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="run folders (trainer.default_local_dir)"
    )
    parser.add_argument("-o", "--out", type=Path, help=f"the file to write or replace (a new {_REPORT})")
    parser.add_argument(
        "--steps", type=int, default=8, help="steps whose samples are included, first to last (8)"
    )
    parser.add_argument("--samples", type=int, default=64, help="samples of each of these steps (64)")


def run(args: argparse.Namespace) -> int:
    """Write the page of the runs as one file."""
    from strop.page.files import RunFiles
    from strop.page.one_file import write_report

    for name in ("steps", "samples"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected 0 or more")
    if args.out is None and Path(_REPORT).exists():
        raise ConfigError(f"{_REPORT} exists already; name another file, or replace it by --out {_REPORT}")
    out = args.out or Path(_REPORT)
    runs = [RunFiles(Path(expand(folder))) for folder in args.run_dirs]
    size = write_report(Path(expand(out)), runs, steps=args.steps, samples=args.samples)
    print(f"{out}: {size:,} bytes")
    return 0

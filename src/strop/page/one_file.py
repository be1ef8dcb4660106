"""``strop report``: the page of runs as one HTML file with its data in it, which needs no server."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strop.errors import DataError
from strop.files import atomic_write_text
from strop.page import SCRIPTS, STYLES, page_file
from strop.page.files import KINDS, RunFiles


def write_report(path: Path, runs: Sequence[RunFiles], *, steps: int, samples: int) -> int:
    """Write the page of ``runs`` to ``path`` and return its size in bytes.

    It has the first ``samples`` samples of each of ``steps`` steps, spread evenly from the first to the last,
    of training and of validation each.
    """
    found = [_run(run, steps=steps, samples=samples) for run in runs]
    data = json.dumps(found, allow_nan=False, separators=(",", ":")).encode()
    # In base64 no text of a sample can end the element that holds it.
    packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()  # mtime=0: equal runs, equal bytes
    styles = "".join(f"<style>\n{page_file(name)}</style>\n" for name in STYLES)
    embedded = f'<script type="text/plain" id="data">{packed}</script>\n'
    scripts = "".join(f"<script>\n{page_file(name)}</script>\n" for name in SCRIPTS)
    policy = (
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:\">\n"
    )
    page = page_file("index.html").replace("<!-- files -->", policy + styles)
    page = page.replace("</body>", f"{embedded}{scripts}</body>")
    atomic_write_text(path, page)
    return len(page.encode())


def _run(run: RunFiles, *, steps: int, samples: int) -> dict[str, Any]:
    summary, distributions, chosen = run.summary(), {}, {}
    for kind in KINDS:
        distributions[kind] = run.distributions(kind)
        known = summary["steps"][kind]
        at = np.linspace(0, len(known) - 1, min(steps, len(known))).round().astype(int)
        chosen[kind] = [[known[i], part] for i in at if (part := _samples(run, kind, known[i], samples))]
        summary["steps"][kind] = [step for step, _ in chosen[kind]]
    records = [record for parts in chosen.values() for _, part in parts for record in part["records"]]
    return {
        "summary": summary,
        "metrics": run.metrics(),
        "facts": run.facts(),
        "validation": run.validation(),
        "distributions": distributions,
        "samples": chosen,
        "pictures": run.pictures({name for record in records for name in record["images"] or ()}),
    }


def _samples(run: RunFiles, kind: str, step: int, count: int) -> dict[str, Any] | None:
    try:
        columns = run.columns(kind, step)
        rows = run.rows(kind, step, range(min(count, columns["rows"])), tokens=True)
    except DataError:  # deleted meanwhile by the run, which keeps the newest files
        return None
    shown = {
        "rows": len(rows),
        "of": columns["rows"],
        "length": columns["length"][: len(rows)],
        "columns": [[name, values[: len(rows)]] for name, values in columns["columns"]],
    }
    return {"columns": shown, "records": rows}

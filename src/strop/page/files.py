"""A run folder as the page reads it: metrics, samples, validations, configuration, machine.

Every answer consists of what JSON has; numbers that are not finite are None. Samples are read by column, and
texts and per-token numbers of single samples by row group, so the size of a file hardly matters. Nothing
outside the run folder is read, also not through a symbolic link.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import json
import math
import re
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from strop.checkpoint.folder import FINAL_MODEL, iteration_of, latest_step
from strop.columns import TOKEN_COLUMNS
from strop.errors import CheckpointError, DataError
from strop.redaction import redacted, redacted_text
from strop.results import Run
from strop.tracking.curves import drawn_panels
from strop.tracking.jsonl import METRICS_FILE, read_metrics
from strop.tracking.machine import MACHINE_FILE
from strop.tracking.report import Estimate
from strop.tracking.samples import (
    TOKEN_TEXTS,
    reading_samples,
    step_file,
    steps_with_file,
    unpack_texts,
)
from strop.tracking.text import names_in_order, shown_names
from strop.tracking.thumbnails import PICTURES

KINDS = ("rollouts", "validation")
"""Folders of samples."""
_SEARCHED = ("prompt", "response", "response_with_special_tokens", "ground_truth", "uid")
_PLAIN = (
    *("uid", "data_source", "ground_truth", "prompt", "response", "response_with_special_tokens"),
    *("ended_by", "conversation", "images", "truncated", "reward_failed", "hidden_tokens"),
)
_PER_TOKEN = ("response_ids", "response_mask", "follows", "rollout_versions", *TOKEN_COLUMNS)
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
_CONFIG_BYTES = 1 << 20
_OF_A_NEW_RUN = (".lock", "config.yaml")
"""Files that a run writes before it has trained a step."""
_FOLLOWED = 1000
"""Samples of one prompt over the steps, at most."""


class RunFiles:
    """The files of one run; methods may be called from several threads."""

    def __init__(self, folder: Path, *, may_be_new: bool = False) -> None:
        """Raise ``DataError`` if ``folder`` has no metrics, or with ``may_be_new`` no other file of a run."""
        self.folder = folder.resolve()
        self._may_be_new = may_be_new and any((folder / name).is_file() for name in _OF_A_NEW_RUN)
        # by path and time of change: a resumed run writes files of the same names again
        self._columns = functools.lru_cache(maxsize=256)(self._read_columns)
        self._metrics = functools.lru_cache(maxsize=1)(self._read_metrics)
        self.steps_logged()

    def metrics(self, after: int = -1) -> dict[str, Any]:
        """Return the steps above ``after``, as one list of values per metric, and the name that shows it.

        ``last`` is the last step of the file: a run that resumes drops steps.
        """
        steps = self.steps_logged()
        names = shown_names(steps)
        new = [step for step in steps if step["step"] > after]
        return {
            "last": max((step["step"] for step in steps), default=-1),
            "steps": [step["step"] for step in new],
            "names": list(names),
            "shown": list(names.values()),
            "values": [rounded([step.get(name) for step in new]) for name in names],
        }

    def steps_logged(self) -> list[dict[str, Any]]:
        """Return the records of ``metrics.jsonl``."""
        path = self._inside(METRICS_FILE)
        with contextlib.suppress(OSError):
            found = path.stat()
            return self._metrics(found.st_mtime_ns, found.st_size)
        return [] if self._may_be_new else read_metrics(path)  # raises

    def _read_metrics(self, changed: int, size: int) -> list[dict[str, Any]]:
        return read_metrics(self._inside(METRICS_FILE))

    def summary(self) -> dict[str, Any]:
        """Return the run's name, the panels of its curves and the steps that have samples."""
        steps = self.steps_logged()
        return {
            "name": self.folder.name,
            "folder": str(self.folder),
            "state": self.state(),
            "resumed": self._resumed(),
            "started": [start.get("started") for start in self.starts()],
            "last": max((step["step"] for step in steps), default=-1),
            "written": _changed(self.folder / METRICS_FILE),
            "panels": [
                {
                    "title": panel.title,
                    "unit": panel.unit,
                    "curves": list(panel.curves.items()),
                    "limits": panel.limits,
                }
                for panel in drawn_panels(names_in_order(steps))
            ],
            "steps": {kind: self.steps(kind) for kind in KINDS},
        }

    def state(self) -> dict[str, Any]:
        """Return where the run stands, as ``text``, and of a running one the number of its steps, ``of``."""
        steps, starts = self.steps_logged(), self.starts()
        last, total = steps[-1]["step"] if steps else None, starts[-1].get("steps") if starts else None
        if last is None or not isinstance(total, int):  # an earlier version writes no total
            return {"text": "no step yet" if last is None else f"step {last}", "of": None}
        if self._is_running():
            return {"text": f"running, step {last} of {total}", "of": total}
        saved = iteration_of(self.folder / FINAL_MODEL) or 0
        with contextlib.suppress(CheckpointError):
            saved = max(saved, latest_step(self.folder) or 0)
        if last >= total:
            return {"text": f"finished, {last} steps", "of": None}
        kept = f"step {saved} saved" if saved else "nothing saved"
        if saved and saved >= last:  # an update whose validation failed has no metrics
            return {"text": f"stopped at step {saved} of {total}, saved", "of": None}
        return {"text": f"died at step {last} of {total}, {kept}", "of": None}

    def _is_running(self) -> bool:
        """Return True if a process holds the run's lock."""
        with contextlib.suppress(OSError, DataError), open(self._inside(".lock")) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return isinstance(error, BlockingIOError)  # others: a file system without locks
        return False

    def _resumed(self) -> list[int]:
        """Return the steps after which the run was resumed, less those that a later start went back over."""
        steps = [start["step"] for start in self.starts() if isinstance(start.get("step"), int)]
        return sorted({step for at, step in enumerate(steps) if 0 < step <= min(steps[at:])})

    def starts(self) -> list[dict[str, Any]]:
        """Return the machine and versions of each start, in order."""
        machine = ""
        with contextlib.suppress(OSError, DataError):
            machine = self._inside(MACHINE_FILE).read_text(errors="replace")
        found = map(_plain_json, machine.splitlines())
        return [redacted(start) for start in found if isinstance(start, dict)]

    def facts(self) -> dict[str, Any]:
        """Return the configuration as text, the trained model's path, and what ``starts`` returns."""
        config = ""
        with contextlib.suppress(OSError, DataError), open(self._inside("config.yaml"), "rb") as file:
            config = file.read(_CONFIG_BYTES).decode(errors="replace")
        try:
            model = str(Run(self.folder).model_path)
        except CheckpointError as error:  # none yet, or in shards
            model = str(error)
        return {"config": _published(config), "model": model, "starts": self.starts()}

    def validation(self) -> list[dict[str, Any]]:
        """Return the report of each validation (``validation/step_*.json``) with its ``step``.

        What is no report, or has no numbers, is left out.
        """
        reports = []
        for step in steps_with_file(self.folder / "validation", ".json"):
            with contextlib.suppress(OSError, DataError, UnicodeError):
                text = self._inside(step_file(Path("validation"), step, ".json")).read_text()
                if report := _report(text):
                    reports.append({"step": step, **report})
        return reports

    def steps(self, kind: str) -> list[int]:
        """Return the steps that have a file of samples, in order."""
        return steps_with_file(self.folder / kind)

    def columns(self, kind: str, step: int) -> dict[str, Any]:
        """Return what lists and distributions need of all samples of a step, as one list per column."""
        path = self._samples(kind, step)
        with reading_samples(path):
            return self._columns(path, path.stat().st_mtime_ns)

    def _read_columns(self, path: Path, changed: int) -> dict[str, Any]:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            numbers = [name for name in names if name == "score" or name.startswith("reward/")]
            others = [name for name in ("uid", "data_source", "truncated", "reward_failed") if name in names]
            length = "response_length" if "response_length" in names else "response_mask"
            table = file.read(columns=[*others, *numbers, length])
        lengths = table[length]
        if length == "response_mask":  # files of earlier versions
            lengths = pa.chunked_array([chunk.value_lengths() for chunk in lengths.chunks], pa.int32())
        columns = {name: table[name].to_pylist() for name in others}
        columns |= {name: rounded(table[name].to_numpy()) for name in numbers}
        return {"rows": len(table), "length": lengths.to_pylist(), "columns": list(columns.items())}

    def search(self, kind: str, step: int, text: str) -> list[int]:
        """Return the rows with ``text`` in their prompt, response, ground truth or uid; case is ignored."""
        path, found = self._samples(kind, step), []
        with reading_samples(path), pq.ParquetFile(path) as file:
            names = [name for name in _SEARCHED if name in file.schema_arrow.names]
            for table, start in _row_groups(file, names):
                matches = np.zeros(len(table), dtype=bool)
                for name in names:
                    options = pc.MatchSubstringOptions(text, ignore_case=True)
                    hits = pc.call_function("match_substring", [table[name]], options)
                    matches |= hits.fill_null(False).to_numpy()
                found += (np.flatnonzero(matches) + start).tolist()
        return found

    def rows(
        self, kind: str, step: int, rows: Sequence[int], *, tokens: bool = False
    ) -> list[dict[str, Any]]:
        """Return samples in the order of ``rows``: texts, scores and, with ``tokens``, a record per column.

        Raises ``DataError`` for a row that the file lacks.
        """
        path = self._samples(kind, step)
        with reading_samples(path), pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [*_PLAIN, "score", "response_length"]
            wanted += [name for name in names if name.startswith("reward/")]
            wanted += _PER_TOKEN if tokens else ()
            missing = [row for row in rows if not 0 <= row < file.metadata.num_rows]
            if missing:
                raise DataError(f"{path}: has {file.metadata.num_rows} samples, and no row {missing[0]}")
            records = _take(file, [name for name in wanted if name in names], rows)
            packed = (file.metadata.metadata or {}).get(TOKEN_TEXTS)
            texts = unpack_texts(packed) if tokens and packed else {}
        return [_record(row, record, texts) for row, record in zip(rows, records, strict=True)]

    def pictures(self, names: Iterable[str]) -> dict[str, str]:
        """Return the thumbnails that there are, as data URLs; ``names``: of the column ``images``."""
        found = {}
        for name in filter(re.compile("[0-9a-f]{16}").fullmatch, names):
            with contextlib.suppress(OSError):
                content = self._inside(Path(PICTURES, f"{name}.jpg")).read_bytes()
                found[name] = f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
        return found

    def history(self, kind: str, prompt: str, images: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the samples of one prompt, by its text and pictures, over all steps that have a file."""
        found: list[dict[str, Any]] = []
        for step in self.steps(kind):
            try:
                rows = self._rows_of_prompt(kind, step, prompt)
                records = self.rows(kind, step, rows)
                found += [{"step": step, **record} for record in records if record["images"] == images]
            except DataError:  # a run keeps the newest files only, and may just have deleted this one
                continue
        return found[-_FOLLOWED:]

    def _rows_of_prompt(self, kind: str, step: int, prompt: str) -> list[int]:
        path, rows = self._samples(kind, step), []
        # A prompt is stored once in a row group: its samples, and other prompts, are compared by number.
        with reading_samples(path), pq.ParquetFile(path, read_dictionary=["prompt"]) as file:
            for table, start in _row_groups(file, ["prompt"]):
                for chunk in table["prompt"].chunks:
                    number = pc.index(chunk.dictionary, prompt).as_py()
                    if number >= 0:
                        rows += (np.flatnonzero(chunk.indices.to_numpy() == number) + start).tolist()
                    start += len(chunk)
        return rows

    def distributions(self, kind: str) -> dict[str, Any]:
        """Return quantiles (0, 0.1, 0.5, 0.9, 1) of scores and lengths at each step."""
        steps, scores, lengths = [], [], []
        for step in self.steps(kind):
            try:
                found = self.columns(kind, step)
            except DataError:
                continue
            steps.append(step)
            scores.append(_quantiles(dict(found["columns"]).get("score", ())))
            lengths.append(_quantiles(found["length"]))
        return {"steps": steps, "score": scores, "length": lengths}

    def _samples(self, kind: str, step: int) -> Path:
        if kind not in KINDS:
            raise DataError(f"samples are in {' and '.join(KINDS)}, not in {kind!r}")
        return self._inside(step_file(Path(kind), step))

    def _inside(self, name: str | Path) -> Path:
        """Return the path of a file of the run; ``DataError`` if a link leads out of the folder."""
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder):
            raise DataError(f"{path} leads outside the run folder, and only files inside it are shown")
        return path


def _plain_json(text: str) -> Any:
    """Return parsed JSON with None for NaN and infinity; None for what is no JSON, as a half-written line."""
    try:
        return json.loads(
            text, parse_constant=lambda name: None, parse_float=lambda x: rounded([float(x)])[0]
        )
    except (ValueError, RecursionError):
        return None


def _report(text: str) -> dict[str, Any] | None:
    """Return the report of a validation, with the scores that are numbers; None for anything else."""
    report, known = _plain_json(text), {}
    sources = report.get("sources") if isinstance(report, dict) else None
    if not isinstance(sources, dict):
        return None
    for name, source in sources.items():
        scores = source.get("scores") if isinstance(source, dict) else None
        if isinstance(scores, dict):
            whole = {key: score for key, score in scores.items() if _is_estimate(score)}
            known[name] = {**source, "scores": whole}
    return {**report, "sources": known}


def _is_estimate(score: Any) -> bool:
    return isinstance(score, dict) and all(isinstance(score.get(x), int | float) for x in Estimate._fields)


def _published(config: str) -> str:
    """Return a configuration file without credentials; as it is if it has none."""
    try:
        # aliases, which strop does not write, can make a small file expand without end
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(config)):
            return redacted_text(config)
        values = yaml.safe_load(config)
        shown = redacted(values)
    except (yaml.YAMLError, ValueError, RecursionError):
        return redacted_text(config)
    if shown == values:
        return config
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=10_000)


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Return numbers with 6 significant digits; None for None and what is not finite."""
    return [None if x is None or not math.isfinite(x) else float(f"{x:.6g}") for x in values]


def _quantiles(values: Sequence[float | None]) -> list[float | None] | None:
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    return rounded(np.quantile(known, _QUANTILES)) if len(known) else None


def _changed(path: Path) -> float | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _row_groups(file: pq.ParquetFile, names: Sequence[str]) -> Generator[tuple[pa.Table, int]]:
    """Yield each row group's columns and its first row."""
    start = 0
    for number in range(file.num_row_groups):
        table = file.read_row_group(number, columns=names)
        yield table, start
        start += len(table)


def _take(file: pq.ParquetFile, names: Sequence[str], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return records of ``rows``; only their row groups are read."""
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    groups = np.searchsorted(starts, rows, side="right") - 1
    records: dict[int, dict[str, Any]] = {}
    for group in np.unique(groups):
        own = [row for row, of in zip(rows, groups, strict=True) if of == group]
        table = file.read_row_group(int(group), columns=names)
        taken = table.take(pa.array([row - int(starts[group]) for row in own]))
        records |= zip(own, taken.to_pylist(), strict=True)
    return [records[row] for row in rows]


def _record(row: int, record: dict[str, Any], token_texts: dict[str, str]) -> dict[str, Any]:
    parts = [[name, rounded([record[name]])[0]] for name in record if name.startswith("reward/")]
    plain = {name: record.get(name) for name in _PLAIN}
    found = {"row": row, **plain, "score": rounded([record.get("score")])[0], "parts": parts}
    if "response_ids" in record:
        ids = record["response_ids"]
        found["tokens"] = {
            "ids": ids,
            "texts": [token_texts.get(str(token)) for token in ids],
            "mask": record.get("response_mask") or [1] * len(ids),
            "follows": record.get("follows"),
            "versions": record.get("rollout_versions"),
            "numbers": [[name, rounded(record[name])] for name in TOKEN_COLUMNS if name in record],
        }
    found["length"] = record.get(
        "response_length", len(record["response_ids"]) if "response_ids" in record else None
    )
    return found

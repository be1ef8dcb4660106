"""The model card (README.md) of a published model, from the files of its run folder."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from strop.config.identity import values_of
from strop.config.paths import expand, may_be_a_hub_name
from strop.config.trees import TREES, Tree
from strop.errors import DataError
from strop.tracking.curves import CURVES_FILE, drawn_panels, series
from strop.tracking.jsonl import METRICS_FILE, read_metrics
from strop.tracking.text import format_number, names_in_order
from strop.tracking.trackers import TRACKERS_FILE
from strop.version import __version__

_HIDDEN = "(not published)"
_SECRET_NAMES = r"token|key|secret|password|passwd|pwd|credentials?|authorization|cookie"
_SECRET = re.compile(rf"(^|[_-])({_SECRET_NAMES})$", re.IGNORECASE)
_IN_TEXT = (
    (re.compile(r"(\w://)[^/@\s]+@"), rf"\1{_HIDDEN}@"),  # https://user:password@host
    (re.compile(rf"\b((?:\w*[_-])?(?:{_SECRET_NAMES})=)\S+", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (re.compile(r"\b(Bearer|Basic) +\S+"), rf"\1 {_HIDDEN}"),
    (re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox\w-|AKIA|ASIA)[\w-]{10,}"), _HIDDEN),
)
"""What looks like a credential inside a text."""
_QUERY = re.compile(r"(\w://[^\s?]*\?)\S+")
"""In a configuration; signatures have many names. The address of a tracker needs its query."""
_COLUMN_KEY = re.compile(r"data\.\w+_key")
_COMMANDS = {
    "train": "reinforcement learning",
    "sft": "supervised fine-tuning",
    "train-rm": "reward modelling",
    "dpo": "preference optimization",
}


def model_card(model: Path, repo_id: str, revision: str, *, run_folder: Path | None, step: int | None) -> str:
    """Return the card of the Hugging Face folder ``model``.

    ``run_folder`` has configuration, metrics, curves and tracker addresses; what is missing there is left
    out. ``step`` is the iteration of the model; None: the last one.
    """
    config: dict[str, Any] = {}
    if run_folder is not None:
        with contextlib.suppress(OSError, yaml.YAMLError):
            config = yaml.safe_load((run_folder / "config.yaml").read_text(encoding="utf-8")) or {}
    config = _without_credentials(config)
    command = _command(config)
    architecture = _architecture(model)
    scores = architecture.endswith("ForSequenceClassification")
    base = _base(config, is_critic=architecture.endswith("ForTokenClassification"))
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        base_model=base if base and may_be_a_hub_name(base) and not Path(expand(base)).exists() else None,
        tags=["strop", *filter(None, [command, values_of(config).get("algorithm.adv_estimator")])],
    )
    lines = ["---", data.to_yaml(), "---", "", f"# {repo_id.rpartition('/')[2]}", ""]
    lines += [_summary(command, config, base, step, run_folder), ""]
    lines += _usage(repo_id, revision, scores=scores)
    if run_folder is not None:
        lines += _addresses(run_folder)
        lines += _metrics(run_folder, step)
    if command is not None:
        lines += _settings(config, TREES[command])
    return "\n".join(lines)


def _without_credentials(value: Any, path: str = "") -> Any:
    """Return values of a configuration without credentials, under their names or inside of texts."""
    if isinstance(value, Mapping):
        inner = f"{path}." if path else ""
        return {name: _without_credentials(item, f"{inner}{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [_without_credentials(item, path) for item in value]
    if not isinstance(value, str):
        return value
    if _SECRET.search(path.rpartition(".")[2]) and not _COLUMN_KEY.fullmatch(path):
        return _HIDDEN
    return _published(_QUERY.sub(rf"\1{_HIDDEN}", value))


def _published(text: str) -> str:
    for pattern, shown in _IN_TEXT:
        text = pattern.sub(shown, text)
    return text


def _command(config: Mapping[str, Any]) -> str | None:
    """Return the command whose schema has exactly the keys of ``config``, in its sections."""
    update = config.get("update", {})
    if "actor_rollout_ref" in config:
        return "train"
    if "loss" in update:
        return "dpo"
    if "center_rewards_coefficient" in update:
        return "train-rm"
    return "sft" if update else None


def _architecture(model: Path) -> str:
    try:
        return str(json.loads((model / "config.json").read_text())["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _base(config: Mapping[str, Any], *, is_critic: bool) -> str | None:
    values = values_of(config)
    keys = ["actor_rollout_ref.model.path", "model.path"]
    return next(
        (values[key] for key in (["critic.model.path"] if is_critic else []) + keys if values.get(key)), None
    )


def _summary(
    command: str | None,
    config: Mapping[str, Any],
    base: str | None,
    step: int | None,
    run_folder: Path | None,
) -> str:
    what = f"Trained with strop {__version__}"
    if command is not None:
        what += f" by {_COMMANDS[command]} (`strop {command}`)"
    values = values_of(config)
    if command == "train":
        what += f", advantage estimator `{values.get('algorithm.adv_estimator')}`"
    if command == "dpo":
        what += f", loss `{values.get('update.loss')}`"
    if base:
        what += f", from `{base}`"
    if files := values.get("data.train_files"):
        names = [files] if isinstance(files, str) else files
        what += f", on {', '.join(f'`{name}`' for name in names)}"
    steps = _steps(run_folder)
    last = step if step is not None else (steps[-1]["step"] if steps else None)
    return f"{what}. {f'{last} iterations.' if last is not None else ''}".strip()


def _usage(repo_id: str, revision: str, *, scores: bool) -> list[str]:
    auto = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    given = f'"{repo_id}", revision="{revision}"'
    return [
        "```python",
        f"from transformers import {auto}, AutoTokenizer",
        "",
        f"model = {auto}.from_pretrained({given})",
        f"tokenizer = AutoTokenizer.from_pretrained({given})",
        "```",
        "",
    ]


def _addresses(run_folder: Path) -> list[str]:
    """Return where the trackers have the run."""
    try:
        found = json.loads((run_folder / TRACKERS_FILE).read_text())
    except (OSError, ValueError):
        return []
    lines = [f"- {name}: {_published(str(address))}" for name, address in found.items()]
    return ["## Run", "", *lines, ""] if found else []


def _steps(run_folder: Path | None) -> list[dict[str, Any]]:
    if run_folder is None:
        return []
    try:
        return read_metrics(run_folder / METRICS_FILE)
    except DataError:
        return []


def _metrics(run_folder: Path, last: int | None) -> list[str]:
    """Return the first and the last value of each metric of the curves, and their picture."""
    steps = [step for step in _steps(run_folder) if last is None or step["step"] <= last]
    rows = []
    for panel in drawn_panels(names_in_order(steps)):
        for label, name in panel.curves.items():
            numbers, values = series(steps, name)
            if values:
                title = f"{panel.title}: {label}" if label.lower() != panel.title.lower() else panel.title
                first, now = format_number(values[0]), format_number(values[-1])
                row = (f"{title} ({panel.unit})", f"`{name}`", first, f"{now} (step {numbers[-1]})")
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    if not rows:
        return []
    picture = ["", f"![Curves of the run]({CURVES_FILE})"] if (run_folder / CURVES_FILE).is_file() else []
    return ["## Metrics", "", "| | metric | first | last |", "| --- | --- | --- | --- |", *rows, *picture, ""]


def _settings(config: Mapping[str, Any], tree: Tree) -> list[str]:
    """Return the keys that differ from the defaults."""
    differing = dict(_differing(config, tree))
    if not differing:
        return []
    text = yaml.safe_dump(differing, sort_keys=False, allow_unicode=True, width=1000).rstrip()
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text)), 3)
    return ["## Configuration", "", "What differs from the defaults:", "", f"{fence}yaml", text, fence, ""]


def _differing(config: Mapping[str, Any], tree: Tree) -> Iterator[tuple[str, Any]]:
    now, defaults = values_of(config), values_of(tree.raw_defaults())
    for path, value in now.items():
        default = defaults.get(path)
        if followed := tree.followed_by(path):
            default = now.get(followed, default)
        if value == default:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        yield path, value

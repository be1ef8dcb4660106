"""The model card (README.md) of a published model, from the files of its run folder."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from strop.checkpoint.folder import architecture_of, auto_class, defined_by_strop
from strop.config.derived import recorded_run
from strop.config.identity import values_of
from strop.config.paths import expand, may_be_a_hub_name
from strop.config.trees import TREES, Tree
from strop.errors import DataError
from strop.files import read_json
from strop.redaction import redacted, redacted_text
from strop.tracking.curves import CURVES_FILE, drawn_panels, series
from strop.tracking.jsonl import METRICS_FILE, read_metrics
from strop.tracking.text import format_number, names_in_order
from strop.tracking.trackers import TRACKERS_FILE
from strop.version import __version__

_NO_RUN = Path(os.devnull)
"""Has no files."""
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
    folder = run_folder or _NO_RUN
    config = redacted(recorded_run(folder))
    values, command = values_of(config), _command(config)
    architecture = architecture_of(model)
    scores = architecture.endswith("ForSequenceClassification")
    base = values.get("actor_rollout_ref.model.path") or values.get("model.path")
    if architecture.endswith("ForTokenClassification"):
        base = values.get("critic.model.path") or base
    steps: list[dict[str, Any]] = []
    with contextlib.suppress(DataError):
        steps = read_metrics(folder / METRICS_FILE)
    last = step if step is not None or not steps else steps[-1]["step"]
    addresses = read_json(folder / TRACKERS_FILE)
    configuration = _differing(config, TREES[command]) if command is not None else ""
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            pipeline_tag="text-classification" if scores else "text-generation",
            base_model=base if base and may_be_a_hub_name(base) and not Path(expand(base)).exists() else None,
            tags=["strop", *filter(None, [command, values.get("algorithm.adv_estimator")])],
        ),
        template_path=str(Path(__file__).with_name("model_card_template.md")),
        name=repo_id.rpartition("/")[2],
        summary=_summary(command, values, base, last),
        auto=auto_class(model),
        own=defined_by_strop(model),
        repo_id=repo_id,
        revision=revision,
        addresses={name: redacted_text(str(address)) for name, address in addresses.items()},
        metrics=_metrics([line for line in steps if step is None or line["step"] <= step]),
        curves=CURVES_FILE if (folder / CURVES_FILE).is_file() else None,
        configuration=configuration,
        fence="`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", configuration)), 3),
    )
    return str(card)


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


def _summary(command: str | None, values: Mapping[str, Any], base: str | None, last: int | None) -> str:
    parts = [f"Trained with strop {__version__}"]
    if command is not None:
        parts[0] += f" by {_COMMANDS[command]} (`strop {command}`)"
    if command == "train":
        parts.append(f"advantage estimator `{values.get('algorithm.adv_estimator')}`")
    if command == "dpo":
        parts.append(f"loss `{values.get('update.loss')}`")
    if base:
        parts.append(f"from `{base}`")
    if files := values.get("data.train_files"):
        names = ", ".join(f"`{name}`" for name in ([files] if isinstance(files, str) else files))
        parts.append(f"on {names}")
    return ", ".join(parts) + ("." if last is None else f". {last} iterations.")


def _metrics(steps: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of a table: the first and the last value of each metric of the curves."""
    rows = []
    for panel in drawn_panels(names_in_order(steps)):
        for label, name in panel.curves.items():
            numbers, values = series(steps, name)
            if values:
                title = f"{panel.title}: {label}" if label.lower() != panel.title.lower() else panel.title
                first, now = format_number(values[0]), format_number(values[-1])
                row = (f"{title} ({panel.unit})", f"`{name}`", first, f"{now} (step {numbers[-1]})")
                rows.append([cell.replace("|", "\\|") for cell in row])
    return rows


def _differing(config: Mapping[str, Any], tree: Tree) -> str:
    """Return the keys that differ from the defaults, as YAML."""
    now, defaults = values_of(config), values_of(tree.raw_defaults())
    found = {}
    for path, value in now.items():
        followed = tree.followed_by(path)
        default = now.get(followed, defaults.get(path)) if followed else defaults.get(path)
        if value != default:
            # YAML would write .inf and .nan
            found[path] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    if not found:
        return ""
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=1000).rstrip()

"""Paths in the configuration: local ones, which may begin with `~`, URLs, and hub names."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple, TypeGuard

from strop.errors import ConfigError, nearest
from strop.files import read_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter, as peft writes it."""
MERGED_CONFIG = "merged_config.json"
"""Beside them: the config.json of the model with the adapter merged in. A config.json here would make
transformers look for a whole model."""
ATTENTION = "[q_proj,k_proj,v_proj,o_proj]"
"""Names of the attention layers of most families, for `target_modules`."""
METRICS_FILE = "metrics.jsonl"
"""Every run folder has it, from the first step on."""
RESULTS, SAMPLES = "results.json", "samples.parquet"
"""Files of an evaluation, beside its config.yaml."""
SAFETENSORS_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("model*.safetensors*", "pytorch_model*", "*.gguf")

_SPLIT = re.compile(r"(.*[^:]):(\w[\w.+-]*(?:\[[\w:%-]*\])?)")  # "::" chains URLs
_HUB_DATA_SET = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?:@([\w./-]+))?")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_url(path: str | Path) -> bool:
    """Return True if `path` is fetched through fsspec (hdfs://, s3://, ...), not read from a local disk."""
    return "://" in str(path)


def expand(path: str | Path) -> str:
    """Return `path` with a leading `~` expanded; URLs and hub names (Qwen/Qwen2.5-0.5B) are unchanged.

    The `~` of an unknown user stays, as in shells; `Path.expanduser` would raise. Raises `ConfigError` for a
    name that no file system takes.
    """
    if is_url(path):
        return str(path)
    if any(len(os.fsencode(name)) > 255 for name in str(path).split("/")):
        raise ConfigError(f"the path {path!s:.80}... has a name of more than 255 bytes: choose a shorter one")
    return os.path.expanduser(path)


def may_be_a_hub_name(path: str) -> bool:
    """Return True if `path` may name a model on the hub (owner/name); local folders take precedence."""
    return _HUB_NAME.fullmatch(path) is not None and not path.endswith(".gguf")


def similar_path(path: str | Path) -> str:
    """Return ``; did you mean PATH?`` for a path that is not on this machine, or "" if none is similar."""
    place = Path(expand(path))
    parts = [part for part in (*reversed(place.parents), place) if not os.path.exists(part)]
    with contextlib.suppress(OSError, ValueError):  # a folder that may not be listed; a null byte
        guess = nearest(parts[0].name, os.listdir(parts[0].parent)) if parts else None
        if guess and (found := parts[0].with_name(guess) / place.relative_to(parts[0])).exists():
            return f"; did you mean {found}?"
    return ""


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: the one of the whole model, else an index's.

    An index of an earlier save may be left beside the one; a repository may have consolidated.safetensors.
    """
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    return [folder / name for name in sorted({*weight_map(folder / SAFETENSORS_INDEX).values()})]


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor by the index of a model's shards; none if it cannot be read."""
    found = read_json(index).get("weight_map")
    return {key: str(file) for key, file in found.items()} if isinstance(found, dict) else {}


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF files in a folder, or that file."""
    return [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))


def is_gguf(path: str | Path) -> bool:
    """Return True for a GGUF file, or a folder here with one in place of a configuration."""
    folder = Path(expand(path))
    return folder.suffix == ".gguf" or (not (folder / "config.json").is_file() and bool(gguf_files(folder)))


def reason_no_model(key: str, path: str | Path) -> str | None:
    """Return why ``path`` on this machine, the value of ``key``, is not a model; None if it is one."""
    folder, expected = Path(expand(path)), "expected config.json or exactly one .gguf file"
    if not folder.exists():
        return f"{key}={path}: no such folder here{similar_path(path) or '; a name on the hub is OWNER/NAME'}"
    if folder.is_file() and folder.suffix != ".gguf":
        meant = f"; did you mean {folder.parent}?" if (folder.parent / "config.json").is_file() else ""
        return f"{key}={path}: a file; expected the folder of a model, or a .gguf file{meant}"
    if is_adapter(folder):
        return instead_of_adapter(key, path)
    if (folder / "config.json").is_file() or len(found := gguf_files(folder)) == 1:
        return None
    meant = newest_model_in(folder)
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{key}={path}: found {len(found)} .gguf files and no config.json; {expected}{hint}"


def newest_model_in(folder: Path) -> Path | None:
    """Return the model or adapter that was written last below a run folder or checkpoint; None without."""
    places = ("*", "*/huggingface", "*/*/huggingface")  # final_model, or those of checkpoints
    found = [
        file
        for place in places
        for name in ("config.json", ADAPTER_CONFIG)
        for file in folder.glob(f"{place}/{name}")
    ]
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def runs_near(path: str | Path) -> str:
    """Return ``; runs near it: FOLDER, ...``, the last written first, for a path that is no run; or "".

    They are up to two levels below the path; without any there, below its parent, ``.``, ``runs`` and
    ``checkpoints``. A misspelt path is answered as by ``similar_path``.
    """
    if similar := similar_path(path):
        return similar
    found: dict[str, float] = {}
    for places in ([Path(path)], [Path(path).parent, Path(), Path("runs"), Path("checkpoints")]):
        for file in [
            file for place in places for up in ("*", "*/*") for file in place.glob(f"{up}/{METRICS_FILE}")
        ]:
            with contextlib.suppress(OSError):
                if not file.parent.name.startswith("previous_"):  # an earlier run, which its folder keeps
                    found[os.path.relpath(file.parent)] = -file.stat().st_mtime
        if found:
            break
    runs = [*sorted(found, key=lambda run: found[run])[:5], *(["..."] if len(found) > 5 else [])]
    return f"; runs near it: {', '.join(runs)}" if runs else ""


class HubSplit(NamedTuple):
    """A split of a data set on the hub, written ``owner/name:split``.

    A configuration and a revision may follow the name: ``owner/name/configuration@revision:split``.
    """

    repo: str
    config: str | None
    revision: str | None
    split: str
    """As for ``datasets.load_dataset``: ``train``, ``train[:1000]``."""


def with_split(path: str) -> tuple[str, str] | None:
    """Return a path and the split that follows it after a colon; None if there is none."""
    found = _SPLIT.fullmatch(path)
    return (found[1], found[2]) if found else None


def hub_split(path: str) -> HubSplit | None:
    """Return the split of a data set on the hub that `path` may name; local files take precedence."""
    parts = with_split(path)
    found = _HUB_DATA_SET.fullmatch(parts[0]) if parts else None
    return HubSplit(*found.groups(), parts[1]) if found and parts else None


def is_rows(path: str) -> bool:
    """Return True if `path` stands for rows that a Python program passes (`strop.data.sources.Rows`)."""
    return path.startswith("rows:")


def is_template_file(template: str | None) -> TypeGuard[str]:
    """Return True if a chat template is given as the path of a file, and not as Jinja text."""
    return template is not None and "{" not in template


def is_adapter(folder: Path) -> bool:
    """Return True if a folder holds an adapter of peft's, and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not any(
        any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS
    )


def base_of_adapter(folder: Path) -> str | None:
    """Return the path of an adapter's base model; None if its file names none."""
    return read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")


def instead_of_adapter(key: str, path: str | Path) -> str:
    """Return what to do where ``key``, a model's path, names the folder of an adapter."""
    base = base_of_adapter(Path(path))
    further = (
        f". To train it further, set {key}={base or 'its base model'} and "
        f"{key.removesuffix('path')}lora_adapter_path={path}; the reference of a KL or of strop dpo is then "
        "that base model alone"
    )
    if key.startswith(("reward_model.", "teacher.")):  # it is not trained
        further = ""
    return (
        f"{key}={path}: a LoRA adapter of {base or 'an unnamed model'}, not a model. Set the path to a model "
        f"with the adapter merged in: strop export {path} --merge --out FOLDER{further}"
    )

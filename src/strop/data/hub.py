"""Models and tokenizers as local folders; a name on the Hugging Face hub is downloaded once per machine.

Downloads go to the hub's own cache (``HF_HUB_CACHE``, ``HF_HOME``), which other programs share. A complete
snapshot in that cache is used without contacting the hub, so all processes of a run, and a resumed run,
load the same version.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import HfApi, constants, get_cached_repo_tree, get_session, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
)

from strop.config.paths import (
    SAFETENSORS_INDEX,
    expand,
    is_url,
    may_be_a_hub_name,
    runs_near,
    similar_path,
    weight_map,
)
from strop.data.fetch import cache_folder, local_path
from strop.errors import ModelError

logger = logging.getLogger("strop")

_ANSWER_S = 10.0
_SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.spm", "*.bpe", "*.vocab"]
_OTHER_FORMATS = ["original/*", "onnx/*", "openvino/*", "coreml/*", "checkpoint-*/*", "runs/*"]
# A single file, or the index of several shards, in the order in which transformers looks for them.
_FORMATS = (
    ("model.safetensors", SAFETENSORS_INDEX),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def is_hub_name(path: str | Path) -> bool:
    """Return True if ``path`` is not a URL, not on this disk, and could be a hub name (owner/name)."""
    return not is_url(path) and may_be_a_hub_name(str(path)) and not Path(expand(path)).exists()


def local_model(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """Return the folder (or GGUF file) of a model: a local path, a URL as in ``local_path``, or a hub name.

    A local path is not checked. From the hub only configuration, tokenizer and the weights in one format are
    downloaded. ``cache_dir`` holds the lock that makes other processes wait.

    Raises :class:`ModelError` for a name that cannot be downloaded, :class:`DataError` as ``local_path``.
    """
    return _from_hub(str(path), cache_dir, weights=True) if is_hub_name(path) else local_path(path, cache_dir)


def local_tokenizer(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """Return a folder with configuration and tokenizer, as ``local_model`` but without weights."""
    if is_hub_name(path):
        return _from_hub(str(path), cache_dir, weights=False)
    return local_path(path, cache_dir)


def require_from_hub(
    *, models: Iterable[str], tokenizers: Iterable[str], cache_dir: str | Path | None, weights: bool
) -> None:
    """Download every path that is a hub name, or raise the ``ModelError`` of the first failure.

    ``weights=False`` leaves the weights to the processes that load them.
    """
    for paths, with_weights in ((models, weights), (tokenizers, False)):
        for name in filter(is_hub_name, dict.fromkeys(paths)):
            _from_hub(name, cache_dir, weights=with_weights)


def parameters_of(path: str) -> int | None:
    """Return the parameters of a model on the hub, by the headers of its safetensors files; else None."""
    with contextlib.suppress(Exception):  # no network, no such files: the download says which
        if is_hub_name(path):
            found = HfApi().get_safetensors_metadata(path, revision=_small_files(path).name)
            return sum(found.parameter_count.values())
    return None


def _from_hub(name: str, cache_dir: str | Path | None, *, weights: bool) -> Path:
    locks = cache_folder(cache_dir) / "hub"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        # processes of one machine start together: the first downloads, the others find it complete
        with FileLock(locks / f"{name.replace('/', '--')}.lock"):
            folder = _small_files(name)
            files = {path.name for path in folder.glob("*")}
            with contextlib.suppress(CachedRepoTreeNotFoundError):
                files |= {file.path for file in get_cached_repo_tree(name)}
            # Without its end tokens a model would load and never stop; other small files fail loudly.
            required = [file for file in files if file == "generation_config.json"]
            has_config = (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file()
            if weights or not has_config:  # a GGUF file holds its own configuration and tokenizer
                required += _weight_files(name, folder, files)
            _require(name, folder, required)
            return folder
    except ModelError:
        raise
    except Exception as error:  # httpx's errors, the client's, OSError for a disk
        raise ModelError(
            f"model {name}: not a local folder, not complete in {constants.HF_HUB_CACHE}, and cannot be "
            f"downloaded from the Hugging Face hub ({_reason(error)}). Check the name; log in for a private "
            f"or gated model (`hf auth login`, or HF_TOKEN); or run `hf download {name}` where there is a "
            f"network{runs_near(name) if Path(name).parent.is_dir() else similar_path(name)}"
        ) from error


def _small_files(name: str) -> Path:
    """Return the snapshot folder with everything but weights."""
    options: dict[str, Any] = {"allow_patterns": _SMALL, "ignore_patterns": _OTHER_FORMATS}
    try:
        # Only with the hub's file list in the cache can a cached snapshot be known to be complete.
        get_cached_repo_tree(name)
        return Path(snapshot_download(name, **options, local_files_only=True))
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        pass
    try:
        return Path(_download(name, **options))
    except IncompleteSnapshotError as error:
        logger.warning("model %s: %s", name, _reason(error))
        return Path(error.snapshot_path)


def _download(name: str, **options: Any) -> str:
    """Return the snapshot folder; the client and the look-up of its host would wait without a limit."""

    def reach() -> None:
        with contextlib.suppress(Exception):  # refused, no such host: the download says which
            get_session().head(constants.ENDPOINT)

    answers = threading.Thread(target=reach, daemon=True)
    answers.start()
    answers.join(_ANSWER_S)
    if answers.is_alive():
        raise LocalEntryNotFoundError(f"no answer from {constants.ENDPOINT} in {_ANSWER_S:g} s")
    return snapshot_download(name, **options)


def _weight_files(name: str, folder: Path, files: set[str]) -> list[str]:
    """Return the weight files among ``files``, in the format that will be loaded."""
    for single, index in _FORMATS:
        if single in files:
            return [single]
        if index in files and (shards := weight_map(folder / index)):
            return sorted({*shards.values()})
    gguf = [file for file in files if file.endswith(".gguf") and "/" not in file]
    if len(gguf) == 1:
        return gguf
    found = ", ".join(sorted(file for file in files if "/" not in file)) or "nothing"
    raise ModelError(
        f"model {name}: found {found}; expected model.safetensors, pytorch_model.bin, their indexes, or "
        f"exactly one .gguf file. If {folder} is incomplete, run `hf download {name}`"
    )


def _require(name: str, folder: Path, files: list[str]) -> None:
    """Download the missing ones of ``files``; ``ModelError`` if any are still missing."""
    if missing := [file for file in files if not (folder / file).is_file()]:
        with contextlib.suppress(LocalEntryNotFoundError):  # the same commit as the small files
            _download(name, revision=folder.name, allow_patterns=missing)
    # snapshot_download may also return an incomplete folder without an error.
    if missing := [file for file in missing if not (folder / file).is_file()]:
        raise ModelError(
            f"model {name}: {folder} lacks {', '.join(missing)}, and the hub cannot be reached "
            f"({_reason()}). Run `hf download {name}` where there is a network"
        )


def _reason(error: Exception | None = None) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}" if error else "no answer"

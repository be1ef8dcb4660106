"""Local folders of models and tokenizers; a name on the Hugging Face hub is fetched once on each machine.

It goes into the user's own cache of the hub (``HF_HUB_CACHE``, ``HF_HOME``), where other programs find it too
and may have put it before. What is whole there is taken as it is and the hub is not asked, so that all
processes of a run, and a run that is resumed, have one version of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from strop.config.paths import is_url, may_be_a_hub_name
from strop.data.fetch import cache_folder, local_path
from strop.errors import ModelError

logger = logging.getLogger("strop")

_LARGE = (
    "*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.tflite",
    "*.npz", "*.zip", "*.tar*", "*.parquet", "*.onnx*", "onnx/*", "openvino/*", "coreml/*", "original/*",
    "checkpoint-*/*", "runs/*",
)  # fmt: skip
_FOR_PEOPLE = ("*.md", "*.pdf", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "LICENSE*", ".gitattributes")
_FORMATS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""One file, or the index of several, as transformers looks for them."""


def is_hub_name(path: str | Path) -> bool:
    """Whether ``path`` is no URL, not on this disk, and could name a model on the hub (owner/name)."""
    return not is_url(path) and may_be_a_hub_name(str(path)) and not Path(path).expanduser().exists()


def local_model(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """The folder (or GGUF file) of a model: a local path, a URL as in ``local_path``, or a name on the hub.

    A local path is not looked at. Of a model on the hub only what is needed is fetched: everything small,
    and its weights in one format. ``cache_dir`` holds the lock that makes other processes wait.

    Raises :class:`ModelError` for a name that cannot be fetched, :class:`DataError` as ``local_path`` does.
    """
    return _from_hub(str(path), cache_dir, weights=True) if is_hub_name(path) else local_path(path, cache_dir)


def local_tokenizer(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """Like ``local_model``, for configuration and tokenizer: the weights of a model on the hub are left."""
    return (
        _from_hub(str(path), cache_dir, weights=False) if is_hub_name(path) else local_path(path, cache_dir)
    )


def require_from_hub(
    *, models: Iterable[str], tokenizers: Iterable[str], cache_dir: str | Path | None, weights: bool
) -> None:
    """Fetch those that are names on the hub, or raise the ``ModelError`` of the first that cannot be.

    ``weights=False`` leaves the weights to the processes that load them.
    """
    for paths, whole in ((models, weights), (tokenizers, False)):
        for name in filter(is_hub_name, dict.fromkeys(paths)):
            _from_hub(name, cache_dir, weights=whole)


def _from_hub(name: str, cache_dir: str | Path | None, *, weights: bool) -> Path:
    with _hub_errors(name):
        locks = cache_folder(cache_dir) / "hub"
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{name.replace('/', '--')}.lock"):
            folder = _without_weights(name)
            described = (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file()
            if weights or not described:  # a GGUF file is its own description
                _add_weights(name, folder)
    return folder


def _without_weights(name: str) -> Path:
    """The folder of the cached snapshot, with all that is small."""
    ignored = [*_LARGE, *_FOR_PEOPLE]
    with suppress(CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        get_cached_repo_tree(name)  # with a listing of the hub's files, the cache knows what is whole
        return Path(snapshot_download(name, ignore_patterns=ignored, local_files_only=True))
    try:
        return Path(snapshot_download(name, ignore_patterns=ignored))
    except IncompleteSnapshotError as error:
        folder, end_tokens = Path(error.snapshot_path), "generation_config.json"
        listed = [file.path for file in get_cached_repo_tree(name)]
        if end_tokens in listed and not (folder / end_tokens).is_file():  # the one that nobody would miss
            raise _lacking(name, folder, [end_tokens], error) from error
        logger.warning("model %s: %s", name, _first_line(error))
        return folder


def _add_weights(name: str, folder: Path) -> None:
    files = {path.name for path in folder.glob("*")}  # none yet, where a GGUF file is all there is
    with suppress(CachedRepoTreeNotFoundError):
        files |= {file.path for file in get_cached_repo_tree(name, revision=folder.name)}
    wanted = _weight_files(folder, files)
    if not wanted:
        found = ", ".join(sorted(file for file in files if "/" not in file)) or "nothing"
        raise ModelError(
            f"model {name}: found {found}; expected model.safetensors, pytorch_model.bin, their indexes, or "
            f"exactly one .gguf file. If {folder} is not whole, fetch it with `hf download {name}`"
        )
    if missing := _missing(folder, wanted):
        # The small files came first: where there are weights, all is there. And of one commit, this one.
        problem: Exception | None = None
        try:
            snapshot_download(name, revision=folder.name, allow_patterns=missing)
        except LocalEntryNotFoundError as error:
            problem = error
        if missing := _missing(folder, wanted):  # it may also return what there is
            raise _lacking(name, folder, missing, problem) from problem


def _weight_files(folder: Path, files: set[str]) -> list[str]:
    """Of all ``files`` of a model those with its weights, in the format that is loaded."""
    for single, index in _FORMATS:
        if single in files:
            return [single]
        if index in files:
            return sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
    gguf = [file for file in files if file.endswith(".gguf") and "/" not in file]
    return gguf if len(gguf) == 1 else []


def _missing(folder: Path, files: list[str]) -> list[str]:
    return [file for file in files if not (folder / file).is_file()]


@contextmanager
def _hub_errors(name: str) -> Generator[None]:
    """Turn what the hub's client raises into one :class:`ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except GatedRepoError as error:
        raise ModelError(
            f"model {name}: the hub gives it only to those who accepted its conditions; do so on its page "
            "there, and log in (`hf auth login`, or HF_TOKEN)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model {name}: there is no such folder here, and no such model on the Hugging Face hub, or none "
            "that you may see. Check the name; for a private one log in (`hf auth login`, or HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {name}: there is no such folder here, so it is taken for a name on the Hugging Face hub, "
            f"but {_no_answer(error)}, and it is not in {constants.HF_HUB_CACHE}. Fetch it with `hf download "
            f"{name}` where there is a network, or give the path of a folder"
        ) from error
    except Exception as error:  # httpx's, the client's own, OSError for a disk, ValueError for an index
        raise ModelError(
            f"model {name}: cannot be fetched from the Hugging Face hub: {_first_line(error)}"
        ) from error


def _lacking(name: str, folder: Path, files: list[str], error: Exception | None) -> ModelError:
    return ModelError(
        f"model {name}: {folder} lacks {', '.join(files)}, and {_no_answer(error)}. Fetch the rest with "
        f"`hf download {name}` where there is a network"
    )


def _no_answer(error: Exception | None) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reason = f" ({_first_line(error.__cause__ or error)})" if error is not None else ""
    return f"the hub does not answer{reason}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__

"""Write Hugging Face folders one file at a time, without holding the whole model."""

from __future__ import annotations

import collections
import itertools
import json
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from strop import ranks
from strop.config.paths import SAFETENSORS_INDEX
from strop.engines.torch.shard_files import IndexReader
from strop.engines.torch.state import failing_as, stored_shapes
from strop.errors import CheckpointError, ModelError, raised_as
from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.deferred import described
from strop.models.loader import no_progress_bars, persistent_buffers
from strop.models.source import dtype_of, save_tensors, set_dtype, source_of, write_config, write_tokenizer

MAX_FILE_BYTES = 2 << 30
"""Size limit of a safetensors file, and of CPU memory in use, unless a single tensor is larger."""
_MODEL = "model.hugging_face_model."


def plan_files(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Return the names that go into each file, in order, with up to ``max_bytes`` per file."""
    files: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not files or used + size > max_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def write_weights(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    sizes: Mapping[str, int],
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write ``tensors``, in the order of ``sizes`` (bytes by name), into files named like transformers'.

    Raises ``CheckpointError`` if writing fails.
    """
    files = plan_files(sizes, max_bytes)
    incoming: Iterator[tuple[str, Tensor]] = iter(tensors)
    weight_map: dict[str, str] = {}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for number, names in enumerate(files, start=1):
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
            file = "model.safetensors" if len(files) == 1 else file
            content = {}
            for _ in names:
                name, tensor = next(incoming)
                content[name] = tensor.cpu().contiguous()
            save_tensors(content, folder / file)
            weight_map.update(dict.fromkeys(content, file))
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_folder(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: CheckpointLayout,
    weights: Iterable[tuple[str, Tensor]] | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write configuration, tokenizer and ``weights`` of a model, on rank zero. Collective.

    ``weights`` have the names of ``layout``. ``dtype`` is theirs in the files; None: that of the model's
    source.
    """
    incoming, dtype = iter(weights or ()), dtype or source_of(model).dtype
    try:
        if ranks.is_first():
            with writing(folder):
                write_config(folder, model, dtype)
                write_tokenizer(folder, tokenizer)
            if weights is not None:
                write_model(folder, model, layout, incoming, dtype)
    finally:
        # the gathers that are left, also if rank zero's disk failed: the other ranks are in them
        collections.deque(incoming, maxlen=0)


def write_model(
    folder: Path,
    model: PreTrainedModel,
    layout: CheckpointLayout,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Write ``weights`` in ``dtype``, and the persistent buffers of ``model``; see ``write_weights``."""
    buffers = {layout.renamed(name): buffer for name, buffer in persistent_buffers(model)}
    sizes = layout.sizes(dtype) | {name: buffer.nbytes for name, buffer in buffers.items()}
    write_weights(folder, itertools.chain(in_dtype(dtype, weights), buffers.items()), sizes)


def in_dtype(
    dtype: torch.dtype | None, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights in ``dtype`` (None: in their own), integers as they are; free each before the next."""
    for name, weight in weights:
        yield name, weight.to(dtype) if weight.is_floating_point() else weight
        del weight


def set_entries(config: PretrainedConfig, entries: Mapping[str, Any]) -> None:
    """Set entries of an exported ``config.json``; None removes one."""
    for name, value in entries.items():
        if value is not None:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


@contextmanager
def writing(folder: Path) -> Generator[None]:
    """Raise ``CheckpointError`` if the body cannot write the model to ``folder``."""
    what = f"cannot write the model to {folder}"
    # bars would break the run's live display
    with no_progress_bars(), raised_as(CheckpointError, what, OSError, SafetensorError):
        yield


def export_from_shards(
    state_folder: Path,
    huggingface_folder: Path,
    out: Path,
    max_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
) -> None:
    """Build a Hugging Face folder from what ``Engine.save`` wrote, in one process.

    Configuration and tokenizer are copied from ``huggingface_folder``. ``dtype`` is that of the weights;
    None: the one that the configuration names. Memory holds the weights of one file at a time. Raises
    ``CheckpointError`` if the state is incomplete or writing fails.
    """
    with failing_as(f"{state_folder} holds no sharded state"):
        stored = stored_shapes(state_folder)
    shapes = {name.removeprefix(_MODEL): entry for name, entry in stored.items() if name.startswith(_MODEL)}
    if not shapes:
        raise CheckpointError(f"{state_folder} holds no weights of a model; it holds {sorted(stored)[:3]}")
    with raised_as(CheckpointError, f"cannot copy {huggingface_folder} to {out}", OSError):
        shutil.copytree(
            huggingface_folder, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*")
        )
    dtype = dtype or dtype_of(out)
    set_dtype(out, dtype)
    try:
        layout = CheckpointLayout(described(out))
    except ModelError:  # a model's own code, which does not run here; the names in it are those of its files
        sizes = {
            name: prod(shape) * (dtype if stored.is_floating_point else stored).itemsize
            for name, (shape, stored) in shapes.items()
        }
        write_weights(out, in_dtype(dtype, _read(state_folder, shapes)), sizes, max_bytes)
        return
    if missing := sorted(layout.parameters - shapes.keys()):
        raise CheckpointError(f"{state_folder} holds no {missing[0]}, which the model has")
    parameters = {name: entry for name, entry in shapes.items() if name in layout.parameters}
    buffers = {name: entry for name, entry in shapes.items() if name not in layout.parameters}
    kept = {layout.renamed(name): prod(shape) * stored.itemsize for name, (shape, stored) in buffers.items()}
    weights = itertools.chain(  # buffers in their dtype, as in `write_model`: some decide a routing
        layout.convert(in_dtype(dtype, _read(state_folder, parameters))),
        layout.convert(_read(state_folder, buffers)),
    )
    write_weights(out, weights, layout.sizes(dtype) | kept, max_bytes)


def _read(
    folder: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[tuple[str, Tensor]]:
    for name, (shape, dtype) in shapes.items():
        tensor = torch.empty(shape, dtype=dtype)
        with failing_as(f"{folder}: {name} cannot be read"):
            dcp.load({_MODEL + name: tensor}, storage_reader=IndexReader(str(folder)), no_dist=True)
        yield name, tensor

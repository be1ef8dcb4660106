"""``strop export``: convert a checkpoint to a Hugging Face folder.

Needs no GPU and none of the processes that wrote the checkpoint. A save in the background writes shards only;
the weights are assembled from them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from strop.checkpoint.folder import has_weights, require_own_files, source_of_export, verify
from strop.checkpoint.remote import download, read_manifest
from strop.config.paths import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGED_CONFIG,
    SAFETENSORS_INDEX,
    expand,
    is_adapter,
    is_url,
)
from strop.data.hub import local_model
from strop.engines.torch.export import export_from_shards, write_model
from strop.errors import CheckpointError, ConfigError, StropError, raised_as
from strop.manifest import MANIFEST, covering, describe, remedy_of, require_unchanged, write
from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.deferred import defer_causal_lm, defer_scorer, described
from strop.models.folder import load_tokenizer
from strop.models.loader import persistent_buffers
from strop.models.lora import Adapters, LoraSettings, base_of
from strop.models.source import save_tensors, set_dtype, source_of, write_config, write_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    role: str = "actor",
    dtype: str | None = None,
    merge: bool = False,
) -> Path:
    """Write the model of ``role`` in a ``global_step_N`` folder or URL to the new folder ``out``; return it.

    ``checkpoint`` may also be a run folder, whose newest model is taken, or the Hugging Face folder of one
    model or adapter, such as ``final_model``.
    ``dtype`` is a name in ``DTYPES``, of a checkpoint's float32 weights or of the folder's; None keeps that
    of the exported folder. ``out`` appears only when whole. With ``merge``, LoRA adapters are merged into
    their base model, of which single weights are read.

    Raises ``CheckpointError`` when the checkpoint is not whole or lacks that role, ``ModelError`` when the
    base model cannot be read.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
    if is_url(out):
        raise ConfigError(f"{out}: models are exported to a folder of this machine; name one, and copy it")
    out = Path(expand(out))
    if out.exists():
        raise CheckpointError(f"{out} exists already; name a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        raised_as(CheckpointError, f"cannot write the model to {out}", OSError, SafetensorError),
        # Beside `out`, hence on the same disk, so that the last step is a rename.
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch,
    ):
        building = Path(scratch) / "model"
        source = _local_role(checkpoint, role, Path(scratch), dtype, merge=merge)
        exported = source if _is_model(source) else source / "huggingface"
        if merge:
            if not is_adapter(exported):
                raise CheckpointError(f"{checkpoint} holds no LoRA adapter, so there is nothing to merge")
            merge_adapter(exported, building, dtype)
        elif exported != source and not is_adapter(exported) and (dtype or not has_weights(exported)):
            # float32, which the exported weights may not be
            export_from_shards(source, exported, building, dtype=None if dtype is None else DTYPES[dtype])
        else:
            shutil.copytree(exported, building, ignore=shutil.ignore_patterns(MANIFEST))
            if dtype is not None:
                _convert(building, dtype)
        write(building, describe(building))  # whoever loads the model compares it
        building.rename(out)
    return out


def _is_model(folder: Path) -> bool:
    """Return True for the Hugging Face folder of a model or an adapter."""
    return is_adapter(folder) or (folder / "config.json").is_file()


def merge_adapter(adapter: Path, out: Path, dtype: str | None = None) -> None:
    """Write the base model of an adapter's folder with the adapter merged in, and the folder's tokenizer.

    ``dtype`` None: the base model's.
    """
    base, is_scorer = base_of(adapter)
    path = local_model(base)
    if is_scorer:
        model, source = defer_scorer(path, fresh_head_seed=0)
    else:
        model, source = defer_causal_lm(path)
    layout = CheckpointLayout(model)
    adapters = Adapters(model, LoraSettings(base=base, folder=adapter))
    own = (MERGED_CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    shutil.copytree(adapter, out, ignore=shutil.ignore_patterns(*own, MANIFEST))
    to = source_of(model).dtype if dtype is None else DTYPES[dtype]
    if (adapter / MERGED_CONFIG).is_file():
        shutil.copy(adapter / MERGED_CONFIG, out / "config.json")
        set_dtype(out, to)
    else:
        write_config(out, model, to)
    if not (out / "tokenizer_config.json").is_file():
        write_tokenizer(out, load_tokenizer(path))
    write_model(out, model, layout, layout.convert(adapters.merged_from(source)), to)


def _local_role(checkpoint: str | Path, role: str, scratch: Path, dtype: str | None, *, merge: bool) -> Path:
    """Return the local folder of ``role``; of a remote checkpoint only the needed files are downloaded.

    With a ``dtype`` these are the float32 weights of the state, also where there are exported ones.
    """
    with_state = dtype is not None
    if is_url(checkpoint):
        url, local = str(checkpoint).rstrip("/"), scratch / "checkpoint"
        names = read_manifest(url)
        _require_role(url, role, {name.partition("/")[0] for name in names if "/" in name})
        needed = _needed(names, role, with_state=with_state)
        download(url, local, wanted=lambda name: name.startswith(needed))
        return local / role
    local = source_of_export(Path(expand(checkpoint)), role=role, dtype=dtype, merge=merge)
    if _is_model(local):
        require_own_files(local)
        require_unchanged(str(local), local, covering(local), remedy_of(local))
        return local
    files = verify(local)
    _require_role(str(local), role, {path.name for path in local.iterdir() if path.is_dir()})
    copied = (path for path in (local / role / "huggingface").rglob("*") if path.is_file())
    if added := sorted({path.relative_to(local).as_posix() for path in copied} - files.keys()):
        raise CheckpointError(
            f"{local} holds {added[0]}, which its {MANIFEST} does not name: it was added after the save. "
            "Export would copy it into the model: remove it"
        )
    needed = _needed(files, role, with_state=with_state)
    require_unchanged(
        str(local), local, {name: entry for name, entry in files.items() if name.startswith(needed)}
    )
    return local / role


def _needed(names: Iterable[str], role: str, *, with_state: bool) -> str:
    """Return what the names of the needed files begin with: without exported weights, all of the role."""
    folder = f"{role}/huggingface/"
    exported = any(name.startswith(folder) and name.endswith(".safetensors") for name in names)
    return folder if exported and not with_state else f"{role}/"


def _require_role(where: str, role: str, found: set[str]) -> None:
    if role not in found:
        raise CheckpointError(f"{where} holds no {role}; it holds {sorted(found)}")


def _convert(folder: Path, dtype: str) -> None:
    """Rewrite floating-point weights in ``dtype``; integers and buffers, which decide a routing, stay."""
    total_size, kept = 0, set() if is_adapter(folder) else _buffers(folder)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        converted = {
            name: tensor.to(DTYPES[dtype]) if tensor.is_floating_point() and name not in kept else tensor
            for name, tensor in tensors.items()
        }
        save_tensors(converted, path, metadata or {})
        total_size += sum(tensor.nbytes for tensor in converted.values())
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        content = json.loads(index.read_bytes())
        content["metadata"]["total_size"] = total_size
        index.write_text(json.dumps(content, indent=2) + "\n")
    if is_adapter(folder):
        return
    set_dtype(folder, DTYPES[dtype])


def _buffers(folder: Path) -> set[str]:
    """Return the names of a model's buffers in its files; none of one that cannot be built here."""
    try:
        model = described(folder)
    except (StropError, LookupError, TypeError):  # a model's own code, a file without architectures
        return set()
    layout = CheckpointLayout(model)
    return {layout.renamed(name) for name, _ in persistent_buffers(model)}

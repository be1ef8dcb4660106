"""Checkpoint folders on disk: the manifest that makes one whole, and the renames that make it the latest.

A checkpoint is written to ``global_step_N.tmp``; its manifest lists every file with size and digest.
``publish`` renames it to ``global_step_N`` and only then writes ``latest_checkpointed_iteration.txt``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from strop import manifest
from strop.config.paths import ADAPTER_CONFIG, is_adapter, runs_near
from strop.errors import CheckpointError
from strop.files import atomic_write_text, crash_point, read_json
from strop.manifest import MANIFEST, TRAINER_STATE, Entry, Manifest
from strop.tracking.jsonl import METRICS_FILE, read_metrics
from strop.tracking.text import VALIDATION_PREFIX

TRAINER = "trainer.pt"
"""The driver's state; every other file of a checkpoint is in the folder of a worker group."""
BY_TIME = "saved_by_time"
"""Empty file in a checkpoint that ``trainer.save_minutes`` or the end of a run by an interrupt has saved."""
_KNOWN = re.compile(rf"{re.escape(TRAINER)}|{BY_TIME}|[A-Za-z_]\w*/.+")
LATEST = "latest_checkpointed_iteration.txt"
_PREFIX = "global_step_"
FINAL_MODEL = "final_model"
"""The trained model, at the end of every run."""


def seal(building: Path, known: Mapping[str, Entry] | None = None) -> None:
    """Write the manifest of ``building`` and force all files to disk; may be repeated after an interrupt.

    ``known`` are entries whose digests have been compared with the files.
    """
    (building / MANIFEST).unlink(missing_ok=True)
    manifest.write(building, manifest.describe(building, known))
    for path in [*building.rglob("*"), building]:
        force_to_disk(path)


def force_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's names, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_manifest(text: str | bytes, where: str) -> Manifest | None:
    """Return the manifest of a checkpoint; None when ``text`` is not a whole one.

    Raises ``CheckpointError`` for the name of a file that no checkpoint has.
    """
    found = manifest.parse(text, where)
    for name in found or {}:
        if not _KNOWN.fullmatch(name):
            raise CheckpointError(
                f"{where}: {MANIFEST} names {name!r}, which no checkpoint has; expected {TRAINER} and "
                "files in the folders of actor, critic, ..."
            )
    return found


def source_in(
    path: Path,
    *,
    role: str | None = "actor",
    step: int | None = None,
    best: bool = False,
    as_model: bool = False,
) -> Path:
    """Return what ``path`` stands for: of a run folder the checkpoint or model to take, else itself.

    It is the newest one, that of iteration ``step``, or the ``best`` validated one of those that are there.
    Where both are there it is the checkpoint, which has float32 weights and adapters that are not merged, or
    with ``as_model`` the model, which the run publishes. ``role`` None: whichever model the run trains.

    Raises ``CheckpointError`` if the run has none such, or ``path`` is no run folder although one is chosen.
    """
    there = {saved: path / name_of(saved) for saved in saved_steps(path)}
    newest, final = latest_checkpoint(path), path / FINAL_MODEL
    if role != "critic" and newest_model(path) == final:
        iteration = iteration_of(final) or -1
        saved = there.get(iteration)
        if saved is None or (as_model and (role is None or (saved / role).is_dir())):
            there[iteration] = newest = final
    if step is None and not best:
        return newest or path
    if not there:
        raise CheckpointError(f"{path} has no checkpoints to choose from; name a run folder")
    chosen = best_step(path, there) if best else step
    if chosen not in there:
        wanted = f"iteration {step}" if chosen is not None else "an iteration that was validated"
        raise CheckpointError(
            f"{path} has no checkpoint of {wanted}; it has those of {', '.join(map(str, sorted(there)))}"
        )
    return there[chosen]


def source_of_export(
    path: Path, *, role: str, dtype: str | None, merge: bool, step: int | None = None, best: bool = False
) -> Path:
    """Return what ``strop export`` takes of ``path``, see ``source_in``: the model that the run publishes.

    Another ``dtype`` is made of the float32 weights of the checkpoint, unless that has an adapter alone
    (``lora_merge``), and ``merge`` needs the adapter.
    """
    published = source_in(path, role=role, step=step, best=best, as_model=True)
    saved = source_in(path, role=role, step=step, best=best)
    is_merged = not merge and is_adapter(saved / role / "huggingface")
    return published if is_merged or not (dtype or merge) else saved


def auto_class(folder: Path) -> str:
    """Return the class of transformers that loads a folder with a model, or with an adapter of one."""
    found = architecture_of(folder)
    adapter = read_json(folder / ADAPTER_CONFIG)
    if "task_type" in adapter:
        found, base = str(adapter["task_type"]), adapter.get("base_model_name_or_path")
        if found != "SEQ_CLS" and base and Path(base).is_dir():
            return auto_class(Path(base))
    if found.endswith("ForSequenceClassification") or found == "SEQ_CLS":
        return "AutoModelForSequenceClassification"
    reads_pictures = found.endswith("ForConditionalGeneration")
    return "AutoModelForImageTextToText" if reads_pictures else "AutoModelForCausalLM"


def defined_by_strop(folder: Path) -> bool:
    """Return True if transformers has no class for the scorer in a folder; see ``strop docs models``."""
    if not (found := architecture_of(folder)).endswith("ForSequenceClassification"):
        return False
    import transformers  # takes a second

    return found not in dir(transformers)


def architecture_of(folder: Path) -> str:
    """Return the class that the configuration in a folder names; "" if there is none."""
    names = read_json(folder / "config.json").get("architectures")
    return str(names[0]) if names and isinstance(names, list) else ""


def model_in(path: Path, *, step: int | None = None, best: bool = False) -> Path:
    """Return the Hugging Face folder of a run folder or checkpoint; see ``source_in``.

    Any other path is returned. Raises ``CheckpointError`` if the model is in shards.
    """
    source = source_in(path, role=None, step=step, best=best, as_model=True)
    exported = [folder / "huggingface" for folder in source.glob("*") if folder.name != "critic"]
    model = next(filter(Path.is_dir, exported), source)
    if model != source and not has_weights(model):
        raise CheckpointError(
            f"{source} was saved in the background, as shards (trainer.async_save): make a model of it "
            f"by strop export {shlex.quote(str(source))} --out FOLDER"
        )
    return model


def has_weights(folder: Path) -> bool:
    """Return True for a folder with weights in safetensors; a background save leaves one without."""
    return any(folder.glob("*.safetensors"))


def require_own_files(model: Path) -> None:
    """Raise ``CheckpointError`` for a link in a model's folder that leads outside.

    Links of the hub's cache lead from ``snapshots/REVISION`` to ``blobs``.
    """
    home = model.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for path in model.rglob("*"):
        target = path.resolve()
        if path.is_symlink() and not any(map(target.is_relative_to, (home, blobs))):
            raise CheckpointError(
                f"{path} is a link to {target}, outside of the model: a copy would have its content. "
                "Remove the link, or put the file itself there"
            )


def verify(checkpoint: Path) -> Manifest:
    """Return the manifest; raise ``CheckpointError`` unless every file of it is there with its size.

    Digests are compared by whoever reads a file: the processes of a role share theirs.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} is no folder; expected a global_step_N folder{runs_near(checkpoint)}"
        )
    path = checkpoint / MANIFEST
    found = parse_manifest(path.read_bytes(), str(checkpoint)) if path.is_file() else None
    if found is None:
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint: it has no whole {MANIFEST} (a save was cut off, or it "
            "is another kind of folder); give a global_step_N folder"
        )
    manifest.require_sizes(str(checkpoint), found, manifest.sizes(checkpoint, found))
    return found


def building_folder(folder: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of iteration ``step`` is written."""
    return folder / f"{name_of(step)}.tmp"


def publish(folder: Path, step: int) -> Path:
    """Rename a sealed checkpoint and make it the latest; return its folder. Idempotent after an interrupt."""
    final, stale = folder / name_of(step), folder / f"{name_of(step)}.old"
    if not is_renamed(folder, step):
        if final.exists():  # repeated after a resume from an earlier checkpoint
            shutil.rmtree(stale, ignore_errors=True)
            final.rename(stale)
        crash_point("rename", step)
        building_folder(folder, step).rename(final)
    crash_point("latest", step)
    make_latest(folder, step)
    shutil.rmtree(stale, ignore_errors=True)
    return final


def make_latest(folder: Path, step: int) -> None:
    """Record ``step`` as the one to resume from."""
    atomic_write_text(folder / LATEST, f"{step}\n")
    force_to_disk(folder)


def remove_unfinished(folder: Path) -> None:
    """Delete folders left by a save that was cancelled or killed while writing or replacing a checkpoint."""
    for path in folder.glob(f"{_PREFIX}*"):
        if path.suffix == ".tmp" or (path.suffix == ".old" and path.with_suffix("").exists()):
            shutil.rmtree(path, ignore_errors=True)


def is_renamed(folder: Path, step: int) -> bool:
    """Return True if ``publish`` has already renamed the checkpoint of iteration ``step``."""
    return (folder / name_of(step)).exists() and not building_folder(folder, step).exists()


def latest_step(folder: Path) -> int | None:
    """Return the iteration of the latest checkpoint; None when there is none.

    It is the newest whole one if no file names it: checkpoints may have been copied alone.
    """
    try:
        return int((folder / LATEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        whole = [step for step in saved_steps(folder) if (folder / name_of(step) / MANIFEST).is_file()]
        return max(whole, default=None)
    except ValueError as error:
        raise CheckpointError(
            f"{folder / LATEST} does not hold a number; write the iteration of a whole checkpoint "
            "into it, or set trainer.resume_mode=disable"
        ) from error


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the latest checkpoint of a run folder; undo the first of two renames if the run died between."""
    step = latest_step(folder)
    if step is None:
        return None
    final, stale = folder / name_of(step), folder / f"{name_of(step)}.old"
    if stale.exists() and not final.exists():  # died between two renames
        stale.rename(final)
    return final


def best_step(folder: Path, steps: Collection[int]) -> int | None:
    """Return the one of ``steps`` of a run with the best validation; None if none of them has one.

    It is by the mean of ``val/test_score/*`` over data sources, else by ``val/accuracy`` or ``val/loss``.
    """
    scores, file = {}, folder / METRICS_FILE
    for metrics in read_metrics(file) if file.is_file() else ():
        if metrics["step"] not in steps:
            continue
        found = [value for name, value in metrics.items() if name.startswith(VALIDATION_PREFIX)]
        if found:
            scores[metrics["step"]] = sum(found) / len(found)
        elif "val/loss" in metrics:
            scores[metrics["step"]] = metrics.get("val/accuracy", -metrics["val/loss"])
    return max(scores, key=lambda step: (scores[step], step), default=None)


def newest_model(folder: Path) -> Path | None:
    """Return the ``final_model`` or latest checkpoint of a run folder, whichever is of the later iteration.

    None if it has neither. A ``final_model`` that does not say its iteration counts only without checkpoints.
    """
    saved, final = latest_step(folder), folder / FINAL_MODEL
    if final.is_dir() and (saved is None or (iteration_of(final) or -1) >= saved):
        return final
    return latest_checkpoint(folder)


def holds_run(folder: Path) -> str | None:
    """Return the name of what a run has written to ``folder``, for a message; None if there is nothing."""
    names = (METRICS_FILE, LATEST, FINAL_MODEL, *map(name_of, saved_steps(folder)), "config.yaml")
    return next((name for name in names if (folder / name).exists()), None)


def iteration_of(source: Path) -> int | None:
    """Return the iteration of a checkpoint, by its name, or of a ``final_model``; None if it is not known."""
    if steps := steps_in([source.name]):
        return steps[0]
    return read_json(source / TRAINER_STATE).get("global_step")


def saved_steps(folder: Path) -> list[int]:
    """Return the iterations of all published checkpoint folders, in order, without verifying them."""
    return sorted(steps_in(path.name for path in folder.glob(f"{_PREFIX}*")))


def name_of(step: int) -> str:
    """Return the name of the checkpoint folder of an iteration."""
    return f"{_PREFIX}{step}"


def steps_in(names: Iterable[str]) -> list[int]:
    """Return the iterations of the names that are those of checkpoint folders."""
    numbers = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
    return [int(number) for number in numbers if number.isascii() and number.isdecimal()]

"""Publish a trained model on the Hugging Face hub: at the end of a run, or later by ``strop export``.

``hub.json`` of the run folder has the repository and the branch, so that a resume publishes to the same, and
after the upload the commit.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from huggingface_hub import CommitOperationAdd, HfApi, constants

from strop.checkpoint.folder import (
    has_weights,
    iteration_of,
    latest_checkpoint,
    require_own_files,
)
from strop.checkpoint.model_card import model_card
from strop.config.paths import expand, is_adapter, is_url
from strop.config.schema import RootConfig
from strop.errors import CheckpointError, ConfigError, UploadError, raised_as
from strop.files import atomic_write_text, read_json
from strop.tracking.curves import CURVES_FILE

HUB_FILE = "hub.json"


@dataclass(frozen=True)
class Publication:
    """Place of a model on the hub."""

    repo_id: str
    """owner/name"""
    revision: str
    """A branch."""
    step: int | None = None
    """Iterations of the model that was uploaded; None before."""
    commit: str | None = None

    @property
    def url(self) -> str:
        """The page of the branch."""
        return f"{constants.ENDPOINT}/{self.repo_id}/tree/{self.revision}"

    @classmethod
    def read(cls, run_folder: Path) -> Self | None:
        """Return what ``hub.json`` in ``run_folder`` says; None if there is none that can be read."""
        found = read_json(run_folder / HUB_FILE)
        with contextlib.suppress(KeyError):
            return cls(found["repo_id"], found["revision"], found["step"], found["commit"])
        return None

    def write(self, run_folder: Path) -> None:
        """Write ``hub.json``."""
        atomic_write_text(
            run_folder / HUB_FILE, json.dumps({**asdict(self), "url": self.url}, indent=2) + "\n"
        )


def open_publication(config: RootConfig) -> Publication | None:
    """Create or find the repository and the branch of a run; None for a run that does not publish.

    A run whose folder has an unfinished publication goes on with its branch. Raises ``ConfigError`` if the
    hub refuses: before hours of training, not after them.
    """
    settings = config.trainer
    if not settings.push_to_hub or settings.val_only:
        return None
    folder = Path(expand(settings.default_local_dir))
    known = Publication.read(folder) if settings.resume_mode != "disable" else None
    if known is not None and known.commit is not None and latest_checkpoint(folder) is None:
        known = None  # that run is finished, and without checkpoints this one starts from the beginning
    api = HfApi()
    name = settings.hub_repo_id or settings.experiment_name
    with _refusals_named("trainer.hub_repo_id", name):
        repo_id = api.get_full_repo_name(name) if "/" not in name else name
        revision = settings.hub_revision or (
            known.revision if known is not None and known.repo_id == repo_id else _new_revision(config)
        )
        create(api, repo_id, revision, private=settings.hub_private)
    if known is not None and (known.repo_id, known.revision) == (repo_id, revision):
        return known
    return Publication(repo_id, revision)


def _new_revision(config: RootConfig) -> str:
    settings = config.trainer
    experiment = re.sub(r"[^\w.-]+|\.\.+", "-", settings.experiment_name, flags=re.ASCII).strip("-.")
    return f"{experiment or 'strop'}__{settings.seed}__{int(time.time())}"


def create(api: HfApi, repo_id: str, revision: str, *, private: bool) -> None:
    """Create the repository and the branch where they do not exist."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision != constants.DEFAULT_REVISION:
        # Also the test whether the token may write to a repository that exists.
        api.create_branch(repo_id, branch=revision, exist_ok=True)


def _refusals_named(key: str, name: str) -> contextlib.AbstractContextManager[None]:
    return raised_as(
        ConfigError,
        f"{key}={name}: the Hugging Face hub ({constants.ENDPOINT}) does not let this run write there",
        remedy="check the name, the token (`hf auth whoami`) and the network, or train with "
        "trainer.push_to_hub=False and upload later with `strop export RUN --push OWNER/NAME`",
    )


def upload(model: Path, to: Publication, *, run_folder: Path | None, step: int | None) -> Publication:
    """Upload a Hugging Face folder with its model card in one commit; return the publication with the commit.

    ``run_folder`` has the configuration, metrics and curves for the card; None: a card without them.
    Raises ``UploadError``, and ``CheckpointError`` for a link out of the folder.
    """
    require_own_files(model)
    card = model_card(model, to.repo_id, to.revision, run_folder=run_folder, step=step)
    files: dict[str, Any] = {
        path.relative_to(model).as_posix(): path for path in sorted(model.rglob("*")) if path.is_file()
    }
    if run_folder is not None and (run_folder / CURVES_FILE).is_file():
        files[CURVES_FILE] = run_folder / CURVES_FILE
    files["README.md"] = card.encode()
    with raised_as(UploadError, f"the model could not be uploaded to {to.repo_id}, branch {to.revision}"):
        commit = HfApi().create_commit(
            to.repo_id,
            [CommitOperationAdd(name, content) for name, content in files.items()],
            commit_message="Upload the model" if step is None else f"Upload the model of iteration {step}",
            revision=to.revision,
        )
    return replace(to, step=step, commit=commit.oid)


@contextlib.contextmanager
def model_of(
    source: str | Path, *, role: str, dtype: str | None = None
) -> Generator[tuple[Path, int | None]]:
    """Yield the Hugging Face folder to upload and its iteration, of a checkpoint or of such a folder.

    Weights that are only in shards, in a URL or in another dtype are exported to a temporary folder.
    """
    if not is_url(source):
        source = Path(expand(source)).absolute()
        if dtype is None and ((source / "config.json").is_file() or is_adapter(source)):
            yield source, iteration_of(source)
            return
    step = iteration_of(Path(source))
    exported = None if is_url(source) else Path(source) / role / "huggingface"
    if dtype is None and exported is not None and has_weights(exported):
        yield exported, step
        return
    parent = None if is_url(source) else Path(source).parent
    if parent is not None and not parent.is_dir():
        raise CheckpointError(f"{source}: no such folder; name a run folder or a global_step_N folder")
    from strop.checkpoint.export import export  # torch

    with tempfile.TemporaryDirectory(prefix=".upload-", dir=parent) as scratch:
        yield export(source, Path(scratch) / "model", role=role, dtype=dtype), step


def run_folder_of(source: str | Path) -> Path | None:
    """Return the run folder that holds ``source`` or is it; None if there is none on this machine."""
    if is_url(source):
        return None
    path = Path(expand(source)).absolute()
    return next((folder for folder in (path, path.parent) if (folder / "config.yaml").is_file()), None)


def push(
    source: str | Path,
    *,
    role: str,
    repo_id: str | None,
    revision: str | None,
    private: bool,
    dtype: str | None = None,
    model: Path | None = None,
) -> Publication:
    """Upload the model of a checkpoint or a run folder: ``strop export --push``.

    ``repo_id`` and ``revision`` None: those of the run's ``hub.json``, else an error and ``main``. ``model``
    is the Hugging Face folder if it was exported before. Raises ``ConfigError`` and ``UploadError``.
    """
    folder = run_folder_of(source)
    known = None if folder is None else Publication.read(folder)
    if repo_id is None and known is None:
        raise ConfigError(f"--push: {source} has no {HUB_FILE}, so name the repository: --push OWNER/NAME")
    api, given = HfApi(), repo_id or (known.repo_id if known else "")
    with _refusals_named("--push", given):
        repo_id = given if "/" in given else api.get_full_repo_name(given)
        if revision is None:
            revision = known.revision if known is not None and known.repo_id == repo_id else "main"
        create(api, repo_id, revision, private=private)
    to = Publication(repo_id, revision)
    opened = (
        model_of(source, role=role, dtype=dtype)
        if model is None
        else contextlib.nullcontext((model, iteration_of(Path(source))))
    )
    with opened as (found, step):
        done = upload(found, to, run_folder=folder, step=step)
    if folder is not None and known is not None and (known.repo_id, known.revision) == (repo_id, revision):
        done.write(folder)
    return done


def command_to_repeat(source: Path, to: Publication, role: str) -> str:
    """Return the command that uploads the model of a checkpoint or of an exported folder again."""
    words = ["strop", "export", str(source), "--push", to.repo_id, "--revision", to.revision]
    return shlex.join(words if role == "actor" else [*words, "--role", role])

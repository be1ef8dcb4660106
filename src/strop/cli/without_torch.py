"""A process that reads what it can of a run without torch, whose import takes seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.config.identity import named_files
from strop.config.keys import all_keys, value_at
from strop.config.memory.facts import read_model_facts
from strop.config.paths import gguf_files
from strop.config.schema import RootConfig

_IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+\.?(\w+)", re.MULTILINE)
_USES_TORCH = re.compile(r"\b(torch|transformers|peft|trl|accelerate|sentence_transformers|datasets)\b")


def needs_torch(config: RootConfig) -> bool:
    """Return True if a user's file names torch, a model has code, or is in a GGUF file, whose reader does.

    Also for a model that reads pictures where torchvision is there: its image processor is another one then.
    """
    keys = all_keys(type(config))
    if importlib.util.find_spec("torchvision") is not None:
        facts = [read_model_facts(str(value_at(config, key))) for key in keys if key.endswith("model.path")]
        if any(found is not None and found.encoder is not None for found in facts):
            return True
    if any(value_at(config, key) for key in keys if key.endswith(("trust_remote_code", "external_lib"))):
        return True
    named = [str(value_at(config, key)) for key, facts in keys.items() if facts.names_files]
    if any("gguf" in name.lower() for name in named):  # on the hub, too
        return True
    found = named_files(config.model_dump(mode="json"), config)
    files = [Path(file) for files in found.values() for file in files]
    codes = _codes(file for file in files if file.suffix == ".py" and file.is_file())
    return any(map(_USES_TORCH.search, codes)) or any(
        not (folder / "config.json").is_file() and gguf_files(folder) for folder in files
    )


def _codes(files: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of Python files, and of those beside them that they import."""
    waiting, seen = [*files], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        yield (code := file.read_text(errors="replace"))
        beside = (file.parent / f"{name}.py" for name in _IMPORTED.findall(code))
        waiting += [one for one in beside if one.is_file()]


class _LazyTorch(ModuleType):
    """Stands for torch until a name of it is used; ``importlib.util.LazyLoader`` ends at the next import."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__wrapped__"):  # inspect asks all modules
            raise AttributeError(name)
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]
        return getattr(importlib.import_module("torch"), name)


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Generator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def leave_out_torch() -> None:
    """Import torch when it is first used, and transformers as if it were missing.

    Tokenizers and configurations are left of transformers. This process can load no model from then on.
    """
    if not {"torch", "transformers"}.isdisjoint(sys.modules):
        return
    sys.modules["torch"] = None  # ty: ignore[invalid-assignment] - the documented sign of a missing module
    # "PyTorch was not found", now and where the processor of a model with pictures is imported
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        # reads the files of every installed package, for those whose import has another name
        with _replaced(importlib.metadata, "packages_distributions", dict):
            from transformers.utils import import_utils
        import_utils.is_torch_available()  # cached
        # reads the files of all models, for names that the import of transformers has found in them
        with _replaced(import_utils, "define_import_structure", lambda _: {}):
            importlib.import_module("transformers.models")
    finally:
        del sys.modules["torch"]
    spec = importlib.util.find_spec("torch")
    sys.modules["torch"] = _LazyTorch("torch")
    sys.modules["torch"].__spec__ = spec

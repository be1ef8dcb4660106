"""Log-probs of the reference model, computed once per pair and kept in the run folder.

The reference is the model that training starts from, so no second model is held. A file has two float32
numbers for each row of a data set, NaN where they were not needed, and in its metadata the hashes of the
model that computed them, of the rows, and of the numbers.

Shapes: N rows of a data set.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from strop.algorithms.preference import REFERENCE_INPUTS
from strop.data.answers import AnsweredDataset
from strop.data.rl_dataset import pictures_digest
from strop.files import atomic_path
from strop.manifest import digest_of_arrays

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

FOLDER = "reference_log_probs"
"""Name of the files' folder in the run folder."""


class Reference(NamedTuple):
    """The reference's log-probs of a data set's N rows."""

    model: str
    """Hash of the model."""
    rows: str
    """Hash of the rows' tokens and pictures."""
    columns: dict[str, Tensor]
    """``REFERENCE_INPUTS`` -> float32 [N], NaN where not computed."""

    def save(self, path: Path) -> None:
        """Write the file, replacing an earlier one in one step."""
        with atomic_path(path) as temporary:
            content = {"model": self.model, "rows": self.rows, "digest": _digest(self.columns)}
            from safetensors.torch import save

            temporary.write_bytes(save(self.columns, metadata=content))  # its errors name disk and file


def load(path: Path, *, model: str, rows: str) -> Reference | None:
    """Return what ``save`` wrote; None if there is no such file, or one of another model or other rows."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in REFERENCE_INPUTS}
        if any(column.dtype != torch.float32 for column in columns.values()):
            raise ValueError("its dtype is not float32")
        if found.get("digest") != _digest(columns):
            raise ValueError("its content is not what was written")
    except (OSError, ValueError, SafetensorError) as error:
        logger.warning("warning: %s cannot be read (%s): its log-probs are computed again", path, error)
        return None
    if (found.get("model"), found.get("rows")) != (model, rows):
        what = "other pairs" if found.get("model") == model else "another model"
        logger.info("%s is of %s: the reference's log-probs are computed again", path, what)
        return None
    return Reference(model, rows, columns)


def _digest(columns: dict[str, Tensor]) -> str:
    return digest_of_arrays({name: column.numpy() for name, column in columns.items()})


def complete(
    reference: Reference, needed: Iterable[int], infer: Callable[[Sequence[int]], Iterable[dict[str, Tensor]]]
) -> int:
    """Compute the log-probs of the ``needed`` rows that are not known, in place; return their number.

    ``infer`` yields ``REFERENCE_INPUTS`` of some rows, batch by batch in their order.
    """
    known_N = torch.stack([*reference.columns.values()]).isfinite().all(dim=0)
    missing, done = [row for row in sorted(set(needed)) if not known_N[row]], 0
    for figures in infer(missing) if missing else ():
        part = missing[done : done + len(next(iter(figures.values())))]
        for name, figure in figures.items():
            reference.columns[name][part] = figure.float()
        done += len(part)
    return done


def rows_hash(dataset: AnsweredDataset) -> str:
    """Return SHA-256 over token ids and pictures of all rows, as they are trained on."""
    whole = hashlib.sha256((pictures_digest(dataset) or "").encode())
    for row in range(len(dataset)):
        fields = dataset[row]
        for name in ("input_ids", "chosen", "rejected"):
            # little-endian on every machine
            ids = fields[name].numpy().astype("<i8")
            # with lengths: [1, 2], [3] must not hash as [1], [2, 3]
            whole.update(np.int64(len(ids)).astype("<i8").tobytes() + ids.tobytes())
    return whole.hexdigest()

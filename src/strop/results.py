"""``Run`` and ``Evaluation``: what a run and an evaluation have written, read from their folders."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from strop.errors import did_you_mean


class Table(list[dict[str, Any]]):
    """Rows as dicts; ``table["name"]`` is a column, a list with None where a row has no such value."""

    def __getitem__(self, index: Any) -> Any:
        """Return a row by its number, a slice of rows, or a column by its name (``KeyError``)."""
        if not isinstance(index, str):
            found = super().__getitem__(index)
            return Table(found) if isinstance(index, slice) else found
        if not any(index in row for row in self):
            raise KeyError(f"{index}{did_you_mean(index, {name for row in self for name in row})}")
        return [row.get(index) for row in self]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a table has no {name!r}; to_pandas() makes a data frame of it, as 0.1.0 returned"
        )

    def to_pandas(self) -> Any:
        """Return a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(list(self))

    def __repr__(self) -> str:
        return repr(self.to_pandas()) if _has_pandas() else super().__repr__()

    def _repr_html_(self) -> str | None:
        return self.to_pandas()._repr_html_() if _has_pandas() else None


def _has_pandas() -> bool:
    return importlib.util.find_spec("pandas") is not None


class Run:
    """The folder of a run, as ``strop.train`` returns it, or ``strop.Run("runs/mine")`` opens it.

    A notebook shows a run as its curves.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()

    @property
    def metrics(self) -> Table:
        """One row for each iteration, in order: ``step`` and the metrics of ``strop docs metrics``."""
        from strop.tracking.jsonl import METRICS_FILE, read_metrics

        return Table(read_metrics(self.folder / METRICS_FILE))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return ``metrics``."""
        return self.metrics

    @property
    def samples(self) -> Table:
        """The samples of the last recorded iteration: ``prompt``, ``response``, ``score`` and others."""
        return self.samples_of()

    def samples_of(self, step: int | None = None, *, validation: bool = False) -> Table:
        """Return the samples of an iteration, None: the last that has a file; or those of a validation.

        The table of a run that generates nothing is empty. Raises ``DataError`` for a step without a file.
        """
        from strop.tracking.samples import find_step, step_file

        folder = self.folder / ("validation" if validation else "rollouts")
        found = find_step(folder, step)
        return Table() if found is None else _samples(step_file(folder, found))

    @property
    def curves(self) -> Path | None:
        """The picture of the main metrics; None if there is none."""
        file = self.folder / "curves.png"
        return file if file.is_file() else None

    @property
    def model_path(self) -> Path:
        """The folder of the trained model, which transformers, ``strop.evaluate`` and vLLM can load.

        It is that of the latest iteration that was saved. Raises ``CheckpointError`` if there is none yet, or
        if it is in shards.
        """
        return self.model_at()

    def model_at(self, step: int | None = None, *, best: bool = False) -> Path:
        """Return the folder of the model of iteration ``step``, or of the ``best`` validated one.

        Of those that were saved; without either, ``model_path``. Raises ``CheckpointError``.
        """
        from strop.checkpoint.folder import model_in, newest_model
        from strop.errors import CheckpointError

        if newest_model(self.folder) is None:
            raise CheckpointError(
                f"{self.folder} has no trained model: a run saves it at its end, and with every checkpoint"
            )
        return model_in(self.folder, step=step, best=best)

    def model(self) -> tuple[Any, Any]:
        """Return the trained model, on the CPU, and its tokenizer.

        That of ``strop.train_rm`` has its score head, and LoRA adapters are merged into their base model.
        """
        from strop.checkpoint.export import merge_adapter
        from strop.checkpoint.folder import auto_class
        from strop.config.paths import is_adapter
        from strop.models.folder import load_tokenizer
        from strop.models.loader import load_causal_lm, load_scorer

        folder = trained = self.model_path
        scores = auto_class(folder) == "AutoModelForSequenceClassification"
        # /tmp may not hold the weights
        room = self.folder if os.access(self.folder, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=room) as scratch:
            if is_adapter(folder):
                merge_adapter(folder, merged := Path(scratch) / "model", "float32")
                folder = merged
            model = load_scorer(folder, fresh_head_seed=None) if scores else load_causal_lm(folder)
            model.config.name_or_path = str(trained)
            return model, load_tokenizer(trained)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _repr_png_(self) -> bytes | None:
        return self.curves.read_bytes() if self.curves else None


class Evaluation:
    """The figures of ``strop.evaluate``, and its folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()

    @property
    def results(self) -> dict[str, Any]:
        """The content of ``results.json``: model, sampling, and statistics with intervals by data source."""
        return json.loads((self.folder / "results.json").read_bytes())

    @property
    def scores(self) -> dict[str, float]:
        """Mean score by data source."""
        found = self.results
        return {
            name: source["scores"][f"mean@{found['n']}"]["value"] for name, source in found["sources"].items()
        }

    @property
    def samples(self) -> Table:
        """All answers: ``prompt``, ``response``, ``score`` and further columns."""
        return _samples(self.folder / "samples.parquet")

    def __repr__(self) -> str:
        return f"Evaluation({str(self.folder)!r}, scores={self.scores})"


def _samples(file: Path) -> Table:
    import pyarrow.parquet as pq

    return Table(pq.read_table(file).to_pylist())

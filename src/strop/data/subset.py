"""Parts of a data set."""

from __future__ import annotations

from collections import Counter
from typing import Any

from strop.data.loader import RowDataset


class FirstRows:
    """The first ``limit`` rows of ``dataset``, or all where there are fewer."""

    def __init__(self, dataset: RowDataset, limit: int) -> None:
        self.dataset = dataset
        self._length = min(limit, len(dataset))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.dataset[row]

    def data_sources(self) -> set[str]:
        """Those of ``dataset``."""
        return self.dataset.data_sources()


class FirstOfEachSource:
    """The first ``limit`` rows of every data source, in the order of ``dataset``."""

    def __init__(self, dataset: RowDataset, limit: int) -> None:
        self.dataset = dataset
        self._rows: list[int] = []
        taken: Counter[str] = Counter()
        for row in range(len(dataset)):
            source = dataset[row]["data_source"]
            taken[source] += 1
            if taken[source] <= limit:
                self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.dataset[self._rows[row]]

    def data_sources(self) -> set[str]:
        """Those of ``dataset``."""
        return self.dataset.data_sources()


def all_rows(dataset: RowDataset) -> RowDataset:
    """The data set that ``dataset`` is a part of, or ``dataset`` itself."""
    while isinstance(dataset, FirstRows | FirstOfEachSource):
        dataset = dataset.dataset
    return dataset

"""The pictures of a table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strop.data.pictures.expand import PromptPictures, load_processor
from strop.data.prompt_table import PromptTable
from strop.errors import DataError


def pictures_of(
    table: PromptTable,
    tokenizer: Any,
    *,
    prompt_key: str,
    truncation: str,
    filter_key: str,
    processor: Any = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_images: int | None = None,
) -> PromptPictures | None:
    """Return the pictures of all rows; None if no row has any.

    ``processor`` may be a folder, by default the tokenizer's. Raises :class:`DataError` where model or
    settings allow none, and for the first row with more than ``max_images``.
    """
    if (images := table.images) is None:
        return None
    if truncation != "error":
        raise DataError(
            f"data.truncation={truncation} cuts prompts, and a picture cannot be cut: leave it at error, and "
            f"drop longer prompts with {filter_key}=True"
        )
    name = tokenizer.name_or_path
    if processor is None or isinstance(processor, str | Path):
        name = processor or name
        processor = load_processor(name, tokenizer, min_pixels=min_pixels, max_pixels=max_pixels)
    counts = [len(row) for row in images]
    if processor is None:
        first = next(row for row, count in enumerate(counts) if count)
        raise table.error(
            first,
            prompt_key,
            f"the row has {counts[first]} pictures, and the model in {name} is of text alone: use a model of "
            "images and text, or a data set without pictures",
        )
    width = max(counts) if max_images is None else max_images
    for row, count in enumerate(counts):
        if count > width:
            raise table.error(row, "images", f"the row has {count} pictures, data.max_images is {max_images}")
    columns = np.zeros((len(images), width), dtype=np.int64)
    for row, own in enumerate(images):
        columns[row, : len(own)] = own
    return PromptPictures(processor, images, columns)


def check_first(pictures: PromptPictures, table: PromptTable, sources: Sequence[Any]) -> None:
    """Decode the pictures of the first row of each data source that has some."""
    first: dict[Any, int] = {}
    for row, source in enumerate(sources):
        if pictures.images[row] and source not in first:
            first[source] = row
            name, number = table.locate(row)
            pictures.check(pictures.images[row], f"{name}, row {number}")

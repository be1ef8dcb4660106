"""What the columns of prompt files must be for their rows to be scored. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strop.data.parquet import Files, PromptTable, read_part_of_prompt_table
from strop.errors import DataError

UNNAMED_SOURCE = "unnamed"
"""The data source of rows whose files have no such column: only a reward of one's own can score them."""

# Columns that a batch makes itself; a file that brings them would be overwritten without a word.
_RESERVED = ("input_ids", "attention_mask", "position_ids", "raw_prompt", "raw_prompt_ids", "uid", "seeds")
_TARGET = "reward_model"
_ROW = "row number"


def read_scoring_columns(files: Files, *, prompt_key: str, reward_fn_key: str) -> PromptTable:
    """What the checks below have to see of local files: columns that are well by the footer stay unread."""

    def wanted(file: pq.ParquetFile) -> set[str]:
        schema = file.schema_arrow
        names = {reward_fn_key}
        if "extra_info" in schema.names and not pa.types.is_struct(schema.field("extra_info").type):
            names.add("extra_info")
        if _TARGET in schema.names and not _has_all_ground_truths(file):
            names.add(_TARGET)
        return names

    return read_part_of_prompt_table(files, prompt_key=prompt_key, wanted=wanted)


def _has_all_ground_truths(file: pq.ParquetFile) -> bool:
    """Whether the footer says so."""
    kind, metadata = file.schema_arrow.field(_TARGET).type, file.metadata
    if not pa.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
        return False
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    leaves = [n for n, path in enumerate(paths) if f"{path}.".startswith(f"{_TARGET}.ground_truth.")]
    statistics = [
        metadata.row_group(group).column(leaf).statistics
        for group in range(metadata.num_row_groups)
        for leaf in leaves
    ]
    return all(found is not None and found.has_null_count and found.null_count == 0 for found in statistics)


def check_columns(table: PromptTable, prompt_key: str, reward_fn_key: str) -> None:
    """Reject names that clash with a batch's own, and columns that the rewards could not use."""
    clashes = [name for name in _RESERVED if name in table.names and name != prompt_key]
    if clashes:
        raise DataError(
            f"{', '.join(table.files)}: the columns {clashes} have names that a batch uses; rename them"
        )
    _check_column(table, reward_fn_key, "a string", is_string)
    _check_column(table, _TARGET, "a record {style, ground_truth}", pa.types.is_struct)
    _check_column(table, "extra_info", "a record or null", pa.types.is_struct, nulls=True)


def sources_of(table: PromptTable, reward_fn_key: str) -> set[str]:
    """The values of the column that says how a row is scored."""
    if reward_fn_key not in table.names:
        return {UNNAMED_SOURCE}
    return set(table.table.column(reward_fn_key).unique().to_pylist())


def no_sources(table: PromptTable, reward_fn_key: str) -> DataError:
    """The error for files without that column, where it is needed."""
    return DataError(
        f"{', '.join(table.files)}: there is no column {reward_fn_key!r} (data.reward_fn_key), which says "
        f"how a row is scored; found {list(table.names)}. Add the column, name another one, or score all "
        "rows with a function of your own (custom_reward_function.path)"
    )


def require_ground_truths(
    table: PromptTable, reward_fn_key: str, sources: Collection[str], *, by_model: bool
) -> None:
    """Every row of these ``sources`` has ``reward_model.ground_truth``, which their scorers compare with.

    With ``by_model``, rows that ask for the reward model (``reward_model.style`` is "model") need none.

    Raises :class:`DataError` naming file, row and field of the first that has none.
    """
    if not sources or reward_fn_key not in table.names:
        return
    rows = _numbered(table, reward_fn_key).filter(pc.field(reward_fn_key).isin(sorted(sources)))
    if not rows:
        return
    if missing := table.files_without(_TARGET):
        raise DataError(
            f"{missing[0]}: there is no column {_TARGET!r}; found {list(table.names)}. Expected a record "
            "{style, ground_truth}: " + _who_needs_it(sources)
        )
    if _TARGET not in rows.column_names:  # nothing that could be missing: it was not even read
        return
    fields = {field.name for field in rows.schema.field(_TARGET).type}
    problem = f"found only the fields {sorted(fields)}"
    if "ground_truth" in fields:
        problem = "found null"
        rows = rows.filter(pc.field(_TARGET, "ground_truth").is_null())
    if by_model and "style" in fields:
        style = pc.field(_TARGET, "style")
        rows = rows.filter(style.is_null() | (style != "model"))
    if rows:
        source = rows[reward_fn_key][0].as_py()
        raise table.error(
            rows[_ROW][0].as_py(),
            f"{_TARGET}.ground_truth",
            f"{problem}, expected the answer: {_who_needs_it([source])}",
        )


def _numbered(table: PromptTable, reward_fn_key: str) -> pa.Table:
    """What says how rows are scored, with the rows' numbers."""
    sources = table.table.column(reward_fn_key).cast(pa.large_string())
    columns = {reward_fn_key: sources, _ROW: pa.array(np.arange(len(table)))}
    if _TARGET in table.table.column_names:
        columns[_TARGET] = table.table.column(_TARGET)
    return pa.table(columns)


def is_string(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _who_needs_it(sources: Collection[str]) -> str:
    return f"the built-in scorer of data_source {', '.join(map(repr, sorted(sources)))} compares with it"


def _check_column(
    table: PromptTable, name: str, expected: str, fits: Callable[[pa.DataType], bool], nulls: bool = False
) -> None:
    """Arrow gives all rows one type: the first value shows a wrong one, and else only nulls are wrong."""
    if name not in table.table.column_names:
        return
    column = table.table.column(name)
    if column.null_count and not nulls:
        if missing := table.files_without(name):
            raise DataError(f"{missing[0]}: there is no column {name!r}, which the other files have")
        row = pc.index(column.is_null(), True).as_py()
        raise table.error(row, name, f"expected {expected}, found null")
    if not fits(column.type) and column.null_count < len(column):
        row = pc.index(column.is_valid(), True).as_py()
        value = column[row].as_py()
        raise table.error(row, name, f"expected {expected}, found {type(value).__name__} {value!r:.60}")

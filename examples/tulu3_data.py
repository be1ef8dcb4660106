"""Write the training files of tulu3_ppo_8b.yaml from allenai/RLVR-GSM-MATH-IF-Mixed-Constraints.

Records have `messages`, `ground_truth` and `dataset` (gsm8k, MATH, ifeval). Rows of gsm8k and MATH get the
data sources that strop scores. Rows with constraints (ifeval) need a scorer of your own, so they are left out
unless --all keeps them, as data source `ifeval`; set custom_reward_function.path then. The first 16 rows of
each data source become the validation file.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strop.prepare.maths import GSM8K, MATH
from strop.prepare.source import make_row, read_source

ON_HUB = "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints"
SCORED = {"gsm8k": GSM8K, "math": MATH}
VALIDATION_ROWS = 16


def convert(record: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the row of a record."""
    kind = record["dataset"].lower()
    return make_row(
        data_source=SCORED.get(kind, kind),
        prompt=[{name: message[name] for name in ("role", "content")} for message in record["messages"]],
        ability="math" if kind in SCORED else "instructions",
        ground_truth=record["ground_truth"],
        split="train",
        index=index,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", default=ON_HUB, help="file, folder or hub name (needs strop[hub])")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--all", action="store_true", help="keep rows that need a scorer of your own")
    options = parser.parse_args()
    rows, seen, left_out = {"train": [], "val": []}, Counter(), Counter()
    for index, record in enumerate(read_source(options.source, unnamed_split="train")["train"]):
        row = convert(record, index)
        source = row["data_source"]
        if not options.all and source not in SCORED.values():
            left_out[source] += 1
            continue
        seen[source] += 1
        rows["val" if seen[source] <= VALIDATION_ROWS else "train"].append(row)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        pq.write_table(pa.Table.from_pylist(found), options.out / f"{name}.parquet")
        print(f"{options.out / name}.parquet: {len(found):,} rows")
    for source, number in left_out.items():
        print(f"left out {number:,} rows of {source}: no scorer; see --help")


if __name__ == "__main__":
    main()

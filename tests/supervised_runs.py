"""Supervised runs on a tiny model in this process, and their input files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from strop.config.load import load_tree
from strop.config.trees import TREES
from strop.trainer.supervised import TRAINERS, build

import tiny_model
from runs import metrics, undrawn  # noqa: F401 - metrics is re-exported

KINDS = {kind: (tree, TRAINERS[tree.schema]) for kind, tree in TREES.items() if tree.schema in TRAINERS}


def make_inputs(folder: Path, *, rows: int = 24) -> Path:
    """Write a model, and answers of uneven lengths to additions; return ``folder``."""
    tiny_model.save(folder / "model", hidden=32)
    for name, n_rows, seed in (("train", rows, 0), ("val", 10, 1)):
        draw = random.Random(seed)
        write_rows(folder / f"{name}.parquet", [row(draw, index) for index in range(n_rows)])
    return folder


def row(draw: random.Random, index: int) -> dict[str, Any]:
    a, b = draw.randrange(100), draw.randrange(100)
    return {
        "data_source": ("even", "odd")[index % 2],
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "response": str(a + b),
        "chosen": str(a + b),
        "rejected": str(draw.randrange(10 ** draw.randrange(1, 5))),
        "extra_info": {"split": "train", "index": index},
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def overrides(inputs: Path, run: Path, *extra: str) -> list[str]:
    """Return the configuration of a run with batches of 8 rows, 3 per epoch."""
    return [
        f"model.path={inputs / 'model'}",
        f"data.train_files={inputs / 'train.parquet'}",
        f"data.val_files={inputs / 'val.parquet'}",
        f"data.cache_dir={inputs / 'cache'}",
        "data.train_batch_size=8",
        "data.val_batch_size=4",
        "data.max_prompt_length=10",
        "data.max_response_length=6",
        "update.optim.lr=1e-2",
        "update.optim.eps=1e-3",  # a gradient that is 0 but for rounding is not scaled up to a whole step
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={run}",
        *extra,
    ]


def train(kind: str, options: list[str]) -> Any:
    """Train as ``strop sft``, ``train-rm`` or ``dpo``, without drawing pictures; return the trainer."""
    tree, trainer_cls = KINDS[kind]
    with undrawn():
        trainer = build(trainer_cls, load_tree(tree, options))
        trainer.init_workers()
        trainer.fit()
    return trainer


def final_weights(run: Path) -> dict[str, Any]:
    """Load the parameters of the trained model."""
    from safetensors.torch import load_file

    return load_file(run / "final_model" / "model.safetensors")


def require_equal_weights(run: Path, expected: dict[str, Any]) -> None:
    """Compare the trained model of ``run`` with the parameters ``expected``."""
    found = final_weights(run)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5)

"""A configuration without errors or warnings, and what `check` says of it with overrides."""

from __future__ import annotations

import pytest

from strop.config.checks.check import check
from strop.config.load import load_config


@pytest.fixture
def valid(tmp_path):
    """Overrides that make a configuration without errors or warnings."""
    (tmp_path / "train.parquet").touch()
    (tmp_path / "test.parquet").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.logger=[console]",
    ]


@pytest.fixture
def report(valid):
    def run(*overrides, **sizes):
        return check(load_config([*valid, *overrides]), **sizes)

    return run

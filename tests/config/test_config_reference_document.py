"""The YAML of the reference document, taken from the document itself."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from strop.config.checks.check import check
from strop.config.checks.keys import status_in_words
from strop.config.load import as_config, load_config
from strop.config.trees import PPO

DOCUMENT = Path(__file__).resolve().parents[2] / ".." / "shared" / "reference" / "config_explanation.rst"


@pytest.fixture(scope="module")
def reference():
    if not DOCUMENT.is_file():
        pytest.skip(f"the reference document is not there: {DOCUMENT}")
    blocks = re.findall(r"\.\. code:: yaml\n\n((?: {3}.*\n|\n)+)", DOCUMENT.read_text())
    assert len(blocks) == 5  # data, actor_rollout_ref, reward_model, algorithm, trainer
    return "".join(textwrap.dedent(block) for block in blocks)


def leaves(mapping, prefix=""):
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def test_every_key_of_the_document_exists_with_the_same_default(reference):
    ours = dict(leaves(OmegaConf.to_container(OmegaConf.load(PPO.defaults_file), resolve=False)))
    theirs = dict(leaves(OmegaConf.to_container(OmegaConf.create(reference), resolve=False)))
    assert len(theirs) == 95
    assert {path: ours.get(path, "missing") for path in theirs} == theirs
    assert {path: type(ours[path]) for path in theirs} == {
        path: type(value) for path, value in theirs.items()
    }


@pytest.fixture
def document_file(reference, tmp_path):
    (tmp_path / "reference.yaml").write_text(reference)
    return tmp_path / "reference.yaml"


def test_the_document_as_a_file_changes_no_default(document_file):
    assert load_config(config_path=document_file) == load_config()


def test_the_document_with_its_paths_replaced_and_small_sizes_passes_the_check(document_file, tmp_path):
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = load_config(
        [
            f"data.train_files={tmp_path}/train.parquet",
            f"data.val_files={tmp_path}/test.parquet",
            f"actor_rollout_ref.model.path={tmp_path}/model",
            "actor_rollout_ref.rollout.name=hf",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=4",
        ],
        config_path=document_file,
    )
    result = check(config, train_rows=9)
    assert result.errors == []
    assert (result.plan.iterations, result.plan.actor.optimizer_steps) == (2 * 30, 2)
    assert (result.plan.ranks, result.plan.actor.samples_per_rank) == (8, 1)


def test_every_key_of_the_document_is_honoured_or_named_in_a_warning(reference):
    config = as_config(
        OmegaConf.merge(OmegaConf.create(reference), {"actor_rollout_ref": {"rollout": {"name": "hf"}}})
    )
    warned = " ".join(check(config).warnings)
    moot = [
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
        "actor_rollout_ref.rollout.load_format=dummy_dtensor",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.max_num_batched_tokens=8192",
        "actor_rollout_ref.rollout.max_num_seqs=1024",
    ]
    for key in moot:
        assert key in warned
        assert status_in_words(key.partition("=")[0]).startswith("no effect")
    # Whatever else a limit is about stands at a value that is what happens anyway, so nothing else is named.
    assert len(re.findall(r"[a-z_]+\.[a-z_.]+=", warned)) == len(moot)
    assert len(check(config).warnings) == 1

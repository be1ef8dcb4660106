"""The YAML of the reference document, taken from the document itself."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from strop.config.checks.check import check
from strop.config.load import load_config
from strop.config.trees import PPO

from messages import Message

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


OWN_DEFAULTS = {
    "data.train_files": [],
    "data.val_files": [],
    "actor_rollout_ref.model.path": "",
    "actor_rollout_ref.rollout.name": "auto",
    "reward_model.model.path": "",
    "trainer.project_name": "strop",
    "trainer.experiment_name": None,
    "trainer.logger": ["console"],
    "trainer.default_hdfs_dir": None,
}
"""Where the document has names and files of its authors."""

OTHER_DEFAULTS = {
    "actor_rollout_ref.model.use_remove_padding": ("auto", False),
    "actor_rollout_ref.actor.use_dynamic_bsz": (True, False),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (None, 16384),
}
"""Keys with another default here, and that of the document."""


def test_every_key_of_the_document_exists_and_other_defaults_are_the_same(reference):
    ours = dict(leaves(OmegaConf.to_container(OmegaConf.load(PPO.defaults_file), resolve=False)))
    theirs = dict(leaves(OmegaConf.to_container(OmegaConf.create(reference), resolve=False)))
    assert len(theirs) == 95
    assert theirs.keys() >= OWN_DEFAULTS.keys()
    assert {path: theirs[path] for path in OTHER_DEFAULTS} == {
        path: there for path, (_, there) in OTHER_DEFAULTS.items()
    }
    other = {path: here for path, (here, _) in OTHER_DEFAULTS.items()}
    assert {path: ours.get(path, "missing") for path in theirs} == {**theirs, **OWN_DEFAULTS, **other}
    same = theirs.keys() - OWN_DEFAULTS.keys() - OTHER_DEFAULTS.keys()
    assert {path: type(ours[path]) for path in same} == {path: type(theirs[path]) for path in same}


@pytest.fixture
def document_file(reference, tmp_path):
    (tmp_path / "reference.yaml").write_text(reference)
    return tmp_path / "reference.yaml"


def test_the_document_as_a_file_changes_no_other_default(document_file):
    document = load_config(config_path=document_file)
    own = [f"{path}={'null' if value is None else repr(value)}" for path, value in OWN_DEFAULTS.items()]
    as_there = [f"{path}={there}" for path, (_, there) in OTHER_DEFAULTS.items()]
    assert load_config(own, config_path=document_file) == load_config(as_there)
    assert document.trainer.project_name == "verl_examples"


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


def test_every_key_of_the_document_is_honoured_or_named_in_a_warning(document_file):
    moot = [
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
        "actor_rollout_ref.rollout.load_format=dummy_dtensor",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.max_num_batched_tokens=8192",
        "actor_rollout_ref.rollout.max_num_seqs=1024",
    ]
    hf = "actor_rollout_ref.rollout.name=hf"
    in_file = check(load_config([hf], config_path=document_file)).warnings
    # All its other values without effect are the defaults, which nobody counts on.
    cap = Message("no effect", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384")
    assert [cap, Message("no effect", "reward_model.model.path=")] == in_file
    overridden = check(load_config([hf, *moot], config_path=document_file)).warnings
    assert Message("no effect", *moot) in overridden

"""The trees of the supervised trainers: defaults and schema agree, and every key has its line."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from strop.config.keys import all_keys, leaf_paths
from strop.config.load import load_config, load_tree, to_yaml
from strop.config.resolve import written_paths
from strop.config.schema.supervised import SupervisedConfig
from strop.config.supervised import require_valid
from strop.config.trees import REWARD_MODELLING, SFT
from strop.errors import ConfigError

TREES = pytest.mark.parametrize("tree", [SFT, REWARD_MODELLING], ids=lambda tree: tree.name)


@TREES
def test_schema_and_yaml_hold_exactly_the_same_keys(tree):
    in_yaml = written_paths(OmegaConf.to_container(OmegaConf.load(tree.defaults_file), resolve=False))
    keys = all_keys(tree.schema)
    assert in_yaml == set(keys)
    assert [key.path for key in keys.values() if not key.doc.strip() or not key.expected] == []


@TREES
def test_a_resolved_configuration_is_read_back_as_it_was(tree, tmp_path):
    config = load_tree(tree, ["update.optim.lr=3e-4", "trainer.experiment_name=mine"])
    (tmp_path / "mine.yaml").write_text(to_yaml(config))
    assert load_tree(tree, config_path=tmp_path / "mine.yaml") == config
    assert load_tree(tree, config_path=tmp_path, config_name="mine").update.optim.lr == 3e-4


@TREES
def test_a_file_may_name_the_shipped_defaults(tree, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [{tree.name}, _self_]\nupdate: {{grad_clip: 0.5}}\n")
    assert load_tree(tree, config_path=tmp_path, config_name="mine").update.grad_clip == 0.5


def test_keys_of_another_tree_are_unknown():
    with pytest.raises(ConfigError, match=r"algorithm: unknown key"):
        load_tree(SFT, ["algorithm.gamma=1"])
    with pytest.raises(ConfigError, match=r"update: unknown key"):
        load_config(["update.grad_clip=1"])
    assert "algorithm.gamma" in leaf_paths()


def test_numbers_of_processes_that_do_not_fit_are_told():
    settings = ("trainer.worker_group=local", "trainer.n_gpus_per_node=4", "model.fsdp_config.fsdp_size=3")
    config = load_tree(SFT, settings)
    assert isinstance(config, SupervisedConfig)
    with pytest.raises(ConfigError) as caught:
        require_valid(config)
    assert "trainer.worker_group=local is one process, and 4 are asked for" in str(caught.value)
    assert "fsdp_size=3 does not divide the 4 ranks" in str(caught.value)

"""A worker gets from a name on the hub what it gets from the folder, alone and with others."""

from __future__ import annotations

import json

import hub_jobs as jobs
import pytest
from hub import COMMIT, cache_by_hand
from huggingface_hub import constants

from strop.config.load import load_config
from strop.errors import ModelError
from strop.trainer.build import build_trainer

import supervised_runs
import tiny_model
from messages import mentions, naming
from ranks import Ranks
from runs import make_inputs, overrides, train

NAME = "org/tiny"
OTHER = COMMIT[::-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose generation configuration has end tokens that its tokenizer lacks."""
    folder = tiny_model.save(tmp_path_factory.mktemp("tiny") / "model", hidden=32)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [3, 5]}))
    return folder


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as processes:
        yield processes


def exported_ends(folder):
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_read_a_name_like_a_folder(model, ranks, tmp_path, world_size):
    cache_by_hand(tmp_path / "hub", NAME, model)
    [by_folder] = ranks.run(1, jobs.ends, tmp_path / "hub", model, tmp_path / "folder")
    for found in ranks.run(world_size, jobs.ends, tmp_path / "hub", NAME, tmp_path / "name"):
        assert found == by_folder
        assert found["ends"] == (1, 3, 5)
    assert exported_ends(tmp_path / "name/exported") == [3, 5]


def test_machines_with_two_versions_of_a_model_are_an_error(model, ranks, tmp_path):
    cache_by_hand(tmp_path / "one", NAME, model)
    cache_by_hand(tmp_path / "two", NAME, model, OTHER)
    for text in ranks.run(2, jobs.refusal, [tmp_path / "one", tmp_path / "two"], NAME, tmp_path):
        assert mentions(text, NAME, COMMIT, OTHER, "`hf", f"{NAME}`")
    assert ranks.run(2, jobs.refusal, [tmp_path / "one"] * 2, NAME, tmp_path) == ["taken", "taken"]


@pytest.fixture
def cache(tmp_path, model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return cache_by_hand(tmp_path / "hub", NAME, model)


def test_runs_start_from_a_name(cache, tmp_path):
    """Actor and critic; then fine-tuning."""
    (tmp_path / "inputs").mkdir()
    inputs = make_inputs(tmp_path / "inputs")
    trainer = train(
        overrides(
            inputs, tmp_path / "run", f"actor_rollout_ref.model.path={NAME}",
            "trainer.total_training_steps=1", "trainer.val_before_train=False", "trainer.test_freq=-1",
        )
    )  # fmt: skip
    assert trainer.actor.worker.rollout.eos_token_ids == (1, 3, 5)
    assert exported_ends(tmp_path / "run/final_model") == [3, 5]
    supervised_runs.make_inputs(inputs)
    options = supervised_runs.overrides(inputs, tmp_path / "sft", f"model.path={NAME}", "data.val_files=[]")
    supervised_runs.train("sft", [*options, "trainer.total_training_steps=1", "trainer.test_freq=-1"])
    assert exported_ends(tmp_path / "sft/final_model") == [3, 5]


@pytest.mark.parametrize(
    "keys",
    [
        ("critic.model.path=org/none",),
        ("reward_model.enable=true", "reward_model.model.path=org/none"),
        ("data.tokenizer=org/none",),
    ],
)
def test_an_unknown_name_is_an_error_before_a_model_loads(cache, tmp_path, keys):
    (tmp_path / "inputs").mkdir()
    inputs = make_inputs(tmp_path / "inputs")
    name = f"actor_rollout_ref.model.path={NAME}"
    config = load_config(overrides(inputs, tmp_path / "run", name, *keys))
    with pytest.raises(ModelError, match=naming("org/none")):
        build_trainer(config)

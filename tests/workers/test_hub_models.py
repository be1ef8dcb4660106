"""Workers and runs load a model by its name on the hub as from a folder."""

from __future__ import annotations

import json

import pytest
import worker_jobs as jobs
from hub import COMMIT, cache_by_hand
from huggingface_hub import constants
from sharded_jobs import failure

import supervised_runs
import tiny_model
from messages import mentions
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


def test_ranks_read_a_name_like_a_folder(model, ranks, tmp_path):
    cache_by_hand(tmp_path / "hub", NAME, model)
    [by_folder] = ranks.run(1, jobs.load_from_hub, tmp_path / "hub", model, tmp_path / "folder")
    for found in ranks.run(2, jobs.load_from_hub, tmp_path / "hub", NAME, tmp_path / "name"):
        assert found == by_folder
        assert found["ends"] == (1, 3, 5)
    assert exported_ends(tmp_path / "name/exported") == [3, 5]


def test_machines_with_two_versions_of_a_model_are_an_error(model, ranks, tmp_path):
    cache_by_hand(tmp_path / "one", NAME, model)
    cache_by_hand(tmp_path / "two", NAME, model, OTHER)
    caches = [tmp_path / "one", tmp_path / "two"]
    for text in ranks.run(2, failure, jobs.load_from_caches, caches, NAME, tmp_path):
        assert mentions(text, "ModelError", NAME, COMMIT, OTHER, "`hf", f"{NAME}`")
    assert ranks.run(2, failure, jobs.load_from_caches, caches[:1] * 2, NAME, tmp_path) == ["", ""]


ONE_STEP = ("trainer.total_training_steps=1", "trainer.test_freq=-1")


def test_runs_start_from_a_name(model, tmp_path, monkeypatch):
    """Actor and critic; then fine-tuning."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cache_by_hand(tmp_path / "hub", NAME, model)
    (tmp_path / "inputs").mkdir()
    inputs = make_inputs(tmp_path / "inputs")
    name, unvalidated = f"actor_rollout_ref.model.path={NAME}", "trainer.val_before_train=False"
    trainer = train(overrides(inputs, tmp_path / "run", name, *ONE_STEP, unvalidated))
    assert trainer.actor.worker.rollout.eos_token_ids == (1, 3, 5)
    assert exported_ends(tmp_path / "run/final_model") == [3, 5]
    supervised_runs.make_inputs(inputs)
    options = supervised_runs.overrides(inputs, tmp_path / "sft", f"model.path={NAME}", "data.val_files=[]")
    supervised_runs.train("sft", [*options, *ONE_STEP])
    assert exported_ends(tmp_path / "sft/final_model") == [3, 5]

"""The example of docs/own_algorithm.md, roles of one's own, samplers and collate functions of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from strop import (
    ActorRolloutRefWorker,
    RayPPOTrainer,
    ResourcePoolManager,
    RewardManager,
    RLHFDataset,
    Role,
)
from strop.config.load import load_config
from strop.controller.group import Dispatch, LocalWorkerGroup, register
from strop.data.build import as_batch
from strop.data.loader import SampledBatches, collate
from strop.errors import CheckpointError, ConfigError, DataError
from strop.protocol import DataProto

import runs
import tiny_model
from messages import naming

DOCUMENT = Path(__file__).parents[2] / "docs" / "own_algorithm.md"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = runs.make_inputs(tmp_path_factory.mktemp("own"))
    tiny_model.save(folder / "teacher", hidden=32, seed=5)
    return folder


@pytest.fixture
def example(inputs):
    """The names that the document's code defines."""
    names: dict = {"__name__": "example"}
    exec(DOCUMENT.read_text().split("```python\n")[1].split("```")[0], names)
    names["Teacher"].path = str(inputs / "teacher")
    return names


class Backwards:
    """A sampler of 24 rows, the last first, that can be continued."""

    def __init__(self):
        self.done = 0

    def __len__(self):
        return 24

    def __iter__(self):
        while self.done < 24:
            self.done += 1
            yield 24 - self.done
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def options(inputs, run, *extra):
    quiet = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.logger=[jsonl]")
    one_step = ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.entropy_coeff=0")
    return runs.overrides(inputs, run, *quiet, *one_step, *extra)


def test_the_documents_example_brings_the_student_to_the_teacher(inputs, example, tmp_path):
    with runs.undrawn():
        trainer = example["distil"](options(inputs, tmp_path, "trainer.total_training_steps=8"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    kl = [line["distillation/kl"] for line in lines]
    assert kl[-1] < 0.5 * kl[0]
    assert trainer.groups["teacher"].worker is None  # ended with the run


def test_state_of_an_own_role_and_of_a_sampler_is_in_checkpoints(inputs, example, tmp_path):
    """Four iterations in one run, and in two of two, with a trained role and a sampler."""
    example["Distillation"].trained = (*RayPPOTrainer.trained, "teacher")
    example["Teacher"].tokenizer = tiny_model.build_tokenizer()
    saved = ("trainer.save_freq=2", "trainer.total_training_steps=4")
    seen: list[list[int]] = []

    def noting(rows):
        seen.append([row["index"] for row in rows])
        return collate(rows, pad_token_id=0, max_prompt_length=8)

    def run(folder, *extra):
        with runs.undrawn():
            example["distil"](
                options(inputs, folder, *saved, *extra), train_sampler=Backwards(), collate_fn=noting
            )
        return (folder / "global_step_4" / "actor" / "huggingface" / "model.safetensors").read_bytes()

    straight, order = run(tmp_path / "straight"), list(seen)
    assert order[0] == list(range(23, 15, -1))
    assert order[3] == order[0]  # the second epoch
    assert (tmp_path / "straight" / "global_step_4" / "teacher").is_dir()
    seen.clear()
    with pytest.raises(FileNotFoundError):  # the run ends at iteration 2
        run(tmp_path / "parts", "trainer.total_training_steps=2")
    assert run(tmp_path / "parts") == straight
    assert seen == order


def refuse(inputs, run, *extra, mapping=None, pools=None, **arguments):
    config = load_config(options(inputs, run, *extra))
    workers = {Role.ActorRollout: object, Role.RefPolicy: object, Role.Critic: object, **(mapping or {})}
    places = {**dict.fromkeys(workers, "p"), **(pools or {})}
    if pools is not None:
        places = {role: "p" for role in workers if role not in pools}
    RayPPOTrainer(
        config,
        tiny_model.build_tokenizer(),
        workers,
        ResourcePoolManager({"p": [1]}, places),
        LocalWorkerGroup,
        reward_fn=lambda batch: torch.zeros(batch.batch["responses"].shape),
        **arguments,
    )


class WithArrays(Backwards):
    def state_dict(self):
        return {"order": np.arange(24)}


def test_what_an_own_role_or_sampler_lacks_is_an_error(inputs, tmp_path):
    with pytest.raises(ConfigError, match=naming("resource_pool_manager.mapping", "teacher")):
        refuse(inputs, tmp_path, mapping={"teacher": object}, pools={"teacher": None})
    with pytest.raises(ConfigError, match=naming("role_worker_mapping", "critic")):
        refuse(inputs, tmp_path, mapping={"critic": object})
    with pytest.raises(ConfigError, match=naming("train_sampler=list", "state_dict", "trainer.save_freq=2")):
        refuse(inputs, tmp_path, "trainer.save_freq=2", train_sampler=list(range(24)))
    refuse(inputs, tmp_path, train_sampler=list(range(24)))
    with pytest.raises(ConfigError, match=naming("train_sampler=WithArrays", "state_dict", "numpy")):
        refuse(inputs, tmp_path, train_sampler=WithArrays())
    filtered = "algorithm.filter_groups.enable=True"
    with pytest.raises(ConfigError, match=naming("train_sampler=Backwards", "filter_groups")):
        refuse(inputs, tmp_path, filtered, train_sampler=Backwards())


def test_batches_of_a_sampler_and_of_a_collate_function():
    batches = SampledBatches(Backwards(), 7)
    assert len(batches) == 3
    taken = [next(batches) for _ in range(4)]
    assert taken[0] == [23, 22, 21, 20, 19, 18, 17]
    assert taken[3] == taken[0]
    again = SampledBatches(Backwards(), 7)
    again.load_state_dict(batches.state_dict())
    assert (again.epoch, again.position, next(again)) == (1, 1, next(batches))
    with pytest.raises(CheckpointError, match="train_sampler"):
        again.load_state_dict({"epoch": 0, "position": 0, "num_rows": 24})
    with pytest.raises(DataError, match=naming("24", "data.train_batch_size")):
        SampledBatches(Backwards(), 25)
    found = as_batch(lambda rows: {"a": torch.ones(len(rows)), "b": rows}, [{"x": 1}, {"x": 2}])
    assert isinstance(found, DataProto)
    assert (found.batch["a"].tolist(), found.non_tensor_batch["b"][1]) == ([1.0, 1.0], {"x": 2})
    with pytest.raises(DataError, match="collate_fn returned list"):
        as_batch(lambda rows: rows, [])


def test_actor_rollout_and_reference_in_one_worker_train_the_same(inputs, tmp_path):
    few = ("trainer.total_training_steps=1", "algorithm.adv_estimator=grpo")
    apart = runs.train(options(inputs, tmp_path / "apart", *few))
    one = ("trainer.resource_pools={p: [1]}", "trainer.placement={ActorRolloutRef: p}")
    together = runs.train(options(inputs, tmp_path / "together", *few, *one))
    assert set(together.groups) == {"actor"}
    assert together.actor.weights_hash() == apart.actor.weights_hash()


class Padded(torch.utils.data.Dataset):
    """Rows of a file, padded on the left as those of verl's data sets."""

    def __init__(self, file):
        self.rows = RLHFDataset(file, tiny_model.build_tokenizer(), max_prompt_length=8)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        ids, width = row.pop("input_ids"), 8
        mask = (torch.arange(width) >= width - len(ids)).long()
        positions = (mask.cumsum(0) - 1).clamp(min=0)
        return {
            **row,
            "input_ids": torch.nn.functional.pad(ids, (width - len(ids), 0), value=1),
            "attention_mask": mask,
            "position_ids": positions,
        }


class WithValidation(RayPPOTrainer):
    def _validate(self):
        return {"val/of_mine": 1.0, **super()._validate()}


def test_data_sets_and_validation_of_a_program(inputs, tmp_path):
    """Its data sets need no files, and train as the same rows of files do."""
    few, found = ("algorithm.adv_estimator=grpo", "trainer.test_freq=2", "trainer.save_freq=1"), []
    files = [inputs / "train.parquet", inputs / "val.parquet"]
    for own in (True, False):
        given = options(inputs, tmp_path / str(own), *few)
        datasets: list = [None, None]
        if own:
            given = [key for key in given if not key.startswith(("data.train_files", "data.val_files"))]
            datasets = [Padded(file) for file in files]
        trainer = WithValidation(
            load_config(given),
            tiny_model.build_tokenizer(),
            {Role.ActorRollout: ActorRolloutRefWorker, Role.RefPolicy: ActorRolloutRefWorker},
            ResourcePoolManager({"p": [1]}, {Role.ActorRollout: "p", Role.RefPolicy: "p"}),
            LocalWorkerGroup,
            RewardManager(tiny_model.build_tokenizer(), 0),
            train_dataset=datasets[0],
            val_dataset=datasets[1],
        )
        trainer.init_workers()
        runs.fit(trainer)
        found.append((trainer.actor.weights_hash(), runs.metrics(tmp_path / str(own))[-1]))
        trainer.shutdown()
    assert found[0] == found[1]
    assert found[0][1]["val/of_mine"] == 1
    assert "val/test_score/strop/arithmetic" in found[0][1]


def test_a_method_that_overrides_a_marked_one_is_called_as_that():
    class Base:
        @register(Dispatch.DATA_PARALLEL)
        def length(self, batch):
            return len(batch)

    class Own(Base):
        def length(self, batch):
            return -super().length(batch)

    assert LocalWorkerGroup(worker_cls=Own, init_kwargs={}).length(DataProto({"x": torch.ones(3)})) == -3

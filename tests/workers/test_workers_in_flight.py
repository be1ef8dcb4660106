"""Batches that are admitted ahead, through worker groups: ranks, prompts of both calls, and their files."""

from __future__ import annotations

import pytest
import torch
import worker_jobs as jobs
from transformers import AutoModelForCausalLM

from strop.controller.group import LocalWorkerGroup
from strop.controller.pools import ResourcePoolManager, Role
from strop.controller.ray.group import RayWorkerGroup
from strop.controller.shards import shard
from strop.errors import CheckpointError, ModelError, TrainingError
from strop.manifest import describe, write
from strop.protocol import DataProto
from strop.workers.policy import ActorRolloutRefWorker

import tiny_model
from builders import random_samples
from messages import naming

KEYS = (
    "data.max_response_length=12",
    "actor_rollout_ref.rollout.stop_token_ids=[4,5,6,7,8,9,10]",
    "actor_rollout_ref.rollout.temperature=1.5",
)
AHEAD, BATCHES, ROWS = 2, 5, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


def local(folder) -> LocalWorkerGroup:
    group = LocalWorkerGroup(
        worker_cls=ActorRolloutRefWorker,
        init_kwargs={"config": jobs.config_of(folder, *KEYS), "role": Role.Rollout},
    )
    group.init_model()
    return group


def prompts_of(number: int, rows: int = ROWS, **facts) -> DataProto:
    """Prompts of different lengths, another number of them than two ranks share evenly."""
    columns = random_samples(rows, seed=number).batch
    width = columns["prompts"].shape[1]
    tensors = {name: columns[name][:, :width] for name in ("input_ids", "attention_mask", "position_ids")}
    tensors["seeds"] = torch.arange(rows * 2).view(rows, 2) + 100 * number
    uids = [f"{number}-{row}" for row in range(rows)]
    return DataProto.from_dict(tensors, {"uid": uids}, {"mode": "train", "batch": number, **facts})


def load_version(group, folder, version: int) -> None:
    """Other weights for every version."""
    torch.manual_seed(version)
    weights = AutoModelForCausalLM.from_pretrained(folder).named_parameters()
    bucket = [(name, weight.detach() + 0.05 * torch.randn_like(weight)) for name, weight in weights]
    group.load_weights(bucket[:3], version)
    group.load_weights(bucket[3:], version)
    group.load_weights(None, version)


def ticks(group, folder, first: int = 1, last: int = BATCHES, part=lambda prompts: prompts, **options):
    """Results of the batches by number: weights, admitted prompts and results of one tick after another."""
    results = {}
    for number in range(first, last + 1):
        load_version(group, folder, number - 1)
        for admitted in range(1 if number == 1 else number + AHEAD, min(number + AHEAD, BATCHES) + 1):
            assert group.admit_prompts(part(prompts_of(admitted))) is None
        request = prompts_of(number, weights_version=number - 1)
        results[number] = group.generate_sequences(part(request), **options)
    return results


def admit(group, numbers, **options) -> None:
    for number in numbers:
        group.admit_prompts(prompts_of(number, **options))


@pytest.fixture(scope="module")
def on_ray(ray_session):
    """Builds groups of the same two processes."""
    pool = ResourcePoolManager({"rollout": [2]}, {Role.Rollout: "rollout"}).pools["rollout"]
    groups = []

    def build(folder):
        kwargs = {"config": jobs.config_of(folder, *KEYS), "role": Role.Rollout}
        group = RayWorkerGroup(
            worker_cls=ActorRolloutRefWorker,
            init_kwargs=kwargs,
            resource_pool=pool,
            name=f"rollout{len(groups)}",
        )
        groups.append(group)
        group.init_model()
        return group

    yield build
    for group in groups:
        group.shutdown()


def test_each_of_two_ranks_generates_its_share_and_goes_on_from_its_file(folder, on_ray, tmp_path):
    parts = []
    for rank in range(2):

        def of_rank(prompts, rank=rank):
            return shard(prompts, 2).parts[rank]

        parts.append(ticks(local(folder), folder, part=of_rank))
    expected = {
        number: shard(prompts_of(number), 2).join([part[number] for part in parts])
        for number in range(1, BATCHES + 1)
    }

    def require_expected(results):
        for number, batch in results.items():
            columns = expected[number].batch
            for name in ("responses", "rollout_versions", "truncated"):
                assert torch.equal(torch.as_tensor(batch.batch[name]), columns[name])
            torch.testing.assert_close(
                torch.as_tensor(batch.batch["rollout_log_probs"]), columns["rollout_log_probs"]
            )
            assert list(batch.non_tensor_batch["uid"]) == list(expected[number].non_tensor_batch["uid"])
            assert batch.meta_info["weights_version"] == number - 1

    reported = {}
    group = on_ray(folder)
    found = ticks(
        group, folder, last=2, finished=lambda row, sample, ids: reported.update({(row, sample): ids})
    )
    require_expected(found)
    group.save_in_flight(tmp_path)
    write(tmp_path, describe(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"rank_0.pt", "rank_1.pt", "manifest.json"}
    require_expected(ticks(group, folder, first=3))
    assert any(
        len(row.unique()) > 2 for batch in expected.values() for row in batch.batch["rollout_versions"]
    )
    responses = expected[2].batch["responses"]
    assert any(
        responses[row * 2 + sample][: len(ids)].tolist() == ids for (row, sample), ids in reported.items()
    )

    resumed = on_ray(folder)
    admit(resumed, (3, 4))
    resumed.load_in_flight(tmp_path)
    require_expected(ticks(resumed, folder, first=3))

    alone = local(folder)
    admit(alone, (3, 4))
    with pytest.raises(CheckpointError, match=naming(str(tmp_path), "2 rollout processes", "resume with 2")):
        alone.load_in_flight(tmp_path)


def test_a_numbered_batch_that_was_not_admitted_is_generated_at_once(folder):
    group = local(folder)
    with pytest.raises(ModelError, match="load_weights"):
        group.generate_sequences(prompts_of(1))
    load_version(group, folder, 7)
    found = group.generate_sequences(prompts_of(1)).batch
    assert found["rollout_versions"].dtype == torch.int32
    assert torch.equal(found["rollout_versions"], torch.where(found["response_mask"] > 0, 7, -1).int())
    admit(group, (2,))
    greedy = group.generate_sequences(prompts_of(2, mode="greedy"))
    assert len(greedy) == ROWS
    prompts = prompts_of(3)
    del prompts.meta_info["batch"]
    assert "rollout_versions" not in group.generate_sequences(prompts)
    assert len(group.generate_sequences(prompts_of(2))) == 2 * ROWS


def test_a_batch_of_a_loader_is_generated_as_for_training(folder):
    group = local(folder)
    load_version(group, folder, 0)
    prompts = prompts_of(1)
    prompts = DataProto(prompts.select("input_ids", "attention_mask", "position_ids").batch)
    torch.manual_seed(3)
    first = group.generate_sequences(prompts).batch["responses"]
    again = group.generate_sequences(prompts).batch["responses"]
    assert len(first) == 2 * ROWS  # rollout.n
    assert not torch.equal(first, again)
    torch.manual_seed(3)
    assert torch.equal(first, group.generate_sequences(prompts).batch["responses"])


def test_other_prompts_than_those_admitted_are_an_error(folder):
    group = local(folder)
    load_version(group, folder, 0)
    admit(group, (1,))
    other = prompts_of(1)
    other.non_tensor_batch["uid"][3] = "other"
    with pytest.raises(TrainingError, match=naming("batch 1", "row 3", "'other'", "'1-3'")):
        group.generate_sequences(other)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-200])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sealed"),
    [(_cut, True), (_flip, True), (_cut, False)],
    ids=["cut", "flipped", "cut, no manifest"],
)
def test_a_damaged_file_is_named(folder, tmp_path, damage, sealed):
    saving, loading = local(folder), local(folder)
    for group in (saving, loading):
        admit(group, (1, 2))
    saving.save_in_flight(tmp_path / "in_flight")
    if sealed:
        write(tmp_path, describe(tmp_path))
    loading.load_in_flight(tmp_path / "in_flight")
    damage(tmp_path / "in_flight" / "rank_0.pt")
    with pytest.raises(CheckpointError, match=naming("in_flight", "damaged", "rank_0.pt")):
        loading.load_in_flight(tmp_path / "in_flight")


def test_files_of_other_prompts_are_refused(folder, tmp_path):
    saving, loading, empty = local(folder), local(folder), local(folder)
    admit(saving, (1, 2))
    saving.save_in_flight(tmp_path)
    admit(loading, (1,))
    admit(loading, (2,), rows=ROWS - 1)
    with pytest.raises(CheckpointError, match=naming("rank_0.pt", "batch 2", "row 4", "'2-4'")):
        loading.load_in_flight(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[1, 2\].*\[\]"):
        empty.load_in_flight(tmp_path)

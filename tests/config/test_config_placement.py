from __future__ import annotations

import json
import pickle

import pytest

from strop.config import placement
from strop.config.backends import ENGINES
from strop.config.checks import processes
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.config.placement import Placement, processes_per_node, runs_on_ray
from strop.errors import ConfigError
from strop.rollout.vllm.kind import tensor_parallel_size

from messages import Message, mentions

POOLS = "trainer.resource_pools={big: [4, 4], small: [2]}"


def of(*overrides):
    return Placement.from_config(load_config(overrides))


def test_one_pool_of_all_processes_is_the_default():
    found = of("trainer.n_gpus_per_node=3", "trainer.nnodes=2")
    assert found.pools == {"global_pool": [3, 3]}
    assert set(found.roles.values()) == {"global_pool"}
    assert "ActorRollout" in found.roles
    assert found.ranks("Critic") == 6


def test_a_role_can_have_a_separate_pool():
    found = of(POOLS, "trainer.placement={Critic: small}")
    assert found.roles == {
        "ActorRollout": "big", "Critic": "small", "RefPolicy": "big", "RewardModel": "big",
    }  # fmt: skip
    assert [found.ranks_of_pass(name) for name in ("actor", "log_prob", "ref", "critic", "values")] == [
        8, 8, 8, 2, 2,
    ]  # fmt: skip


def test_actor_and_rollout_part_without_the_hybrid_engine():
    found = of(
        POOLS, "trainer.placement={Rollout: small, Actor: big}", "actor_rollout_ref.hybrid_engine=False"
    )
    assert (found.roles["Actor"], found.roles["Rollout"]) == ("big", "small")
    assert "ActorRollout" not in found.roles
    assert (found.ranks_of_pass("actor"), found.ranks_of_pass("log_prob")) == (8, 8)


def test_names_that_do_not_fit_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        of(POOLS, "trainer.placement={Actor: big, Critic: tiny}")
    actor, critic = caught.value.problems
    assert mentions(actor, "trainer.placement.Actor", "actor_rollout_ref.hybrid_engine=True", "ActorRollout")
    assert mentions(critic, "trainer.placement.Critic=tiny", "trainer.resource_pools")


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"), [("", 0, 1), ("3,5", 2, 2), ("NoDevFiles", 0, 1), ("GPU-1a,-1,2", 1, 1)]
)
def test_the_default_number_of_processes_is_that_of_the_visible_gpus(monkeypatch, visible, gpus, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert placement.visible_gpus() == gpus
    assert processes_per_node(load_config([])) == expected
    assert processes_per_node(load_config(["trainer.device=cpu"])) == 1
    assert processes_per_node(load_config(["trainer.n_gpus_per_node=8"])) == 8
    monkeypatch.setattr(placement, "visible_gpus", lambda: 16)
    assert processes_per_node(load_config([])) == 8


def test_a_process_of_ray_that_sees_one_gpu_counts_those_of_the_run(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = load_config(["actor_rollout_ref.rollout.tensor_model_parallel_size=2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")  # as Ray sets it
    config = pickle.loads(pickle.dumps(config))
    assert processes_per_node(config) == 4
    assert runs_on_ray(config)
    assert tensor_parallel_size(config) == 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.n_gpus_per_node=1"], False),
        (["trainer.n_gpus_per_node=2"], True),
        (["trainer.n_gpus_per_node=1", "trainer.worker_group=ray"], True),
        (["trainer.n_gpus_per_node=2", "trainer.worker_group=local"], False),
    ],
)
def test_more_than_one_process_runs_on_ray(overrides, expected):
    assert runs_on_ray(load_config(overrides)) is expected


@pytest.mark.parametrize("overrides", [[], ["trainer.worker_group=local"]])
def test_several_processes_without_ray_are_an_error(monkeypatch, overrides):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = processes.worker_group(load_config(["trainer.n_gpus_per_node=2", *overrides]))
    assert found.level == "error"
    assert mentions(found.text, "2", *(overrides or ["Ray", "'strop[ray]'"]))


def test_restarts_without_checkpoints_or_processes_are_doubtful():
    assert list(processes.restarts(load_config(["trainer.max_restarts=0"]))) == []
    ray = ["trainer.max_restarts=2", "trainer.n_gpus_per_node=2", "trainer.save_minutes=null"]
    assert list(processes.restarts(load_config([*ray, "trainer.save_freq=1"]))) == []
    (fresh,) = processes.restarts(load_config(ray))
    assert mentions(fresh.text, "trainer.max_restarts=2", "trainer.save_freq=-1")
    alone = check(load_config(["trainer.max_restarts=2", "trainer.n_gpus_per_node=1"])).warnings
    assert [Message("no effect", "trainer.max_restarts=2")] == [line for line in alone if "restarts" in line]


def test_restarts_do_not_hide_a_placement_that_does_not_fit():
    result = check(load_config(["trainer.max_restarts=2", POOLS, "trainer.placement={Critic: tiny}"]))
    assert [line for line in result.errors if mentions(line, "trainer.placement.Critic=tiny")]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["trainer.resource_pools={a: [2], typo: [2]}"], ("trainer.resource_pools.typo",)),
        (
            [POOLS, "trainer.placement={Critic: small}", "algorithm.adv_estimator=grpo"],
            ("trainer.resource_pools.small",),
        ),
        (
            ["trainer.placement={Critic: global_pool}", "algorithm.adv_estimator=grpo"],
            ("no effect", "trainer.placement.Critic"),
        ),
        (
            ["trainer.resource_pools={a: [2]}", "trainer.nnodes=3"],
            ("no effect", "trainer.nnodes", "trainer.resource_pools"),
        ),
        (
            ["trainer.n_gpus_per_node=1", "trainer.phase_timeout_s=5", "trainer.handles=false"],
            ("no effect", "trainer.phase_timeout_s=5", "trainer.handles=False"),
        ),
        (
            ["trainer.async_save=true", "trainer.save_minutes=null"],
            ("no effect", "trainer.save_freq=-1", "trainer.async_save"),
        ),
        (  # only the policy is exported at the end
            ["critic.model.lora_rank=8", "critic.model.lora_merge=True"],
            ("no effect", "critic.model.lora_merge=True", "--role critic --merge"),
        ),
    ],
)
def test_keys_without_effect_are_reported(overrides, parts):
    result = check(load_config(["trainer.n_gpus_per_node=2", *overrides]))
    assert Message(*parts) in result.errors + result.warnings
    assert not [line for line in check(load_config([])).warnings if mentions(line, "no effect", "trainer")]


def test_copies_have_to_share_the_ranks_evenly():
    actor = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    (found,) = ENGINES["fsdp"].rules(load_config(["trainer.n_gpus_per_node=8", f"{actor}=3"]))
    assert mentions(found.text, f"{actor}=3", "8", "2", "4", "-1")
    for size in (-1, 1, 2, 4, 8, 16):
        even = load_config(["trainer.n_gpus_per_node=8", f"{actor}={size}"])
        assert list(ENGINES["fsdp"].rules(even)) == []


@pytest.fixture
def eight_ranks(tmp_path):
    """Return the findings for sequences shared among eight ranks, with a model of six heads."""
    facts = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "intermediate_size": 8}))
    common = ("trainer.n_gpus_per_node=8", f"actor_rollout_ref.model.path={tmp_path}")

    def found(*overrides):
        return [finding.text for finding in ENGINES["fsdp"].rules(load_config([*common, *overrides]))]

    return found


ACTOR = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
PACKED = "actor_rollout_ref.model.use_remove_padding"


def test_ranks_share_packed_rows_only(eight_ranks):
    assert eight_ranks(f"{ACTOR}=2", f"{PACKED}=True") == []
    assert eight_ranks(f"{ACTOR}=1") == eight_ranks(f"{ACTOR}=2", "trainer.n_gpus_per_node=1") == []
    without_reference = "algorithm.kl_ctrl.kl_coef=0"
    assert eight_ranks(f"{ACTOR}=2") == []  # by default
    assert eight_ranks(f"{ACTOR}=2", f"{PACKED}=False", without_reference) == [
        Message(f"{ACTOR}=2", f"{PACKED}=True")
    ]
    critic = "critic.ulysses_sequence_parallel_size=2"
    assert eight_ranks(critic, f"{PACKED}=True", "critic.model.use_remove_padding=False") == [
        Message(critic, "critic.model.use_remove_padding=True")
    ]
    assert eight_ranks(critic, "algorithm.adv_estimator=grpo") == []


def test_ranks_divide_the_heads_among_them(eight_ranks, tmp_path):
    critic = "critic.ulysses_sequence_parallel_size=4"
    assert eight_ranks(critic, f"{PACKED}=True") == [Message(critic, "6", tmp_path, "3")]
    assert eight_ranks(critic, f"{PACKED}=True", "critic.model.path=some/name") == []  # not here to be read


APART = ("actor_rollout_ref.hybrid_engine=False", "trainer.resource_pools={learner: [1], rollout: [1]}")


def test_generation_ahead_needs_a_pool_for_the_rollout_alone():
    def findings(*overrides):
        config = load_config(["trainer.async_steps=1", *overrides])
        return [(level, text) for level, text in processes.generation_ahead(config)]

    for overrides in ((), ("actor_rollout_ref.hybrid_engine=False",), APART):
        ((level, text),) = findings(*overrides)
        assert level == "error"
        assert mentions(text, "hybrid_engine=False", "trainer.resource_pools", "trainer.placement")
    assert findings(*APART, "trainer.placement={Rollout: rollout}") == []
    ((level, text),) = findings(*APART, "trainer.placement={Rollout: rollout, Critic: rollout}")
    assert level == "warning"
    assert mentions(text, "Critic", "trainer.placement")


def test_pools_of_one_process_may_be_threads():
    config = load_config([*APART, "trainer.worker_group=local"])
    assert list(processes.worker_group(config)) == []
    (found,) = processes.worker_group(load_config([POOLS, "trainer.worker_group=local"]))
    assert found[0] == "error"

"""The same run on other processes: parameters after three PPO steps, norm of the difference over the norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from strop.config.load import load_config
from strop.trainer.build import build_trainer

from runs import hashes, make_inputs, metrics, overrides, saved_state, train

STEPS = 3
ACTOR = "actor_rollout_ref.actor"
PACKED = "actor_rollout_ref.model.use_remove_padding=true"  # the critic's follows it
COMMON = (
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    f"{ACTOR}.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
    "algorithm.kl_ctrl.kl_coef=0.1",
)
TOLERANCE = 1e-5


def micro_batches(actor: int, critic: int) -> tuple[str, str]:
    return f"{ACTOR}.ppo_micro_batch_size_per_gpu={actor}", f"critic.ppo_micro_batch_size_per_gpu={critic}"


WEIGHED = (  # by the update's own log-probs; the sampler is another distribution, so that weights are not 1
    PACKED,
    "algorithm.kl_ctrl.kl_coef=0",
    "actor_rollout_ref.rollout.top_k=6",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.rollout_is=sequence",
)


LAYOUTS = {
    "local": micro_batches(8, 8),
    "local, padded": (*micro_batches(8, 8), "actor_rollout_ref.model.use_remove_padding=false"),
    "ray with 1 rank": (*micro_batches(8, 8), "trainer.worker_group=ray"),
    "ray with 1 rank, without handles": (
        *micro_batches(8, 8),
        "trainer.worker_group=ray",
        "trainer.handles=false",
    ),
    "2 ranks": (*micro_batches(3, 1), "trainer.n_gpus_per_node=2"),
    "4 ranks": (*micro_batches(1, 2), "trainer.n_gpus_per_node=4"),
    "HSDP 2x2": (
        *micro_batches(2, 2),
        "trainer.n_gpus_per_node=4",
        f"{ACTOR}.fsdp_config.fsdp_size=2",
        "critic.model.fsdp_config.fsdp_size=2",
    ),
    "2 ranks, critic and reference on 2 others": (
        *micro_batches(3, 1),
        "trainer.resource_pools={policy: [2], rest: [2]}",
        "trainer.placement={Critic: rest, RefPolicy: rest}",
    ),
    "actor on 2 ranks, rollout on 1 other": (
        *micro_batches(3, 1),
        "actor_rollout_ref.hybrid_engine=false",
        "trainer.resource_pools={policy: [2], rollout: [1]}",
        "trainer.placement={Actor: policy, Critic: policy, RefPolicy: policy, Rollout: rollout}",
    ),
    "2 ranks that share sequences": (
        *micro_batches(3, 1),
        "trainer.n_gpus_per_node=2",
        PACKED,
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
    ),
    "local, weighed by sequence": (*micro_batches(8, 8), *WEIGHED),
    "2 ranks that share sequences, weighed by sequence": (
        *micro_batches(3, 1),
        *WEIGHED,
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
    ),
    "4 ranks, every role in its own way": (
        "trainer.n_gpus_per_node=4",
        PACKED,
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.fsdp_size=2",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=12",
        "critic.ppo_max_token_len_per_gpu=12",
        "critic.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    ),
    "dynamic micro-batches on 2 ranks, padded": (
        "actor_rollout_ref.model.use_remove_padding=false",
        "trainer.n_gpus_per_node=2",
        *(f"{section}.use_dynamic_bsz=true" for section in (ACTOR, "critic")),
        *(f"{section}.ppo_max_token_len_per_gpu=24" for section in (ACTOR, "critic")),
        "critic.forward_max_token_len_per_gpu=24",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


class Results:
    """Runs a layout once, when it is first asked for."""

    def __init__(self, inputs: Path) -> None:
        self.inputs = inputs
        self.found: dict[str, dict[str, str]] = {}

    def folder(self, layout: str) -> Path:
        return self.inputs / layout.replace(" ", "_").replace(",", "")

    def hashes(self, layout: str) -> dict[str, str]:
        if layout not in self.found:
            options = overrides(self.inputs, self.folder(layout), *COMMON, *LAYOUTS[layout])
            trainer = train(options)
            self.found[layout] = hashes(trainer)
            trainer.shutdown()
        return self.found[layout]

    def weights(self, layout: str, role: str) -> torch.Tensor:
        self.hashes(layout)
        folder = self.folder(layout) / f"global_step_{STEPS}" / role / "huggingface"
        return torch.cat(
            [w.double().flatten() for _, w in sorted(load_file(folder / "model.safetensors").items())]
        )


@pytest.fixture(scope="module")
def results(inputs, ray_session):
    return Results(inputs)


@pytest.mark.fast("local-2 ranks")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("local", "local, padded"),
        ("local", "2 ranks"),
        pytest.param("2 ranks", "4 ranks", marks=pytest.mark.slow),
        pytest.param("local", "HSDP 2x2", marks=pytest.mark.slow),
        pytest.param("local", "dynamic micro-batches on 2 ranks, padded", marks=pytest.mark.slow),
        pytest.param("local", "2 ranks that share sequences", marks=pytest.mark.slow),
        pytest.param(
            "local, weighed by sequence",
            "2 ranks that share sequences, weighed by sequence",
            marks=pytest.mark.slow,
        ),
        pytest.param("local", "4 ranks, every role in its own way", marks=pytest.mark.slow),
        pytest.param("2 ranks", "actor on 2 ranks, rollout on 1 other", marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_gives_the_same_parameters(results, one, other):
    for role in ("actor", "critic"):
        expected, found = results.weights(one, role), results.weights(other, role)
        distance = ((expected - found).norm() / expected.norm()).item()
        print(f"{role}, {one} and {other}: {distance:.1e}")
        assert distance < TOLERANCE


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("local", "ray with 1 rank"),
        pytest.param("local", "ray with 1 rank, without handles", marks=pytest.mark.slow),
        pytest.param("2 ranks", "2 ranks, critic and reference on 2 others", marks=pytest.mark.slow),
    ],
)
def test_another_place_for_the_same_ranks_gives_the_same_bits(results, one, other):
    assert results.hashes(one) == results.hashes(other)
    assert metrics(results.folder(one)) == metrics(results.folder(other))


def test_training_moved_the_parameters_much_further(results):
    """The tolerance above would also hold for runs that do nothing."""
    before = load_file(results.inputs / "model" / "model.safetensors")
    start = torch.cat([w.double().flatten() for _, w in sorted(before.items())])
    moved = ((results.weights("local", "actor") - start).norm() / start.norm()).item()
    assert moved > 1000 * TOLERANCE


@pytest.mark.parametrize("layout", ["local", pytest.param("4 ranks", marks=pytest.mark.slow)])
def test_a_checkpoint_of_two_ranks_goes_on_with_others_bit_for_bit(results, tmp_path, layout):
    """Loaded, with no step taken, and saved again: weights, moments and step counts are those of the file."""
    results.hashes("2 ranks")
    checkpoint = results.folder("2 ranks") / f"global_step_{STEPS}"
    options = [
        *overrides(results.inputs, tmp_path / "run", *COMMON, *LAYOUTS[layout]),
        f"trainer.resume_mode={checkpoint}",
        f"trainer.total_training_steps={STEPS + 2}",
    ]
    trainer = build_trainer(load_config(options))
    trainer.init_workers()
    for role in ("actor", "critic"):
        trainer.groups[role].load_checkpoint(checkpoint / role)
        trainer.groups[role].save_checkpoint(tmp_path / "again" / role)
    trainer.shutdown()
    for role in ("actor", "critic"):
        written, again = saved_state(checkpoint / role), saved_state(tmp_path / "again" / role)
        assert written.keys() == again.keys()
        assert any("exp_avg_sq" in name for name in written)
        assert all(torch.equal(written[name], again[name]) for name in written)
    resumed = train(options)
    assert resumed.global_step == STEPS + 2
    resumed.shutdown()

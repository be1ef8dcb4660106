"""The schedule of generation ahead of training, recorded by workers without a model."""

from __future__ import annotations

import itertools
import time
from typing import Any, ClassVar

import pytest
import torch

from strop import RayPPOTrainer, ResourcePoolManager, Role
from strop.config.load import load_config
from strop.controller.group import Dispatch, LocalWorkerGroup, register
from strop.protocol import DataProto
from strop.rollout.base import Samples, SamplingParams, answer
from strop.trainer.build import fetch_tokenizer

from runs import fit, make_inputs, overrides


class Toy:
    """Records what it is asked for, and takes ``seconds`` for a generation and for an update."""

    seconds: ClassVar[float] = 0.0
    spans: ClassVar[list[tuple[str, float, float]]] = []
    """Beginning and end of each generation and update."""
    generated: ClassVar[list[tuple[int, int]]]

    def __init__(self, config: Any, role: Role) -> None:
        self.config, self.version, self.updates = config, None, 0

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def export(self, folder: Any, iteration: int) -> None:
        """Write nothing."""

    def take(self, what: str) -> None:
        begun = time.monotonic()
        time.sleep(self.seconds)
        self.spans.append((what, begun, time.monotonic()))

    @register(Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """Hold nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def sync_rollout(self, version: int) -> None:
        self.version = version

    @register(Dispatch.ONE_TO_ALL)
    def weight_bucket(self, restart: bool) -> None:
        return None

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket: None, version: int) -> None:
        self.version = version

    @register(Dispatch.DATA_PARALLEL)
    def admit_prompts(self, prompts: DataProto) -> None:
        """Keep nothing."""

    @register(Dispatch.DATA_PARALLEL)
    def generate_sequences(self, prompts: DataProto, **callbacks: Any) -> DataProto:
        self.take("generation")
        self.generated.append((int(prompts.non_tensor_batch["uid"][0].split("-")[0]), self.version))
        rows, width = len(prompts) * 2, 4
        samples = Samples(
            torch.full((rows, width), 5),
            torch.zeros(rows, width),
            torch.full((rows,), width),
            torch.zeros(rows, dtype=torch.bool),
        )
        return answer(prompts, SamplingParams(max_tokens=width, n=2), samples, pad_token_id=0)

    @register(Dispatch.DATA_PARALLEL)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        zeros = torch.zeros(len(batch), 4)
        return DataProto({"old_log_probs": zeros, "entropys": zeros})

    @register(Dispatch.DATA_PARALLEL)
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto({"values": torch.zeros(len(batch), 4)})

    @register(Dispatch.DATA_PARALLEL)
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        return {"vf_loss": 0.0, "vf_clipfrac": 0.0, "lr": 0.0}

    @register(Dispatch.DATA_PARALLEL)
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        self.take("update")
        return {"pg_loss": 0.0, "lr": 0.0}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"), rows=24)  # 3 iterations per epoch


def run(inputs, folder, steps: int, *extra: str) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Train 7 iterations; return (batch, version) of each generation, and the rows trained by iteration."""
    Toy.generated, Toy.spans, rows = [], [], []
    apart = steps > 0
    config = load_config(
        overrides(
            inputs,
            folder,
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.old_log_prob_from_update=false",
            "actor_rollout_ref.actor.rollout_is=token",
            "actor_rollout_ref.rollout.verify_weights_every=0",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "algorithm.kl_ctrl.kl_coef=0",
            "trainer.total_training_steps=7",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.val_before_train=false",
            f"trainer.async_steps={steps}",
            f"actor_rollout_ref.hybrid_engine={not apart}",
            "trainer.resource_pools={learner: [1], rollout: [1]}" if apart else "trainer.resource_pools={}",
            "trainer.placement={Rollout: rollout}" if apart else "trainer.placement={}",
            "trainer.worker_group=local",
            *extra,
        )
    )
    path = config.actor_rollout_ref.model.path
    tokenizer = fetch_tokenizer(
        config, config.actor_rollout_ref.model, models=[path], tokenizers=[], weights=True
    )
    pools = {"learner": [1], "rollout": [1]} if apart else {"learner": [1]}
    roles = [Role.Actor, Role.Rollout, Role.Critic] if apart else [Role.ActorRollout, Role.Critic]
    mapping = {role: "rollout" if role is Role.Rollout else "learner" for role in roles}
    trainer = RayPPOTrainer(
        config,
        tokenizer,
        dict.fromkeys(roles, Toy),
        ResourcePoolManager(pools, mapping),
        LocalWorkerGroup,
        lambda batch: torch.zeros(len(batch), 4),
    )
    trainer.init_workers()
    plain = trainer.step

    def step(prompts: DataProto) -> Any:
        batch, metrics = plain(prompts)
        expected = [extra["index"] for extra in prompts.non_tensor_batch["extra_info"]]
        trained = [extra["index"] for extra in batch.non_tensor_batch["extra_info"]]
        assert trained == [row for row in expected for _ in range(2)]
        rows.append(expected)
        return batch, metrics

    trainer.step = step
    try:
        fit(trainer)
    finally:
        trainer.shutdown()
    return Toy.generated, rows


@pytest.mark.fast("2-2", "0-0", "3-0")
@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_every_batch_is_generated_once_by_the_version_of_the_formula(inputs, tmp_path, steps, warmup):
    generated, rows = run(inputs, tmp_path, steps, f"trainer.critic_warmup={warmup}")
    behind = steps - steps // 2

    def version(batch: int) -> int:
        iteration = max(0, batch - 1 - behind)
        return iteration if iteration > warmup else 0  # the policy does not change before

    assert generated == [(batch, version(batch)) for batch in range(1, 8)]
    for epoch in (rows[:3], rows[3:6]):
        assert sorted(itertools.chain(*epoch)) == list(range(24))


@pytest.mark.slow
def test_generation_and_update_overlap(inputs, tmp_path, monkeypatch):
    def overlaps() -> int:
        generations, updates = (
            [span for name, *span in Toy.spans if name == kind] for kind in ("generation", "update")
        )
        return sum(begun < ended and start < end for begun, end in generations for start, ended in updates)

    monkeypatch.setattr(Toy, "seconds", 0.5)
    run(inputs, tmp_path / "ahead", 1)
    assert overlaps() >= 1  # 6 on an idle machine
    run(inputs, tmp_path / "synchronous", 0)
    assert len(Toy.spans) == 14
    assert overlaps() == 0

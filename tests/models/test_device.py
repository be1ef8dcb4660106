"""Engine and rollout on a device that refuses to meet the CPU's tensors, and counts waits (``pretended``)."""

from __future__ import annotations

import families
import pretended
import pytest
import torch
from pretended import DEVICE, Device

from strop.algorithms.token_tree import PROMPT, plain
from strop.config.load import load_config
from strop.engines.base import OptimizerSettings
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.models.lora import LoraSettings
from strop.models.passes.micro_batch import send
from strop.models.scorer import ValueModel
from strop.protocol import DataProto
from strop.rollout.base import SamplingParams
from strop.rollout.hf.engine import HFRollout
from strop.rollout.hf.replica import HFReplica
from strop.rollout.weights import checksums
from strop.workers.losses import actor_objective, critic_objective

GROUPS = [(7, [6, 1, 5, 2]), (2, [3, 3]), (5, [4, 4]), (4, [2, 6, 1, 3])]
CPU = torch.device("cpu")
SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8, grad_clip=1.0)
KINDS = {
    "packed": {},
    "sessions with branches": {"branches": True},
    "critic": {"critic": True},
    "padded": {"packed": False},
    "LoRA": {"lora": True},
    "offload": {"offload_parameters": True, "offload_moments": True},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
    "selective checkpointing": {"gradient_checkpointing": "selective"},
}


@pytest.fixture
def device(monkeypatch):
    pretended.prepare(monkeypatch)
    monkeypatch.setattr("strop.engines.torch.offload.replace_tensors", pretended.replace_tensors)
    with Device() as device:
        yield device


def engine(on: torch.device, device: Device, *, critic=False, packed=True, lora=False, **options):
    role = "critic" if critic else "actor"
    wrapper, head = families.ROLES[role]
    module = wrapper(families.model("Qwen2", head, tie_word_embeddings=True), packed=packed)
    if lora:
        module.adapt(LoraSettings(base="", rank=2))
    if on == DEVICE:
        device.place(module)
    return TorchEngine(module, device=on, optimizer=SETTINGS, **options)


def samples(*, branches: bool) -> DataProto:
    batch = DataProto(families.samples(GROUPS))
    if branches:
        batch.batch["follows"] = follows_BT = plain(*batch.batch["response_mask"].shape)
        follows_BT[::2, 2] = PROMPT  # a second answer to the prompt
    chance = torch.Generator().manual_seed(1)
    for name in ("advantages", "old_log_probs", "values", "returns", "ref_log_prob"):
        shape = batch.batch["response_mask"].shape
        batch.batch[name] = torch.randn(shape, generator=chance) * batch.batch["response_mask"]
    return batch


def step(engine: TorchEngine, rows: int, device: Device | None = None, *, branches: bool = False):
    """Return outputs, metrics, norm and weights of a step, and the waits of inference, gradient and step."""
    batch, micro = samples(branches=branches), MicroBatching(rows=rows)
    config = load_config(["actor_rollout_ref.actor.use_kl_loss=true"])
    counts = {"n_tokens": 45.0, "n_seqs": 12.0, "max_response_length": 6}
    critic = isinstance(engine.module, ValueModel)
    loss = (
        critic_objective(config.critic, **counts)
        if critic
        else actor_objective(config.actor_rollout_ref.actor, **counts)
    )
    if device:
        device.waited()  # for the model to arrive
    works = (
        lambda: engine.infer(batch, micro),
        lambda: engine.forward_backward(batch, loss, micro),
        lambda: engine.optimizer_step(1e-3).grad_norm,
    )
    found, waits = [], []
    for work in works:
        found.append(work())
        waits.append(device.waited() if device else 0)
    weights = {name: weight.detach().cpu() for name, weight in engine.module.named_parameters()}
    return (*found, weights), waits


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_computes_as_on_a_cpu_and_waits_for_nothing_in_a_micro_batch(device, kind):
    options = {**KINDS[kind]}
    branches = {"branches": options.pop("branches", False)}
    expected, _ = step(engine(CPU, device, **options), 6, **branches)
    found, few = step(engine(DEVICE, device, **options), 6, device, **branches)
    _, many = step(engine(DEVICE, device, **options), 2, device, **branches)
    if kind == "bfloat16":  # the first step of a weight is its gradient's sign, which rounding may turn
        torch.testing.assert_close(found[:3], expected[:3], rtol=1e-2, atol=1e-3)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    outputs = len(found[0])
    if kind == "padded":  # transformers reads two numbers of a mask in every micro-batch
        assert few == [outputs + 4, 1 + 4, 1], device.waits
    else:
        assert few == many == [outputs, 1, 1], device.waits


def test_weights_reach_a_replica_and_equal_the_trainers(device):
    trainer, model = engine(DEVICE, device), families.model("Qwen2", tie_word_embeddings=True)
    options = {"device": DEVICE, "dtype": torch.bfloat16, "pad_token_id": 0, "eos_token_ids": [1]}
    replica = HFReplica(device.place(model), trainer.named_weights(), **options)
    with torch.no_grad():
        trainer.module.hugging_face_model.lm_head.weight += 1
    device.waited()
    replica.update_weights(trainer.named_weights(dtype=torch.bfloat16))
    assert device.waited() == 0, device.waits
    weights = trainer.module.layout.convert(trainer.named_weights())
    assert checksums(weights, torch.bfloat16) == replica.checksums()


def generated(on: torch.device, device: Device, tokens: int, *, stops: bool):
    """Two batches, the second begun with the first and finished by the next version, and the waits."""
    model = families.model("Qwen2", tie_word_embeddings=True)
    rollout = HFRollout(device.place(model) if on == DEVICE else model, pad_token_id=0, eos_token_ids=[1])
    ids = torch.randint(2, 19, (4, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    params = SamplingParams(max_tokens=tokens, n=2, ignore_eos=not stops)
    device.waited()
    for batch in range(2):
        seeds = torch.arange(8).view(4, 2) + 16 - 8 * batch  # the first one ends at the 57th of 66 tokens
        rollout.admit(batch, DataProto({**columns, "seeds": seeds}), params)
    found = [dict(rollout.finish(batch, batch).to("cpu").batch) for batch in range(2)]
    return found, device.waited()


@pytest.mark.fast("False")
@pytest.mark.parametrize("stops", [True, False])
def test_generation_draws_as_on_a_cpu_and_looks_at_every_eighth_token(device, stops):
    expected, _ = generated(CPU, device, 80, stops=stops)
    found, many = generated(DEVICE, device, 80, stops=stops)
    _, few = generated(DEVICE, device, 24, stops=stops)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if stops:  # a look reads two numbers, and fewer rows are one wait more; the second call has 22 of its own
        assert many - few <= 3 * (72 - 24) / 8 + 22, device.waits
    else:
        assert many == few, device.waits


@pytest.mark.parametrize("operation", [torch.add, torch.matmul])
def test_the_device_refuses_tensors_of_the_cpu(device, operation):
    numbers = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="same device"):
        operation(numbers.to(DEVICE), numbers)
    assert float(operation(numbers.to(DEVICE), numbers.to(DEVICE)).sum()) == 8
    assert device.waited() == 4  # three copies and a number


def test_the_device_counts_sizes_that_depend_on_numbers(device):
    numbers = torch.arange(4).to(DEVICE, non_blocking=True)
    for work in (lambda: numbers[numbers > 1], numbers.nonzero, lambda: numbers[torch.tensor([1])]):
        work()
        assert device.waited() == 1
    numbers.repeat_interleave(numbers, output_size=6)
    numbers.to("cpu", non_blocking=True)
    assert device.waited() == 0


def test_the_device_counts_copies_of_what_is_not_contiguous(device):
    columns = torch.ones(2, 3)
    columns[:, :2].to(DEVICE, non_blocking=True)
    assert device.waited() == 1
    send(columns[:, :2], DEVICE)
    columns[:1, :2].to(DEVICE, non_blocking=True)
    assert device.waited() == 0

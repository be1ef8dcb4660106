from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.load import load_config
from strop.engines.base import (
    EngineSpec,
    ModelSpec,
    OptimizerSettings,
    engine_class,
    pick_device,
    weights_hash,
)
from strop.engines.micro_batches import MicroBatching, trim
from strop.engines.torch.engine import TorchEngine
from strop.errors import CheckpointError, ConfigError
from strop.models.loader import load_causal_lm, load_scorer, load_tokenizer
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel
from strop.protocol import DataProto
from strop.workers.losses import actor_objective, critic_objective

import tiny_model
from builders import random_samples
from messages import naming

SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8, grad_clip=1.0)
MICRO_BATCHINGS = [
    MicroBatching(rows=1),
    MicroBatching(rows=3),
    MicroBatching(rows=8),
    MicroBatching(max_tokens=23),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


def _engine(folder, **options) -> TorchEngine:
    policy = PolicyModel(load_causal_lm(folder))
    return TorchEngine(policy, device=torch.device("cpu"), **{"optimizer": SETTINGS, **options})


def _training_samples(n_rows: int = 16) -> DataProto:
    samples = random_samples(n_rows)
    generator = torch.Generator().manual_seed(5)
    mask = samples.batch["response_mask"]
    for name, scale in (("advantages", 1.0), ("old_log_probs", 0.3), ("values", 0.3), ("returns", 1.0)):
        samples.batch[name] = scale * torch.randn(mask.shape, generator=generator) * mask
    samples.batch["old_log_probs"] -= 2.5 * mask
    samples.batch["ref_log_prob"] = samples.batch["old_log_probs"] - 0.1
    return samples


def _objectives(mode: str):
    config = load_config(
        [
            f"actor_rollout_ref.actor.loss_agg_mode={mode}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
        ]
    )
    samples = _training_samples()
    counts = {
        "n_tokens": float(samples.batch["response_mask"].sum()),
        "n_seqs": float(len(samples)),
        "max_response_length": 5,
    }
    return (
        actor_objective(config.actor_rollout_ref.actor, **counts),
        critic_objective(config.critic, **counts),
    )


def _gradient(engine: TorchEngine) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in engine.module.parameters()])


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_the_gradient_and_the_metrics_do_not_depend_on_the_split_into_micro_batches(folder, mode):
    actor_loss, critic_loss = _objectives(mode)
    samples = _training_samples()
    for build, loss, options in (
        (lambda: PolicyModel(load_causal_lm(folder)), actor_loss, {"temperature": 0.9}),
        (lambda: ValueModel(load_scorer(folder, fresh_head_seed=1)), critic_loss, {}),
    ):
        found = []
        for micro in [MicroBatching(rows=16), *MICRO_BATCHINGS]:
            engine = TorchEngine(build(), device=torch.device("cpu"), optimizer=SETTINGS)
            metrics = engine.forward_backward(samples, loss, micro, **options)
            found.append((_gradient(engine), metrics))
        whole, whole_metrics = found[0]
        assert whole.norm() > 1e-3
        for gradient, metrics in found[1:]:
            assert (gradient - whole).norm() / whole.norm() < 1e-6
            assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("micro", MICRO_BATCHINGS)
def test_inference_returns_the_rows_in_the_batchs_order_and_width(folder, micro):
    engine, samples = _engine(folder), random_samples(11)
    whole = engine.infer(samples, MicroBatching(rows=11), temperature=1.0, with_hidden=True)
    found = engine.infer(samples, micro, temperature=1.0, with_hidden=True)
    assert found["log_prob"].shape == (11, 5)
    assert found["hidden"].shape == (11, 5, 32)
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], atol=1e-5, rtol=1e-5)


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(11, 60), st.integers(0, 5))
def test_dynamic_micro_batches_hold_every_row_once_and_never_exceed_the_cap(rows, cap, seed):
    samples = random_samples(rows, seed=seed)
    pieces = MicroBatching(max_tokens=cap).split(samples)
    assert sorted(torch.cat(pieces).tolist()) == list(range(rows))
    assert all(trim(samples[piece])["input_ids"].numel() <= cap for piece in pieces)


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(11, 60), st.integers(1, 25), st.integers(0, 5))
def test_asked_for_more_micro_batches_the_rows_are_spread_thinner_and_the_cap_holds(rows, cap, wanted, seed):
    samples = random_samples(rows, seed=seed)
    pieces = MicroBatching(max_tokens=cap).split(samples, at_least=wanted)
    assert len(pieces) == max(wanted, len(MicroBatching(max_tokens=cap).split(samples)))
    assert sorted(torch.cat(pieces).tolist()) == list(range(rows))
    assert sum(len(piece) > 0 for piece in pieces) >= min(wanted, rows)
    assert all(trim(samples[piece])["input_ids"].numel() <= cap for piece in pieces if len(piece))


def test_a_row_above_the_cap_is_an_error_with_both_numbers():
    samples = random_samples(6)
    longest = int(samples.batch["attention_mask"].sum(dim=1).max())
    with pytest.raises(ConfigError, match=naming(longest, longest - 1)):
        MicroBatching(max_tokens=longest - 1).split(samples)


def test_trimming_removes_only_columns_that_are_padding_everywhere():
    samples = random_samples(8)
    two = samples[samples.batch["attention_mask"][:, :6].sum(dim=1).argsort()[:2]]
    columns = trim(two)
    prompts = two.batch["attention_mask"][:, :6].sum(dim=1).max()
    responses = two.batch["response_mask"].sum(dim=1).max()
    assert columns["input_ids"].shape[1] == prompts + responses
    assert columns["response_mask"].shape[1] == responses
    assert columns["attention_mask"].sum() == two.batch["attention_mask"].sum()
    assert torch.equal(columns["input_ids"][:, int(prompts) :], columns["responses"])


def test_gradient_checkpointing_changes_no_gradient(folder):
    actor_loss, _ = _objectives("token-mean")
    plain, checkpointed = _engine(folder), _engine(folder, gradient_checkpointing=True)
    for engine in (plain, checkpointed):
        engine.forward_backward(_training_samples(), actor_loss, MicroBatching(rows=8), temperature=1.0)
    assert checkpointed.module.hugging_face_model.is_gradient_checkpointing
    torch.testing.assert_close(_gradient(checkpointed), _gradient(plain), atol=1e-7, rtol=1e-5)


def test_one_step_is_clipped_adamw_as_torch_does_it(folder):
    actor_loss, _ = _objectives("token-mean")
    engine, twin = _engine(folder), PolicyModel(load_causal_lm(folder))
    oracle = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
    for _ in range(3):
        engine.forward_backward(_training_samples(), actor_loss, MicroBatching(rows=4), temperature=1.0)
        result = engine.optimizer_step(0.01)
        loss, _metrics = actor_loss(
            twin(_training_samples().batch, temperature=1.0), _training_samples().batch
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        oracle.step()
        oracle.zero_grad()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    ours = torch.cat([weight.flatten() for weight in engine.module.parameters()])
    theirs = torch.cat([weight.flatten() for weight in twin.parameters()])
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_nothing_behind(folder, poison):
    engine = _engine(folder)
    before = weights_hash(engine.named_weights())

    def poisoned(outputs, columns):
        return outputs["log_prob"].sum() * poison, {}

    engine.forward_backward(random_samples(4), poisoned, MicroBatching(rows=4), temperature=1.0)
    result = engine.optimizer_step(0.1)
    assert result.skipped
    assert weights_hash(engine.named_weights()) == before
    assert all(weight.grad is None for weight in engine.module.parameters())
    actor_loss, _ = _objectives("token-mean")
    engine.forward_backward(_training_samples(), actor_loss, MicroBatching(rows=4), temperature=1.0)
    assert not engine.optimizer_step(0.1).skipped
    assert weights_hash(engine.named_weights()) != before


def test_bfloat16_autocast_computes_near_float32_and_keeps_float32_weights(folder):
    samples = random_samples(8)
    exact = _engine(folder).infer(samples, MicroBatching(rows=8), temperature=1.0)["log_prob"]
    engine = _engine(folder, compute_dtype="bfloat16")
    rough = engine.infer(samples, MicroBatching(rows=8), temperature=1.0)["log_prob"]
    assert 0 < (rough - exact).abs().max() < 0.1
    assert rough.dtype == torch.float32
    assert {weight.dtype for weight in engine.module.parameters()} == {torch.float32}


def test_engines_are_found_by_strategy_and_devices_by_name(folder):
    fsdp = load_config([]).actor_rollout_ref.actor.fsdp_config
    model, spec = ModelSpec(kind="policy", path=folder), EngineSpec(device=pick_device("cpu"), section=fsdp)
    engine = engine_class("fsdp").build(model, spec)
    assert isinstance(engine, TorchEngine)
    with pytest.raises(ConfigError, match=naming("strategy='ddp'", "fsdp")):
        engine_class("ddp")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=naming("GPU")):
            pick_device("cuda")


def _train_twice(engine: TorchEngine) -> str:
    actor_loss, _ = _objectives("token-mean")
    for _ in range(2):
        engine.forward_backward(_training_samples(), actor_loss, MicroBatching(rows=4), temperature=1.0)
        engine.optimizer_step(0.01)
    return weights_hash(engine.named_weights())


def test_training_goes_on_bit_for_bit_from_a_saved_state(folder, tmp_path):
    engine, resumed = _engine(folder), _engine(folder)
    _train_twice(engine)
    engine.save(tmp_path)
    expected = _train_twice(engine)
    resumed.load(tmp_path)
    assert _train_twice(resumed) == expected


def test_saving_before_the_first_step_changes_nothing(folder, tmp_path):
    engine, saved = _engine(folder), _engine(folder)
    saved.save(tmp_path)
    assert _train_twice(saved) == _train_twice(engine)


def test_a_state_cut_short_is_a_checkpoint_error(folder, tmp_path):
    engine = _engine(folder)
    engine.save(tmp_path)
    shard = next(tmp_path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        _engine(folder).load(tmp_path)


def test_an_export_is_a_hugging_face_folder_with_the_same_weights(folder, tmp_path):
    engine = _engine(folder)
    _train_twice(engine)
    engine.export(tmp_path, load_tokenizer(folder))
    assert (tmp_path / "model.safetensors").is_file()
    again = _engine(tmp_path)
    assert weights_hash(again.named_weights()) == weights_hash(engine.named_weights())
    assert load_tokenizer(tmp_path).chat_template == load_tokenizer(folder).chat_template


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: offloading needs a GPU")
def test_offloaded_parameters_and_moments_wait_on_the_cpu_and_change_no_number(folder):
    actor_loss, _ = _objectives("token-mean")
    device, found = torch.device("cuda"), []
    for offload in (False, True):
        options = {"optimizer": SETTINGS, "offload_parameters": offload, "offload_moments": offload}
        engine = TorchEngine(PolicyModel(load_causal_lm(folder)), device=device, **options)
        for _ in range(2):
            engine.infer(_training_samples(), MicroBatching(rows=4), temperature=1.0)
            engine.forward_backward(_training_samples(), actor_loss, MicroBatching(rows=4), temperature=1.0)
            engine.optimizer_step(0.01)
        where = {weight.device.type for weight in engine.module.parameters()}
        assert where == {"cpu" if offload else "cuda"}
        found.append(weights_hash(engine.named_weights()))
    assert found[0] == found[1]

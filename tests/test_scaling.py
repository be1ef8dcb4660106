"""docs/scaling.md: the script's sizes are those that real ranks send, and real files have."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import scaling_jobs
import torch
import transformers

from strop.config.load import load_config
from strop.config.memory.facts import ModelFacts
from strop.protocol import DataProto
from strop.tracking.samples import samples_table, write_table

import tiny_model
from ranks import Ranks

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

scaling = importlib.import_module("generate_scaling")

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
ROWS, WIDTH = 4, 32
TOKENS, ANSWERS = ROWS * (2 * WIDTH - 1), ROWS * WIDTH  # nothing follows a response's last token


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as processes:
        yield processes


@pytest.fixture
def folder(tmp_path):
    """Folder of a random model."""

    def made(name: str, **more) -> Path:
        torch.manual_seed(0)
        model = scaling.Model(name, **SHAPE | more)
        getattr(transformers, f"{name}ForCausalLM")(model.config).save_pretrained(tmp_path / name)
        tiny_model.build_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    return made


def near(found: float, expected: float, limit: float = 0.03) -> bool:
    print(f"{found} of {expected}: {found / expected - 1:+.2%}")
    return abs(found / expected - 1) < limit


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_fsdp_sends_what_the_page_says(ranks, folder, world):
    path, model = folder("Qwen2"), scaling.Model("Qwen2", **SHAPE)
    found = ranks.run(world, scaling_jobs.sent, path, None, ROWS, WIDTH)[0]
    assert near(sum(found["pass"].values()), scaling.fsdp_pass(model, world))
    assert near(sum(found["update"].values()), scaling.fsdp_update(model, world))
    assert near(sum(found["weights"].values()), scaling.gathered_weights(model, world))


@pytest.mark.parametrize("plan", scaling.PLANS[:2], ids=lambda plan: plan.title)
def test_micro_batches_of_fsdp_are_those_that_a_run_chooses_on_gpus_of_80_gb(monkeypatch, plan):
    shape = plan.model.config
    facts = ModelFacts(
        plan.model.parameters,
        shape.num_hidden_layers,
        shape.hidden_size,
        shape.vocab_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        plan.model.cache // (4 * shape.num_hidden_layers),
        None,
    )
    for module in ("forecast", "choices"):
        monkeypatch.setattr(f"strop.config.memory.{module}.read_model_facts", lambda path: facts)
    monkeypatch.setattr("strop.config.machine.gpu_memory", lambda: 80 * 10**9)
    config = load_config(
        [
            "trainer.device=cuda",
            *(f"trainer.nnodes={plan.trainers // scaling.NODE}", f"trainer.n_gpus_per_node={scaling.NODE}"),
            *("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm"),
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            *(f"data.max_prompt_length={plan.prompt}", f"data.max_response_length={plan.response}"),
            "algorithm.adv_estimator=grpo",
        ]
    )
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == plan.micro


@pytest.mark.slow
def test_megatron_sends_what_the_page_says(ranks, folder):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'strop[megatron]'")
    path, model = folder("Qwen2"), scaling.Model("Qwen2", **SHAPE)
    layout = {"tensor_model_parallel_size": 2}
    found = ranks.run(2, scaling_jobs.sent, path, layout, ROWS, WIDTH)[0]
    assert near(sum(found["update"].values()), scaling.tensor_parallel(model, TOKENS, ANSWERS, 2))
    assert near(sum(found["pass"].values()), scaling.tensor_parallel_pass(model, TOKENS, ANSWERS, 2))

    [first, _] = ranks.run(2, scaling_jobs.sent, path, {"pipeline_model_parallel_size": 2}, ROWS, WIDTH)
    assert near(first["update"]["send", torch.bfloat16], scaling.pipeline(model, TOKENS, 1))

    found = ranks.run(2, scaling_jobs.sent, path, {}, ROWS, WIDTH)[0]
    assert near(sum(found["step"].values()), scaling.megatron_step(model.parameters, 0, 2, 2))


@pytest.mark.slow
def test_megatron_sends_experts_what_the_page_says(ranks, folder):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'strop[megatron]'")
    path, model = folder("Qwen3Moe", **EXPERTS), scaling.Model("Qwen3Moe", **SHAPE, **EXPERTS)
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    found = ranks.run(4, scaling_jobs.sent, path, layout, ROWS, WIDTH)
    for name, passes, of_activations in (
        ("update", 3, scaling.tensor_parallel),
        ("pass", 1, scaling.tensor_parallel_pass),
    ):
        moved = sum(one[name]["alltoall", torch.bfloat16] for one in found) / len(found)
        expected = passes * scaling.to_experts(model, TOKENS // 2, 2, 4)
        assert near(moved, expected, limit=0.06)  # a router chooses unevenly
        other = sum(found[0][name].values()) - found[0][name]["alltoall", torch.bfloat16]
        assert near(other, of_activations(model, TOKENS, ANSWERS, 2))
    dense = (model.parameters - model.routed) / 2
    assert near(sum(found[0]["step"].values()), scaling.megatron_step(dense, model.routed / 2, 2, 2))


@pytest.mark.slow
def test_the_driver_sends_and_receives_what_the_page_says(ray_session):
    driver = importlib.import_module("driver")
    prompts, tokens = 256, 512  # on two ranks, columns are as large as an object of their own
    rows, _ = driver.measure(2, prompts=prompts, tokens=tokens, steps=1)
    for row in rows:
        sent, received = scaling.through_driver(
            tokens, tokens, handles=row.handles, critic=True, reference=True
        )
        assert (row.cost.sent, row.cost.received) == (prompts * sent, prompts * received)


def test_a_checkpoint_is_as_large_as_the_page_says(ranks, folder, tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 1024}
    path, model = folder("Qwen2", **wide), scaling.Model("Qwen2", **SHAPE | wide)
    ranks.run(2, scaling_jobs.save, path, tmp_path / "state")
    assert near(
        sum(file.stat().st_size for file in (tmp_path / "state").iterdir()), scaling.checkpoint(model)
    )


def test_samples_are_as_large_as_the_page_says(tmp_path):
    """Log-probs of a distribution with long tails, and ids of a vocabulary of 50,000 by Zipf's law."""
    rows, prompt, response = 64, 16, 1024
    generator = np.random.default_rng(0)
    ids = torch.from_numpy(generator.zipf(1.2, (rows, prompt + response)) % 50_000 + 4)
    mask = torch.ones(rows, response)
    columns = {
        name: -torch.from_numpy(generator.exponential(1.0, (rows, response))).float() for name in NUMBERS
    }
    batch = DataProto(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "response_mask": mask,
            "token_level_scores": torch.zeros(rows, response),
            **columns,
        },
        {"uid": np.array([str(row) for row in range(rows)], dtype=object)},
    )
    write_table(tmp_path / "samples.parquet", samples_table(batch, Words()))
    size = (tmp_path / "samples.parquet").stat().st_size
    expected = scaling.samples_file(rows * response, NUMBERS)
    print(size / rows / response, expected / rows / response)
    assert abs(size / expected - 1) < 0.05


NUMBERS = ("rollout_log_probs", "old_log_probs", "entropys", "advantages")


class Words:
    """Tokenizer whose tokens are words of about four letters."""

    def batch_decode(self, rows, *, skip_special_tokens):
        return ["".join(f" {token:x}" for token in row) for row in rows]

"""Ranks that share sequences compute what one rank computes on padded rows, for any lengths."""

from __future__ import annotations

import pytest
import torch
import ulysses_jobs as jobs

from strop.controller.pools import Role
from strop.controller.shards import shard
from strop.engines.micro_batches import MicroBatching
from strop.models.loader import load_scorer

import tiny_model
from messages import mentions
from ranks import Ranks

MODELS = {
    "Qwen2, 2 kv heads": ("Qwen2", {}),
    "Qwen2, 1 kv head": ("Qwen2", {"num_key_value_heads": 1}),
    "Llama, 2 kv heads": ("Llama", {}),
    "Llama, 1 kv head": ("Llama", jobs.ONE_KV_HEAD),
    "Qwen2, windows": ("Qwen2 with windows", {}),
    "Gemma2, 1 kv head": ("Gemma2", {"num_key_value_heads": 1}),
    "Qwen3Moe with the auxiliary loss": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "router_aux_loss_coef": 0.5,
        },
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: jobs.save_model(tmp_path_factory.mktemp("model"), family, **sizes)
        for name, (family, sizes) in MODELS.items()
    }


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as processes:
        yield processes


NEIGHBOURS = ("Qwen2, 1 kv head", "Llama, 2 kv heads")


@pytest.mark.fast("Qwen3Moe with the auxiliary loss")
@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.slow] if m in NEIGHBOURS else []) for m in MODELS]
)
def test_gradients_in_every_family(ranks, folders, model):
    """Every layout with one family: test_layouts.py."""
    layouts = {
        "2 ranks": (2, MicroBatching(rows=8), (*jobs.sharing(2), *jobs.CHECKPOINTING)),
        "4 ranks": (4, MicroBatching(rows=8), jobs.sharing(4)),
    }
    batches = [[(4, 3), (2, 6), (7, 1), (1, 5), (3, 0)]]
    jobs.require_equal_gradients(ranks, folders[model], Role.Actor, batches, layouts)


# ------------------------------------------------------------------------------------------------- outputs

LAYOUTS = {
    "2 ranks": (2, jobs.sharing(2)),
    "4 ranks in pairs": (4, jobs.sharing(2)),
    "every role in its own way": (
        4,
        (
            *jobs.PACKED,
            f"{jobs.KEYS[Role.Actor]}=4",
            f"{jobs.KEYS[Role.RefPolicy]}=1",
            f"{jobs.KEYS[Role.Critic]}=2",
        ),
    ),
}


@pytest.fixture(scope="module")
def scorer(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer")
    load_scorer(folders["Llama, 2 kv heads"], fresh_head_seed=3).save_pretrained(folder)
    tiny_model.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.fast("every role in its own way")
@pytest.mark.parametrize(
    "layout",
    [pytest.param("2 ranks", marks=pytest.mark.slow), "4 ranks in pairs", "every role in its own way"],
)
def test_outputs_come_back_once_in_the_order_of_the_rows(ranks, folders, scorer, layout):
    """Log-probs, entropies, hidden states, the full KL, values and scores, as the controller joins them."""
    lengths = [(4, 3), (2, 6), (7, 1), (1, 5), (3, 2), (1, 1), (5, 5)]
    folder = folders["Llama, 2 kv heads"]
    size, keys = LAYOUTS[layout]
    [expected] = ranks.run(1, jobs.outputs, folder, scorer, lengths)
    names = set()
    for (_, whole), *by_rank in zip(
        expected, *ranks.run(size, jobs.outputs, folder, scorer, lengths, *keys), strict=True
    ):
        parts = dict(reversed([(place, found) for place, found in by_rank]))  # of each part, the lowest rank
        shards = shard(jobs.samples(lengths), len(parts))
        found = shards.join([parts[part, len(parts)] for part in range(len(parts))])
        assert found.batch.keys() == whole.batch.keys()
        for name, column in found.batch.items():
            torch.testing.assert_close(column, whole.batch[name], atol=1e-5, rtol=1e-5)
            names.add(name)
    assert names == {
        "ref_log_prob", "ref_hidden", "old_log_probs", "entropys", "full_kl", "values", "rm_scores",
    }  # fmt: skip


@pytest.mark.slow
def test_layers_see_a_piece_of_the_tokens(ranks, folders):
    lengths = [(4, 3), (2, 2)]  # 11 tokens
    for size, tokens in ((2, 6), (4, 3)):
        for seen in ranks.run(
            4, jobs.lengths_in_layers, folders["Llama, 2 kv heads"], lengths, *jobs.sharing(size)
        ):
            assert seen == [("LlamaMLP", tokens)] * 2


def test_flash_attention_gets_whole_rows_of_some_heads(ranks, folders):
    folder, lengths = folders["Llama, 2 kv heads"], [(2, 3), (5, 1), (1, 6)]
    [(expected, calls)] = ranks.run(1, jobs.with_flash_attention, folder, lengths, *jobs.PACKED)
    assert calls == {("flash_attention_2", 4, 2, 18, 0, 7, 13, 18)}
    for size, kv_heads in ((2, 1), (4, 1)):
        for found, calls in ranks.run(size, jobs.with_flash_attention, folder, lengths, *jobs.sharing(size)):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            assert calls == {("flash_attention_2", 4 // size, kv_heads, 18, 0, 7, 13, 18)}


def test_whole_rows_of_some_heads_attend_in_one_call_on_a_gpu(ranks, folders):
    folder, lengths = folders["Qwen2, windows"], [(2, 3), (5, 1), (1, 6)]
    [expected] = ranks.run(1, jobs.log_probs_by, "sdpa", folder, lengths, *jobs.PACKED)
    for size, kv_heads in ((2, 1), (4, 1)):
        for found, calls in ranks.run(size, jobs.with_varlen_attention, folder, lengths, *jobs.sharing(size)):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            heads = (18, 4 // size, 8), (18, kv_heads, 8)
            assert calls == [(*heads, window, [0, 7, 13, 18]) for window in (-1, 2)]


@pytest.mark.parametrize(
    ("size", "keys"),
    [
        pytest.param(1, jobs.PACKED, marks=pytest.mark.slow),
        (2, jobs.sharing(2)),
        pytest.param(4, jobs.sharing(4), marks=pytest.mark.slow),
    ],
)
def test_flex_attention_gets_the_mask_of_whole_rows(ranks, folders, size, keys):
    folder, lengths = folders["Qwen2, windows"], [(2, 3), (5, 1), (1, 6), (7, 4)]
    [expected] = ranks.run(1, jobs.log_probs_by, "sdpa", folder, lengths, *jobs.PACKED)
    for found in ranks.run(size, jobs.log_probs_by, "flex_attention", folder, lengths, *keys):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_passes_are_shared_too(ranks, folders):
    batches, rows = [[(4, 3), (2, 6), (7, 1)]], MicroBatching(rows=3)
    arguments = folders["Llama, 2 kv heads"], Role.Actor, batches, rows, "token-mean"
    bfloat16 = "actor_rollout_ref.model.compute_dtype=bfloat16"
    [(alone, _)], _ = ranks.run(2, jobs.gradients, *arguments, bfloat16)
    [(shared, _)], _ = ranks.run(2, jobs.gradients, *arguments, bfloat16, *jobs.sharing(2))
    [[(exact, _)]] = ranks.run(1, jobs.gradients, *arguments)
    assert 0 < (jobs.flat(alone) - jobs.flat(exact)).norm() <= 5e-2 * jobs.flat(exact).norm()
    assert (jobs.flat(shared) - jobs.flat(exact)).norm() <= 5e-2 * jobs.flat(exact).norm()


# ------------------------------------------------------------------------------------------------ refusals


SIZE = "ulysses_sequence_parallel_size"
REFUSED = {
    "padded": (
        {},
        (*jobs.PADDED, f"actor_rollout_ref.actor.{SIZE}=2"),
        ("ModelError", f"{SIZE}=2", "actor_rollout_ref.model.use_remove_padding=True"),
    ),
    "heads": (
        {"num_attention_heads": 2, "num_key_value_heads": 1},
        jobs.sharing(4),
        ("ModelError", f"{SIZE}=4", "LlamaForCausalLM", "2 attention heads", "divisor of 2"),
    ),
    "rotary embeddings that depend on the longest sequence": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        jobs.sharing(2),
        ("ModelError", f"{SIZE}=2", "LlamaForCausalLM", "rotary embeddings", "dynamic"),
    ),
    "a number that does not divide the ranks": (
        {},
        jobs.sharing(3),
        ("ConfigError", f"actor_rollout_ref.actor.{SIZE}=3", "4 ranks", "2, 4"),
    ),
}


@pytest.mark.parametrize(("sizes", "keys", "parts"), REFUSED.values(), ids=REFUSED)
def test_sharing_that_cannot_work_is_refused_before_weights_are_read(ranks, tmp_path, sizes, keys, parts):
    jobs.save_model(tmp_path, "Llama", **sizes)
    (tmp_path / "model.safetensors").write_bytes(b"")
    for found in ranks.run(4, jobs.refusal, tmp_path, Role.Actor, *keys):
        assert mentions(found, *parts)


def test_ranks_with_different_batches_raise_instead_of_waiting(ranks, folders):
    for found in ranks.run(2, jobs.different_batches, folders["Llama, 2 kv heads"], *jobs.sharing(2)):
        assert mentions(found, "2 ranks")

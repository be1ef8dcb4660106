"""Ranks that share sequences compute what one rank computes on padded rows, for any lengths."""

from __future__ import annotations

import pytest
import torch
import ulysses_jobs as jobs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from strop.controller.pools import Role
from strop.controller.shards import shard
from strop.engines.micro_batches import MicroBatching
from strop.models.loader import load_scorer

import tiny_model
from messages import mentions
from ranks import Ranks

PACKED = "actor_rollout_ref.model.use_remove_padding=true"  # the critic's follows it
CHECKPOINTING = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "critic.model.enable_gradient_checkpointing=true",
)
HSDP = (
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
    "critic.model.fsdp_config.fsdp_size=2",
)
FAMILIES = {
    "Qwen2, 2 kv heads": ("Qwen2", {}),
    "Qwen2, 1 kv head": ("Qwen2", {"num_key_value_heads": 1}),
    "Llama, 2 kv heads": ("Llama", {}),
    "Llama, 1 kv head": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "Gemma2, 1 kv head": ("Gemma2", {"num_key_value_heads": 1, "sliding_window": 3}),
}


def sharing(size: int) -> tuple[str, ...]:
    return PACKED, *(f"{key}={size}" for key in jobs.KEYS.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: jobs.save_model(tmp_path_factory.mktemp("model"), family, **sizes)
        for name, (family, sizes) in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as processes:
        yield processes


def _assert_gradients(ranks, folder, role, batches, layouts, mode="token-mean"):
    """``layouts``: (ranks, micro-batches, keys). The reference is one rank, padded, in one micro-batch."""
    [expected] = ranks.run(1, jobs.gradients, folder, role, batches, MicroBatching(rows=8), mode)
    for size, micro, keys in layouts:
        for found in ranks.run(size, jobs.gradients, folder, role, batches, micro, mode, *keys):
            for (gradient, metrics), (theirs, their_metrics) in zip(found, expected, strict=True):
                assert list(gradient) == list(theirs)
                difference = _flat(gradient) - _flat(theirs)
                assert difference.norm() <= 1e-6 * _flat(theirs).norm()
                assert metrics == pytest.approx(their_metrics, rel=1e-4, abs=1e-6)


def _flat(gradient):
    return torch.cat([weight.double().flatten() for weight in gradient.values()])


LENGTHS = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=6).filter(
    lambda lengths: any(response for _, response in lengths)
)


@pytest.mark.parametrize("role", [Role.Actor, Role.Critic])
@pytest.mark.parametrize("family", ["Qwen2, 1 kv head", "Llama, 2 kv heads"])
@settings(max_examples=2, derandomize=True, phases=[Phase.generate])
@given(batches=st.lists(LENGTHS, min_size=4, max_size=4))
def test_gradients_are_those_of_one_rank(ranks, folders, role, family, batches):
    rows = MicroBatching(rows=2)
    layouts = [(2, rows, sharing(2)), (4, rows, sharing(2))]
    _assert_gradients(ranks, folders[family], role, batches, layouts)


EDGES = [
    [(1, 1), (1, 1), (2, 1)],  # single-token responses
    [(1, 1)],  # fewer tokens than ranks
    [(3, 0), (4, 3)],  # a row that is all masked
    [(4, 3), (2, 2), (1, 1)],  # an odd number of tokens
    [(1, 1), (7, 6), (2, 1), (7, 6)],  # one in eight; two ranks have nothing to learn from
    [(7, 6), (2, 6)],  # every response is cut at the limit
]
EDGE_LAYOUTS = {
    "2 ranks": (2, MicroBatching(rows=8), sharing(2)),
    "2 x 2 ranks with empty micro-batches": (
        4,
        MicroBatching(max_tokens=15),
        (*sharing(2), *HSDP, *CHECKPOINTING),
    ),
    "4 ranks, row by row": (4, MicroBatching(rows=1), sharing(4)),
}


@pytest.mark.parametrize("layout", EDGE_LAYOUTS.values(), ids=EDGE_LAYOUTS)
@pytest.mark.parametrize("role", [Role.Actor, Role.Critic])
def test_gradients_at_the_edges(ranks, folders, role, layout):
    _assert_gradients(ranks, folders["Llama, 1 kv head"], role, EDGES, [layout], "seq-mean-token-mean")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_every_family(ranks, folders, family):
    batches = [[(4, 3), (2, 6), (7, 1), (1, 5), (3, 0)]]
    layouts = [
        (2, MicroBatching(rows=8), (*sharing(2), *CHECKPOINTING)),
        (4, MicroBatching(rows=8), sharing(4)),
    ]
    _assert_gradients(ranks, folders[family], Role.Actor, batches, layouts)


# ------------------------------------------------------------------------------------------------- outputs

LAYOUTS = {
    "2 ranks": (2, sharing(2)),
    "4 ranks in pairs": (4, sharing(2)),
    "every role in its own way": (
        4,
        (
            PACKED,
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


@pytest.mark.parametrize("layout", LAYOUTS)
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


def test_layers_see_a_piece_of_the_tokens(ranks, folders):
    lengths = [(4, 3), (2, 2)]  # 11 tokens
    for size, tokens in ((2, 6), (4, 3)):
        for seen in ranks.run(
            4, jobs.lengths_in_layers, folders["Llama, 2 kv heads"], lengths, *sharing(size)
        ):
            assert seen == [("LlamaMLP", tokens)] * 2


def test_flash_attention_gets_whole_rows_of_some_heads(ranks, folders):
    folder, lengths = folders["Llama, 2 kv heads"], [(2, 3), (5, 1), (1, 6)]
    [(expected, calls)] = ranks.run(1, jobs.with_flash_attention, folder, lengths, PACKED)
    assert calls == {("flash_attention_2", 4, 2, 18, 0, 7, 13, 18)}
    for size, kv_heads in ((2, 1), (4, 1)):
        for found, calls in ranks.run(size, jobs.with_flash_attention, folder, lengths, *sharing(size)):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            assert calls == {("flash_attention_2", 4 // size, kv_heads, 18, 0, 7, 13, 18)}


def test_bfloat16_passes_are_shared_too(ranks, folders):
    batches, rows = [[(4, 3), (2, 6), (7, 1)]], MicroBatching(rows=3)
    arguments = folders["Llama, 2 kv heads"], Role.Actor, batches, rows, "token-mean"
    bfloat16 = "actor_rollout_ref.model.compute_dtype=bfloat16"
    [(alone, _)], _ = ranks.run(2, jobs.gradients, *arguments, bfloat16)
    [(shared, _)], _ = ranks.run(2, jobs.gradients, *arguments, bfloat16, *sharing(2))
    [[(exact, _)]] = ranks.run(1, jobs.gradients, *arguments)
    assert 0 < (_flat(alone) - _flat(exact)).norm() <= 5e-2 * _flat(exact).norm()
    assert (_flat(shared) - _flat(exact)).norm() <= 5e-2 * _flat(exact).norm()


# ------------------------------------------------------------------------------------------------ refusals


REFUSED = {
    "padded": (
        {},
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",),
        "ModelError: ulysses_sequence_parallel_size=2 shares packed rows; "
        "set actor_rollout_ref.model.use_remove_padding=True",
    ),
    "heads": (
        {"num_attention_heads": 2, "num_key_value_heads": 1},
        sharing(4),
        "ModelError: ulysses_sequence_parallel_size=4: LlamaForCausalLM has 2 attention heads, expected a "
        "multiple of 4; set it to a divisor of 2",
    ),
    "rotary embeddings that depend on the longest sequence": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        sharing(2),
        "ModelError: ulysses_sequence_parallel_size=2: LlamaForCausalLM has rotary embeddings of type "
        "dynamic",
    ),
    "a number that does not divide the ranks": (
        {},
        sharing(3),
        "ConfigError: actor_rollout_ref.actor.ulysses_sequence_parallel_size=3 does not divide the 4 ranks "
        "(nearest: 2, 4)",
    ),
}


@pytest.mark.parametrize(("sizes", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shared_is_refused_before_weights_are_read(ranks, tmp_path, sizes, keys, message):
    jobs.save_model(tmp_path, "Llama", **sizes)
    (tmp_path / "model.safetensors").write_bytes(b"")
    for found in ranks.run(4, jobs.refusal, tmp_path, Role.Actor, *keys):
        assert found.startswith(message)


def test_ranks_with_different_batches_say_so_instead_of_waiting(ranks, folders):
    for found in ranks.run(2, jobs.different_batches, folders["Llama, 2 kv heads"], *sharing(2)):
        assert mentions(found, "2 ranks")

"""FSDP2 on gloo: one, two and four ranks compute the same, and read what the others wrote."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
import sharded_jobs as jobs
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.export import export_from_shards
from strop.models.heads import scorer_config

import tiny_model
from messages import mentions
from ranks import Ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
families = importlib.import_module("families")

ROWS = MicroBatching(rows=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A Llama with untied embeddings in several safetensors files."""
    return jobs.save_untied(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as processes:
        yield processes


@pytest.fixture(scope="module")
def alone(folder, ranks):
    """Results of the same updates in one process, by role."""
    found = {role: ranks.run(1, jobs.train, folder, role, ROWS, {}, {})[0] for role in ("actor", "critic")}
    for role, (weights, *_) in found.items():
        assert distance(weights, ranks.run(1, jobs.initial, folder, role)[0]) > 1e-3  # something was learned
    return found


def distance(found: jobs.Weights, expected: jobs.Weights) -> float:
    """Norm of the difference over the norm, over all parameters."""
    assert list(found) == list(expected)
    ours, theirs = (torch.cat([w.flatten().float() for w in side.values()]) for side in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())


LAYOUTS = {
    "2": (2, MicroBatching(rows=4), {}),
    "4": (4, MicroBatching(rows=1), {}),
    "2x2": (4, MicroBatching(rows=2), {"sharding": {"fsdp_size": 2}}),
    "2 copies": (2, MicroBatching(rows=3), {"sharding": {"fsdp_size": 1}}),
    "dynamic": (4, MicroBatching(max_tokens=15), {}),
    "checkpointing": (2, MicroBatching(rows=5), {"gradient_checkpointing": True}),
    "selective": (2, MicroBatching(rows=5), {"gradient_checkpointing": "selective"}),
    "by size": (2, MicroBatching(rows=8), {"sharding": {"min_num_params": 5000}}),
    "by class": (2, MicroBatching(rows=8), {"sharding": {"layer_classes": ("Qwen2MLP",)}}),
}


@pytest.mark.fast("dynamic-actor", "by size-critic")
@pytest.mark.parametrize(
    ("layout", "role"),
    [
        *((layout, "actor") for layout in LAYOUTS if layout not in ("2", "4", "selective")),
        *(pytest.param(layout, "actor", marks=pytest.mark.slow) for layout in ("2", "4", "selective")),
        *(pytest.param(layout, "critic", marks=pytest.mark.slow) for layout in ("4", "2x2")),
        ("by size", "critic"),
    ],
)
def test_updates_are_those_of_one_process(folder, ranks, alone, role, layout):
    world_size, micro, options = LAYOUTS[layout]
    expected, expected_norms, expected_metrics = alone[role]
    for found, norms, metrics in ranks.run(world_size, jobs.train, folder, role, micro, {}, options):
        assert distance(found, expected) < 1e-5
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-5)


@pytest.mark.fast("1-all_reduce-options2")
@pytest.mark.parametrize(
    ("fsdp_size", "collective", "options"),
    [
        pytest.param(-1, "reduce_scatter_single", {}, marks=pytest.mark.slow),
        (-1, "reduce_scatter_single", {"compute_dtype": "bfloat16"}),
        (1, "all_reduce", {}),
        pytest.param(1, "all_reduce", {"compute_dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_gradients_reduced_once_a_step_give_the_same_weights(folder, ranks, options, fsdp_size, collective):
    micro = MicroBatching(rows=2)  # four micro-batches

    def run(**sharding):
        sharding = {"fsdp_size": fsdp_size, **sharding}
        return ranks.run(2, jobs.train_counting, folder, micro, {"sharding": sharding, **options})

    each_time, once = run(), run(reduce_once=True)
    for (expected, before), (found, after) in zip(each_time, once, strict=True):
        assert distance(found, expected) < 1e-6
        assert before[collective] == 4 * after[collective] > 0


@pytest.mark.slow
def test_parameters_that_stay_gathered_after_the_forward_pass_change_no_bit(folder, ranks):
    def run(**sharding):
        return ranks.run(2, jobs.train_counting, folder, MicroBatching(rows=2), {"sharding": sharding})

    for (expected, before), (found, after) in zip(run(), run(reshard_after_forward=False), strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        assert after["all_gather_single"] < before["all_gather_single"]


@pytest.mark.slow
def test_the_auxiliary_loss_of_experts_is_over_all_ranks(ranks, tmp_path):
    families.model(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, router_aux_loss_coef=0.5
    ).save_pretrained(tmp_path)
    tiny_model.build_tokenizer().save_pretrained(tmp_path)
    [(expected, _, expected_metrics)] = ranks.run(1, jobs.train, tmp_path, "actor", ROWS, {}, {})
    assert expected_metrics["router_aux_loss"] > 2
    options = {"rows": 16, "mode": "token-mean"}
    for found, _, metrics in ranks.run(2, jobs.train, tmp_path, "actor", MicroBatching(rows=3), options, {}):
        assert distance(found, expected) < 1e-5
        assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"sharding": {"fsdp_size": 2}}], ids=["1-D", "2x2"])
def test_the_gradient_is_the_sum_over_the_ranks_and_the_same_norm_everywhere(folder, ranks, options):
    [(expected, norm)] = ranks.run(1, jobs.gradient, folder, "actor", ROWS, {})
    found = ranks.run(4, jobs.gradient, folder, "actor", MicroBatching(rows=3), options)
    assert len({rank_norm for _, rank_norm in found}) == 1
    assert found[0][1] == pytest.approx(norm, rel=1e-6)
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in expected.values()]).norm()), rel=1e-6)
    assert all(distance(gradient, expected) < 1e-6 for gradient, _ in found)


@pytest.mark.fast("rows-actor")
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    "micro", [MicroBatching(rows=2), MicroBatching(max_tokens=60)], ids=["rows", "tokens"]
)
def test_trees_on_one_rank_alone_give_the_gradient_of_one_process(folder, ranks, role, micro):
    [(expected, norm)] = ranks.run(1, jobs.gradient, folder, role, ROWS, {}, jobs.sessions)
    for found, found_norm in ranks.run(2, jobs.gradient, folder, role, micro, {}, jobs.sessions):
        assert distance(found, expected) < 1e-6
        assert found_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.fast("critic-seq-mean-token-sum-norm")
@pytest.mark.parametrize(
    ("role", "mode"),
    [
        ("actor", "token-mean"),
        pytest.param("critic", "seq-mean-token-sum", marks=pytest.mark.slow),
        pytest.param("actor", "seq-mean-token-mean", marks=pytest.mark.slow),
        ("critic", "seq-mean-token-sum-norm"),
    ],
)
def test_rows_without_a_response_contribute_nothing(folder, ranks, role, mode):
    options = {"rows": 5, "mode": mode}  # on four ranks three such rows, each in a separate micro-batch
    [(expected, _, expected_metrics)] = ranks.run(1, jobs.train, folder, role, ROWS, options, {})
    for found, _, metrics in ranks.run(4, jobs.train, folder, role, MicroBatching(rows=1), options, {}):
        assert distance(found, expected) < 1e-5
        assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-5)


def test_bfloat16_keeps_float32_masters_and_is_close(folder, ranks, alone):
    options = {"compute_dtype": "bfloat16"}
    for found, norms, _ in ranks.run(2, jobs.train, folder, "actor", ROWS, {}, options):
        assert {weight.dtype for weight in found.values()} == {torch.float32}
        assert 1e-6 < distance(found, alone["actor"][0]) < 0.02
        assert norms[0] == pytest.approx(alone["actor"][1][0], rel=0.05)


@pytest.mark.slow
def test_bfloat16_of_one_rank_is_that_of_several(folder, ranks):
    """Up to the gradients of tied weights and embedding rows, which FSDP2 adds up in 16 bits."""
    arguments = (folder, "actor", MicroBatching(rows=1), {"compute_dtype": "bfloat16"})
    [(expected, norm)] = ranks.run(1, jobs.gradient, *arguments)
    [(exact, _)] = ranks.run(1, jobs.gradient, *arguments[:3], {})
    for found, found_norm in ranks.run(2, jobs.gradient, *arguments):
        print(distance(found, expected), distance(exact, expected))
        assert distance(found, expected) < 0.1 * distance(exact, expected)
        assert found_norm == pytest.approx(norm, rel=1e-3)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(folder, ranks):
    for skipped, unchanged, grads_left in ranks.run(2, jobs.poisoned_step, folder):
        assert (skipped, unchanged, grads_left) == (True, True, 0)


def test_inference_gives_each_rank_its_rows_whatever_the_others_need(folder, ranks):
    [expected] = ranks.run(1, jobs.infer, folder, ROWS)
    found = ranks.run(4, jobs.infer, folder, MicroBatching(max_tokens=12))
    assert expected["log_prob"].shape == (16, 5)
    assert expected["hidden"].shape == (16, 5, 32)
    for name, column in expected.items():
        together = torch.stack([part[name] for part in found], dim=1).flatten(0, 1)
        torch.testing.assert_close(together, column, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_rank_with_fewer_rows_than_rounds_takes_part_in_all_rounds(folder, ranks):
    [expected] = ranks.run(1, jobs.uneven_update, folder)
    found = ranks.run(2, jobs.uneven_update, folder)
    assert all(distance(weights, expected) < 1e-5 for weights in found)


def test_the_full_kl_is_measured_against_the_frozen_output_layer(folder, ranks):
    [(start, expected)] = ranks.run(1, jobs.full_kl, folder)
    assert start == pytest.approx(0, abs=1e-6)
    assert expected > 1e-4
    for first, second in ranks.run(4, jobs.full_kl, folder):
        assert first == pytest.approx(0, abs=1e-6)
        assert second == pytest.approx(expected, rel=1e-4)


def test_states_load_bit_for_bit_on_other_numbers_of_ranks(folder, ranks, tmp_path):
    """Two ranks write; four, 2x2 and one read and write; all have the same tensors, moments included."""
    role = "critic"  # a body and a head
    [digest, _] = ranks.run(2, jobs.train_and_save, folder, role, tmp_path / "by 2")
    previous = tmp_path / "by 2"
    for world_size, sharding in ((4, {}), (4, {"fsdp_size": 2}), (1, {})):
        own = tmp_path / f"{world_size} {len(list(tmp_path.iterdir()))}"
        found = ranks.run(world_size, jobs.load_and_save, folder, role, previous, own, sharding)
        assert found == [digest] * world_size
        previous = own
    original, last = jobs.read_state(tmp_path / "by 2"), jobs.read_state(previous)
    assert original.keys() == last.keys()
    assert any(name.endswith("exp_avg_sq") for name in original)
    assert all(torch.equal(original[name], last[name]) for name in original)
    steps = [tensor for name, tensor in last.items() if name.endswith(".step")]
    assert {float(step) for step in steps} == {2.0}


@pytest.mark.slow
def test_a_background_save_holds_the_state_of_its_start_while_training_goes_on(folder, ranks, tmp_path):
    ranks.run(2, jobs.save_both_ways, folder, tmp_path)
    fore, back = jobs.read_state(tmp_path / "fore"), jobs.read_state(tmp_path / "back")
    assert fore.keys() == back.keys()
    assert all(torch.equal(fore[name], back[name]) for name in fore)
    norm = "model.hugging_face_model.model.norm.weight"
    assert not torch.equal(fore[norm], jobs.read_state(tmp_path / "later")[norm])


def test_a_background_save_that_fails_raises_when_it_is_finished(folder, ranks, tmp_path):
    for message in ranks.run(2, jobs.failure, jobs.failing_save, folder, tmp_path / "gone"):
        assert mentions(message, "CheckpointError", "cannot write the checkpoint")


@pytest.mark.slow
def test_a_state_of_another_model_is_refused_by_name(folder, untied, ranks, tmp_path):
    ranks.run(2, jobs.train_and_save, folder, "actor", tmp_path / "state")
    for message in ranks.run(2, jobs.failure, jobs.load, untied, tmp_path / "state"):
        assert mentions(message, "CheckpointError", "model.hugging_face_model.model.layers.2")


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    """A language model of a family for which transformers has no sequence-classification class."""
    return jobs.save_granite(tmp_path_factory.mktemp("granite"))


@pytest.mark.fast("critic")
@pytest.mark.parametrize("kind", ["tied", "untied", "critic", "granite critic"])
def test_an_export_is_what_transformers_loads(folder, untied, granite, ranks, tmp_path, kind):
    source = {"untied": untied, "granite critic": granite}.get(kind, folder)
    role = "critic" if "critic" in kind else "actor"
    found = ranks.run(2, jobs.export_both_ways, source, role, tmp_path)
    out = tmp_path / "from_shards"
    export_from_shards(tmp_path / "state", tmp_path / "no_weights", out, max_bytes=20_000)
    auto = AutoModelForSequenceClassification if role == "critic" else AutoModelForCausalLM
    scorer_config(AutoConfig.from_pretrained(out))  # registers the class that transformers lacks
    for name in ("streamed", "from_shards"):
        loaded, info = auto.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert loaded.dtype == torch.float32
        theirs = dict(loaded.named_parameters())
        assert theirs.keys() == found[0].keys()
        assert all(torch.equal(theirs[weight], found[0][weight]) for weight in theirs)
        assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / name).iterdir()}
    assert len(list(out.glob("model-*.safetensors"))) > 2


def test_no_rank_ever_holds_the_model_or_two_whole_tensors(ranks, tmp_path):
    deep = jobs.save_untied(tmp_path, layers=12)
    [(_, whole, _)] = ranks.run(1, jobs.measure_memory, deep)
    for peak, _, alive_at_once in ranks.run(4, jobs.measure_memory, deep):
        assert alive_at_once == 1
        # a quarter of the model, and of the forward pass that checks it a layer, its copy and the next one
        assert whole / 4 < peak < 0.6 * whole


def test_files_other_than_safetensors_are_read_by_one_rank(untied, ranks, tmp_path):
    jobs.save_as_bin(untied, tmp_path / "bin")
    expected = ranks.run(1, jobs.names_and_hash, untied)
    assert ranks.run(2, jobs.names_and_hash, tmp_path / "bin") == expected * 2
    broken = jobs.break_weights(untied, tmp_path / "broken")
    for message in ranks.run(2, jobs.failure, jobs.engine, broken):
        assert message.startswith("ModelError")


def test_sizes_and_classes_that_do_not_fit_are_configuration_errors(folder, ranks):
    for sharding, words in (({"fsdp_size": 3}, "one of [1, 2, 4]"), ({"layer_classes": ("Nope",)}, "Nope")):
        built = partial(jobs.engine, folder, sharding=sharding)
        for message in ranks.run(4, jobs.failure, built):
            assert mentions(message, "ConfigError", words)


@pytest.mark.slow
def test_shards_that_move_between_the_phases_are_trained_like_those_that_stay(folder, ranks):
    stayed, moved = (ranks.run(2, jobs.train_offloaded, folder, ROWS, offloads) for offloads in (False, True))
    for (expected, none), (found, many) in zip(stayed, moved, strict=True):
        assert (none, many > 0) == (0, True)
        assert all(torch.equal(found[name], expected[name]) for name in expected)

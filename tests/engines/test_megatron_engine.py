"""megatron-core on gloo ranks: every layout computes what one process of the engine ``fsdp`` does."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import megatron_jobs as jobs
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.engines.megatron.roles import StagedValues
from strop.engines.torch.export import export_from_shards
from strop.engines.torch.state import stored_shapes
from strop.models.comparison import few_rows
from strop.models.loader import load_scorer
from strop.models.lora import LoraSettings
from strop.models.scorer import ValueModel

import tiny_model
from messages import mentions
from ranks import Ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
families = importlib.import_module("families")

if find_spec("megatron") is None:  # found, not imported: its import takes 2 s of every worker
    pytest.skip("needs megatron-core: pip install 'strop[megatron]'", allow_module_level=True)

LAYERS = 4
FAMILIES = {
    "Qwen2": {"tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False},
    "Qwen3": {"tie_word_embeddings": True},
    "Mistral": {"tie_word_embeddings": False},
    "Qwen3Moe": {  # the second layer has no experts
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "mlp_only_layers": [1], "router_aux_loss_coef": 0.1,
    },
    "Qwen2Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 32, "router_aux_loss_coef": 0.1, "tie_word_embeddings": True,
    },
}  # fmt: skip


def layout(
    tensor: int = 1, pipeline: int = 1, virtual: int | None = None, *, experts: int = 1, **keys
) -> dict:
    return {
        "expert_model_parallel_size": experts,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        **keys,
    }


LAYOUTS = {  # ranks, layout, rows of a micro-batch
    "tp2 sp": (2, layout(2), 3),
    "tp2": (2, layout(2, sequence_parallel=False), 8),
    "pp2": (2, layout(1, 2), 2),
    "pp2 vpp2": (2, layout(1, 2, 2), 3),
    "dp2": (2, layout(), 1),
    "dp2, whole optimizer": (2, layout(use_distributed_optimizer=False), 4),
    "tp2 pp2": (4, layout(2, 2), 3),
    "tp2 pp2 vpp2": (4, layout(2, 2, 2), 1),
    "tp2 dp2": (4, layout(2), 3),
    "pp2 dp2": (4, layout(1, 2), 3),
    "tp2, recomputed": (
        2,
        layout(2, override_transformer_config={"recompute_granularity": "full", "recompute_method": "uniform",
                                                "recompute_num_layers": 1}),
        3,
    ),
    "ep2": (2, layout(experts=2), 3),
    "ep2, whole optimizer": (2, layout(experts=2, use_distributed_optimizer=False), 3),
    "tp2 ep2": (2, layout(2, experts=2), 2),
    "pp2 ep2": (4, layout(1, 2, experts=2), 3),
    "tp2 dp2 ep2": (4, layout(2, experts=2), 1),
    "tp2 dp2 ep4": (4, layout(2, experts=4), 3),
    "tp2 ep2, recomputed": (
        2,
        layout(2, experts=2, override_transformer_config={"recompute_granularity": "full",
                                                           "recompute_method": "uniform",
                                                           "recompute_num_layers": 1}),
        3,
    ),
}  # fmt: skip
EXPERTS = [name for name in LAYOUTS if "ep" in name]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as processes:
        yield processes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a random model of each family; 19 words divide by neither 2 nor 4."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            extra = {**FAMILIES[family], "num_hidden_layers": LAYERS}
            families.model(family, **extra).save_pretrained(made[family])
            tiny_model.build_tokenizer().save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="module")
def alone(folders, ranks):
    """Results of the engine ``fsdp`` in one process."""
    found: dict[tuple[str, str], jobs.Trained] = {}

    def results(family: str, kind: str) -> jobs.Trained:
        if (family, kind) not in found:
            found[family, kind] = ranks.run(1, jobs.train, folders(family), kind, None, 8)[0]
        return found[family, kind]

    return results


def differences(found: jobs.Trained, expected: jobs.Trained, rank: int, sizes: dict, world: int):
    """Largest differences: figures, gradient (relative to its largest), norms (relative), parameters."""
    assert list(found.weights) == list(expected.weights)
    tensor = sizes["tensor_model_parallel_size"]
    copies = world // tensor // sizes["pipeline_model_parallel_size"]
    mine = rank // tensor % copies
    largest = max(float(gradient.abs().max()) for gradient in expected.gradient.values())
    return {
        "figures": apart(found.figures, {n: f[mine::copies] for n, f in expected.figures.items()}),
        "gradient": apart(found.gradient, expected.gradient) / largest,
        "norm": max(abs(a / b - 1) for a, b in zip(found.norms, expected.norms, strict=True)),
        "weights": apart(found.weights, expected.weights),
    }


def apart(found: jobs.Weights, expected: jobs.Weights) -> float:
    return float(torch.stack([(found[name] - expected[name]).abs().max() for name in expected]).max())


BOUNDS = {"figures": 1e-5, "gradient": 1e-5, "norm": 1e-5, "weights": 2e-5}


def require_equal(found: list[jobs.Trained], expected: jobs.Trained, sizes: dict, label: str) -> None:
    for rank, result in enumerate(found):
        assert all(torch.equal(result.initial[n], w) for n, w in expected.initial.items()), "round trip"
        apart_by = differences(result, expected, rank, sizes, len(found))
        print(label, rank, {name: f"{value:.1e}" for name, value in apart_by.items()})
        assert all(apart_by[name] < bound for name, bound in BOUNDS.items()), apart_by
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("tp2 sp", "Qwen2", "policy"),
        *(pytest.param(n, "Qwen2", "policy", marks=SLOW) for n in LAYOUTS if n not in ("tp2 sp", *EXPERTS)),
        *(pytest.param(n, "Llama", "value", marks=SLOW) for n in ("tp2 sp", "pp2", "dp2", "tp2 pp2 vpp2")),
        *(pytest.param(n, "Qwen3", "policy", marks=SLOW) for n in ("tp2 pp2", "tp2")),
        *(pytest.param(n, "Mistral", "policy", marks=SLOW) for n in ("tp2 pp2", "pp2 vpp2")),
        *(pytest.param(n, "Qwen3Moe", "policy", marks=SLOW) for n in ("tp2 sp", "dp2", "pp2 vpp2", *EXPERTS)),
        *(pytest.param(n, "Qwen2Moe", "policy", marks=SLOW) for n in ("tp2 pp2", "tp2 ep2", "tp2 dp2 ep2")),
        *(pytest.param(n, "Qwen2Moe", "value", marks=SLOW) for n in ("ep2", "pp2 ep2")),
    ],
)
def test_updates_are_those_of_one_process_of_fsdp(folders, ranks, alone, name, family, kind):
    world, sizes, rows = LAYOUTS[name]
    found = ranks.run(world, jobs.train, folders(family), kind, sizes, rows)
    require_equal(found, alone(family, kind), sizes, f"{name}, {family} {kind}, rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "name", "kind"),
    [
        (jobs.unmark_norms, "tp2 sp", "policy"),
        (jobs.divide_by_micro_batches, "pp2", "policy"),
        (jobs.sum_head_over_ranks, "tp2 sp", "value"),
        (jobs.drop_the_loss_of_experts, "tp2 ep2", "policy"),
    ],
)
def test_a_broken_engine_is_found(folders, alone, spoil, name, kind):
    """Negative controls: the comparison above fails for faults that leave outputs alone.

    Clipping and AdamW hide a wrong scale from the parameters, so gradients are compared.
    """
    world, sizes, rows = LAYOUTS[name]
    family = "Qwen3Moe" if name in EXPERTS else "Llama"
    with Ranks(world) as broken:
        found = broken.run(world, jobs.train, folders(family), kind, sizes, rows, spoil)
    apart_by = differences(found[0], alone(family, kind), 0, sizes, world)
    print(spoil.__name__, {name: f"{value:.1e}" for name, value in apart_by.items()})
    assert apart_by["figures"] < BOUNDS["figures"]
    assert apart_by["gradient"] > 100 * BOUNDS["gradient"]


@pytest.mark.slow
def test_passes_of_another_model_are_refused_at_the_start(folders):
    with Ranks(2) as broken, pytest.raises(AssertionError) as caught:
        broken.run(2, jobs.train, folders("Llama"), "policy", layout(2), 8, jobs.add_bias_on_every_rank)
    assert mentions(caught.value, "ModelError", "differ from those of LlamaForCausalLM")


SIZES = [(1, layout()), (2, layout(2)), (2, layout(1, 2)), (4, layout(2, 2))]
SIZES_OF_EXPERTS = [(2, layout(2, experts=2)), (4, layout(1, 2, experts=2)), (4, layout(experts=4))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world", "sizes"),
    [
        (family, *sizes)
        for family in FAMILIES
        for sizes in (*SIZES, *(SIZES_OF_EXPERTS if "Moe" in family else ()))
    ],
)
def test_weights_go_in_and_out_bit_for_bit(folders, ranks, family, world, sizes):
    model = AutoModelForCausalLM.from_pretrained(folders(family))
    expected = dict(model.named_parameters())
    for found in ranks.run(world, jobs.initial, folders(family), "policy", sizes):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_four_ranks_share_words_that_do_not_divide(folders, ranks, alone, tmp_path):
    families.model(
        "Llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    ).save_pretrained(tmp_path)
    expected = ranks.run(1, jobs.train, tmp_path, "policy", None, 8)[0]
    require_equal(
        ranks.run(4, jobs.train, tmp_path, "policy", layout(4), 3), expected, layout(4), "tp4, rank"
    )


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(folders, ranks):
    [expected] = ranks.run(1, jobs.go_on, folders("Qwen2"), None, None, [0], None)
    for step, same, norm in ranks.run(4, jobs.skip, folders("Qwen2"), layout(2, 2)):
        assert step.skipped
        assert same
        assert norm == pytest.approx(expected[1][0], rel=1e-5)


@pytest.mark.slow
def test_weights_for_a_rollout_are_rounded_before_they_are_sent(folders, ranks):
    assert all(ranks.run(4, jobs.rounds_once, folders("Qwen2"), layout(2, 2)))
    assert all(ranks.run(2, jobs.rounds_once, folders("Qwen3Moe"), layout(2, experts=2)))


@pytest.mark.slow
def test_16_bits_are_as_near_to_float32_as_those_of_fsdp(folders, ranks, alone):
    folder, exact = folders("Qwen2"), alone("Qwen2", "policy")
    half = {"compute_dtype": "bfloat16"}
    reference = ranks.run(1, jobs.train, folder, "policy", None, 8, None, half)[0]
    recomputing = {**half, "gradient_checkpointing": True}
    for sizes, rows in ((layout(2), 3), (layout(1, 2), 2), (layout(1, 2, 2), 3)):
        found = [
            ranks.run(2, jobs.train, folder, "policy", sizes, rows, None, o)[0] for o in (half, recomputing)
        ]
        assert all(torch.equal(found[0].gradient[name], found[1].gradient[name]) for name in exact.gradient)
        for name in ("figures", "gradient"):
            error, others = (apart(getattr(x, name), getattr(exact, name)) for x in (found[0], reference))
            print(name, f"{error:.1e} {others:.1e}")
            assert 0 < error < 3 * others


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout_and_engine(folders, ranks, tmp_path):
    folder = folders("Qwen2")
    before, going_on = [0, 1], [2]
    ranks.run(4, jobs.go_on, folder, layout(2, 2), None, before, tmp_path / "four")
    uninterrupted = ranks.run(4, jobs.go_on, folder, layout(2, 2), None, before + going_on, None)[0]
    weights, norms = ranks.run(4, jobs.go_on, folder, layout(2, 2), tmp_path / "four", going_on, None)[0]
    assert all(torch.equal(weights[name], w) for name, w in uninterrupted[0].items())
    assert norms == uninterrupted[1][-1:]
    for world, sizes in ((1, layout()), (2, layout()), (2, layout(1, 2, 2)), (1, None)):
        for found, norm in ranks.run(world, jobs.go_on, folder, sizes, tmp_path / "four", going_on, None):
            print(sizes, f"{apart(found, weights):.1e} {abs(norm[0] / norms[0] - 1):.1e}")
            assert apart(found, weights) < 1e-6
            assert norm == pytest.approx(norms, rel=1e-6)
    ranks.run(1, jobs.go_on, folder, None, None, before, tmp_path / "fsdp")
    assert stored_shapes(tmp_path / "fsdp") == stored_shapes(tmp_path / "four")
    found, _ = ranks.run(2, jobs.go_on, folder, layout(2), tmp_path / "fsdp", going_on, None)[0]
    assert apart(found, weights) < 5e-6


@pytest.mark.slow
def test_a_checkpoint_of_shared_experts_goes_on_in_another_layout_and_engine(folders, ranks, tmp_path):
    folder, four = folders("Qwen2Moe"), layout(2, experts=2)
    before, going_on = [0, 1], [2]
    ranks.run(4, jobs.go_on, folder, four, None, before, tmp_path / "four")
    uninterrupted = ranks.run(4, jobs.go_on, folder, four, None, before + going_on, None)[0]
    weights, norms = ranks.run(4, jobs.go_on, folder, four, tmp_path / "four", going_on, None)[0]
    assert all(torch.equal(weights[name], w) for name, w in uninterrupted[0].items())
    assert norms == uninterrupted[1][-1:]
    for world, sizes in ((1, layout()), (2, layout(2)), (4, layout(1, 2, experts=2)), (1, None)):
        for found, norm in ranks.run(world, jobs.go_on, folder, sizes, tmp_path / "four", going_on, None):
            print(sizes, f"{apart(found, weights):.1e} {abs(norm[0] / norms[0] - 1):.1e}")
            assert apart(found, weights) < 1e-6
            assert norm == pytest.approx(norms, rel=1e-6)
    ranks.run(1, jobs.go_on, folder, None, None, before, tmp_path / "fsdp")
    assert stored_shapes(tmp_path / "fsdp") == stored_shapes(tmp_path / "four")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [layout(1, 2), layout(2)], ids=["pp2", "tp2"])
def test_a_background_save_is_of_its_moment_and_exports_without_ranks(folders, ranks, tmp_path, sizes):
    folder = folders("Llama")
    ranks.run(2, jobs.go_on, folder, sizes, None, [0], tmp_path / "whole")
    ranks.run(2, jobs.save_in_background, folder, sizes, [0], [1], tmp_path / "behind")
    export_from_shards(tmp_path / "behind", folder, tmp_path / "exported")
    expected, _ = ranks.run(1, jobs.go_on, folder, None, tmp_path / "whole", [], None)[0]
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_an_exported_folder_loads_and_generates_the_same(folders, ranks, tmp_path):
    folder = folders("Qwen3")
    log_probs = ranks.run(4, jobs.export, folder, layout(2, 2), tmp_path / "four")[0]
    expected = ranks.run(1, jobs.export, folder, None, tmp_path / "one")[0]
    assert apart({"log_prob": log_probs}, {"log_prob": expected}) < 1e-5
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("four", "one")]
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    answers = [model.generate(torch.tensor([[2, 5, 7, 9]]), **options) for model in models]
    assert torch.equal(*answers)


def test_what_it_cannot_hold_is_named(folders, ranks, tmp_path):
    families.model("Gemma2").save_pretrained(tmp_path)
    refusals = [
        (1, tmp_path, layout(), {}, ["gemma2", "llama, mistral, qwen2, qwen2_moe", "strategy=fsdp"]),
        (1, folders("Qwen2"), layout(), {"keeps_reference_head": True}, ["full KL", "strategy=fsdp"]),
        (1, folders("Qwen2"), layout(), {"freeze": ["encoder"]}, ["strategy=megatron", "['encoder']"]),
        (1, folders("Qwen2"), layout(), {"lora": LoraSettings(base="b", rank=4)}, ["LoRA", "strategy=fsdp"]),
    ]
    transformer, ddp = "override_transformer_config", "override_ddp_config"
    for section, name, value in (
        (transformer, "calculate_per_token_loss", False),  # gradients would be wrong by 75 %
        (transformer, "attention_dropout", 0.1),
        (transformer, "moe_expert_capacity_factor", 2.0),
        (transformer, "recompute_granularty", "full"),
        (transformer, "recompute_modules", ["layernorm"]),
        (ddp, "overlap_param_gather", True),  # weights would be those of an earlier step
        (ddp, "overlap_grad_reduce", True),  # gradients of micro-batches beyond the first step's number
        (ddp, "overlap_grad_reduced", True),  # unknown
    ):
        sizes = layout(**{section: {name: value}})
        refusals.append((1, folders("Qwen2"), sizes, {}, [f"megatron.{section}", name]))
    for world, folder, sizes, options, words in refusals:
        [message] = ranks.run(world, jobs.refusal, folder, "policy", sizes, options)
        assert mentions(message, *words)


def test_a_stage_without_a_head_knows_the_familys_own_figures(tmp_path):
    tiny_model.save(tmp_path)
    model = load_scorer(tmp_path, fresh_head_seed=1)
    batch = few_rows(model.config.vocab_size, torch.device("cpu"))
    with torch.no_grad():
        expected = ValueModel(model, packed=False).own_figures(batch)
        assert expected.any()
        assert torch.equal(StagedValues(model, packed=True).own_figures(batch), expected)

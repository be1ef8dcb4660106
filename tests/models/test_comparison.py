"""Passes are those of transformers' eager forward pass, in eval mode and in the mode of the update.

Where they are not, an engine is not built.
"""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import sharded_jobs as jobs
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strop.config.load import load_config
from strop.engines.base import EngineSpec, ModelSpec
from strop.engines.torch.engine import TorchEngine, build_module
from strop.errors import ConfigError, ModelError
from strop.models import flex_attention, loader, packing
from strop.models.comparison import require_eager_figures
from strop.models.deferred import defer_causal_lm
from strop.models.folder import attention_for
from strop.models.loader import load_causal_lm
from strop.models.policy import PolicyModel

from messages import mentions, naming
from ranks import Ranks

CAPPED = {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1, "initializer_range": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": {**CAPPED, "sliding_window": 4},
    "VaultGemma": {**CAPPED, "sliding_window": 4},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
    "Mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.2},
    "Phimoe": {"num_local_experts": 4, "sliding_window": None, "initializer_range": 0.3},
}
BATCH = families.samples([(5, [6, 3]), (2, [4]), (7, [1])])
KINDS = {"policy": "ForCausalLM", "value": "ForSequenceClassification", "score": "ForSequenceClassification"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models by (family, kind)."""
    made: dict[tuple[str, str], Path] = {}

    def folder(family: str, head: str = "ForCausalLM") -> Path:
        if (family, head) not in made:
            made[family, head] = tmp_path_factory.mktemp(family)
            model = families.model(family, head, **FAMILIES.get(family, {}))
            for name, weight in model.named_parameters():
                if name.endswith("sinks"):
                    nn.init.normal_(weight, std=2.0)
            model.save_pretrained(made[family, head])
        return made[family, head]

    return folder


def eager(folder: Path, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs by transformers alone, row by row without padding, and the gradient of their weighted sum."""
    auto = "AutoModelForCausalLM" if kind == "policy" else "AutoModelForSequenceClassification"
    model = getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager").float().eval()
    rows = []
    for row in range(len(BATCH["input_ids"])):
        ids = BATCH["input_ids"][row][BATCH["attention_mask"][row].bool()][None]
        length = int(BATCH["response_mask"][row].sum())
        if kind == "policy":
            log_probs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            found = log_probs[-length - 1 : -1].gather(-1, ids[0, -length:, None])[:, 0]
        else:
            found = model.score(model.model(input_ids=ids, use_cache=False).last_hidden_state)[0, :, 0]
            found = found[-length - 1 : -1] if kind == "value" else found[-1:]
        rows.append(found)
    outputs = torch.cat(rows)
    (outputs * weights(outputs)).sum().backward()
    return outputs.detach(), gradients(model)


def weights(outputs: Tensor) -> Tensor:
    return torch.randn(outputs.shape, generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }


def require_eager(folder: Path, kind: str, *, packed: bool) -> None:
    expected, expected_gradients = eager(folder, kind)
    spec = ModelSpec(kind=kind, path=folder, packed=packed)
    role, _ = build_module(spec, sharded=False)
    role.enable_gradient_checkpointing()
    for training in (False, True):
        torch.manual_seed(1)
        role.train(training)
        role.zero_grad()
        found = role.figures(BATCH)
        found = found[BATCH["response_mask"].bool()] if kind != "score" else found
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        (found * weights(found)).sum().backward()
        ours = gradients(role.hugging_face_model)
        distance = sum(
            (ours[name] - gradient).square().sum() for name, gradient in expected_gradients.items()
        )
        norm = sum(gradient.square().sum() for gradient in expected_gradients.values())
        assert distance.sqrt() < 1e-5 * norm.sqrt()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_of_policies_are_those_of_eager_attention_in_both_modes(
    folders, family, packed
):
    require_eager(folders(family), "policy", packed=packed)


@pytest.mark.parametrize("kind", ["value", "score"])
def test_critics_and_reward_models_with_a_cap_are_those_of_eager_attention(folders, kind):
    require_eager(folders("Gemma2", KINDS[kind]), kind, packed=True)


def test_a_cap_selects_eager_attention_and_refuses_sdpa_by_name(folders):
    folder = folders("Gemma2")
    assert load_causal_lm(folder).config._attn_implementation == "eager"
    assert defer_causal_lm(folder)[0].config._attn_implementation == "eager"
    for load in (load_causal_lm, defer_causal_lm):
        with pytest.raises(
            ConfigError, match=naming("attn_implementation=sdpa", "attn_logit_softcapping=1.0")
        ):
            load(folder, attn_implementation="sdpa")
    without = load_causal_lm(folder, override_config={"attn_logit_softcapping": None})
    assert without.config._attn_implementation == "sdpa"
    inside = transformers.Gemma3Config(text_config={"attn_logit_softcapping": 50.0})
    assert attention_for(inside, None) == "eager"
    assert attention_for(inside, "flash_attention_2") == "flash_attention_2"


@pytest.mark.parametrize("family", ["Mixtral", "Phimoe"])
def test_a_jitter_that_the_user_sets_is_left_on(folders, family):
    model = load_causal_lm(folders(family), override_config={"router_jitter_noise": 0.3}).train()
    passes = [model(input_ids=BATCH["input_ids"], use_cache=False).logits for _ in range(2)]
    assert not torch.equal(*passes)


def test_dropout_inside_a_part_of_the_configuration_is_off(tmp_path):
    transformers.Gemma3Config(text_config={"attention_dropout": 0.5}).save_pretrained(tmp_path)
    assert loader.load_model_config(tmp_path).text_config.attention_dropout == 0.0


# ------------------------------------------------------------------------------------ the check at start-up


def build(
    folder: Path,
    kind: str = "policy",
    *,
    world_size: int = 1,
    trained: bool = True,
    sdpa: bool = False,
    sequence_parallel_size: int = 1,
    **options: Any,
) -> TorchEngine:
    """Build an engine; with ``sdpa``, as if the choice of the back-end were transformers' alone."""
    patch = pytest.MonkeyPatch()
    if sdpa:
        patch.setattr(loader, "attention_for", lambda config, requested: requested)
    loading = {key: options.pop(key, None) for key in ("override_config", "attn_implementation")}
    model = ModelSpec(
        role="the role",
        kind=kind,
        path=folder,
        options=loading,
        head_seed=None if kind == "policy" else 1,
        **options,
    )
    spec = EngineSpec(
        device=torch.device("cpu"),
        world_size=world_size,
        section=load_config([]).actor_rollout_ref.actor.fsdp_config,
        optimizer=jobs.SETTINGS if trained else None,
        sequence_parallel_size=sequence_parallel_size,
    )
    try:
        engine = TorchEngine.build(model, spec)
    finally:
        patch.undo()
    assert all(weight.grad is None for weight in engine.module.parameters())
    return engine


def test_attention_by_flex_attention_is_compared(folders, monkeypatch):
    flex = torch.nn.attention.flex_attention
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # a CPU has gradients, from all scores
    monkeypatch.setattr("strop.engines.torch.engine.reason_not_compiled", lambda device: "")
    options = {"packed": True, "attn_implementation": "flex_attention"}
    build(folders("Gemma2"), **options)
    attend = flex_attention.flex_attention
    wrong = lambda *args, score_mod, **own: attend(*args, **own)  # noqa: E731 - no soft cap
    monkeypatch.setattr(flex_attention, "flex_attention", wrong)
    with pytest.raises(ModelError, match=naming("=flex_attention", "attn_implementation=eager", "eval")):
        build(folders("Gemma2"), **options)


@pytest.mark.parametrize("options", [{"compile": True}, {"attn_implementation": "flex_attention"}])
def test_what_is_compiled_needs_a_compiler(folders, monkeypatch, options):
    monkeypatch.setattr(
        "strop.engines.torch.engine.reason_not_compiled", lambda device: "there is no compiler"
    )
    [(key, value)] = options.items()
    with pytest.raises(
        ModelError, match=naming("the role", f"{key}={value}", "there is no compiler", f"set {key} to")
    ):
        build(folders("Qwen2"), packed=True, **options)


SETTINGS = {
    "float32": {},
    "packed": {"packed": True},
    "packed by default": {"packed": "auto"},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "as the reference": {"trained": False},
    "checkpointing, packed": {"packed": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_a_back_end_that_drops_the_cap_is_an_error_that_names_both(folders, options):
    with pytest.raises(ModelError, match=naming("the role", "=sdpa", "attn_implementation=eager", "eval")):
        build(folders("Gemma2"), sdpa=True, **options)
    build(folders("Gemma2"), **options)


@pytest.mark.parametrize("kind", ["value", "score", "pairs"])
def test_the_other_kinds_of_model_are_compared_too(folders, kind):
    folder = folders("Gemma2", KINDS["value"])
    with pytest.raises(ModelError, match=naming("the role", "=sdpa", "attn_implementation=eager")):
        build(folder, kind, sdpa=True, packed=True)
    build(folder, kind, packed=True)


def test_passes_that_differ_when_packed_are_padded_by_default(caplog):
    module = PolicyModel(families.model("Llama"), packed="auto")
    figures = module.figures
    module.figures = lambda batch: figures(batch) + module.packed
    require_eager_figures(module, name="the role", updates=True, dtype=torch.float32, remedy="")
    assert not module.packed
    assert mentions(caplog.text, "padded", "differ")


@pytest.mark.parametrize("packed", [False, True, "auto"])
@pytest.mark.parametrize("kind", ["policy", "value", "score"])
def test_weights_that_are_not_numbers_are_named_as_the_cause(folders, tmp_path, kind, packed):
    shutil.copytree(folders("Gemma2", KINDS[kind]), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = math.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=naming(str(tmp_path / "model"), "NaN", "damaged")):
        build(tmp_path / "model", kind, packed=packed)


class _NoisyMLP(nn.Module):
    """Draws random numbers in training under a name that no rule knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) * (1 + 0.1 * self.training * torch.rand_like(hidden))


def test_noise_of_the_update_alone_is_an_error_unless_the_user_set_it(folders, monkeypatch):
    load = loader._load

    def noisy(*arguments, **options):
        model, missing = load(*arguments, **options)
        model.model.layers[0].mlp = _NoisyMLP(model.model.layers[0].mlp).eval()
        return model, missing

    monkeypatch.setattr(loader, "_load", noisy)
    folder = folders("Qwen2")
    with pytest.raises(ModelError, match=naming("the role", "update")) as caught:
        build(folder)
    assert "eval" not in str(caught.value)
    build(folder, trained=False)
    build(folder, override_config={"attention_dropout": 0.5})


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as processes:
        yield processes


SHARDED = {
    "float32": {},
    "bfloat16, packed, checkpointing": {
        "compute_dtype": "bfloat16",
        "packed": True,
        "gradient_checkpointing": True,
    },
    "shared sequences": {"packed": True, "sequence_parallel_size": 2},
}


@pytest.mark.parametrize("options", SHARDED.values(), ids=SHARDED)
def test_sharded_models_are_compared_too(folders, ranks, options):
    found = ranks.run(2, _refusals, folders("Gemma2"), {**options, "world_size": 2})
    assert found[0] == found[1]
    assert found[0][0] == ""
    assert mentions(found[0][1], "ModelError: the role", "=sdpa", "attn_implementation=eager")


def test_ranks_agree_to_pad_where_the_figures_of_one_differ(folders, ranks):
    assert ranks.run(2, _packed_with_errors_of_one_rank, folders("Qwen2")) == [False, False]


def _packed_with_errors_of_one_rank(folder: Path) -> bool:
    figures = PolicyModel.figures
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PolicyModel, "figures", lambda self, batch: figures(self, batch) + dist.get_rank() * self.packed
        )
        return build(folder, packed="auto", world_size=2).module.packed


def test_ranks_agree_on_the_refusal_of_one(folders, ranks):
    assert ranks.run(2, _packed_where_one_rank_differs, folders("Qwen2"), "auto") == ["padded", "padded"]
    for error in ranks.run(2, _packed_where_one_rank_differs, folders("Qwen2"), True):
        assert mentions(error, "ModelError", "use_remove_padding=True", "packed", "use_remove_padding=False")


def _packed_where_one_rank_differs(folder: Path, packed: Any) -> str:
    hidden_states = packing.packed_hidden_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "packed_hidden_states", lambda *own: hidden_states(*own) + dist.get_rank())
        try:
            module = build(folder, packed=packed, world_size=2).module
        except ModelError as error:
            return f"{type(error).__name__}: {error}"
    return "packed" if module.packed else "padded"


def _refusals(folder: Path, options: dict[str, Any]) -> list[str]:
    """Errors with the loader's choice of attention, and with transformers' choice."""
    return [jobs.failure(partial(build, folder, sdpa=sdpa, **options)) for sdpa in (False, True)]


@pytest.mark.parametrize("family", ["Qwen2", "Mixtral", "GptOss"])
def test_bfloat16_of_sharded_models_is_within_the_bound(folders, ranks, family):
    options = {"compute_dtype": "bfloat16", "world_size": 2}
    assert ranks.run(2, jobs.failure, partial(build, folders(family), **options)) == ["", ""]

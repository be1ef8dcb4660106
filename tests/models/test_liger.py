from __future__ import annotations

import importlib.util
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType

import families
import pytest
import sharded_jobs as jobs
import torch
from torch import nn
from torch.nn.functional import silu
from transformers.models.qwen2 import modeling_qwen2

from strop.config.load import load_config
from strop.engines.base import EngineSpec, ModelSpec
from strop.engines.torch.engine import TorchEngine
from strop.errors import ModelError
from strop.models.passes.liger import Liger
from strop.models.policy import PolicyModel

from messages import naming

BATCH = families.samples([(5, [6, 3]), (2, [4])])


class Norm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, states):
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


class MLP(modeling_qwen2.Qwen2MLP):
    activation = torch.relu

    def forward(self, states):
        return self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))


def backwards(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """Rotate by the negative angle."""
    return _own_rotary(q, k, cos, -sin, unsqueeze_dim)


_own_rotary = modeling_qwen2.apply_rotary_pos_emb


class StandIn:
    """Patches models of Qwen 2 as liger-kernel 0.8.5 does, with functions that run on a CPU."""

    def __init__(self) -> None:
        self.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}
        self.calls, self.activation, self.rotary = [], silu, _own_rotary

    def _apply_liger_kernel_to_instance(self, model, **options) -> None:
        self.calls.append((model, options))
        modeling_qwen2.apply_rotary_pos_emb = self.rotary
        modeling_qwen2.Qwen2RMSNorm = Norm
        modeling_qwen2.Qwen2MLP = MLP
        for layer in getattr(model, model.base_model_prefix).layers:
            layer.mlp.activation = self.activation
            layer.mlp.__dict__["forward"] = MethodType(MLP.forward, layer.mlp)


@pytest.fixture
def package(monkeypatch):
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    for name in names[:2]:
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, names[2], StandIn())
    for name in ("apply_rotary_pos_emb", "Qwen2RMSNorm", "Qwen2MLP"):
        monkeypatch.setattr(modeling_qwen2, name, getattr(modeling_qwen2, name))
    return sys.modules[names[2]]


def figures(module: PolicyModel) -> torch.Tensor:
    return module.figures(BATCH).detach()


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=naming("use_liger=True", "pip install liger-kernel")):
        Liger(families.model("Qwen2"))


def test_losses_stay_those_of_strop_and_unknown_families_are_refused(package):
    model = families.model("Qwen2")
    Liger(model)
    [(patched, options)] = package.calls
    assert patched is model
    off = {"cross_entropy", "fused_linear_cross_entropy", "layer_norm"}
    assert {name for name, on in options.items() if not on} == off
    with pytest.raises(ModelError, match=naming("mistral", "qwen2")):
        Liger(families.model("Mistral"))


@pytest.mark.parametrize("packed", [False, True])
def test_other_models_of_the_family_are_left_alone(package, packed):
    """A reference is built before the actor, whose class then must not be made of Liger's modules."""
    expected = figures(PolicyModel(families.model("Qwen2")))
    package.activation, package.rotary = torch.relu, backwards
    earlier, patched = (PolicyModel(families.model("Qwen2"), packed=packed) for _ in range(2))
    patched.use_liger()
    later = PolicyModel(families.model("Qwen2"), packed=packed)
    for other in (earlier, later):
        torch.testing.assert_close(figures(other), expected, atol=1e-5, rtol=1e-5)
    both = figures(patched)
    package.rotary = _own_rotary
    later.use_liger()
    for one, another in ((both, expected), (figures(later), expected), (both, figures(later))):
        assert (one - another).abs().max() > 1e-3  # the rotary function, too, is replaced in the model
    with patched.own_modules():
        torch.testing.assert_close(figures(patched), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(figures(patched), both)


@pytest.mark.parametrize("family", ["Qwen2", "Llama", "Mistral", "Qwen3", "Gemma2"])
def test_liger_itself_patches_one_model(family):
    """Its kernels need a GPU; the modules that call them do not."""
    pytest.importorskip("liger_kernel", reason="not compared with Liger itself: pip install 'strop[dev]'")
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    file = sys.modules[type(families.model(family)).__module__]
    before, expected = dict(vars(file)), figures(PolicyModel(families.model(family)))
    patched = PolicyModel(families.model(family))
    patched.use_liger()
    assert {name: value for name, value in vars(file).items() if before.get(name) is not value} == {}
    for layer in patched.hugging_face_model.model.layers:
        rotary = layer.self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
        assert rotary is liger_rotary_pos_emb
        for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            assert part.forward.__func__.__module__.startswith("liger_kernel.")
    assert torch.equal(figures(PolicyModel(families.model(family))), expected)
    with patched.own_modules():
        assert torch.equal(figures(patched), expected)


def test_a_family_that_liger_knows_in_part_is_refused():
    pytest.importorskip("liger_kernel", reason="not compared with Liger itself: pip install 'strop[dev]'")
    with pytest.raises(ModelError, match=naming("model.use_liger=True", "Glm4", "set it to False")):
        Liger(families.model("Glm4"))


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_passes_are_compared_with_the_familys_own_at_start_up(package, tmp_path, kind):
    families.model("Qwen2").save_pretrained(tmp_path)
    section = {"policy": "actor_rollout_ref.model", "value": "critic.model"}[kind]
    model = ModelSpec(
        kind=kind,
        path=tmp_path,
        head_seed=None if kind == "policy" else 1,
        packing_key=f"{section}.use_remove_padding",
        use_liger=True,
    )
    fsdp = load_config([]).actor_rollout_ref.actor.fsdp_config
    spec = EngineSpec(device=torch.device("cpu"), world_size=1, section=fsdp, optimizer=jobs.SETTINGS)
    TorchEngine.build(model, spec)
    package.activation = torch.relu
    with pytest.raises(ModelError, match=naming("differ", f"set {section}.use_liger=False")):
        TorchEngine.build(model, spec)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_layers_call_what_liger_has_replaced(package, monkeypatch, packed):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    package.activation, package.rotary = torch.relu, backwards
    own, patched = (PolicyModel(families.model("Qwen2"), packed=packed) for _ in range(2))
    patched.use_liger()
    expected = [figures(module) for module in (own, patched)]
    torch._dynamo.reset()
    for module in (own, patched):
        module.compile_layers()
    for _ in range(2):
        for module, wanted in zip((own, patched), expected, strict=True):
            torch.testing.assert_close(figures(module), wanted, atol=1e-5, rtol=1e-5)

"""Private names of other packages: each is in one file, exists, and behaves as it is used."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import strop
from strop import torch_private
from strop.controller.group import plain_class
from strop.models import transformers_private

SOURCE = Path(strop.__file__).parent
FILES = {"torch_private.py", "models/transformers_private.py", "controller/ray/ray_private.py"}
OF_OTHERS = {
    # documented by the standard library
    *("_actions", "_asdict", "_current_frames", "_exit", "_fields", "_replace", "_SubParsersAction"),
    *("_run_exitfuncs", "_shutdown"),  # of the standard library, which has no public ones
    "_strop_number",  # strop's own, on a class of its own
    "_validate",  # strop's own, as verl names it for subclasses
    *("_disable_adapters", "_data_files", "_custom_ops", "_get_model_param_range_map"),  # one use
    "_defaults",  # documented by transformers' ProcessingKwargs
}
"""Private names in other files than ``FILES``."""


def private_names(file: Path) -> Iterator[str]:
    """Yield private attributes that the file reads from objects other than its own, and private imports."""
    tree = ast.parse(file.read_text())
    own = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                own.add(node.name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                own.add(node.attr)
            case ast.Name(ctx=ast.Store()):
                own.add(node.id)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute() if node.attr not in own:
                yield node.attr
            case ast.ImportFrom() if node.module and not node.module.startswith("strop"):
                yield from [*node.module.split("."), *(name.name for name in node.names)]


def test_private_names_of_other_packages_are_in_the_files_for_them():
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in FILES
        for name in private_names(path)
        if name.startswith("_") and not name.startswith("__") and name not in OF_OTHERS
    }
    assert found == set()


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads))


def test_attention_name(model):
    before = transformers_private.attention_name(model.config)
    assert before == "sdpa"
    transformers_private.set_attention_name(model.config, "eager")
    assert model.model.layers[0].self_attn.config is model.config
    assert transformers_private.attention_name(model.config) == "eager"
    transformers_private.set_attention_name(model.config, before)


def test_set_attention_name_reaches_inner_configurations():
    config = transformers.Gemma3Config()
    transformers_private.set_attention_name(config, "eager")
    assert transformers_private.attention_name(config.text_config) == "eager"


def test_what_a_family_supports(model):
    assert transformers_private.attention_is_replaceable(model)
    assert transformers_private.takes_any_attention(model)
    assert transformers_private.supports_sdpa(model)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=2))
    assert not transformers_private.takes_any_attention(bloom)


def test_layer_classes(model):
    assert transformers_private.layer_classes(model) == {"Qwen2DecoderLayer"}


def test_save_custom_code(model, tmp_path):
    transformers_private.save_custom_code(model, tmp_path)  # a class of transformers has no code of its own
    assert not any(tmp_path.iterdir())


def test_recorded_outputs(model):
    assert "router_logits" not in transformers_private.recorded_outputs(model.model)
    assert transformers_private.recorded_outputs(nn.Linear(1, 1)) == {}
    recorder = transformers_private.recorded_outputs(transformers.MixtralModel)["router_logits"]
    assert {"target_class", "layer_name", "index"} <= set(dir(recorder))


def test_own_parameters():
    layer = nn.Linear(2, 1, bias=False)
    torch_private.own_parameters(layer)["weight"] = torch.ones(1, 2)
    assert layer(torch.ones(2)).item() == 2


def test_replace_tensors():
    layer = nn.BatchNorm1d(2)
    weight = layer.weight
    torch_private.replace_tensors(layer, lambda tensor: tensor.detach() + 1)
    assert layer.weight is weight
    assert layer.weight.tolist() == [2, 2]
    assert layer.running_mean.tolist() == [1, 1]


def test_hooks_are_seen():
    layer = nn.Linear(1, 1)
    assert not torch_private.has_backward_hooks(layer.weight)
    layer.weight.register_hook(lambda gradient: gradient)
    assert torch_private.has_backward_hooks(layer.weight)
    assert not torch_private.has_forward_hooks(layer)
    layer.register_forward_pre_hook(lambda *_: None)
    assert torch_private.has_forward_hooks(layer)


def test_writes_in_place():
    tensor = torch.zeros(2)
    before = torch_private.writes_in_place(tensor)
    tensor.add_(1)
    assert torch_private.writes_in_place(tensor) == before + 1


def test_scale_in_place():
    tensors = [torch.ones(2), torch.ones(1)]
    torch_private.scale_in_place(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [0.5]]


def test_wrapper():
    class Kind(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    tensor = torch_private.wrapper(Kind, (2, 3), torch.int64)
    assert (type(tensor), tensor.shape, tensor.dtype) == (Kind, (2, 3), torch.int64)


def test_nccl_options_have_a_timeout():
    from torch._C._distributed_c10d import Backend

    assert hasattr(Backend.Options, "_timeout")  # the base class; NCCL's is in builds for GPUs only


def test_pin():
    from torch.cuda import _pin_memory_utils

    assert {"pin_memory", "unpin_memory"} <= set(vars(_pin_memory_utils))


def test_storage_info():
    place = torch_private.storage_info()("file", 1, 2)
    assert (place.relative_path, place.offset, place.length) == ("file", 1, 2)


def test_products_by_onednn():
    assert torch_private.multiplies_bfloat16() in (True, False)
    weight, rows = torch.rand(4, 3), torch.rand(2, 3)
    blocked = torch_private.blocked(weight, 2)
    torch.testing.assert_close(torch_private.blocked_linear(rows, blocked, None), rows @ weight.T)


def test_softmax_backward():
    scores = torch.rand(3, requires_grad=True)
    probs = scores.softmax(-1)
    probs.backward(torch.tensor([1.0, 2.0, 3.0]))
    found = torch_private.softmax_backward(torch.tensor([1.0, 2.0, 3.0]), probs.detach())
    torch.testing.assert_close(found, scores.grad)


def test_set_allocator():
    torch_private.set_allocator("expandable_segments:False")


def test_names_of_ray():
    pytest.importorskip("ray")
    from strop.controller.ray import ray_private

    assert set(ray_private.__all__) <= set(vars(ray_private))
    assert ray_private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR in str(vars(ray_private.ray_constants))
    assert hasattr(ray_private.ray_constants, "ENABLE_RAY_CLUSTER")
    from ray._private import worker

    assert "ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV" in inspect.getsource(worker)
    assert callable(ray_private.authentication.enable_token_auth_by_default)
    assert ray_private.RayParams(num_cpus=2, include_dashboard=False).num_cpus == 2
    assert "gcs_address" in dir(ray_private.Node)
    assert ray_private.find_gcs_addresses() == set() or all(ray_private.find_gcs_addresses())


def test_the_class_that_ray_remote_has_wrapped():
    ray = pytest.importorskip("ray")

    class Plain:
        pass

    assert plain_class(ray.remote(Plain)) is Plain
    assert plain_class(ray.remote(num_cpus=2)(Plain)) is Plain
    assert plain_class(Plain) is Plain

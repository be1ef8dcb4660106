from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import families
import pytest

from strop.errors import ModelError
from strop.models.passes.liger import use_liger

from messages import naming


def test_a_package_that_is_missing_is_named():
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger_kernel is installed")
    with pytest.raises(ModelError, match=naming("use_liger=True", "pip install liger-kernel")):
        use_liger(families.model("Qwen2"))


def test_losses_stay_those_of_strop_and_unknown_families_are_refused(monkeypatch):
    """A stand-in with the names of liger-kernel 0.8.5, whose kernels need a GPU."""
    calls = []
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    for name in names:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    patch = sys.modules[names[-1]]
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}
    patch._apply_liger_kernel_to_instance = lambda model, **options: calls.append((model, options))
    model = families.model("Qwen2")
    use_liger(model)
    [(patched, options)] = calls
    assert patched is model
    assert {name for name, on in options.items() if not on} == {"cross_entropy", "fused_linear_cross_entropy"}
    with pytest.raises(ModelError, match=naming("mistral", "qwen2")):
        use_liger(families.model("Mistral"))

"""Liger's fused RMSNorm, rotary positions and gated MLP for the families that it knows, on a GPU."""

from __future__ import annotations

import importlib
import importlib.util

from transformers import PreTrainedModel

from strop.errors import ModelError


def use_liger(model: PreTrainedModel) -> None:
    """Let Liger replace modules of ``model``, but not its losses: log-probs come from strop's output layer.

    Liger also replaces functions in the file of the family, so in all its models of this process. Raises
    ``ModelError`` if ``liger_kernel`` is not installed or has no kernels for the family.
    """
    kind = model.config.model_type
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(
            "model.use_liger=True: the package liger_kernel is not installed; pip install liger-kernel, or "
            "set it to False"
        )
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    if kind not in patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(patch.MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ModelError(f"model.use_liger=True: Liger has no kernels for {kind} (it has for {known})")
    patch._apply_liger_kernel_to_instance(
        model,
        rope=True,
        rms_norm=True,
        swiglu=True,
        geglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )

"""The auxiliary loss of routed experts in updates of the engine ``fsdp``."""

from __future__ import annotations

import families
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from strop.engines.base import OptimizerSettings
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.errors import ModelError
from strop.models.policy import PolicyModel
from strop.protocol import DataProto

from messages import naming

EXPERTS, TOP_K, COEFFICIENT = 6, 2, 0.5
SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.0, eps=1e-8, grad_clip=1e9)


def model(coefficient: float = COEFFICIENT):
    return families.model(
        "Qwen3Moe",
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        router_aux_loss_coef=coefficient,
    )


def rows() -> dict[str, torch.Tensor]:
    """Samples that share prompts, and a row that fills up: it has nothing to learn from."""
    return families.samples([(4, [3, 5, 1]), (6, [2, 0]), (2, [4])])


def log_probs(outputs, columns):
    return -(outputs["log_prob"] * columns["response_mask"]).sum() / 20, {}


def update(coefficient: float = COEFFICIENT, micro: int = 6, *, checkpointing=False, **options):
    engine = TorchEngine(
        PolicyModel(model(coefficient), **options),
        device=torch.device("cpu"),
        optimizer=SETTINGS,
        gradient_checkpointing=checkpointing,
    )
    metrics = engine.forward_backward(
        DataProto(rows()), log_probs, MicroBatching(rows=micro), with_entropy=False
    )
    named = engine.module.hugging_face_model.named_parameters()
    return metrics, {name: weight.grad.clone() for name, weight in named}


def expected() -> tuple[float, dict[str, torch.Tensor], float]:
    """Mean loss, its gradient, and the largest load, by transformers' own function."""
    own, batch = model(), rows()
    losses, loads = [], torch.zeros(2, EXPERTS)
    for ids, mask, learns in zip(
        batch["input_ids"], batch["attention_mask"].bool(), batch["response_mask"].any(dim=1), strict=True
    ):
        if not learns:
            continue
        logits = own(ids[mask][None, :-1], output_router_logits=True, use_cache=False).router_logits
        for layer, each in enumerate(logits):
            losses.append(load_balancing_loss_func((each,), EXPERTS, TOP_K))
            loads[layer] += torch.bincount(each.topk(TOP_K).indices.flatten(), minlength=EXPERTS)
    loss = torch.stack(losses).mean()
    loss.backward()
    gradient = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in own.named_parameters()
    }
    return float(loss), gradient, float((loads / loads.sum(dim=1, keepdim=True)).max() * EXPERTS)


def apart(found: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(found[name] - others[name]).abs().max() for name in others]).max())


def test_the_loss_is_that_of_transformers_for_each_sequence_and_layer():
    loss, gradient, load = expected()
    without, plain = update(coefficient=0.0)
    assert not any(name.startswith("router") for name in without)
    with_loss, found = update()
    assert with_loss["router_aux_loss"] == pytest.approx(loss, rel=1e-5)
    assert with_loss["router_load_max"] == pytest.approx(load, rel=1e-5)
    assert with_loss["loss"] == pytest.approx(without["loss"] + COEFFICIENT * loss, rel=1e-5)
    added = {name: found[name] - plain[name] for name in plain}
    assert apart(added, {name: COEFFICIENT * each for name, each in gradient.items()}) < 1e-6
    assert float(gradient["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-4


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"packed": True, "checkpointing": True}])
@pytest.mark.parametrize("micro", [1, 4])
def test_neither_micro_batches_nor_packing_change_it(options, micro):
    metrics, gradient = update()
    others, found = update(micro=micro, **options)
    assert others == pytest.approx(metrics, rel=1e-5)
    assert apart(found, gradient) < 1e-6


@pytest.mark.parametrize("coefficient", [COEFFICIENT, 0.0])
def test_mixtures_of_experts_are_not_compiled(coefficient):
    with pytest.raises(ModelError, match=naming("compile=True", "Qwen3MoeForCausalLM")):
        PolicyModel(model(coefficient)).compile_layers()

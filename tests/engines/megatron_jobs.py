"""Functions that ranks run in the tests of the engine ``megatron``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import sharded_jobs
import torch
import torch.distributed as dist

from strop.engines.base import EngineSpec, ModelSpec, OptimizerSettings
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.errors import ConfigError, ModelError
from strop.models.loader import load_tokenizer

SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, eps=1e-5, grad_clip=0.5)
STEPS = 5
LEARNING_RATE = 1e-2
Weights = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """What some updates gave on one rank."""

    initial: Weights
    figures: dict[str, torch.Tensor]
    gradient: Weights
    """Of the first step."""
    metrics: dict[str, float]
    """Of the first step."""
    norms: list[float]
    weights: Weights


def section(**keys: Any) -> SimpleNamespace:
    """A section ``megatron`` with these keys."""
    defaults = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "param_offload": False,
        "override_transformer_config": {},
        "override_ddp_config": {},
    }
    return SimpleNamespace(**{**defaults, **keys})


def build(
    folder: Path, kind: str, layout: dict[str, Any] | None, *, trains: bool = True, **options: Any
) -> Any:
    """The engine ``megatron`` in a layout; None: the engine ``fsdp`` in one process."""
    model = ModelSpec(kind=kind, path=folder, head_seed=1, **options)
    settings: dict[str, Any] = {"device": torch.device("cpu"), "optimizer": SETTINGS if trains else None}
    if layout is None:
        offload = SimpleNamespace(param_offload=False, model_dump=dict)
        return TorchEngine.build(model, EngineSpec(section=offload, **settings))
    import megatron_shim  # noqa: F401

    from strop.engines.megatron.engine import MegatronEngine

    world = sharded_jobs.world_size()
    return MegatronEngine.build(model, EngineSpec(section=section(**layout), world_size=world, **settings))


def place(layout: dict[str, Any] | None) -> tuple[int, int]:
    """This rank's part of a batch, and the number of parts."""
    if layout is None:
        return 0, 1
    from strop.engines.megatron.engine import MegatronEngine

    return MegatronEngine.data_parallel_place(
        sharded_jobs.rank(), sharded_jobs.world_size(), section=section(**layout), sequence_parallel_size=1
    )


def part_of(batch: Any, layout: dict[str, Any] | None) -> Any:
    """This rank's rows."""
    mine, parts = place(layout)
    return batch[torch.arange(mine, len(batch), parts)]


def gradients(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole gradients of an update by Hugging Face name, after the reduction over ranks."""
    if isinstance(engine, TorchEngine):
        for name, weight in engine.module.hugging_face_model.named_parameters():
            yield name, weight.grad.clone()
        return
    from megatron.core.distributed import finalize_model_grads

    from strop.engines.megatron.convert import copies

    finalize_model_grads(engine._chunks)

    def reduced(parameter: torch.Tensor) -> torch.Tensor:
        held = engine._optimizer._held(parameter)
        values = torch.zeros_like(parameter)
        if held is not None:  # the rest of the buffer is not reduced
            values.view(-1)[held[2]] = parameter.main_grad.view(-1)[held[2]]
        if engine._optimizer._is_sharded:
            dist.all_reduce(values, group=copies(parameter))
        return values

    yield from engine._weights.whole(reduced)


def samples(seed: int) -> Any:
    """A mini-batch in which prompts are shared, and a response has the padding token's id."""
    batch = sharded_jobs.samples(8, seed)
    width = batch.batch["prompts"].shape[1]
    for name in ("input_ids", "attention_mask"):
        batch.batch[name][1::2, :width] = batch.batch[name][::2, :width]
    batch.batch["position_ids"] = (batch.batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    batch.batch["responses"][:, 0] = batch.batch["input_ids"][:, width] = 0
    return batch


def objective(kind: str, batch: Any) -> Callable[..., Any]:
    """The loss of a role."""
    return sharded_jobs.objective("actor" if kind == "policy" else "critic", batch, "seq-mean-token-mean")


def train(
    folder: Path,
    kind: str,
    layout: dict[str, Any] | None,
    rows: int,
    spoil: Callable[[], None] | None = None,
    options: dict[str, Any] | None = None,
) -> Trained:
    """Some updates; ``spoil`` breaks megatron-core for a negative control."""
    if spoil is not None:
        import megatron_shim  # noqa: F401

        spoil()
    engine = build(folder, kind, layout, **(options or {}))
    micro = MicroBatching(rows=rows)
    passes: dict[str, Any] = {"temperature": 0.8} if kind == "policy" else {}
    initial = {name: weight.clone() for name, weight in engine.named_weights()}
    batch = samples(0)
    figures = engine.infer(part_of(batch, layout), micro, **passes)
    metrics = engine.forward_backward(part_of(batch, layout), objective(kind, batch), micro, **passes)
    gradient = {name: weight.clone() for name, weight in gradients(engine)}
    engine = build(folder, kind, layout, **(options or {}))  # the reduction of `gradients` must not run twice
    norms = []
    for seed in range(STEPS):
        batch = samples(seed)
        engine.forward_backward(part_of(batch, layout), objective(kind, batch), micro, **passes)
        norms.append(engine.optimizer_step(LEARNING_RATE).grad_norm)
    weights = {name: weight.clone() for name, weight in engine.named_weights()}
    return Trained(initial, figures, gradient, metrics, norms, weights)


def initial(folder: Path, kind: str, layout: dict[str, Any]) -> Weights:
    """Weights as loaded."""
    return {
        name: weight.clone() for name, weight in build(folder, kind, layout, trains=False).named_weights()
    }


def rounds_once(folder: Path, layout: dict[str, Any]) -> bool:
    """Whether weights that are sent in 16 bits are the rounded whole ones."""
    engine = build(folder, "policy", layout, trains=False)
    whole = {name: weight.clone() for name, weight in engine.named_weights()}
    sent = dict(engine.named_weights(dtype=torch.bfloat16))
    return sent.keys() == whole.keys() and all(torch.equal(sent[n], whole[n].bfloat16()) for n in sent)


def refusal(folder: Path, kind: str, layout: dict[str, Any], options: dict[str, Any]) -> str:
    """Message of the error that building raises."""
    try:
        build(folder, kind, layout, **options)
    except (ConfigError, ModelError) as error:
        return str(error)
    return "nothing was raised"


def update(engine: Any, layout: dict[str, Any] | None, seed: int) -> float:
    """Take a step of the policy; return its gradient norm."""
    batch = samples(seed)
    engine.forward_backward(part_of(batch, layout), objective("policy", batch), MicroBatching(rows=2))
    return engine.optimizer_step(LEARNING_RATE).grad_norm


def go_on(
    folder: Path, layout: dict[str, Any] | None, start: Path | None, seeds: list[int], end: Path | None
) -> tuple[Weights, list[float]]:
    """Load ``start``, take steps, save to ``end``; return weights and gradient norms."""
    engine = build(folder, "policy", layout)
    if start is not None:
        engine.load(start)
    norms = [update(engine, layout, seed) for seed in seeds]
    if end is not None:
        engine.save(end)
    return {name: weight.clone() for name, weight in engine.named_weights()}, norms


def save_in_background(
    folder: Path, layout: dict[str, Any], before: list[int], meanwhile: list[int], end: Path
) -> None:
    """Take steps, begin a save, and take more steps before it is finished."""
    engine = build(folder, "policy", layout)
    for seed in before:
        update(engine, layout, seed)
    engine.save(end, background=True)
    for seed in meanwhile:
        update(engine, layout, seed)
    engine.finish_save()


def export(folder: Path, layout: dict[str, Any] | None, out: Path) -> torch.Tensor:
    """Take a step and export; return log-probs [B, T] of this rank's rows."""
    engine = build(folder, "policy", layout)
    update(engine, layout, 0)
    engine.export(out, load_tokenizer(folder))
    return engine.infer(part_of(samples(1), layout), MicroBatching(rows=3))["log_prob"]


def skip(folder: Path, layout: dict[str, Any]) -> tuple[Any, bool, float]:
    """Take a step whose loss is not finite; return it, whether weights stayed, and the next step's norm."""
    engine = build(folder, "policy", layout)
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    batch = samples(0)
    own = objective("policy", batch)

    def infinite(outputs: Any, columns: Any) -> Any:
        loss, metrics = own(outputs, columns)
        return loss * float("inf"), metrics

    engine.forward_backward(part_of(batch, layout), infinite, MicroBatching(rows=3))
    step = engine.optimizer_step(LEARNING_RATE)
    same = all(torch.equal(before[name], weight) for name, weight in engine.named_weights())
    return step, same, update(engine, layout, 0)


def unmark_norms() -> None:
    """Do not sum the gradients of norms over the ranks that share the tokens."""
    from strop.engines.megatron import build as building

    own = building.Norm.__init__

    def unmarked(self: Any, *args: Any, **options: Any) -> None:
        own(self, *args, **options)
        self.weight.sequence_parallel = False

    building.Norm.__init__ = unmarked


def divide_by_micro_batches() -> None:
    """Divide losses by the number of micro-batches, as megatron-core does by default."""
    from megatron.core.pipeline_parallel import schedules

    own = schedules.forward_step_calc_loss

    def divided(*args: Any, **options: Any) -> Any:
        loss, tokens = own(*args, **options)
        micro_batches, is_last_stage = args[6], args[9]
        return (loss / micro_batches if is_last_stage else loss), tokens

    schedules.forward_step_calc_loss = divided


def add_bias_on_every_rank() -> None:
    """Add what all ranks have, a bias after a row-parallel layer, once on each rank."""
    from megatron.core.tensor_parallel import layers

    own = layers.RowParallelLinear.forward

    def doubled(self: Any, hidden: torch.Tensor) -> Any:
        output, bias = own(self, hidden)
        return output + 0.01 * self.tp_group.size(), bias

    layers.RowParallelLinear.forward = doubled


def sum_head_over_ranks() -> None:
    """Sum the gradient of a value head over ranks that all have the whole of it."""
    from strop.engines.megatron import build as building

    own = building.HiddenStates.__init__

    def marked(self: Any, *args: Any) -> None:
        own(self, *args)
        self.weight.sequence_parallel = True

    building.HiddenStates.__init__ = marked


def drop_the_loss_of_experts() -> None:
    """Compute the auxiliary loss of experts, and keep it from the gradient."""
    from strop.engines.megatron import experts

    experts.MoEAuxLossAutoScaler = SimpleNamespace(apply=lambda probs, loss: probs)

"""megatron-core's optimizer: data-parallel buffers, global norm and clipping, moments of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from strop.engines.base import OptimizerSettings, StepResult
from strop.engines.megatron.convert import copies
from strop.engines.megatron.settings import ParallelSettings, with_choices
from strop.errors import ConfigError, raised_as

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over this rank's model chunks, with moments spread over the data-parallel ranks."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mcore: TransformerConfig,
        settings: OptimizerSettings,
        parallel: ParallelSettings,
    ) -> None:
        self._settings = settings
        entries = {
            "use_distributed_optimizer": parallel.distributed_optimizer,
            # Its hooks start a reduction after as many micro-batches as the first step had: gradients of
            # further ones would be of one rank each.
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,  # weights would be sent and saved before they are gathered
            "num_distributed_optimizer_instances": 1,
            "average_in_collective": False,  # losses have global denominators
            "use_megatron_fsdp": False,
        }
        choices = {"grad_reduce_in_fp32": True}
        chosen = with_choices("override_ddp_config", entries, choices, parallel.ddp)
        with raised_as(ConfigError, "megatron.override_ddp_config", TypeError):
            ddp = DistributedDataParallelConfig(**chosen)
        self.chunks = [DistributedDataParallel(mcore, ddp, chunk) for chunk in chunks]
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.grad_clip,
            use_distributed_optimizer=parallel.distributed_optimizer,
        )
        # No overrides: megatron-core decays neither biases nor norms, torch's AdamW decays all.
        self._optimizer = get_megatron_optimizer(config, self.chunks, {}, use_gloo_process_groups=False)
        self._create_moments()
        self.clear()

    def _create_moments(self) -> None:
        """Create the (zero) moments, so that a checkpoint before the first step has them."""
        for optimizer, _, parameter in self._own():
            state = optimizer.state[parameter]
            state |= {name: torch.zeros_like(parameter) for name in MOMENTS}
            if isinstance(optimizer, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32)

    def _own(self) -> Iterator[tuple[Any, dict[str, Any], Tensor]]:
        """Yield this rank's parameters, each with its optimizer and group."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                yield from ((part.optimizer, group, parameter) for parameter in group["params"])

    @property
    def _parts(self) -> list[Any]:
        return self._optimizer.chained_optimizers

    def step(self, learning_rate: float) -> StepResult:
        """Reduce, clip and apply the gradients; skip the step if they are not finite. Collective."""
        finalize_model_grads(self.chunks)
        self._optimizer.prepare_grads()
        # in separate calls: megatron-core's step() looks for non-finite gradients under fp16 only
        norm = float(self._optimizer.get_grad_norm())
        skipped = not math.isfinite(norm)
        if not skipped:
            for part in self._parts:
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, self._settings.grad_clip, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step_with_ready_grads()
        self.clear()
        return StepResult(grad_norm=norm, skipped=skipped)

    def clear(self) -> None:
        """Clear the gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of this rank's parameter, whole. Collective over its ``copies``."""
        held = self._held(parameter)
        found = {}
        for name in MOMENTS:
            values = torch.zeros_like(parameter)
            if held is not None:
                part, main, span = held
                values.view(-1)[span] = part.optimizer.state[main][name].view(-1)
            if self._is_sharded:
                # each rank has zeros outside of its part, so the sum joins the parts
                dist.all_reduce(values, group=copies(parameter))
            found[name] = values
        return found

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Write this rank's part of the moments of a parameter."""
        if (held := self._held(parameter)) is not None:
            part, main, span = held
            for name, values in moments.items():
                part.optimizer.state[main][name].view(-1).copy_(values.reshape(-1)[span])

    @property
    def steps(self) -> float:
        """Steps taken; the same for every parameter."""
        for optimizer, group, parameter in self._own():
            state = optimizer.state[parameter]
            # torch's AdamW counts by parameter, megatron-core's fused Adam on a GPU by group
            return float(state["step"] if "step" in state else group.get("step", 0))
        return 0.0

    @steps.setter
    def steps(self, number: float) -> None:
        for optimizer, group, parameter in self._own():
            if isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[parameter]["step"].fill_(number)
            else:
                group["step"] = int(number)

    def reload_parameters(self) -> None:
        """Copy the model's parameters to the optimizer's, after they were loaded."""
        self._optimizer.reload_model_params()

    @property
    def _is_sharded(self) -> bool:
        return any(hasattr(part, "gbuf_ranges") for part in self._parts)

    def _held(self, parameter: nn.Parameter) -> tuple[Any, Tensor, slice] | None:
        """Return the optimizer, its own parameter, and the part of ``parameter`` that this is; or None."""
        for part in self._parts:
            if not self._is_sharded:
                groups = part.optimizer.param_groups
                if any(parameter is other for group in groups for other in group["params"]):
                    return part, parameter, slice(None)
            elif parameter in part.model_param_gbuf_map:
                span = part._get_model_param_range_map(parameter)["param"]
                group, order = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                return part, main, slice(span.start, span.end)
        return None

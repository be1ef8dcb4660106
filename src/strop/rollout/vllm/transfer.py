"""Weights handed to vLLM in the process that has them: its weight-transfer interface, without a wire.

Trainer and engine share the process (and the GPU), so a tensor is passed as it is. vLLM loads layer by layer:
beside the two models there is memory for one layer's weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

IN_PROCESS = "strop_in_process"
"""Name of the back-end in vLLM's registry."""


@dataclass
class InProcessInit(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """Some of the weights, by Hugging Face name."""

    weights: Iterable[tuple[str, Tensor]]


class InProcessWeightTransfer(WeightTransferEngine[InProcessInit, InProcessUpdate]):
    """Between ``start`` and ``finish`` any number of ``receive``, each of any weights in any order."""

    init_info_cls = InProcessInit
    update_info_cls = InProcessUpdate

    def init_transfer_engine(self, init_info: InProcessInit) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """From now on a layer is loaded when all of its weights have come."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        """Load some weights, in vLLM's names, layout and dtype."""
        load: Any = self.model.load_weights
        load(update_info.weights)

    def finish_weight_update(self) -> None:
        """Load what has padding, and what depends on other layers."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            # An output layer that is tied to the embedding gets no weight of its own, so that vLLM (0.32)
            # leaves what it has packed for the CPU as it was.
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                method: Any = layer.quant_method
                method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing to close."""


WeightTransferEngineFactory.register_engine(IN_PROCESS, InProcessWeightTransfer)

"""Construction of a vLLM engine in the trainer's process.

It runs inside ``keeping_process_state`` and ``keeping_model_classes``, as vLLM reseeds generators and changes
classes of transformers, and ``joined``, in which the engines of a tensor-parallel group meet over the worker
group's ``torch.distributed``. ``InProcessWeightTransfer`` is the back-end of vLLM's weight-transfer interface
that takes tensors from this process.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.models.transformers import base as transformers_backend
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from strop.errors import ModelError

_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def keeping_process_state() -> Generator[None]:
    """Undo what building an engine does to the process: it seeds all generators and patches torch."""
    python, numpy_state, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    threads = torch.get_num_threads()  # 1 of an engine on a GPU
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextlib.contextmanager
def drawing_from(seed: int) -> Generator[None]:
    """Seed the process's generators in the body: requests without a seed draw from torch's, or numpy's."""
    with keeping_process_state():
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def keeping_model_classes() -> Generator[None]:
    """Let vLLM's transformers back-end decorate subclasses of transformers' classes instead of the classes.

    It decorates a family's class for torch.compile in place. All models of the process would get vLLM's
    ``__init__`` and its ``__call__``, which fails for those of the trainer and skips their hooks.
    """
    classes: list[Any] = []
    compiling = transformers_backend.support_torch_compile

    def of_subclass(**options: Any) -> Callable[[Any], Any]:
        def decorate(model_class: Any) -> Any:
            own = type(model_class.__name__, (model_class,), {"__module__": model_class.__module__})
            compiling(**options)(own)
            model_class.__new__ = lambda _, *args, **more: object.__new__(own)  # vLLM makes it next
            classes.append(model_class)
            return model_class

        return decorate

    with mock.patch.object(transformers_backend, "support_torch_compile", of_subclass):
        try:
            yield
        finally:
            for model_class in classes:  # deleted, CPython would not let the class take arguments any more
                model_class.__new__ = lambda kind, *_, **__: object.__new__(kind)


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Generator[None]:
    """Build engines on all ranks over the existing process group. Collective.

    The ranks of an engine share memory. On a CPU vLLM names it after the rendezvous address; with an external
    launcher there is none, and all runs on a machine would use one name. So a random name is patched in. The
    files are unlinked once all ranks have opened them: nothing is left however the processes end.
    """
    if world_size == 1:
        yield
        return
    name: list[Any] = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0"}
    address = (f"tcp://strop:{name[0]}", rank, 0)
    with mock.patch.object(ExecutorWithExternalLauncher, "_distributed_args", return_value=address):
        yield
    queue = get_tp_group().mq_broadcaster
    buffer = None if queue is None else queue.buffer
    dist.barrier()
    names = [path.name for path in _SHARED_MEMORY.glob(f"{name[0]}-*")]
    names += [] if buffer is None else [buffer.shared_memory.name]
    for left in names:
        (_SHARED_MEMORY / left).unlink(missing_ok=True)


IN_PROCESS = "strop_in_process"
"""Name of ``InProcessWeightTransfer`` in vLLM's registry."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """A part of the weights, by Hugging Face name."""

    weights: Iterable[tuple[str, Tensor]]


class InProcessWeightTransfer(WeightTransferEngine[WeightTransferInitInfo, InProcessUpdate]):
    """Load tensors of this process; ``receive_weights`` may be called repeatedly, in any order."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = InProcessUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Begin an update, in which a layer is loaded once all of its weights were received."""
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():
            # vLLM 0.32 packs experts for a CPU only when it builds their kernel, not in an update.
            if isinstance(layer, RoutedExperts) and current_platform.is_cpu():
                method: Any = layer.quant_method
                method.moe_kernel = None

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        """Load a part of the weights, converted to vLLM's names, layout and dtype."""
        load: Any = self.model.load_weights
        load(update_info.weights)

    def finish_weight_update(self) -> None:
        """Finish layers that have padding or depend on other layers; ``ModelError`` for stale experts."""
        for path, layer in self.model.named_modules():
            # Some models copy into the parameters of experts, which are on the meta device in an update.
            info = get_layerwise_info(layer)
            if isinstance(layer, RoutedExperts) and info.can_load() and info.load_numel == 0:
                raise ModelError(
                    f"weight transfer: vLLM's {type(self.model).__name__} takes no new weights of {path}, so "
                    "it would sample with old ones; set actor_rollout_ref.rollout.name=hf"
                )
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            # vLLM 0.32 does not repack an output layer that is tied to the embedding: it receives no weight
            # itself, so its packed copy for the CPU would stay stale.
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                method: Any = layer.quant_method
                method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


WeightTransferEngineFactory.register_engine(IN_PROCESS, InProcessWeightTransfer)

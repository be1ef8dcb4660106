"""How the engine is built: strop's keys in vLLM's words, and what importing vLLM may not change."""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_BLOCK = 128


"""Tokens of a KV-cache block: at most this many of a sequence's last block are unused."""


@dataclass(frozen=True, kw_only=True)
class VLLMSettings:
    """The section ``actor_rollout_ref.rollout`` as the engine needs it."""

    model_path: Path
    config_overrides: Mapping[str, Any]
    tokenizer_path: Path | None
    """None: token ids are all it sees. Stop strings and bad words need a tokenizer."""
    device: torch.device
    dtype: torch.dtype
    load_format: str
    """``dummy``: the first weights come from the trainer; ``auto``: they are read from ``model_path``."""
    max_model_len: int
    """Most tokens of a prompt and its response."""
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    """``gpu_memory_utilization``: of the device's memory, for weights and KV cache."""
    enforce_eager: bool
    sleeps: bool
    """Give weights and cache up between generation and update (``free_cache_engine``, on a GPU)."""
    tensor_parallel: int
    """Ranks that run one engine together."""
    rank: int
    world_size: int
    """Ranks of the worker group, which have met in ``torch.distributed``."""
    trust_remote_code: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's ``SamplingParams``, by name."""

    @property
    def detokenize(self) -> bool:
        """Whether vLLM has to see text: it looks for stop strings there."""
        return bool(self.sampling.get("stop"))


def engine_arguments(settings: VLLMSettings, model: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``."""
    arguments = {
        "model": str(settings.model_path),
        "hf_overrides": dict(settings.config_overrides),
        "tokenizer": str(settings.tokenizer_path or settings.model_path),
        "skip_tokenizer_init": settings.tokenizer_path is None,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "load_format": settings.load_format,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "gpu_memory_utilization": settings.memory_share,
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "generation_config": "vllm",  # the folder's own sampling defaults are not asked
        "enable_prefix_caching": True,  # a prompt is computed once for its samples
        "disable_log_stats": True,
        "seed": 0,
    }
    if settings.world_size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if settings.device.type == "cuda":
        arguments["enable_sleep_mode"] = settings.sleeps
    else:
        arguments["kv_cache_memory_bytes"] = _cache_bytes(settings, model)
    return arguments


def _cache_bytes(settings: VLLMSettings, model: PreTrainedConfig) -> int:
    """On a CPU: room for ``max_num_seqs`` whole sequences, and no more than the share of the machine.

    vLLM itself would take its whole share, however small the model, once for every rank. Of what is free at
    the moment nothing may depend: a resumed run has to batch as the first one did.
    """
    text = model.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token_bytes = 2 * text.num_hidden_layers * heads * head_width(model) * settings.dtype.itemsize
    blocks = math.ceil(settings.max_model_len / _BLOCK) + 1
    wanted = settings.max_num_seqs * blocks * _BLOCK * token_bytes // settings.tensor_parallel
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(wanted, int(total * settings.memory_share / settings.world_size))


def head_width(model: PreTrainedConfig) -> int:
    """Dimensions of an attention head."""
    text = model.get_text_config(decoder=True)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


@contextlib.contextmanager
def keeping_process_state() -> Generator[None]:
    """Building an engine seeds every random generator and replaces a function of torch: undo that."""
    python, numpy_state, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_num_threads


# Engines on several ranks: these have met in ``torch.distributed``, and vLLM is to use that.

_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Generator[None]:
    """Inside, all ranks build their engines.

    Ranks of one engine share memory. On a CPU vLLM names it after the address at which processes meet; here
    they meet nowhere, and the name would be the same for every run on the machine: it gets one of its own.
    All names are removed when all ranks have opened them, so that nothing stays behind however they end.
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


# Weights handed to vLLM in the process that has them: its weight-transfer interface, without a wire.

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

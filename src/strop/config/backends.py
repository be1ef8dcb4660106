"""Training engines and rollouts by name, with the facts that checks need before a back-end is imported.

A new back-end is one entry here and one module with the class that the entry names.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineKind:
    """A value of ``actor.strategy``, ``critic.strategy`` or ``update.strategy``."""

    engine: str
    """"module:class" of the ``Engine``."""
    section: str = "fsdp_config"
    """Name of the section with its sharding and memory keys."""
    trains_adapters: bool = False
    """True if it trains LoRA adapters (``lora_rank`` and others)."""
    package: str | None = None
    """Package that must be installed."""


@dataclass(frozen=True, kw_only=True)
class RolloutKind:
    """A value of ``actor_rollout_ref.rollout.name``."""

    replica: str
    """"module:class" of the rollout that holds a copy of the weights."""
    shared: str | None = None
    """"module:class" of the rollout that generates on the actor's own module; None: a copy is needed."""
    keys: frozenset[str] = frozenset()
    """Keys of ``actor_rollout_ref.rollout`` that this back-end honours and not all others do."""
    extra_sampling: bool = False
    """True if it honours the keys of ``VLLMSamplingConfig``."""
    forecast: str = "strop.config.memory.forecast:sample_caches"
    """"module:function" of the memory forecast: (config, batch plan, model facts) -> ``Forecast``."""
    package: str | None = None
    """Package that must be installed."""

    @property
    def installed(self) -> bool:
        """True unless a required package is missing."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


ENGINES: dict[str, EngineKind] = {
    "fsdp": EngineKind("strop.engines.torch.engine:TorchEngine", trains_adapters=True),
    "megatron": EngineKind(
        "strop.engines.megatron.engine:MegatronEngine", section="megatron", package="megatron"
    ),
}

ROLLOUTS: dict[str, RolloutKind] = {
    "hf": RolloutKind(
        replica="strop.rollout.hf.replica:HFReplica",
        shared="strop.rollout.hf.engine:HFRollout",
        keys=frozenset({"micro_batch_size_per_gpu"}),
    ),
    "vllm": RolloutKind(
        replica="strop.rollout.vllm.engine:VLLMRollout",
        keys=frozenset(
            {
                "dtype",
                "enforce_eager",
                "free_cache_engine",
                "gpu_memory_utilization",
                "load_format",
                "max_num_batched_tokens",
                "max_num_seqs",
                "seed_per_sample",
                "tensor_model_parallel_size",
            }
        ),
        extra_sampling=True,
        forecast="strop.config.memory.forecast:replica_with_cache",
        package="vllm",
    ),
}


def load_backend(reference: str) -> Any:
    """Import the attribute that ``reference`` ("module:attribute") names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)

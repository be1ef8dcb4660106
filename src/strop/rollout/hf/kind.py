"""Facts about rollout ``hf`` that the configuration needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strop.config.backends import Forecast, RolloutKind, total
from strop.config.checks.finding import Finding, warning
from strop.config.keys import longest_row
from strop.config.machine import memory_for
from strop.config.memory.facts import ModelFacts
from strop.config.memory.forecast import resident_weights
from strop.config.memory.shapes import FLOAT32, cache_bytes, number_bytes, weights
from strop.config.placement import Placement, is_small, uses_gpu
from strop.config.schema import Config
from strop.rollout.hf.keys import SECTIONS

_SMALL_ON_A_GPU = 200 * 2**20
"""Bytes of weights below which it is a good engine on a GPU."""
_SHARE_OF_CACHES = 0.5  # of the memory beside the models; the rest is for prefills, batches and the system
_UNKNOWN_GPU = 16 << 30  # bytes that a GPU is assumed to have where nvidia-smi lists none


class HFKind(RolloutKind):
    """Rollout ``hf``."""

    replica = "strop.rollout.hf.replica:HFReplica"
    shared = "strop.rollout.hf.engine:HFRollout"
    reads_pictures = True
    remedy = (
        "lower actor_rollout_ref.rollout.micro_batch_size_per_gpu (null: as many as fit) or "
        "data.max_response_length"
    )
    offers = frozenset(key for section in SECTIONS for key in section.model_fields)

    def suits(self, device: str, model_path: str) -> tuple[bool, str]:
        """See ``RolloutKind.suits``: it works everywhere."""
        return True, ""

    def rules(self, config: Any) -> Iterator[Finding]:
        """Warn of a GPU, except for small models."""
        if uses_gpu(config) and not is_small(config.actor_rollout_ref.model.path, _SMALL_ON_A_GPU):
            yield warning(
                "actor_rollout_ref.rollout.name=hf on a GPU: it launches every operation of a decoding step "
                "from Python, and the GPU waits for it; set it to vllm (pip install 'strop[vllm]'), which "
                "replays CUDA graphs"
            )

    def bytes(self, config: Any, samples: int, facts: ModelFacts | None) -> Forecast:
        """See ``RolloutKind.bytes``: a copy of the weights, and caches of samples generated at once.

        With ``async_steps`` they are needed during updates, too.
        """
        cache = None
        if facts is not None:
            number = number_bytes(config.actor_rollout_ref.model)
            at_once = min(samples, samples_at_once(config, facts))
            cache = at_once * longest_row(config.data)[0] * cache_bytes(facts, number)
        size = {"generation: weights' copy, KV cache": total(_copy(config, facts), cache)}
        return Forecast(size, {}) if config.trainer.async_steps else Forecast({}, size)


def samples_at_once(config: Config, facts: ModelFacts) -> int:
    """Return how many samples are generated at once: ``micro_batch_size_per_gpu``, or what fits.

    What fits depends on the configuration and on the memory that is installed (of a GPU of unknown size
    ``_UNKNOWN_GPU``), not on what is free at the moment: a resumed run has to form the same batches.
    """
    rollout: Any = config.actor_rollout_ref.rollout
    if size := rollout.micro_batch_size_per_gpu:
        return size
    memory, placement = memory_for(config), Placement.from_config(config)
    own = memory.size // memory.processes if memory else _UNKNOWN_GPU
    held = total(*resident_weights(config, placement.roles[placement.rollout_role]).values())
    number = number_bytes(config.actor_rollout_ref.model)
    free = own // 2 if held is None else own - held - (_copy(config, facts) or 0)
    tokens, logits = longest_row(config.data)[0], 2 * FLOAT32 * facts.vocabulary
    cache = tokens * cache_bytes(facts, number)
    sample = cache * (facts.layers + 1) // max(facts.layers, 1) + logits  # grows by a layer
    return max(1, max(int(free * _SHARE_OF_CACHES), own // 32) // sample)


def _copy(config: Config, facts: ModelFacts | None) -> int | None:
    """Return the bytes of weights in the compute dtype: cast, packed on a CPU, or beside a sharded actor."""
    return weights(facts, number_bytes(config.actor_rollout_ref.model))


KIND = HFKind()

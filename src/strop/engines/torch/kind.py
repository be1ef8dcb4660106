"""Facts about strategy ``fsdp`` that the configuration needs: one process, or FSDP2 over several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strop.config.backends import ABILITIES, EngineKind, total
from strop.config.batch_plan import MODELS, forward_passes, keys_of_pass, sequence_parallel_size
from strop.config.checks.finding import Finding, error
from strop.config.keys import divisors, nearest_in_words, value_at
from strop.config.memory.facts import ModelFacts, read_model_facts
from strop.config.memory.shapes import (
    FLOAT32,
    MOMENTS,
    cast_weights,
    number_bytes,
    trained,
    weights,
    whole_gradients,
)
from strop.config.placement import Placement, process_count, uses_gpu
from strop.config.schema import Config
from strop.engines.torch.keys import SECTION, SECTIONS
from strop.errors import ConfigError


class FsdpKind(EngineKind):
    """Strategy ``fsdp``."""

    engine = "strop.engines.torch.engine:TorchEngine"
    section, sections = SECTION, SECTIONS
    accumulation = "use_no_sync_for_gradient_accumulation"
    offers = frozenset({*ABILITIES, SECTION})

    def ranks_with_same_rows(self, config: Any, name: str, ranks: int) -> int:
        return sequence_parallel_size(config, name, ranks)

    def rules(self, config: Any) -> Iterator[Finding]:
        """Require ranks that divide into groups of `fsdp_size`, and sequences that can be shared."""
        for name in ("actor", "critic") if isinstance(config, Config) else ("update",):
            size, ranks = self.section_of(config, name).fsdp_size, _ranks(config, name)
            if 1 < size < ranks and ranks % size:
                working = nearest_in_words(size, divisors(ranks))
                yield error(
                    f"{self.key_of(name)}.fsdp_size={size} does not divide the {ranks} ranks ({working}; -1: "
                    "all)"
                )
        if isinstance(config, Config):
            yield from _shared_sequences(config)

    def bytes(self, config: Any, name: str, facts: ModelFacts | None, *, trains: bool) -> int | None:
        """See ``EngineKind.bytes``: ranks that shard a model share it evenly.

        What is offloaded is on a GPU for a while alone: moments 0.5 GiB at a time, a frozen model in its own
        pass. A trained one that is parked between its phases counts all the same.
        """
        ranks, section = _ranks(config, name), self.section_of(config, name)
        size = getattr(section, "fsdp_size", -1)  # frozen models have no such key
        shards = min(size, ranks) if size > 0 else ranks
        if not trains:
            is_away = uses_gpu(config) and getattr(section, "param_offload", False)
            return 0 if is_away else weights(facts, FLOAT32, shards)
        model = value_at(config, MODELS[name])
        found = trained(facts, model, shards)
        if found is None or model.has_adapters or not (uses_gpu(config) and section.optimizer_offload):
            return found
        return found - (weights(facts, MOMENTS, shards) or 0)

    def update_bytes(self, config: Any, name: str, facts: ModelFacts | None, model: Any) -> int | None:
        if _ranks(config, name) == 1:
            return cast_weights(config, facts, model)
        section = self.section_of(config, name)
        kept = 0 if section.reshard_after_forward else weights(facts, number_bytes(model))
        whole = section.use_no_sync_for_gradient_accumulation
        return total(kept, whole_gradients(facts, model) if whole else 0)


def _ranks(config: Any, name: str) -> int:
    if isinstance(config, Config):
        return Placement.from_config(config).ranks_of_pass(name)
    return process_count(config)


def _shared_sequences(config: Config) -> Iterator[Finding]:
    """Require packed rows, and heads that divide, where ranks share sequences."""
    for name in forward_passes(config):
        try:
            size = sequence_parallel_size(config, name, _ranks(config, name))
        except ConfigError:
            continue  # reported with the batch sizes
        if size == 1:
            continue
        key, path = keys_of_pass(name).sequence_parallel, value_at(config, f"{MODELS[name]}.path")
        padding_key = f"{'critic' if name == 'values' else 'actor_rollout_ref'}.model.use_remove_padding"
        if not value_at(config, padding_key):
            yield error(f"{key}={size} shares packed rows; set {padding_key}=True")
        facts = read_model_facts(path)
        if facts is not None and facts.heads % size:
            working = nearest_in_words(size, divisors(facts.heads))
            yield error(
                f"{key}={size} does not divide the {facts.heads} attention heads of {path} ({working})"
            )


KIND = FsdpKind()

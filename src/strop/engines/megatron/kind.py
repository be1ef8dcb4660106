"""Facts about strategy ``megatron`` that the configuration needs: layouts over ranks by megatron-core."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from strop.config.backends import EngineKind
from strop.config.batch_plan import MODELS, forward_passes
from strop.config.checks.finding import Finding, error
from strop.config.keys import divisors, nearest_in_words, value_at
from strop.config.memory.facts import ModelFacts, read_model_facts
from strop.config.memory.shapes import FLOAT32, TRAINED, cast_weights
from strop.config.placement import Placement
from strop.config.roles import teacher_models
from strop.engines.megatron.keys import SECTION, SECTIONS
from strop.errors import ConfigError


class MegatronKind(EngineKind):
    """Strategy ``megatron``."""

    engine = "strop.engines.megatron.engine:MegatronEngine"
    section, sections, needs_gpu = SECTION, SECTIONS, True
    offers = frozenset({SECTION})
    package, distribution = "megatron", "megatron-core"
    install = "pip install 'strop[megatron]'"

    def load(self, reference: str) -> Any:
        """Import the engine and hide warnings of megatron-core.

        It calls functions that torch has renamed, in every step, and advises on options that are set.
        """
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
        return super().load(reference)

    def ranks_with_same_rows(self, config: Any, name: str, ranks: int) -> int:
        """See ``EngineKind.ranks_with_same_rows``: those that hold one copy of the model."""
        key, layout = self.key_of(name), self.section_of(config, name)
        tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        size, experts = tensor * pipeline, layout.expert_model_parallel_size
        if ranks % size:
            raise ConfigError(
                f"{key}: tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline} does "
                f"not divide the {ranks} ranks ({nearest_in_words(size, divisors(ranks))})"
            )
        if ranks // pipeline % experts:
            raise ConfigError(
                f"{key}: expert_model_parallel_size={experts} does not divide the {ranks // pipeline} ranks "
                f"of a pipeline stage ({nearest_in_words(experts, divisors(ranks // pipeline))})"
            )
        return size

    def rules(self, config: Any) -> Iterator[Finding]:
        """Require heads, layers and experts that divide, and one layout for all models in a pool."""
        placed, of_pool = Placement.from_config(config), dict[str, tuple[str, tuple[int | None, ...]]]()
        for name in forward_passes(config):  # one of each model; the actor's is log_prob
            paths = [value_at(config, f"{MODELS[name]}.path")]
            if name == "teacher" and not (paths := [one.path for one in teacher_models(config).values()]):
                continue  # servers have it
            key, layout = self.key_of(name), self.section_of(config, name)
            sizes = (
                layout.tensor_model_parallel_size,
                layout.pipeline_model_parallel_size,
                layout.virtual_pipeline_model_parallel_size,
                layout.expert_model_parallel_size,
            )
            other, others = of_pool.setdefault(placed.pool_of_pass(name), (key, sizes))
            if others != sizes:
                yield error(
                    f"{key} and {other} have the tensor, pipeline, virtual pipeline and expert sizes {sizes} "
                    f"and {others}, and their models are in one pool; make them equal, or use different pools"
                )
            for path in paths:
                if (facts := read_model_facts(path)) is not None:
                    yield from _fits(key, layout, facts, path)

    def bytes(self, config: Any, name: str, facts: ModelFacts | None, *, trains: bool) -> int | None:
        """See ``EngineKind.bytes``: moments may be shared by all ranks, other numbers by those of a copy."""
        if facts is None or facts.parameters is None:
            return None
        layout, ranks = self.section_of(config, name), Placement.from_config(config).ranks_of_pass(name)
        shards = self.ranks_with_same_rows(config, name, ranks)
        holders = layout.expert_model_parallel_size * layout.pipeline_model_parallel_size
        apart = trains and layout.use_distributed_optimizer
        each = 2 * FLOAT32 if apart else TRAINED if trains else FLOAT32
        dense = facts.parameters - facts.expert_parameters
        own = each * dense // shards + each * facts.expert_parameters // holders
        return own + (facts.parameters * 2 * FLOAT32 // ranks if apart else 0)

    def update_bytes(self, config: Any, name: str, facts: ModelFacts | None, model: Any) -> int | None:
        ranks = Placement.from_config(config).ranks_of_pass(name)
        return cast_weights(config, facts, model) if ranks == 1 else 0


def _fits(key: str, layout: Any, facts: ModelFacts, path: str) -> Iterator[Finding]:
    """Require that the sizes of the model in ``path`` divide over the ``layout``."""
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    virtual, experts = layout.virtual_pipeline_model_parallel_size, layout.expert_model_parallel_size
    if facts.heads % tensor or facts.kv_heads % tensor:
        yield error(
            f"{key}.tensor_model_parallel_size={tensor} does not divide the {facts.heads} attention heads "
            f"and {facts.kv_heads} key-value heads of {path}"
        )
    if experts > 1 and not facts.experts:
        yield error(f"{key}.expert_model_parallel_size={experts}: {path} has no routed experts; set it to 1")
    elif facts.experts % experts:
        yield error(
            f"{key}.expert_model_parallel_size={experts} does not divide the {facts.experts} routed experts "
            f"of a layer of {path}"
        )
    if facts.experts and tensor > 1 and not layout.sequence_parallel:
        yield error(
            f"{key}.sequence_parallel=False with tensor_model_parallel_size={tensor}: every rank would send "
            f"its copy of a token to the experts of {path}; set it to True"
        )
    stages = pipeline * (virtual or 1)
    uneven = any(entry.startswith("num_layers_in_") for entry in layout.override_transformer_config)
    if facts.layers % stages and not uneven:
        yield error(
            f"{key}: the {facts.layers} layers of {path} do not divide into {stages} stages "
            f"(pipeline_model_parallel_size={pipeline}, virtual_pipeline_model_parallel_size={virtual})"
        )


KIND = MegatronKind()

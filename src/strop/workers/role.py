"""What the workers of reinforcement learning share: passes whose micro-batches the configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from strop.config.batch_plan import resolve_micro_batch, sequence_parallel_size
from strop.config.schema import Config
from strop.controller.pools import Role
from strop.data.hub import local_tokenizer
from strop.engines.base import Engine
from strop.engines.micro_batches import MicroBatching
from strop.errors import ConfigError
from strop.models.base import RoleModel
from strop.models.deferred import WeightSource
from strop.models.loader import load_tokenizer
from strop.workers.base import Worker


class RoleWorker(Worker[Config]):
    """One process of actor, rollout, reference, critic or reward model."""

    shared_passes: ClassVar[Mapping[str, str]] = {}
    """Data-parallel methods whose rows several ranks may share -> their pass, a key of ``MICRO_BATCHES``."""

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, role, rank=rank, world_size=world_size)
        is_critic = role is Role.Critic
        self.strategy = config.critic.strategy if is_critic else config.actor_rollout_ref.actor.strategy

    def load_tokenizer(self, path: str) -> Any:
        """The tokenizer of a local path, a URL or a name on the hub."""
        return load_tokenizer(
            local_tokenizer(path, self.config.data.cache_dir),
            trust_remote_code=self.config.actor_rollout_ref.model.trust_remote_code,
        )

    def data_parallel_place(self, method: str) -> tuple[int, int]:
        """Which part of the rows of a data-parallel ``method`` this rank gets, and how many parts there are.

        Neighbouring ranks that share sequences get the same part.
        """
        size, name = 1, self.shared_passes.get(method)
        if name is not None:
            with suppress(ConfigError):  # a pass of another role: `check` has seen this role's own
                size = sequence_parallel_size(self.config, name, self.world_size)
        return self.rank // size, self.world_size // size

    def build_engine(
        self,
        module: RoleModel,
        *,
        name: str,
        compute_dtype: str,
        fsdp: Any,
        weights: WeightSource | None = None,
        checkpointing: bool = False,
        trained: Any | None = None,
    ) -> Engine:
        """See ``build_engine_on``; ``name`` is one of the module's passes, a key of ``MICRO_BATCHES``."""
        return self.build_engine_on(
            module,
            strategy=self.strategy,
            compute_dtype=compute_dtype,
            fsdp=fsdp,
            sequence_parallel_size=sequence_parallel_size(self.config, name, self.world_size),
            weights=weights,
            checkpointing=checkpointing,
            trained=trained,
        )

    def micro_batching(self, name: str) -> MicroBatching:
        """How the pass ``name`` (a key of ``MICRO_BATCHES``) is cut on this rank."""
        size = resolve_micro_batch(self.config, name, self.world_size)
        return MicroBatching(rows=size.rows, max_tokens=size.max_tokens)

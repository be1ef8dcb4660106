"""The roots of the configuration trees: what they share, and that of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import PrivateAttr

from strop.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from strop.config.schema.algorithm import AlgorithmConfig
from strop.config.schema.base import Section
from strop.config.schema.critic import CriticConfig
from strop.config.schema.data import DataConfig
from strop.config.schema.reward import CustomRewardFunctionConfig, RewardModelConfig
from strop.config.schema.rows import RowsConfig
from strop.config.schema.run import RunConfig
from strop.config.schema.trainer import TrainerConfig


class RootConfig(Section):
    """Everything that a run of any kind is told, read by attribute: config.trainer.total_epochs."""

    data: RowsConfig
    trainer: RunConfig

    _written: frozenset[str] | None = PrivateAttr(default=None)
    _overridden: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def written(self) -> frozenset[str] | None:
        """Full paths of the keys that a file or an override wrote; None when that is not known."""
        return self._written

    @property
    def overridden(self) -> frozenset[str]:
        """Those that an override wrote: what is typed is meant, and a file may be a copy of another."""
        return self._overridden

    def note_written(self, paths: Iterable[str], *, overridden: Iterable[str] | None = None) -> None:
        """Keep which keys the user wrote: what stands on its default is not worth a warning."""
        self._written = frozenset(paths)
        if overridden is not None:
            self._overridden = frozenset(overridden)

    def __eq__(self, other: object) -> bool:
        """Equal values; who wrote them does not matter."""
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    __hash__ = None


class Config(RootConfig):
    """Everything that a run of reinforcement learning is told."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    reward_model: RewardModelConfig
    custom_reward_function: CustomRewardFunctionConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig

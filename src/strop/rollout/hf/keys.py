"""The key of ``actor_rollout_ref.rollout`` that rollout ``hf`` honours."""

from __future__ import annotations

from typing import Annotated

from strop.config.schema.base import MAY_CHANGE, PositiveInt, Section, honoured_where


class BatchConfig(Section, resumes=MAY_CHANGE):
    """Samples that are generated at once."""

    micro_batch_size_per_gpu: Annotated[PositiveInt | None, honoured_where()]
    """Sequences that hf generates at once, per rank; null: as many as fit. It never changes a sample."""


SECTIONS = (BatchConfig,)
"""Classes of keys that are part of ``actor_rollout_ref.rollout``."""

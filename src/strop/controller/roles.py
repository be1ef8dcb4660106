"""The roles that workers play."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """A role is a group of workers; several may share a process."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2  # actor and rollout on the same weights: the hybrid engine
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6

"""Rules about agent programs: what their sessions cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strop.config.backends import ENGINES, ROLLOUTS, engines_with
from strop.config.checks.finding import Finding, error
from strop.config.keys import value_at
from strop.config.schema.agent import uses_agent
from strop.config.schema.environment import uses_environment


def sessions(config: Any) -> Iterator[Finding]:
    """Refuse what sessions of a program would train otherwise than it says."""
    if not uses_agent(config):
        return
    agent, steps = config.agent, config.trainer.async_steps
    rollout = config.actor_rollout_ref.rollout
    if agent.path and agent.command:
        yield error("agent.path and agent.command are both set, and a sample has one program: keep one")
    if uses_environment(config):
        yield error(
            "agent and environment are both set: a program answers the policy's turns by itself, so tools "
            "are the program's; remove one of the two"
        )
    if config.algorithm.adv_estimator == "remax":
        yield error(
            "algorithm.adv_estimator=remax with agent: the greedy response of its baseline would be a second "
            "session of the program; use grpo, rloo or gae"
        )
    if steps >= 2 and not agent.lockstep:
        yield error(
            f"trainer.async_steps={steps} with agent.lockstep=False: how far sessions get would depend on "
            "the clock; set agent.lockstep=True, or trainer.async_steps=1"
        )
    if steps >= 2 and not ROLLOUTS[rollout.name].keeps_lockstep:
        yield error(
            f"trainer.async_steps={steps} with actor_rollout_ref.rollout.name={rollout.name} and agent: set "
            "0 or 1"
        )
    if config.reward_model.enable:
        yield error(
            "reward_model.enable=True with agent: a reward model does not read sessions with branches; set "
            "False, and score with a function or in the program"
        )
    for name in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        if (size := value_at(config, name).ulysses_sequence_parallel_size) > 1:
            yield error(
                f"{name}.ulysses_sequence_parallel_size={size} with agent: shared sequences have no "
                "branches; set 1"
            )
    for name in ("actor_rollout_ref.actor", "critic"):
        if "branches" not in ENGINES[strategy := value_at(config, name).strategy].offers:
            yield error(
                f"{name}.strategy={strategy} with agent: it does not compute sessions with branches; set "
                f"{engines_with('branches')}"
            )

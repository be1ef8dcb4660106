"""Keys that still work under an old name or meaning, and the line that says so.

Each `*_micro_batch_size` counts sequences over all ranks; its successor `*_micro_batch_size_per_gpu` counts
them per rank. The defaults set the successors, so who writes one key of a pair sets the other one aside.
"""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from strop.config.keys import value_at
from strop.config.schema import Config

OLD_LIBS = "actor_rollout_ref.model.external_libs"
NEW_LIB = "actor_rollout_ref.model.external_lib"

OLD_MICRO_BATCH_KEYS = (
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.forward_micro_batch_size",
    "reward_model.micro_batch_size",
)


def settle(tree: DictConfig, explicit: Collection[str]) -> None:
    """Make old and new keys agree in `tree`, in place, before it is resolved.

    `explicit` holds the full paths of the keys that the user wrote. A pair of which both were written stays
    as it is, for `check` to report.
    """

    def written(path: str) -> bool:
        return (
            path in explicit and OmegaConf.select(tree, path, throw_on_resolution_failure=False) is not None
        )

    for old in OLD_MICRO_BATCH_KEYS:
        new = f"{old}_per_gpu"
        if written(old) and not written(new):
            OmegaConf.update(tree, new, None)
        elif written(new) and not written(old):
            OmegaConf.update(tree, old, None)
    if written(OLD_LIBS) and not written(NEW_LIB):
        OmegaConf.update(tree, NEW_LIB, OmegaConf.select(tree, OLD_LIBS))


def deprecation_lines(config: Config) -> list[str]:
    """One line for each deprecated key that `config` uses."""
    lines = [
        f"{old}={value_at(config, old)} is deprecated: use {old}_per_gpu, which counts sequences per rank"
        for old in OLD_MICRO_BATCH_KEYS
        if value_at(config, old) is not None
    ]
    if config.actor_rollout_ref.model.external_libs is not None:
        lines.append(f"{OLD_LIBS} is deprecated: use {NEW_LIB}")
    return lines

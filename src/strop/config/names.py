"""The names that configuration keys may hold, as plain strings: the check knows them without importing torch.

A test holds these tables against the registries that they mirror.
"""

from __future__ import annotations

ESTIMATOR_NEEDS: dict[str, frozenset[str]] = {
    "gae": frozenset({"values"}),
    "grpo": frozenset({"uid"}),
    "reinforce_plus_plus": frozenset(),
    "reinforce_plus_plus_baseline": frozenset({"uid"}),
    "rloo": frozenset({"uid"}),
    "remax": frozenset({"baseline_scores"}),
}
"""Estimator -> what it needs besides rewards: a critic's values, groups by prompt, greedy answers' scores."""

ESTIMATOR_TAKES: dict[str, frozenset[str]] = {
    "gae": frozenset({"gamma", "lam", "whiten_advantages"}),
    "grpo": frozenset({"norm_adv_by_std_in_grpo"}),
    "reinforce_plus_plus": frozenset({"gamma", "whiten_advantages"}),
    "reinforce_plus_plus_baseline": frozenset({"whiten_advantages"}),
    "rloo": frozenset(),
    "remax": frozenset(),
}
"""Estimator -> the keys of `algorithm` that it is told."""

POLICY_LOSSES = ("ppo", "gspo", "cispo")
REWARD_MANAGERS = ("naive", "prime")

LOGGER_PACKAGES: dict[str, str | None] = {
    "console": None,
    "jsonl": None,
    "file": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Tracker -> the optional package that it needs, which is also the name of the extra."""


def is_import_path(name: str) -> bool:
    """Whether `name` looks like an import path: `package.module:attribute` or `package.module.attribute`."""
    return "." in name.strip(".") or ":" in name.strip(":")


def needs_critic(adv_estimator: str) -> bool:
    """Whether the estimator needs values; one that is named by its import path counts as if it did."""
    return "values" in ESTIMATOR_NEEDS.get(adv_estimator, frozenset({"values"}))

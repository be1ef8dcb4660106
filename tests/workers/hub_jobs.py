"""What the ranks do in the tests of models from the hub: functions that a spawned process can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import worker_jobs
from huggingface_hub import constants

from strop.controller.pools import Role
from strop.errors import ModelError
from strop.models import deferred


def ends(cache: Path, name: str, out: Path) -> dict[str, Any]:
    """A worker of a model in ``cache``: the ids that end its answers; ``out`` gets its export."""

    def read_whole(*_: Any, **__: Any) -> None:
        raise AssertionError("a sharded model is read tensor by tensor")

    constants.HF_HUB_CACHE = str(cache)
    deferred.load_causal_lm = read_whole
    built = worker_jobs.worker(name, Role.ActorRollout, f"data.cache_dir={out / 'strop'}")
    weights = built.weights_hash()
    built.export(out / "exported")
    rollout = built.rollout._rollout if built.world_size > 1 else built.rollout
    return {"ends": rollout.eos_token_ids, "weights": weights}


def refusal(caches: list[Path], name: str, out: Path) -> str:
    """What a rank says that has the cache of its place in ``caches``."""
    constants.HF_HUB_CACHE = str(caches[worker_jobs.rank()])
    try:
        worker_jobs.worker(name, Role.ActorRollout, f"data.cache_dir={out / 'strop'}")
    except ModelError as error:
        return str(error)
    return "taken"

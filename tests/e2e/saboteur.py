"""Disturbs a worker from inside: imported there as a model's ``external_lib``, as a user's package would be.

The environment variable SABOTAGE is JSON: ``method`` of a worker, ``call`` (which call of it in this
process, from 1), ``rank`` (null: all), ``deed`` (``kill``, ``raise``, ``give up``, ``sleep``, ``crawl``:
generate slowly from then on), ``marker``: a file that is written first and keeps a second process from doing
it again, unless ``again``; ``after``: strike when the method has done its work.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from strop.engines.torch import state
from strop.errors import ModelError
from strop.rollout.hf import decoding
from strop.workers.base import Worker
from strop.workers.policy import ActorRolloutRefWorker

plan = json.loads(os.environ.get("SABOTAGE", "null"))
calls = 0


def strike(rank: int) -> None:
    marker = Path(plan["marker"])
    if (
        plan["rank"] not in (None, rank)
        or calls != plan["call"]
        or (marker.exists() and not plan.get("again"))
    ):
        return
    marker.write_text(f"{os.getpid()} {time.time()}")
    print(f"about to {plan['deed']} in {plan['method']}", flush=True)
    if plan["deed"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan["deed"] == "raise":
        raise RuntimeError("the saboteur was here")
    elif plan["deed"] == "give up":
        raise ModelError("the saboteur has the weights")
    elif plan["deed"] == "crawl":
        crawl(rank)
    else:
        time.sleep(10_000)


def crawl(rank: int) -> None:
    """Let each token take half a second, on each rank a little more, and rank 0 hear late of a stop.

    The steps of each rank are noted next to the marker.
    """
    delay(decoding, "next_tokens", 0.5 + 0.2 * rank)
    if rank == 0:
        delay(ActorRolloutRefWorker, "stop_generation", 2.0)


def delay(owner: Any, name: str, seconds: float) -> None:
    original, noted = getattr(owner, name), Path(f"{plan['marker']}.{name}.{os.getpid()}")

    @functools.wraps(original)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        with noted.open("a") as file:
            file.write("x")
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, delayed)


def disturb(owner: Any, name: str, rank_of: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        if not plan.get("after"):
            strike(rank_of(args))
        result = original(*args, **kwargs)
        if plan.get("after"):
            strike(rank_of(args))
        return result

    setattr(owner, name, wrapped)


if plan is not None:
    if plan["method"] == "state.save":  # in the middle of a save: other ranks have written, this one has not
        import torch.distributed as dist

        disturb(state, "save", lambda args: dist.get_rank() if dist.is_initialized() else 0)
    else:
        owner = Worker if plan["method"] in vars(Worker) else ActorRolloutRefWorker
        disturb(owner, plan["method"], lambda args: args[0].rank)

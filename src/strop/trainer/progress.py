"""Progress inside an iteration, as a line: phase, samples, tokens per second, and times.

While the first iteration generates, its time is an upper bound: samples that are not complete get the most
tokens. Later iterations have the mean of those before them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

from strop.config.keys import value_at
from strop.config.schema import Config, RootConfig

logger = logging.getLogger(__name__)

_LONG_S = 86_400.0
_STEADY_S = 10.0
"""Time of a phase before its forecast may be warned of: the first tokens are slow."""
_SHORTER = ("data.max_response_length", "actor_rollout_ref.rollout.n", "data.train_batch_size")
_GENERATES = {"gen": "generate", "gen_greedy": "greedy", "wait_samples": "wait", "testing": "validate"}


class Progress:
    """Phases, samples and times of the run of ``config``."""

    def __init__(self, config: RootConfig) -> None:
        self.phases: list[tuple[str, float]] = []
        """Phases under way, the innermost last, each with its start in seconds of ``perf_counter``."""
        self._config, self._warned = config, False
        self._generation: Callable[[], tuple[str, float]] = lambda: ("", 0.0)
        self._step = self._steps = 0
        self._begins: deque[float] = deque(maxlen=11)

    def begin(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps
        self._begins.append(time.perf_counter())

    def generating(self, total: int, before: int = 0) -> Callable[[int, int, int], None]:
        """Return the callback ``advanced`` of a call of the rollout.

        ``total`` samples are awaited, of which earlier calls completed ``before``.
        """
        counts: dict[int, tuple[int, int]] = {}  # samples and tokens, by the first row of a rank
        longest, began, last = value_at(self._config, "data.max_response_length"), 0.0, 0.0

        def advanced(row: int, done: int, tokens: int) -> None:
            nonlocal began, last
            last = time.perf_counter()
            began = began or last
            counts[row] = done, tokens
            self._generation = state  # of several calls in flight, the one that runs

        def state() -> tuple[str, float]:
            done, tokens = map(sum, zip((before, 0), *counts.values(), strict=True))
            text = f"{done:,} of {total:,} samples"
            if not tokens:
                return text, 0.0
            rate = tokens / max(last - began, 1e-3)
            # those left get at least the mean
            return f"{text}, {rate:,.0f} tok/s", (total - done) * (longest - tokens / total) / rate

        self._generation = state
        return advanced

    @contextmanager
    def shown(self, show: Callable[[str], None]) -> Generator[None]:
        """Call ``show`` with a line twice a second, in a thread, until the body ends."""
        end = threading.Event()

        def refresh() -> None:
            while not end.wait(0.5):
                show(self._line())

        thread = threading.Thread(target=refresh, name="strop-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join(timeout=1)  # a terminal may be stopped
            show("")

    def _line(self) -> str:
        if not (phases := self.phases[-1:]):
            return ""
        now, ((name, since),) = time.perf_counter(), phases
        parts, most = [f"{_GENERATES.get(name, name)} {duration(now - since)}"], 0.0
        if name in _GENERATES:
            text, most = self._generation()
            parts.append(text)
        if self._begins:
            seconds, kind = now - self._begins[-1] + most, "generation at most " if most else "at least "
            if len(self._begins) > 1:
                seconds, kind = (self._begins[-1] - self._begins[0]) / (len(self._begins) - 1), ""
            parts = [f"step {self._step}/{self._steps}", *parts]
            parts.append(f"{kind}{duration(seconds)} a step, {duration(seconds * self._steps)} in the run")
            warning = long_run(self._config, seconds, self._steps)
            if warning and not self._warned and (not kind or now - since > _STEADY_S):
                self._warned = True
                logger.warning("warning: %s", warning)
        elif most:
            parts.append(f"at most {duration(most)} left")
        return "  ".join(parts)


def long_run(config: RootConfig, seconds: float, steps: int) -> str:
    """Return a sentence on a run of more than a day, with the keys that shorten it; else ""."""
    keys = [f"{key}={value_at(config, key)}" for key in _SHORTER if isinstance(config, Config)]
    found = f"this run takes about {duration(seconds * steps)}. Lower values shorten it: "
    keys = ", ".join([f"trainer.total_training_steps={steps}", *keys])
    return f"{found}{keys}" if seconds * steps > _LONG_S else ""


def duration(seconds: float) -> timedelta:
    """Return a time that is shown as 0:01:40, or 2 days, 3:00:00."""
    return timedelta(seconds=round(seconds))

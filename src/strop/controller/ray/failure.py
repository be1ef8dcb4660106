"""What went wrong in a worker, in words: role, rank, node, phase, cause, and what it printed last."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError, RayError, RayTaskError

from strop.controller.ray.host import STACK_SIGNAL
from strop.errors import StropError

_LINES = 20
_LOG_BYTES = 1 << 16
_READ_S = 5.0
_SIGNAL_S = 1.0
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "Read error",
    "Timed out waiting",
)


@dataclass(frozen=True)
class Failure:
    """One rank's failure in one call."""

    role: str
    rank: int
    method: str
    facts: Mapping[str, Any]
    error: RayError

    @property
    def weight(self) -> int:
        """The higher, the nearer to the cause: a death, then an exception, then the loss of a peer."""
        if isinstance(self.error, RayActorError):
            return 2
        return 0 if self.is_a_loss or any(words in str(self.error) for words in _LOST_PEER) else 1

    @property
    def is_a_loss(self) -> bool:
        """Whether an object of the store is gone: then a process is gone that had put it there."""
        error = self.error.cause if isinstance(self.error, RayTaskError) else self.error
        return isinstance(error, ObjectLostError)

    @property
    def is_final(self) -> bool:
        """Whether the same would happen again: an error that strop raises on purpose."""
        return isinstance(self.error, RayTaskError) and isinstance(self.error.cause, StropError)

    def describe(self, lines: str) -> str:
        """The message for the console."""
        where = f"{self.role} rank {self.rank} on {place(self.facts)}"
        if isinstance(self.error, RayTaskError):
            cause = self.error.cause
            if isinstance(cause, StropError):
                return f"{where}, in {self.method}: {type(cause).__name__}: {cause}"
            return f"{where} raised in {self.method}:\n{_own_traceback(str(self.error))}"
        if not isinstance(self.error, RayActorError):
            return f"{where} failed in {self.method}: {type(self.error).__name__}: {self.error}"
        text = f"{where} died in {self.method}"
        if isinstance(self.error, ActorDiedError) and "OOM" in str(self.error).split("Some common")[0]:
            text += " (out of memory)"
        return f"{text}; the last it printed:\n{lines}" if lines else f"{text}; it had printed nothing"


def worst(failures: Sequence[Failure]) -> Failure:
    """The one that is nearest to the cause."""
    return max(failures, key=lambda failure: failure.weight)


def place(facts: Mapping[str, Any]) -> str:
    """Node and process of a rank."""
    return f"{facts['host']} (pid {facts['pid']})" if facts else "a node that did not report yet"


@dataclass(frozen=True)
class Stack:
    """Where one rank stands."""

    rank: int
    facts: Mapping[str, Any]
    text: str | None
    """The innermost call last; None where nobody could tell."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether its innermost frames are in ``torch.distributed``."""
        frames = [line for line in (self.text or "").splitlines() if line.lstrip().startswith("File ")]
        return any("torch/distributed" in frame for frame in frames[-4:])

    def show(self, role: str = "") -> str:
        """Under a line that says whose it is."""
        text = self.text or "(no answer: it may be in native code that holds the interpreter)"
        whose = f"{role} rank {self.rank}".lstrip()
        return f"--- {whose} on {place(self.facts)}\n{text.rstrip()}"


def describe_hang(
    role: str,
    method: str,
    limit_s: float,
    late: Sequence[int],
    stacks: Sequence[Stack],
    others: Mapping[str, Sequence[Stack]],
) -> str:
    """Which ranks keep the others waiting, and the stacks of all; ``others``: of the other pools, by role.

    A rank that waits in ``torch.distributed`` waits for another one; the others are named.
    """
    stuck = [stack for stack in stacks if stack.rank in late and not stack.waits_for_peers]
    stuck = stuck or [stack for stack in stacks if stack.rank in late]
    named = ", ".join(f"rank {stack.rank} on {place(stack.facts)}" for stack in stuck)
    lines = [
        f"{role}: {named} did not return from {method} within {limit_s:g} s (trainer.phase_timeout_s); "
        f"ranks {list(late)} were still in it. Where every rank stands, the innermost call last:"
    ]
    lines += [stack.show() for stack in sorted(stacks, key=lambda stack: stack not in stuck)]
    lines += [stack.show(roles) for roles, theirs in others.items() for stack in theirs]
    return "\n".join(lines)


def _own_traceback(text: str) -> str:
    """Without the lines in which Ray says where the actor was, and its own frames."""
    _, found, rest = text.partition('  File "')
    return found + rest if found else text


def last_lines(facts: Mapping[str, Any]) -> str:
    """The end of what a process printed; read on its node, which is there although the process is not."""
    if not facts:
        return ""
    lines = _on_node_of(facts, read_end, facts["logs"])
    return "(its node has left the cluster or does not answer)" if lines is None else lines


def stack_by_signal(facts: Mapping[str, Any]) -> str | None:
    """Where the thread stands that runs the calls, for a process that does not answer itself."""
    if not facts:
        return None
    return _on_node_of(facts, signal_for_stack, facts["pid"], facts["stacks"], facts["thread"]) or None


def _on_node_of(facts: Mapping[str, Any], function: Callable[..., str], *args: Any) -> str | None:
    """What a function returns there; None when the node does not answer."""
    if facts["node_id"] == ray.get_runtime_context().get_node_id():
        return function(*args)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(facts["node_id"], soft=False)
    try:
        remote = ray.remote(function).options(num_cpus=0, scheduling_strategy=there)
        return ray.get(remote.remote(*args), timeout=_READ_S)
    except RayError:
        return None


def signal_for_stack(pid: int, path: str, thread: int) -> str:
    """Make a process of this node write its stacks, and read the one of a thread; empty if there is none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    time.sleep(_SIGNAL_S)
    threads = Path(path).read_text().split("\n\n") if Path(path).is_file() else []
    frames = next((text.splitlines()[1:] for text in threads if f"hread 0x{thread:016x}" in text), [])
    outside = next((i for i, frame in enumerate(frames) if "/ray_host.py" in frame), len(frames))
    return "\n".join(reversed(frames[:outside]))


def read_end(paths: Sequence[str]) -> str:
    """The last lines of these log files, without those that Ray writes about itself."""
    lines = []
    for path in map(Path, paths):
        if not path.is_file():
            continue
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - _LOG_BYTES, 0))
            text = log.read().decode(errors="replace")
        lines += [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return "\n".join(lines[-_LINES:])

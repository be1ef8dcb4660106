"""Descriptions of worker failures: role, rank, node, phase, cause, last output lines, stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

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
        """Likelihood of being the cause: a death (2), an exception (1), the loss of a peer (0)."""
        if self.is_a_death:
            return 2
        return 0 if self.is_a_loss or any(words in str(self.error) for words in _LOST_PEER) else 1

    @property
    def is_a_death(self) -> bool:
        """True if the process ended; Ray's memory monitor raises another error."""
        return isinstance(self.error, RayActorError | OutOfMemoryError)

    @property
    def is_a_loss(self) -> bool:
        """True if an object of the store is lost, which means that the process holding it died."""
        error = self.error.cause if isinstance(self.error, RayTaskError) else self.error
        return isinstance(error, ObjectLostError)

    @property
    def is_final(self) -> bool:
        """True for errors that strop raises deliberately, of which a restart would fail in the same way."""
        cause = self.error.cause if isinstance(self.error, RayTaskError) else None
        return isinstance(cause, StropError) and cause.is_final

    def describe(self, lines: str) -> str:
        """Return the error message."""
        where = f"{self.role} rank {self.rank} on {place(self.facts)}"
        if isinstance(self.error, RayTaskError):
            cause = self.error.cause
            if isinstance(cause, StropError):
                return f"{where}, in {self.method}: {type(cause).__name__}: {cause}"
            return f"{where} raised in {self.method}:\n{_own_traceback(str(self.error))}"
        if isinstance(self.error, OutOfMemoryError):
            reason = next((line for line in str(self.error).splitlines() if "exceeded" in line), "")
            return (
                f"{where} died in {self.method} (out of memory): Ray's memory monitor killed processes of "
                f"its node. {reason.removeprefix('OOM kill reason: ')}"
            )
        if not isinstance(self.error, RayActorError):
            return f"{where} failed in {self.method}: {type(self.error).__name__}: {self.error}"
        text = f"{where} died in {self.method}"
        if isinstance(self.error, ActorDiedError) and "OOM" in str(self.error).split("Some common")[0]:
            text += " (out of memory)"
        return f"{text}; its last output:\n{lines}" if lines else f"{text}; it had printed nothing"


def place(facts: Mapping[str, Any]) -> str:
    """Return node and process of a rank."""
    return f"{facts['host']} (pid {facts['pid']})" if facts else "a node that did not report yet"


@dataclass(frozen=True)
class Stack:
    """The stack of one rank."""

    rank: int
    facts: Mapping[str, Any]
    text: str | None
    """Innermost call last; None if unknown."""

    @property
    def waits_for_peers(self) -> bool:
        """True if the innermost frames are in ``torch.distributed``: the rank waits for another one."""
        frames = [line for line in (self.text or "").splitlines() if line.lstrip().startswith("File ")]
        return any("torch/distributed" in frame for frame in frames[-4:])

    def show(self, role: str = "") -> str:
        """Return the stack below a line with role, rank and node."""
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
    """Return a message that names the stuck ranks and shows all stacks; ``others``: of other pools, by role.

    A rank whose stack is in ``torch.distributed`` waits for another one, so the remaining ranks are named.
    """
    stuck = [stack for stack in stacks if stack.rank in late and not stack.waits_for_peers]
    stuck = stuck or [stack for stack in stacks if stack.rank in late]
    named = ", ".join(f"rank {stack.rank} on {place(stack.facts)}" for stack in stuck)
    lines = [
        f"{role}: {named} did not return from {method} within {limit_s:g} s (trainer.phase_timeout_s); "
        f"ranks {list(late)} were still in it. Stacks of all ranks, innermost call last:"
    ]
    lines += [stack.show() for stack in sorted(stacks, key=lambda stack: stack not in stuck)]
    lines += [stack.show(roles) for roles, theirs in others.items() for stack in theirs]
    return "\n".join(lines)


def _own_traceback(text: str) -> str:
    """Strip Ray's header and frames from a traceback."""
    _, found, rest = text.partition('  File "')
    return found + rest if found else text


def last_lines(facts: Mapping[str, Any]) -> str:
    """Return the end of a process's output, read on its node, which may outlive the process."""
    if not facts:
        return ""
    lines = _on_node_of(facts, read_end, facts["logs"])
    return "(its node has left the cluster or does not answer)" if lines is None else lines


def last_phase(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return role and method of the call in which a process died; None if unknown.

    Read on its node: results of earlier calls can be lost with the process, so a call without a result need
    not be the one that ran.
    """
    text = _on_node_of(facts, read_phase, facts["phase"]) if facts else None
    role, _, method = (text or "").partition("\n")
    return (role, method) if method else None


def read_phase(path: str) -> str:
    """Return what the process wrote at the beginning of its last call."""
    return Path(path).read_text() if Path(path).is_file() else ""


def stack_by_signal(facts: Mapping[str, Any]) -> str | None:
    """Return the stack of the thread that runs calls, of a process that does not answer."""
    if not facts:
        return None
    return _on_node_of(facts, signal_for_stack, facts["pid"], facts["stacks"], facts["thread"]) or None


def _on_node_of(facts: Mapping[str, Any], function: Callable[..., str], *args: Any) -> str | None:
    """Run a function on the node of a process; None when the node does not answer."""
    if facts["node_id"] == ray.get_runtime_context().get_node_id():
        return function(*args)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(facts["node_id"], soft=False)
    try:
        # num_cpus=0: the run's own processes may hold all of the node's
        remote = ray.remote(function).options(num_cpus=0, scheduling_strategy=there)
        return ray.get(remote.remote(*args), timeout=_READ_S)
    except RayError:
        return None


def signal_for_stack(pid: int, path: str, thread: int) -> str:
    """Signal a process on this node to write its stacks; return that of a thread, or an empty text."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    time.sleep(_SIGNAL_S)
    threads = Path(path).read_text().split("\n\n") if Path(path).is_file() else []
    frames = next((text.splitlines()[1:] for text in threads if f"hread 0x{thread:016x}" in text), [])
    outside = next((i for i, frame in enumerate(frames) if "/controller/ray/host.py" in frame), len(frames))
    return "\n".join(reversed(frames[:outside]))


def read_end(paths: Sequence[str]) -> str:
    """Return the last lines of log files, without Ray's own."""
    lines = []
    for path in map(Path, paths):
        if not path.is_file():
            continue
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - _LOG_BYTES, 0))
            # the seek may cut a character in two
            text = log.read().decode(errors="replace")
        lines += [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return "\n".join(lines[-_LINES:])

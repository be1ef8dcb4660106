"""Child processes forked from a server that has torch, transformers and the trainer loaded.

Importing them takes 6 s of CPU time, a fork takes milliseconds. Each xdist worker has one server, started
with its first child. The server only imports and forks: its only threads are those of pyarrow's allocator,
which is fork-safe.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "pyarrow.parquet",
        "matplotlib.figure",
        "strop.cli.main",
        "strop.engines.torch.engine",
        "strop.rollout.hf.engine",
        "strop.rollout.hf.replica",
        "strop.trainer.build",
        "strop.trainer.commands",
        "strop.trainer.evaluation",
        "strop.trainer.supervised",
        "strop.workers.critic",
        "strop.workers.policy",
        "strop.workers.reward_model",
        "strop.workers.supervised",
        "frozen",
    ]
)
Target = Callable[..., Any] | Sequence[str]


@dataclass(frozen=True)
class Completed:
    """Output and exit status of a child; as in ``subprocess``, negative for a signal."""

    returncode: int
    stdout: str
    stderr: str


class Child:
    """Running child process; see ``start``."""

    def __init__(self, target: Target, arguments: tuple[Any, ...], env: dict[str, str], out: Path) -> None:
        self._out = out
        self._process = CONTEXT.Process(target=_main, args=(target, arguments, env, os.getcwd(), out))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the child runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float = 300) -> Completed:
        """Wait for the child to exit; raise ``TimeoutError`` after ``seconds``."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} runs after {seconds} s:\n{self.stderr[-3000:]}")
        return Completed(self._process.exitcode, self.stdout, self.stderr)

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return _read(self._out / "stdout")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return _read(self._out / "stderr")


@contextlib.contextmanager
def start(target: Target, *arguments: Any, env: dict[str, str] | None = None) -> Generator[Child]:
    """Run ``target`` in a child with this process's environment and ``env``; kill it when the block ends.

    ``target`` is a module-level function, called with ``arguments``, or a command line of Python without the
    interpreter: ``["-m", "strop", ...]`` or ``["-c", code, ...]``.
    """
    with tempfile.TemporaryDirectory() as out:
        child = Child(target, arguments, {**os.environ, **(env or {})}, Path(out))
        try:
            yield child
        finally:
            child.kill()
            child.wait(60)


def run(
    target: Target, *arguments: Any, env: dict[str, str] | None = None, seconds: float = 900
) -> Completed:
    """Run ``start`` and wait for the child to exit."""
    with start(target, *arguments, env=env) as child:
        return child.wait(seconds)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _main(target: Target, arguments: tuple[Any, ...], env: dict[str, str], folder: str, out: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    import torch

    torch.set_num_threads(1)
    try:
        if callable(target):
            target(*arguments)
        else:
            _command(list(target))
    except KeyboardInterrupt:  # as the interpreter ends then
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing skips


def _command(arguments: list[str]) -> None:
    kind, what, *rest = arguments
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})

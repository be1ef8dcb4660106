"""Run a program against tests (``run_assert_tests``, ``run_stdin_tests``), or as a tool (``run_program``)."""

from __future__ import annotations

import functools
import json
import os
import select
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from strop.errors import RewardError
from strop.rewards.sandbox.bubblewrap import Limits
from strop.rewards.sandbox.process import SandboxedProcess

_WATCH_S = 0.02
_PACKING_S = 5.0
_VERDICT_BYTES = 1 << 16
_LENGTH_BYTES = 4
_JSON_BYTES = 8  # a byte of output takes up to 6 in JSON


@dataclass(frozen=True)
class Verdict:
    """True if all tests passed, else the reason."""

    passed: bool
    reason: str = ""


@functools.cache
def require_sandbox() -> None:
    """Start a sandbox once, in a tenth of a second; raise as ``run_assert_tests`` if it cannot start."""
    run_stdin_tests("", [""], [""])


def run_assert_tests(
    program: str,
    tests: Sequence[str],
    *,
    entry_point: str = "",
    prefix: str = "",
    limits: Limits | None = None,
) -> Verdict:
    """Check that every one of ``tests``, Python with assertions, holds for ``program``.

    The tests run in a separate sandbox (:mod:`strop.rewards.sandbox.guest.judge`), after ``prefix`` (trusted
    code, such as the prompt). Functions that they call run in the program's sandbox; arguments and results
    are passed as plain values. HumanEval's ``check(candidate)`` is called with ``entry_point``.

    Raises:
        ConfigError: bubblewrap is not installed.
        RewardError: a sandbox cannot be started.
    """
    limits = limits or Limits()
    deadline = time.monotonic() + limits.wall_s
    with ExitStack() as pipes:
        questions, answers, verdicts = (Pipe(pipes) for _ in range(3))
        solution = SandboxedProcess(
            "solution",
            {"program": program},
            descriptors={"questions": questions.reader, "answers": answers.writer},
            limits=limits,
        )
        judge = None
        try:
            judge = SandboxedProcess(
                "judge",
                {"tests": list(tests), "entry_point": entry_point, "prefix": prefix},
                descriptors={
                    "questions": questions.writer,
                    "answers": answers.reader,
                    "verdict": verdicts.writer,
                },
                limits=limits,
            )
            for pipe in (questions, answers):
                pipe.close()
            verdicts.close_writer()
            content, reason = _read(verdicts.reader, deadline, [solution, judge], limit=_VERDICT_BYTES)
        finally:
            words = [process.close() for process in (solution, judge) if process is not None]
    if reason:
        return Verdict(False, reason)
    started, _, written = content.partition(b"\n")
    verdict = json.loads(written) if written else {"status": "failed", "reason": "the tests ended early"}
    if not started or verdict["status"] == "not started":
        raise _no_sandbox(" ".join(words))
    return Verdict(verdict["status"] == "passed", verdict.get("reason", ""))


def run_stdin_tests(
    program: str, inputs: Sequence[str], outputs: Sequence[str], *, limits: Limits | None = None
) -> Verdict:
    """Check that ``program`` writes ``outputs[i]`` when it reads ``inputs[i]``, for every i.

    One sandbox runs all inputs, within one ``limits.wall_s``, and never holds the expected outputs. Ignores
    white space at the end of lines and of the text. ``limits.output_bytes`` grows with the expected outputs.

    Raises as ``run_assert_tests`` does.
    """
    limits = limits or Limits()
    deadline = time.monotonic() + limits.wall_s
    longest = max((len(text.encode(errors="surrogatepass")) for text in outputs), default=0)
    most_output = max(limits.output_bytes // _JSON_BYTES, 2 * longest)  # twice, for white space
    given = {"program": program, "inputs": list(inputs), "most_output": most_output}
    limit = max(limits.output_bytes, 2 * len(json.dumps(list(outputs))) + _VERDICT_BYTES)
    messages, reason = _messages_of(
        "solution", given, deadline, len(outputs), limit, function="main_stdin", limits=limits
    )
    for number, expected in enumerate(outputs, 1):
        message = messages[number] if number < len(messages) else {"failure": reason or "it ended early"}
        if not isinstance(message, dict) or not isinstance(message.get("written"), str):
            return Verdict(False, f"test {number}: {message}"[:1000])
        if _lines(message["written"]) != _lines(expected):
            return Verdict(False, f"test {number}: the output differs")
    return Verdict(True)


def run_program(program: str, files: str, *, limits: Limits) -> tuple[str, str]:
    """Run a program in the files of an earlier one; return what it prints and the files that it leaves.

    ``files`` is a text that an earlier call returned, or "". It is a tar, which only sandboxes unpack. What
    the program prints ends with a line in brackets if a limit ended it; all that it started ends with it.

    Raises as ``run_assert_tests`` does.
    """
    deadline = time.monotonic() + limits.wall_s + _PACKING_S
    given = {"program": program, "files": files, "seconds": limits.wall_s}
    messages, reason = _messages_of("tool", given, deadline, 1, limits.output_bytes + 100, limits=limits)
    answer = messages[1] if len(messages) > 1 else {}
    if not isinstance(answer, dict) or not isinstance(printed := answer.get("printed"), str):
        return f"[ended, and its files are not kept: {reason or 'it ended its sandbox'}]", files
    return "\n".join(filter(None, (printed, answer["note"]))), answer.get("files", files)


def _messages_of(
    name: str, given: dict[str, Any], deadline: float, most: int, limit: int, **options: Any
) -> tuple[list[Any], str]:
    """Return the greeting of a sandbox and up to ``most`` answers, and the reason for stopping early, or "".

    ``options`` are those of ``SandboxedProcess``.
    """
    with ExitStack() as pipes:
        answers = Pipe(pipes)
        process = SandboxedProcess(name, given, descriptors={"answers": answers.writer}, **options)
        try:
            answers.close_writer()
            content, reason = _read(answers.reader, deadline, [process], limit=limit)
        finally:
            words = process.close()
    messages = _messages(content, 1 + most)
    if not reason and messages[:1] != ["hello"]:
        raise _no_sandbox(words)
    return messages, reason


class Pipe:
    """Two descriptors, closed at the latest with their stack."""

    def __init__(self, stack: ExitStack) -> None:
        self.reader, self.writer = os.pipe()
        self._open = {self.reader, self.writer}
        stack.callback(self.close)

    def close_writer(self) -> None:
        """Close this process's writing end, so that the reader sees the end of the other writers."""
        self._open.remove(self.writer)
        os.close(self.writer)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


def _read(
    descriptor: int, deadline: float, processes: list[SandboxedProcess], *, limit: int
) -> tuple[bytes, str]:
    """Read until the end of the pipe; return the content and the reason for stopping early, or ""."""
    content, source = bytearray(), select.poll()  # select.select takes no descriptor above 1023
    source.register(descriptor, select.POLLIN)
    while True:
        if time.monotonic() > deadline:
            return bytes(content), "it took too long"
        if any(process.exceeds_memory() for process in processes):
            return bytes(content), "it takes too much memory"
        if not source.poll(_WATCH_S * 1000):
            continue
        chunk = os.read(descriptor, 1 << 16)
        content += chunk
        if not chunk:
            return bytes(content), ""
        if len(content) > limit:
            return bytes(content), "it writes too much"


def _messages(content: bytes, most: int) -> list[Any]:
    """Parse ``most`` messages of ``guest/channel.py``, or those before the first invalid one."""
    messages: list[Any] = []
    start = 0
    while len(messages) < most and start + _LENGTH_BYTES <= len(content):
        start += _LENGTH_BYTES
        end = start + int.from_bytes(content[start - _LENGTH_BYTES : start], "big")
        try:
            messages.append(json.loads(content[start:end]))
        except (ValueError, RecursionError):
            break
        start = end
    return messages


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _no_sandbox(words: str) -> RewardError:
    return RewardError(
        f"the sandbox for code cannot be started: {words or 'no error output'}. It needs bubblewrap "
        "with user namespaces: check `sysctl kernel.unprivileged_userns_clone user.max_user_namespaces` "
        "kernel.apparmor_restrict_unprivileged_userns, and in a container allow them "
        "(for Docker: --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
    )

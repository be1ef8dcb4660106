"""A program that a tool call runs, in the files that earlier calls left."""

from __future__ import annotations

import base64
import contextlib
import io
import linecache
import os
import select
import signal
import sys
import tarfile
import time
import traceback
import types

from .channel import Channel, end_program, leave_streams, offer_exit, read_job

_FILES = "/tmp"
_NAME = "<python>"
_PRINTED_BYTES = 100_000
_MOST_FILES = 1000  # packing tens of thousands takes seconds
_CHUNK = 1 << 16


def main(job_descriptor: int) -> None:
    """Run the program; send its output, a note about its end, and the files that it leaves, as a tar."""
    job = read_job(job_descriptor)
    leave_streams()
    offer_exit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this is process 1, which a program may signal
    channel = Channel(-1, job["answers"], job["limits"]["output_bytes"])
    channel.send("hello")
    if job["files"]:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(job["files"]))) as archive:
            vars(archive)["extraction_filter"] = lambda member, path: (
                member
            )  # trusted no more than the program
            archive.extractall(_FILES)
    printed, note = _run(job["program"], job["seconds"], job["limits"]["cpu_s"], job["answers"])
    answer = {"printed": printed.decode(errors="replace"), "note": note}
    try:
        packed = io.BytesIO()
        if sum(len(names) for _, _, names in os.walk(_FILES)) > _MOST_FILES:
            raise ValueError("too many files")
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            archive.add(_FILES, arcname=".")
        channel.send(answer | {"files": base64.b64encode(packed.getvalue()).decode()})
    except (OSError, ValueError, MemoryError):  # too many, too large, or unreadable
        lost = f"[its files are not kept: expected at most {_MOST_FILES} readable ones]"
        channel.send(answer | {"note": f"{note}\n{lost}".strip()})
    os._exit(0)


def _run(program: str, seconds: float, cpu_s: int, answers: int) -> tuple[bytes, str]:
    """Return what the program prints, and why it was ended, or ""; end all that it started."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(writer, stream)
        for descriptor in (reader, writer, answers):
            os.close(descriptor)
        _be_the_program(program)
    os.close(writer)
    printed, note, ended = bytearray(), "", os.pidfd_open(child)
    sources, deadline = [reader, ended], time.monotonic() + seconds
    while True:
        ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            note = f"[ended after {seconds:g} s]"
        elif reader in ready:
            chunk = os.read(reader, _CHUNK)
            printed += chunk
            if not chunk:  # closed
                sources.remove(reader)
            if len(printed) > _PRINTED_BYTES:
                note = f"[ended, because it printed more than {_PRINTED_BYTES} bytes]"
        if note or ready == [ended]:
            break
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            identity, status, used = os.wait3(0)
            if identity == child and not note and os.WIFSIGNALED(status):
                is_late = used.ru_utime + used.ru_stime > cpu_s - 0.5
                by_signal = f"by {signal.Signals(os.WTERMSIG(status)).name}"
                note = f"[ended {f'after {cpu_s} s of CPU time' if is_late else by_signal}]"
    return bytes(printed[:_PRINTED_BYTES]), note


def _be_the_program(program: str) -> None:
    """Run the program as ``__main__``, and print the traceback of what it raises."""
    status = 0
    try:
        # line by line, so that it stands among the lines of standard error
        sys.stdout = open(1, "w", 1, "utf-8", closefd=False)  # noqa: SIM115
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        sys.argv = [_NAME]
        linecache.cache[_NAME] = len(program), None, program.splitlines(keepends=True), _NAME
        exec(compile(program, _NAME, "exec"), module.__dict__)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        status = 1
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    end_program()
    os._exit(status)

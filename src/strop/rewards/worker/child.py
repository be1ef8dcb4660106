"""The process that scores: ``python -m strop.rewards.worker.child LIFELINE``, started by ``RewardProcess``.

It runs one scorer on one sample after another, so that a sample which hangs or crashes costs a process and
not the run. Requests arrive on standard input and answers leave on standard output; the scorer sees an empty
standard input, and its prints go to standard error. Requests are pickles: first ``sys.path`` and the pickled
function, then pickled ``Sample``s; the outer pickle of bytes marks their ends. Answers are lines of JSON:
unpickling would let a scorer run code in the run's own process.

LIFELINE is the descriptor of a pipe to which nothing is written. It closes when the starter ends, even by
SIGKILL, and then this process group is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Iterator
from typing import IO, Any

from strop.rewards.worker.records import Outcome, Sample, ScoreFunction, call_scorer

_F_SETSIG = 10  # Linux; the module fcntl does not name it on Python 3.11
_MAX_ERROR_CHARACTERS = 8000


def main() -> None:
    """Redirect the standard streams, end with the starter, and serve until the requests end."""
    follow_to_death(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    faulthandler.enable()
    serve(requests, answers)


def serve(requests: IO[bytes], answers: IO[str]) -> None:
    """Answer every request, until the pipe is closed.

    Answers the first one with the status ``ready``, or with ``raised`` and the traceback, and then returns.
    """
    own_id = os.getpid()
    messages = _receive(requests)
    if (setup := next(messages, None)) is None:
        return
    try:
        sys.path[:], function = setup
        function = pickle.loads(function)  # needs the sender's sys.path
    # A user's module may raise anything; the starter reports it.
    except BaseException:  # noqa: BLE001
        _send(answers, {"status": "raised", "error": _traceback()})
        return
    _send(answers, {"status": "ready"})
    for message in messages:
        outcome = evaluate(function, message)
        if os.getpid() != own_id:  # a fork of the scorer returned from the call
            os._exit(0)
        _send(answers, vars(outcome))


def _receive(requests: IO[bytes]) -> Iterator[Any]:
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # closed, between messages or within one
        while True:
            yield pickle.load(requests)


def _send(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def evaluate(function: ScoreFunction, message: bytes) -> Outcome:
    """Score one pickled sample; any exception, ``SystemExit`` included, becomes the outcome."""
    try:
        sample: Sample = pickle.loads(message)
        _seed_generators(sample)
        outcome = call_scorer(function, sample)
    # User code may raise anything; a bad sample must not end the process.
    except BaseException:  # noqa: BLE001
        outcome = Outcome("raised", error=_traceback())
    with contextlib.suppress(Exception):  # the scorer may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()
    return outcome


def _seed_generators(sample: Sample) -> None:
    """Seed by the sample, so that a scorer draws the same random numbers for it in every run."""
    seed = zlib.crc32(repr((sample.data_source, sample.solution_str, sample.ground_truth)).encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # imported by the scorer
        numpy.random.seed(seed)


def follow_to_death(lifeline: int) -> None:
    """Kill this process group when the other end of the pipe ``lifeline`` is closed.

    On Linux the kernel does it (F_SETSIG), even while a scorer holds the interpreter's lock, as a hanging
    regular expression does; elsewhere a thread does it.
    """
    threading.Thread(target=_kill_group_when_closed, args=(lifeline,), daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # gVisor and the like lack it; the thread remains
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _kill_group_when_closed(lifeline: int) -> None:
    poll = select.poll()
    poll.register(lifeline, 0)  # 0: hang-ups are always reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _traceback() -> str:
    text = traceback.format_exc().encode(errors="replace").decode()  # replaces lone surrogates
    if len(text) <= _MAX_ERROR_CHARACTERS:
        return text
    half = _MAX_ERROR_CHARACTERS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


if __name__ == "__main__":
    main()

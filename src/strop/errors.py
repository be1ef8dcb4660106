"""Errors that strop raises on purpose.

Each is also the standard error that it resembles, so ``except ValueError`` works as expected.
The message has what was found, what was expected and what to do; the command line prints it without a
traceback and exits with status 2 (``--debug`` shows the traceback).
"""

from __future__ import annotations

import difflib
import errno
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary, TracebackException
from typing import Any, Self

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CUT_OFF = r"unexpected pos \d+|only \d+ of \d+ bytes written|iostream error"
_TOGETHER_S = 0.5
_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def nearest(name: str, known: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """Return the one of `known` that a misspelt `name` probably means; None if none is similar (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, similarity)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` for a misspelt name, or "" if none is similar."""
    guess = nearest(name, known)
    return f"; did you mean {guess}?" if guess else ""


class StropError(Exception):
    """The base class of all errors of strop."""

    is_final: bool = True
    """A retry would fail the same way."""


class ConfigError(StropError, ValueError):
    """One or more configuration keys are wrong; ``problems`` holds one line for each."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class SeveralErrors(StropError, ValueError):
    """Several inputs of a run are wrong; ``errors`` holds an error for each."""

    def __init__(self, *errors: StropError) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(map(str, errors)))


class DataError(StropError, ValueError):
    """A data file, column or row cannot be used."""


class ModelError(StropError, ValueError):
    """A model folder or its tokenizer cannot be used."""


class RewardError(StropError, RuntimeError):
    """Scoring failed in a way that must stop the run."""


class CheckpointError(StropError, RuntimeError):
    """A checkpoint cannot be written, found or read."""


class UploadError(StropError, RuntimeError):
    """A trained model could not be uploaded to the hub; it is still on this machine."""


class TrainingError(StropError, RuntimeError):
    """The run cannot go on: for example a reward that is not a number."""


class LostServersError(TrainingError):
    """Too few servers answer; they, or others, may answer a retry."""

    is_final = False


class RunFolderError(TrainingError):
    """The run folder was removed, or may be used by another run: nothing more is written there."""


class WorkerError(StropError, RuntimeError):
    """A worker's process died, raised or hung."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        self.is_final = is_final
        super().__init__(message)


class MissingExtraError(StropError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        self._given = (package, extra, needed_for)
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'strop[{extra}]'"
        )

    # pickle would call the constructor with args, the message alone
    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtraError, self._given


@contextmanager
def raised_as(
    kind: type[StropError], what: str, *types: type[Exception], remedy: str = ""
) -> Generator[None]:
    """Raise ``kind`` with ``what``, the error and the ``remedy`` for an exception of ``types`` in the body.

    Errors of strop pass unchanged. Without ``types`` any other exception counts: file systems, hubs and the
    code of model families raise types of their own.
    """
    caught = types or (Exception,)
    try:
        yield
    except StropError:
        raise
    except caught as error:
        text = write_failure(error, what) if types else in_one_line(error)
        raise kind(f"{what}: {text}{f'; {remedy}' if remedy else ''}") from error


def write_failure(error: BaseException, where: str | Path = "") -> str:
    """Return the message of an error of writing ``where``, after "the disk is full" if that is behind it.

    ``where`` may be a message with the path. torch passes the text of the operating system on, or reports a
    position that it did not expect.
    """
    text = " ".join(str(error).split())
    # a copy names its source first
    named = getattr(error, "filename2", None) or getattr(error, "filename", None) or where
    found = re.search(r"(?:^|[\s=])(/.*)", str(named), re.DOTALL)
    place = Path(found[1] if found else ".")
    while not os.path.exists(place):  # not Path.exists, which raises without permission
        place = place.parent
    free = shutil.disk_usage(place).free >> 20
    is_full = getattr(error, "errno", None) in _FULL or any(os.strerror(number) in text for number in _FULL)
    if "the disk is full" in text or not (is_full or (free == 0 and re.search(_CUT_OFF, text))):
        return text
    quota = "; a quota or the number of files may be the limit" if free > 16 else ""
    return f"the disk is full{f' ({free:,} MB free on {place}{quota})' if found else ''}: {text}"


def in_one_line(error: Exception) -> str:
    """Return type and message of an error in one line."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error without strop's own frames: one line for an error of strop's.

    Of a long text the middle is left out; there are no lone surrogates.
    """
    found = TracebackException.from_exception(error)
    one: TracebackException | None = found
    while one is not None:
        own = [frame for frame in one.stack if not frame.filename.startswith(_PACKAGE)]
        one.stack = StackSummary.from_list(own)
        one = one.__cause__ or one.__context__
    text = "".join(found.format() if found.stack else found.format_exception_only())
    text = text.encode(errors="replace").decode()
    return text if len(text) <= 8000 else f"{text[:4000]}\n[...]\n{text[-4000:]}"


class Attempts:
    """Run steps that do not depend on one another, and collect their errors, so that all are reported."""

    def __init__(self) -> None:
        self.errors: list[StropError] = []

    def __call__(self, step: Callable[[], Any]) -> Any:
        """Return the result of ``step``, or None if it raises a ``StropError``; equal errors count once."""
        try:
            return step()
        except StropError as error:
            found = error.errors if isinstance(error, SeveralErrors) else [error]
            # by text: each attempt raises another object for the same cause
            self.errors += [new for new in found if str(new) not in map(str, self.errors)]
            return None

    @property
    def lines(self) -> list[str]:
        """The messages, one line for each problem."""
        return list(dict.fromkeys(line for error in self.errors for line in problems_of(error)))

    def raise_errors(self) -> None:
        """Raise the only error, or all of them as ``SeveralErrors``."""
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else SeveralErrors(*self.errors)


def reword(error: StropError, words: Callable[[str], str]) -> None:
    """Replace message and notes of an error, and those of the errors in it, by ``words(text)``, in place."""
    if isinstance(error, SeveralErrors):
        for one in error.errors:
            reword(one, words)
    if isinstance(error, ConfigError):
        error.problems = [words(problem) for problem in error.problems]
    error.args = (words(str(error)),)
    if notes := getattr(error, "__notes__", None):
        notes[:] = map(words, notes)


def problems_of(error: StropError) -> list[str]:
    """Return the problems that an error reports, one message for each."""
    return error.problems if isinstance(error, ConfigError) else [str(error)]


def is_interrupt(error: BaseException | None) -> bool:
    """Return True if an interrupt (Ctrl-C, SIGTERM) is behind ``error``.

    Libraries replace it: writers by the error of the file that they then cannot finish,
    torch.distributed.checkpoint by a CheckpointException with the failure of each rank.
    """
    behind, seen = [error], set()
    while behind:
        one = behind.pop()
        if isinstance(one, KeyboardInterrupt):
            return True
        if one is None or id(one) in seen:  # the error of a future that is asked twice is behind itself
            continue
        seen.add(id(one))
        # of a CheckpointException: rank -> (error, stack)
        of_ranks = [failure[0] for failure in getattr(one, "failures", {}).values()]
        behind += [*of_ranks, one.__cause__ or one.__context__]
    return False


@contextmanager
def signals_interrupt(received: list[int]) -> Generator[None]:
    """Turn SIGTERM (of schedulers) and SIGHUP (of a closed terminal) into a KeyboardInterrupt as of Ctrl-C.

    All are recorded in ``received``. Only in the main thread. The exception itself carries no mark: Ray
    replaces it by a new one, and writers of files by their own errors. Ctrl-C stays ignored where it is, as
    in a background job, and SIGHUP as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    since = 0.0

    def interrupt(number: int, frame: Any) -> None:
        nonlocal since
        if received and _repeats(number, since):
            return
        since = time.monotonic()
        received.append(number)
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _repeats(number: int, since: float) -> bool:
    """Return True for a signal that has the cause of the one at ``since``, and is no second wish to stop.

    A closed terminal is reported by the shell and by the kernel, ``timeout`` signals its child and then its
    group, and a session that ends sends SIGTERM and SIGHUP.
    """
    return number == signal.SIGHUP or time.monotonic() - since < _TOGETHER_S


HOLD_INTERRUPTS_S = 3600.0
"""Longest time in which an interrupt waits: longer than an iteration takes, for one that hangs."""


def interrupt_after(seconds: float, number: int = signal.SIGINT) -> threading.Timer:
    """Return a timer that sends this thread a signal, if it is the main thread, unless it is cancelled."""
    if signal.getsignal(number) is signal.SIG_IGN and callable(signal.getsignal(signal.SIGTERM)):
        number = signal.SIGTERM  # SIGINT is ignored in a background job of a script
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    if threading.current_thread() is threading.main_thread():
        timer.start()
    return timer


class HeldInterrupts:
    """A context manager that lets its body end before an interrupt is raised, from ``begin`` on.

    Takes the place of the handlers that raise one (``signals_interrupt``, Python's own) in the main thread;
    elsewhere, and before ``begin``, it changes nothing. A second interrupt is raised at once, and after
    ``HOLD_INTERRUPTS_S`` the first: the body may hang. An error of a worker that ends the body gives way to
    it, or a restart would go on. ``when_held`` is called in a thread: a handler may not write to a stream in
    whose middle it was called.
    """

    def __init__(self, when_held: Callable[[], Any]) -> None:
        self._when_held = when_held
        self._replaced: dict[int, Callable[[int, Any], Any]] = {}
        self._first: int | None = None
        self._since = 0.0
        self._limit: threading.Timer | None = None
        self.broke_in = False
        """True if an interrupt was raised in the body after ``begin``."""

    def begin(self) -> None:
        """Hold interrupts from now on, to the end of the body."""
        if self._replaced or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if callable(handler := signal.getsignal(number)):
                self._replaced[number] = handler
        for number in self._replaced:
            signal.signal(number, self._hold)

    def _hold(self, number: int, frame: Any) -> None:
        if self._first is not None:
            if not _repeats(number, self._since):
                self.broke_in = True
                self._replaced[number](number, frame)
            return
        self._first, self._since = number, time.monotonic()
        # a further SIGHUP would count as the same one
        again = signal.SIGTERM if number == signal.SIGHUP else number
        self._limit = interrupt_after(HOLD_INTERRUPTS_S, again)
        threading.Thread(target=self._when_held, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._limit is not None:
            self._limit.cancel()
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, handler)
        may_restart = isinstance(error, WorkerError) and not error.is_final
        if self._first is not None and (kind is None or may_restart):
            try:
                replaced[self._first](self._first, None)
            except KeyboardInterrupt as interrupt:
                if isinstance(error, Exception):
                    interrupt.add_note(f"meanwhile {in_one_line(error)[:500]}")
                raise


def portable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled, else one with the same message.

    An exception that cannot be rebuilt from its ``args`` (a constructor with further arguments) would reach
    another process as an error about pickling.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs code of the exception's class
        kind = StropError if isinstance(error, StropError) else RuntimeError
        return kind(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error

"""Run hostile programs in the sandbox, and measure sandboxed calls per second.

    python benchmarks/sandbox.py [--calls 40] [--out FILE]

The attacks are those of tests/rewards/sandbox_attacks.py: every program is wrong and must fail its tests.
During an attack the benchmark monitors the host: a secret file, another process of the same user, a server on
the loopback device, a server on an abstract socket, and every 20 ms the processes and memory of all
descendants. Harm means that one of these was reached (or the file's content appears in the verdict), that
processes or memory exceeded the limits (plus those of bubblewrap and the judge), that a process remained,
that the call took a second longer than the time limit, or that it ended as an error instead of a score. As a
check of the monitor, the benchmark first does all of this harm but the last itself, outside a sandbox.

Calls per second: a small function with three assertions, in two sandboxes per call; and a program that reads
standard input, with three inputs, in one sandbox; each with one and with two calls at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from machine import description

from strop.errors import RewardError
from strop.process_tree import MARKER, descendants, marked_processes
from strop.rewards.sandbox import Limits, Verdict, run_assert_tests, run_stdin_tests
from strop.rewards.sandbox.process import resident_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rewards"))
import sandbox_attacks as attacks

LIMITS = Limits(wall_s=3.0)
_SLACK_S = 1.0
_OWN_PROCESSES = 8  # of bubblewrap and shells, and the judge, beside those of a program
_OWN_MIB = 256  # likewise; pages that several processes share are counted for each
_SECRET = "strop-" + uuid.uuid4().hex
_ERROR = "RewardError"


class Attack(NamedTuple):
    """Hostile program and a function that runs it."""

    name: str
    run: Callable[[], Verdict]


class Seen(NamedTuple):
    """Observations of one attack."""

    verdict: Verdict
    seconds: float
    processes: int
    mib: int
    harm: list[str]


def asserting(program: str, test: str = attacks.TRICK_TEST) -> Callable[[], Verdict]:
    """Return a function that runs a program that defines ``f`` against ``test``."""
    return lambda: run_assert_tests(program, [test], entry_point="f", limits=LIMITS)


def reporting(body: str) -> Callable[[], Verdict]:
    """Return a function that runs ``body`` as ``f``; its return value becomes the verdict's reason."""
    return asserting(attacks.reporting(body), "got = f(3)\nassert got == 1234567, got")


def printing(program: str) -> Callable[[], Verdict]:
    """Return a function that runs a program that should write 5."""
    return lambda: run_stdin_tests(program, [""], ["5"], limits=LIMITS)


def all_attacks(watch: Watch) -> Iterator[Attack]:
    """Yield the attacks in the order of the table."""
    for name, program in attacks.BOMBS.items():
        yield Attack(name, asserting(program))
    for name, (body, _) in attacks.FLOODS.items():
        yield Attack(name, reporting(body))
    yield Attack("memory bomb of many children", reporting(attacks.MANY_CHILDREN))
    for name, program in attacks.OF_STANDARD_OUTPUT.items():
        yield Attack(f"stdin to stdout: {name}", printing(program))
    for name, program in attacks.MEMORY_OF_THE_KERNEL.items():
        yield Attack(f"memory of the kernel: {name}", asserting(program))
    canary = str(watch.file)
    yield Attack("reading a file of the host", reporting(f"return open({canary!r}).read()"))
    yield Attack("writing a file of the host", reporting(f"return open({canary!r}, 'w')"))
    yield Attack("reading the tests' file", reporting(f"return open({attacks.__file__!r}).read()"))
    environment = attacks.ENVIRONMENT.format(secret=_SECRET.encode())
    yield Attack("reading the host's environment", reporting(environment))
    yield Attack("connecting to the host's loopback", reporting(attacks.LOOPBACK.format(port=watch.port)))
    named = attacks.ABSTRACT_SOCKET.format(name=watch.socket_name)
    yield Attack("connecting to an abstract socket", reporting(named))
    yield Attack("killing a process of the host", reporting(f"os.kill({watch.neighbour.pid}, 9)"))
    for name, (body, _) in attacks.REACHES.items():
        yield Attack(name, reporting(body))
    for name, program in attacks.TRICKS.items():
        yield Attack(name, asserting(program))
    for name, program in attacks.CHANNEL.items():
        yield Attack(f"its channel: {name}", asserting(program))
    for raised in attacks.ENDINGS:
        yield Attack(f"raising {raised}", asserting(f"def f(x): raise {raised}", attacks.LOOPS[0]))
    for test in attacks.LOOPS[1:]:
        lines = " ".join(test.split())
        yield Attack(f"raising StopIteration: {lines}", asserting("def f(x): raise StopIteration", test))


class Watch:
    """Monitor of host resources that an attack must not reach."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "secret"
        self.file.write_text(_SECRET)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._named = socket.socket(socket.AF_UNIX)
        self._named.bind("\0strop-" + uuid.uuid4().hex)
        self._named.listen()
        self.socket_name = self._named.getsockname()
        for server in (self._server, self._named):
            server.setblocking(False)
        self.neighbour = subprocess.Popen(["sleep", "100000"])

    def close(self) -> None:
        """Close the servers and kill the neighbour process."""
        self._server.close()
        self._named.close()
        self.neighbour.kill()
        self.neighbour.wait()

    def run(self, attack: Attack) -> Seen:
        """Run one attack and monitor the host during and after it."""
        marker = os.environ[MARKER] = uuid.uuid4().hex
        own = len(descendants(os.getpid()))
        done, most = threading.Event(), [0, 0]

        def sample() -> None:
            while not done.wait(0.02):
                most[0] = max(most[0], len(descendants(os.getpid())) - own)
                others = [child for child in _children() if child != self.neighbour.pid]
                most[1] = max(most[1], sum(map(resident_bytes, others)) >> 20)

        with _running(threading.Thread(target=sample), done):
            started = time.monotonic()
            try:
                verdict = attack.run()
            except RewardError as error:
                verdict = Verdict(False, f"{_ERROR}: {error}")
            seconds = time.monotonic() - started
        del os.environ[MARKER]
        return Seen(verdict, seconds, *most, list(self._harm(verdict, seconds, marker, *most)))

    def prove(self) -> None:
        """Do every kind of harm outside a sandbox; raise if any goes undetected."""
        eat = f"import time; x = bytearray(b'x') * ({2 * LIMITS.memory_mb} << 20); time.sleep(99)"
        started: list[subprocess.Popen[bytes]] = []

        def harm() -> Verdict:
            for command in [["sleep", "99"]] * 40 + [[sys.executable, "-c", eat]]:
                started.append(subprocess.Popen(command))
            socket.create_connection(("127.0.0.1", self.port)).close()
            socket.socket(socket.AF_UNIX).connect(self.socket_name)
            self.neighbour.send_signal(signal.SIGSTOP)
            time.sleep(LIMITS.wall_s + _SLACK_S)
            while resident_bytes(started[-1].pid) >> 20 < LIMITS.memory_mb + _OWN_MIB + 50:
                time.sleep(0.1)  # a busy machine fills memory slowly
            return Verdict(False, self.file.read_text())

        seen = self.run(Attack("harm", harm)).harm
        for process in started:
            process.kill()
            process.wait()
        self.neighbour.send_signal(signal.SIGCONT)
        if len(seen) != 8:
            raise RuntimeError(f"the watch is blind: of eight kinds of harm it saw {seen}")

    def _harm(self, verdict: Verdict, seconds: float, marker: str, processes: int, mib: int) -> Iterator[str]:
        if verdict.reason.startswith(_ERROR):
            yield "an error, not a score"
        if self.file.read_text() != _SECRET or _SECRET in verdict.reason:
            yield "the file or the environment was reached"
        state = Path(f"/proc/{self.neighbour.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state not in "SR":
            yield f"the neighbour's state is {state}"
        for server in (self._server, self._named):
            with contextlib.suppress(BlockingIOError):
                server.accept()[0].close()
                yield "the server was reached"
        if processes > LIMITS.processes + _OWN_PROCESSES:
            yield f"{processes} processes"
        if mib > LIMITS.memory_mb + _OWN_MIB:
            yield f"{mib} MiB"
        if left := marked_processes(marker):
            yield f"{len(left)} processes left"
        if seconds > LIMITS.wall_s + _SLACK_S:
            yield f"{seconds:.1f} s"


def _children() -> list[int]:
    return [
        int(word)
        for task in Path("/proc/self/task").iterdir()
        for word in (task / "children").read_text().split()
    ]


@contextlib.contextmanager
def _running(thread: threading.Thread, done: threading.Event) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def attack_table() -> Iterator[str]:
    """Run all attacks; yield the lines of their table."""
    yield "| attack | outcome | s | processes | MiB | harmed the host | scored |"
    yield "| --- | --- | ---: | ---: | ---: | --- | --- |"
    count, harmful, scored = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Watch(Path(folder))) as watch:
        watch.prove()
        for attack in all_attacks(watch):
            seen = watch.run(attack)
            count, harmful, scored = count + 1, harmful + bool(seen.harm), scored + seen.verdict.passed
            reason = (seen.verdict.reason or "passed").strip().splitlines()[-1]
            cells = [
                attack.name.replace("|", "\\|"),
                reason.replace("|", "\\|")[:70],
                f"{seen.seconds:.1f}",
                str(seen.processes),
                str(seen.mib),
                ", ".join(seen.harm) or "no",
                "YES" if seen.verdict.passed else "no",
            ]
            yield "| " + " | ".join(cells) + " |"
    yield ""
    yield f"{count} attacks; {harmful} harmed the host, {scored} scored."


def calls_table(calls: int) -> Iterator[str]:
    """Measure calls per second; yield the lines of their table."""
    program = "def f(x): return sorted(x)"
    tests = ["assert f([2, 1]) == [1, 2]", "assert f([]) == []", "assert f('ba') == ['a', 'b']"]
    doubling = "for _ in range(int(input())): print(2 * int(input()))"
    kinds: dict[str, Callable[[int], Verdict]] = {
        "assertions": lambda _: run_assert_tests(program, tests),
        "standard input and output": lambda _: run_stdin_tests(
            doubling, ["1\n1\n", "2\n1\n2\n", "0\n"], ["2", "2\n4", ""]
        ),
    }
    yield "| tests | at a time | calls per second | median s of a call |"
    yield "| --- | ---: | ---: | ---: |"
    for name, call in kinds.items():
        for at_a_time in (1, 2):
            seconds: list[float] = []

            def timed(number: int, call: Callable[[int], Verdict] = call) -> bool:
                started = time.monotonic()
                passed = call(number).passed
                seconds.append(time.monotonic() - started)  # noqa: B023 - used before the next round
                return passed

            with ThreadPoolExecutor(at_a_time) as threads:
                started = time.monotonic()
                passed = sum(threads.map(timed, range(calls)))
                elapsed = time.monotonic() - started
            assert passed == calls, f"{calls - passed} honest programs did not pass"
            yield f"| {name} | {at_a_time} | {calls / elapsed:.1f} | {statistics.median(seconds):.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["STROP_BENCHMARK_SECRET"] = _SECRET
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# The sandbox: attacks, and calls per second",
        "",
        "`python benchmarks/sandbox.py`, whose first lines say what is run and what counts as harm; other "
        "work was running on the machine.",
        "",
        description("strop", threads=1),
        f"{cores} of the cores used; as user {os.getuid()}; {LIMITS}.",
        "",
        *attack_table(),
        "",
        *calls_table(args.calls),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()

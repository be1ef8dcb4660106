"""Hostile programs. Where one reports what befell it, the test passes only if the attack ran and failed."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from rewards_support import children

from strop.errors import ConfigError, RewardError
from strop.rewards.process_tree import MARKER, marked_processes
from strop.rewards.sandbox import (
    Limits,
    Verdict,
    bubblewrap,
    cgroups,
    require_bubblewrap,
    run_assert_tests,
    run_stdin_tests,
)
from strop.rewards.sandbox.process import _descendants

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt-get install bubblewrap"
)

QUICK = Limits(wall_s=2.0)
PATIENT = Limits(wall_s=20.0)


def outcome_of(attack: str, expected: object, *, limits: Limits = PATIENT) -> Verdict:
    """Whether ``f()``, whose body is ``attack``, gives ``expected``, or the name of what is raised in it."""
    body = "\n".join(f"        {line}" for line in attack.strip().splitlines())
    program = (
        f"import os, sys\ndef f():\n    try:\n{body}\n    except Exception as e: return type(e).__name__"
    )
    return run_assert_tests(program, [f"got = f()\nassert got == {expected!r}, got"], limits=limits)


def passes(program: str, test: str = "assert f(3) == 1234567", *, limits: Limits = PATIENT) -> Verdict:
    return run_assert_tests(program, [test], entry_point="f", limits=limits)


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch):
    """Afterwards no process of the test's sandboxes is there, and no control group."""
    marker = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, marker)
    before = children()  # other tests of this process may have left theirs
    yield
    assert marked_processes(marker) == []
    assert children() - before == set()
    own = f"strop-sandbox-{os.getpid()}-*"
    assert [str(found) for parent in cgroups._parents() for found in parent.glob(own)] == []


def test_honest_programs_pass_and_wrong_ones_do_not():
    assert passes("def f(x): return 1234567").passed
    assert passes("def f(x): return 7").reason.startswith("AssertionError")
    assert "ZeroDivisionError" in passes("def f(x): return 1 / 0").reason
    assert "the program raised SyntaxError" in passes("def f(x) return").reason
    assert not passes("g = 1").passed


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


# Tricks to get a score: every one of these programs is wrong.
FAKES = {
    "equals everything": "class E:\n  __eq__ = lambda s, o: True\n  __bool__ = lambda s: True\n"
    "def f(x): return E()",
    "an int that equals everything": "class E(int):\n  __eq__ = lambda s, o: True\n  __hash__ = None\n"
    "def f(x): return E(1)",
    "early exit": "import sys\nsys.exit(0)",
    "early exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "early hard exit": "import os\nos._exit(0)",
    "hard exit in the call": "import os\ndef f(x): os._exit(0)",
    "the marker of success": 'import os\nfor d in range(64):\n  try: os.write(d, b\'{"status": "passed"}\')\n'
    "  except OSError: pass\ndef f(x): os._exit(0)",
    "builtins": "import builtins\nbuiltins.AssertionError = type('A', (), {})\n"
    "builtins.__build_class__ = builtins.isinstance = lambda *a: True\ndef f(x): return 1",
    "modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None\ndef f(x): return 1",
    "the worker's own code": "import guest.solution, guest.channel, guest.plain\n"
    "guest.plain.encode = guest.solution.encode = lambda v, r: {'passed': True}\ndef f(x): return 1",
    "the frames of its caller": "import sys\ndef f(x):\n  frame, found = sys._getframe(), []\n"
    "  while frame: found += [v for v in frame.f_locals.values() if type(v) is int]; frame = frame.f_back\n"
    "  return max(found)",
    "all objects": "import gc, re\ndef f(x):\n"
    "  found = re.findall(r'isclose.f.3., (\\d+)', ' '.join(repr(o)[:9999] for o in gc.get_objects()))\n"
    "  return int(found[0]) if found else 1",
    "memory of others": "import os, re\ndef f(x):\n"
    "  for p in os.listdir('/proc'):\n"
    "    for line in open(f'/proc/{p}/maps') if p.isdigit() else []:\n"
    "      a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
    "      try:\n"
    "        m = open(f'/proc/{p}/mem', 'rb', 0); m.seek(a)\n"
    "        if found := re.search(rb'isclose.f.3., (\\d+)', m.read(b - a)): return int(found[1])\n"
    "      except (OSError, OverflowError, MemoryError): pass\n"
    "  return 1",
    "a value that cannot be pickled": "def f(x): return lambda: 1",
    "recursion": "def f(x): return f(x)",
    "a structure of endless depth": "def f(x):\n  l = []; l.append(l); return l",
    "a deep structure": "def f(x):\n  l = []\n  for _ in range(100000): l = [l]\n  return l",
    "a huge answer": "def f(x): return 'x' * 10**8",
    "a name of the tests' modules": "class math: isclose = lambda *a: True\ndef f(x): return 1",
}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("trick", FAKES)
def test_tricks_do_not_score(trick: str):
    verdict = passes(FAKES[trick], "import math\nassert math.isclose(f(3), 1234567)\nassert f(3) == 1234567")
    assert not verdict.passed
    assert "took too long" not in verdict.reason


@pytest.mark.parametrize(
    ("attack", "outcome"),
    [
        ("return open('/etc/shadow').read()", "FileNotFoundError"),
        ("return open('/etc/passwd').read()", "FileNotFoundError"),
        (f"return open({str(Path(__file__).resolve())!r}).read()", "FileNotFoundError"),
        (f"return open({str(Path(bubblewrap.__file__).resolve())!r}).read()", "FileNotFoundError"),
        ("return os.listdir('/home')", "FileNotFoundError"),
        ("return open('/strop/guest/x', 'w')", "OSError"),
        ("return open('/usr/lib/x', 'w')", "OSError"),
        ("return open('/x', 'w')", "OSError"),
        ("return open('/dev/x', 'w')", "OSError"),
        ("return os.memfd_create('x')", "PermissionError"),
        ("import ctypes\nreturn ctypes.CDLL(None, use_errno=True).unshare(0x10000000)", -1),
        ("import ctypes\nreturn ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600)", -1),
        ("os.setuid(0)", "OSError"),
        ("os.chroot('/tmp')", "PermissionError"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))", "ValueError"),
        ("import socket\nsocket.create_connection(('192.0.2.1', 80), 2)", "OSError"),
        ("return [os.getuid(), os.getgid(), 0 in os.getgroups()]", [65534, 65534, False]),
        ("os.kill(1, 9)\nreturn os.path.exists('/proc/1')", True),
        ("return len([p for p in os.listdir('/proc') if p.isdigit()])", 2),
        ("return os.path.exists('/dev/tty') and open('/dev/tty')", "OSError"),
        ("import torch", "ModuleNotFoundError"),
    ],
)
def test_the_host_is_out_of_reach(attack: str, outcome: object):
    assert outcome_of(attack, outcome) == Verdict(True)


def test_the_environment_of_the_host_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STROP_TEST_SECRET", "hidden")
    attack = "return [b'hidden' in open(f'/proc/{p}/environ', 'rb').read() for p in (1, 'self')]"
    assert outcome_of(attack, [False, False]) == Verdict(True)


def test_a_server_of_the_host_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind("\0strop-" + uuid.uuid4().hex)
        named.listen()
        name = named.getsockname()
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it is there
        attack = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert outcome_of(attack, "ConnectionRefusedError") == Verdict(True)
        attack = f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})"
        assert outcome_of(attack, "ConnectionRefusedError") == Verdict(True)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "bomb",
    [
        "while True: pass",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\nwhile True: signal.pause()",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  os.fork()\ntime.sleep(99)",
        "import os, signal\nif os.fork() == 0:\n  os.kill(os.getppid(), signal.SIGSTOP)\n  os.pause()",
        "import re\nre.match('(a+)+b', 'a' * 99)",
    ],
    ids=[
        "endless loop",
        "fork bomb",
        "deaf to signals",
        "daemon",
        "stopping its parent",
        "regular expression",
    ],
)
def test_what_does_not_end_is_ended(bomb: str):
    verdict = passes(bomb, limits=QUICK)
    assert not verdict.passed


@pytest.mark.usefixtures("nothing_left")
def test_a_daemon_does_not_outlive_a_program_that_passes():
    program = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(99)\ndef f(x): return 1234567"
    assert passes(program).passed


def test_processes_memory_and_files_are_limited():
    count = "n = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      os.read(os.pipe()[0], 1)\n    n += 1\n"
    forks = count + "except BlockingIOError: return 15 <= n <= 24"
    assert outcome_of(forks, True) == Verdict(True)
    assert outcome_of("return len(bytearray(1 << 30))", "MemoryError") == Verdict(True)
    flood = "for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"
    assert outcome_of(flood, "OSError") == Verdict(True)
    assert outcome_of(flood.replace("/tmp", "/dev/shm"), "OSError") == Verdict(True)
    assert outcome_of("[os.open('/dev/null', 0) for _ in range(99)]", "OSError") == Verdict(True)


MANY_CHILDREN = (
    "children = []\n"
    "for i in range(12):\n"
    "  child = os.fork()\n"
    "  if child == 0:\n"
    "    x = bytearray(b'x') * (100 << 20)\n"
    "    import time; time.sleep(1.5); os._exit(0)\n"
    "  children.append(child)\n"
    "return any(os.waitpid(child, 0)[1] for child in children)"
)


@pytest.mark.usefixtures("nothing_left")
def test_many_children_together_have_the_memory_of_one():
    groups = cgroups.ControlGroups(Limits())
    groups.remove()
    if not groups.limits_memory:
        pytest.skip("no control group for memory can be made here; the test below watches without one")
    assert outcome_of(MANY_CHILDREN, True) == Verdict(True)


@pytest.mark.usefixtures("nothing_left")
def test_without_control_groups_the_memory_is_watched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cgroups, "_parents", lambda: iter(()))
    assert outcome_of(MANY_CHILDREN, True).reason == "it takes too much memory"
    assert outcome_of("return 5", 5) == Verdict(True)


def test_standard_input_and_output():
    double = "import sys\nfor line in sys.stdin: print(int(line) * 2)"
    assert run_stdin_tests(double, ["1\n2\n", "", "5"], ["2\n4", "", "10 \n\n"], limits=PATIENT) == Verdict(
        True
    )
    assert (
        run_stdin_tests(double, ["1", "2"], ["2", "5"], limits=PATIENT).reason == "test 2: the output differs"
    )
    assert "status 1" in run_stdin_tests(double, ["x"], [""], limits=PATIENT).reason
    assert run_stdin_tests("exit(0)", ["x"], [""], limits=PATIENT).passed
    assert run_stdin_tests("if __name__ == '__main__': print('ö')", [""], ["ö"], limits=PATIENT).passed
    assert "SyntaxError" in run_stdin_tests("print(", ["x"], [""], limits=PATIENT).reason
    kept = "import sys\nn = globals().get('n', 0) + 1\nprint(n)"
    assert run_stdin_tests(kept, ["", ""], ["1", "1"], limits=PATIENT).passed


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x' * 10**6)",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 9)",
        "while True: pass",
        "import os, time\nif os.fork() == 0: time.sleep(99)\nprint(5)",
        'import os\nfor d in range(3, 64):\n  try: os.write(d, b\'\\0\\0\\0\\x10{"written": "5"}\')\n'
        "  except OSError: pass",
        "raise SystemExit('5')",
        "import sys\nsys.stdout.close()",
    ],
)
def test_programs_of_standard_output_that_misbehave_do_not_pass(program: str):
    assert not run_stdin_tests(program, [""], ["5"], limits=QUICK).passed


def test_sandboxes_end_when_their_starter_is_killed():
    starter = (
        "from strop.rewards.sandbox import *\nrun_assert_tests('while 1: 1', ['f()'], limits=Limits(99))"
    )
    with subprocess.Popen([sys.executable, "-c", starter]) as process:
        try:
            deadline = time.monotonic() + 60
            while not (started := sandboxed(process.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(started) == 2
            handles = [os.pidfd_open(identity) for identity in _descendants(process.pid)]
        finally:
            os.kill(process.pid, signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], 10.0)[0], "a process outlived its starter by ten seconds"
        os.close(handle)


def sandboxed(root: int) -> list[int]:
    """The interpreters in the two sandboxes, once both are there."""
    found = []
    for identity in _descendants(root):
        try:
            command = Path(f"/proc/{identity}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(os.fsencode(bubblewrap._interpreter())) and b"from guest import" in command:
            found.append(identity)
    return found if len(found) == 2 else []


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    require_bubblewrap.cache_clear()
    for name in ("setpriv", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    yield tmp_path
    require_bubblewrap.cache_clear()


@pytest.mark.usefixtures("own_path")
def test_without_bubblewrap_nothing_runs():
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        passes("def f(x): return 1234567")
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        run_stdin_tests("print(5)", [""], ["5"])


def test_a_bubblewrap_that_does_not_work_is_an_error_with_its_words(own_path: Path):
    (own_path / "bwrap").write_text(
        "#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n"
    )
    (own_path / "bwrap").chmod(0o755)
    with pytest.raises(RewardError, match="No permissions to create new namespace"):
        passes("def f(x): return 1234567")
    with pytest.raises(RewardError, match="No permissions to create new namespace"):
        run_stdin_tests("print(5)", [""], ["5"])

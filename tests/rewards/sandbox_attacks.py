"""Hostile programs, for the tests and for the table that ``benchmarks/sandbox.py`` makes.

All of them are wrong: ``f(3)`` should be 1234567, or the standard output 5.
"""

from __future__ import annotations

TRICK_TEST = "import math\nassert math.isclose(f(3), 1234567)\nassert f(3) == 1234567"

TRICKS = {
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
"""To get a score."""

ENDINGS = [
    "StopIteration",
    "StopAsyncIteration",
    "GeneratorExit",
    "SystemExit(0)",
    "KeyboardInterrupt",
    "type('Own', (BaseException,), {})",
    "type('Own', (StopIteration,), {})",
    "type('Own', (GeneratorExit,), {})",
]
"""What a solution may raise to end a test's loop before its first comparison."""

LOOPS = [
    "assert all(map(f, [1, 2]))",
    "assert all(a == b for a, b in zip(map(f, [1, 2]), [5, 6]))",
    "for got, wanted in zip(map(f, [1, 2]), [5, 6]): assert got == wanted",
    "for got in map(f, [1]): assert got == 5",
    "assert not any(map(f, [1, 2]))",
    "assert list(map(f, [1, 2])) in ([], [5, 6])",
    "assert sum(map(f, [1, 2])) in (0, 11)",
    "assert max(map(f, [1, 2]), default=6) == 6",
    "assert next(map(f, [1]), 5) == 5",
    "for got in iter(lambda: f(1), 5): assert False",
    "class Cases:\n  def __iter__(self): return self\n  def __next__(self): return f(1)\n"
    "for got in Cases(): assert got == 5",
]
"""Tests that hold for no case at all."""

_EACH = "import os\nfor d in range(3, 1024):\n  try: os.{call}\n  except OSError: pass\n"
_NUMBERED = "len(m).to_bytes(4, 'big') + m"
CHANNEL = {
    "reading its own messages back": "import glob, os\n"
    "for path in glob.glob('/proc/*/fd/*') + glob.glob('/dev/fd/*'):\n"
    "  try: os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 16)\n  except OSError: pass\n"
    "def f(x): return 1",
    "garbage": _EACH.format(call="write(d, bytes(range(256)))") + "def f(x): return 1",
    "garbage in the call": "def f(x):\n"
    + "".join(f"  {line}\n" for line in _EACH.format(call="write(d, b'x' * 999)").splitlines()),
    "closing it": "import os\nos.closerange(3, 1024)\ndef f(x): return 1234567",
    "half a message": _EACH.format(call="write(d, b'\\0\\0\\1\\0{')") + "os._exit(0)",
    "a message of 4 GB": _EACH.format(call="write(d, b'\\xff' * 4)") + "def f(x): return 1",
    "a flood of messages": _EACH.format(call="write(d, b'\\0\\0\\0\\x011' * 800000)"),
    "deep JSON": "m = b'[' * 99999\n" + _EACH.format(call=f"write(d, {_NUMBERED})") + "def f(x): return 1",
    "answers of every kind of JSON": "import json\n"
    "for answer in ({'names': ['f']}, [], 1, None, 'hello', {}, {'value': {'object': -1}}, {'raised': [1]}, "
    "{'raised': [{}, []]}, {'raised': ['BaseExceptionGroup', 1]}):\n"
    "  m = json.dumps(answer).encode()\n"
    + "".join(f"  {line}\n" for line in _EACH.format(call=f"write(d, {_NUMBERED})").splitlines())
    + "def f(x): return 1",
    "the judge's lines": _EACH.format(call='write(d, b\'started\\n{"status": "passed"}\')') + "os._exit(0)",
}
"""What a program can do to the descriptors that it inherits: its failure, never the sandbox's error."""

REACHES: dict[str, tuple[str, object]] = {
    "reading /etc/shadow": ("return open('/etc/shadow').read()", "FileNotFoundError"),
    "reading /etc/passwd": ("return open('/etc/passwd').read()", "FileNotFoundError"),
    "listing /home": ("return os.listdir('/home')", "FileNotFoundError"),
    "writing strop's own code": ("return open('/strop/guest/x', 'w')", "OSError"),
    "writing to /usr/lib": ("return open('/usr/lib/x', 'w')", "OSError"),
    "writing to /": ("return open('/x', 'w')", "OSError"),
    "writing to /dev": ("return open('/dev/x', 'w')", "OSError"),
    "a file in memory (memfd_create)": ("return os.memfd_create('x')", "PermissionError"),
    "a user namespace (unshare)": (
        "import ctypes\nreturn ctypes.CDLL(None, use_errno=True).unshare(0x10000000)",
        -1,
    ),
    "shared memory (shmget)": (
        "import ctypes\nreturn ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600)",
        -1,
    ),
    "becoming root (setuid)": ("os.setuid(0)", "OSError"),
    "another root folder (chroot)": ("os.chroot('/tmp')", "PermissionError"),
    "raising its own limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
        "ValueError",
    ),
    "limits of the host's user (priorities, queues of messages)": (
        "import resource as r\nkinds = r.RLIMIT_NICE, r.RLIMIT_RTPRIO, r.RLIMIT_MSGQUEUE, r.RLIMIT_MEMLOCK\n"
        "return [max(r.getrlimit(kind)) for kind in kinds]",
        [0, 0, 0, 0],
    ),
    "queueing signals": (
        "import ctypes, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])\n"
        "queue = ctypes.CDLL(None).sigqueue\n"
        "return 1 <= [queue(os.getpid(), int(signal.SIGRTMIN), None) for _ in range(999)].count(0) <= 64",
        True,
    ),
    "connecting to the net": ("import socket\nsocket.create_connection(('192.0.2.1', 80), 2)", "OSError"),
    "its ids and groups": (
        "return [os.getuid(), os.getgid(), 0 in os.getgroups()]",
        [65534, 65534, False],
    ),
    "killing process 1": ("for s in (9, 15, 19): os.kill(1, s)\nos.kill(1, 0)\nreturn True", True),
    "processes in /proc": ("return os.listdir('/proc')", "FileNotFoundError"),
    "descriptors of process 1": ("return os.listdir('/proc/1/fd')", "FileNotFoundError"),
    "its own descriptors": ("return os.listdir('/dev/fd')", "FileNotFoundError"),
    "mounts with the host's paths": ("return open('/proc/self/mountinfo').read()", "FileNotFoundError"),
    "mounts and namespaces by system calls (fsconfig, statmount, listmount, open_tree_attr, listns)": (
        "import ctypes\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
        "return [_errno(call(number, 0, 0, 0, 0, 0)) for number in (431, 457, 458, 467, 470)]",
        [1, 1, 1, 1, 1],
    ),
    "the host's paths in Python's own": (
        "paths = [sys.prefix, sys.exec_prefix, sys.executable, *sys.path, os.__file__]\n"
        "return [path for path in paths if not f'{path}/'.startswith(('/strop', '/usr/'))]",
        [],
    ),
    "a descriptor of process 1 (pidfd_getfd)": (
        "import ctypes\n"
        "return _errno(ctypes.CDLL(None, use_errno=True).syscall(438, os.pidfd_open(1), 0, 0))",
        1,
    ),
    "tracing process 1 (ptrace)": (
        "import ctypes\nreturn _errno(ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0))",
        1,
    ),
    "memory of process 1 (process_vm_readv)": (
        "import ctypes\nreturn _errno(ctypes.CDLL(None, use_errno=True).process_vm_readv(1, 0, 0, 0, 0, 0))",
        1,
    ),
    "families of sockets": (
        "import socket\nmade = set()\nfor family in range(64):\n  for kind in range(1, 7):\n"
        "    try: socket.socket(family, kind).close()\n    except PermissionError: pass\n"
        "    except OSError: made.add(family)\n    else: made.add(family)\nreturn sorted(made)",
        [1, 2, 10],
    ),
    "a family of sockets, above 32 bits": (
        "import ctypes\nnumber = {'x86_64': 41, 'aarch64': 198}[os.uname().machine]\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "return [_errno(libc.syscall(number, ctypes.c_long(high << 32 | 40), 1, 0)) for high in (0, 1, -1)]",
        [1, 1, 1],
    ),
    "protocols of sockets (SCTP, MPTCP)": (
        "import socket\nmade = []\nfor protocol in (132, 262):\n"
        "  try: made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol))\n"
        "  except PermissionError: pass\nreturn made",
        [],
    ),
    "larger buffers of a socket": (
        "import socket\n"
        "socket.socket(socket.AF_UNIX).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
        "PermissionError",
    ),
    "watches of files (inotify)": (
        "import ctypes\nreturn _errno(ctypes.CDLL(None, use_errno=True).inotify_init1(0))",
        1,
    ),
    "huge pages": (  # PR_GET_THP_DISABLE, PR_SET_THP_DISABLE
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "return [libc.prctl(42, 0, 0, 0, 0), _errno(libc.prctl(41, 0, 0, 0, 0)), libc.prctl(42, 0, 0, 0, 0)]",
        [1, 1, 1],
    ),
    "pages in a pipe (vmsplice)": (
        "import ctypes\nreturn _errno(ctypes.CDLL(None, use_errno=True).vmsplice(os.pipe()[1], None, 0, 0))",
        1,
    ),
    "the terminal": ("return os.path.exists('/dev/tty') or os.openpty()", "FileNotFoundError"),
    "installed packages": (
        "sys.path += [path for path, _, _ in os.walk('/') if path.endswith('-packages')]\nimport torch",
        "ModuleNotFoundError",
    ),
}
"""What to do -> what ``reporting`` it gives, as it is out of reach."""

ENVIRONMENT = (
    "return [{secret!r} in b' '.join(os.environb.values()), "
    "[p for p in (1, 'self') if os.path.exists(f'/proc/{{p}}/environ')]]"
)
LOOPBACK = "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
ABSTRACT_SOCKET = "import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})"

BOMBS = {
    "endless loop": "while True: pass",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "deaf to signals": "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\nwhile True: signal.pause()",
    "daemon": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  os.fork()\ntime.sleep(99)",
    "stopping its parent": "import os, signal, time\nif os.fork() == 0:\n"
    "  os.kill(os.getppid(), signal.SIGSTOP)\n  signal.pause()\ntime.sleep(99)",
    "endless regular expression": "import re\nre.match('(a+)+b', 'a' * 99)",
}
"""They do not end by themselves."""

FLOODS: dict[str, tuple[str, object]] = {
    "memory bomb": ("return len(bytearray(1 << 30))", "MemoryError"),
    "flood of the disk": (
        "for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))",
        "OSError",
    ),
    "flood of /dev/shm": (
        "for i in range(99): open(f'/dev/shm/{i}', 'wb').write(bytes(1 << 20))",
        "OSError",
    ),
    "open files": ("[os.open('/dev/null', 0) for _ in range(99)]", "OSError"),
}
"""What to do -> what ``reporting`` it gives, as it is limited."""

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
"""Together they take more memory than one may have."""

_CHILDREN = (
    "import os, socket, time\ndef fill():\n{body}\n  time.sleep(9)\n"
    "for i in range(12):\n  if os.fork() == 0:\n    try: fill()\n    finally: os._exit(0)\ntime.sleep(9)"
)
_FILLS = {
    "connections over TCP": "  kept, server = [], socket.create_server(('127.0.0.1', 0))\n"
    "  while len(kept) < 50:\n"
    "    kept += [socket.create_connection(server.getsockname()), server.accept()[0]]\n"
    "    for s in kept[-2:]:\n"
    "      s.setblocking(False)\n"
    "      try:\n        while True: s.send(bytes(65536))\n      except OSError: pass",
    "empty files": "  n = os.getpid()\n"
    "  for i in range(10**6): os.close(os.open(f'/tmp/{n}-{i}', os.O_CREAT))",
}
MEMORY_OF_THE_KERNEL = {name: _CHILDREN.format(body=body) for name, body in _FILLS.items()}
"""It is not part of any process's memory."""

OF_STANDARD_OUTPUT = {
    "its parent's descriptors": "import glob, os\n"
    "for path in glob.glob(f'/proc/{os.getppid()}/fd/*') + glob.glob('/proc/1/fd/*'):\n"
    '  try: os.write(os.open(path, os.O_WRONLY), b\'\\0\\0\\0\\x10{"written": "5"}\')\n'
    "  except OSError: pass",
    "a flood of its parent's descriptors": "import glob, os\n"
    "for path in glob.glob(f'/proc/{os.getppid()}/fd/*') + glob.glob('/proc/1/fd/*'):\n"
    "  try: os.write(os.open(path, os.O_WRONLY), b'\\0\\0\\0\\x011' * 800000)\n"
    "  except OSError: pass",
    "reading its parent's start message back": "import glob, os\n"
    "for path in glob.glob('/proc/*/fd/*'):\n"
    "  try: os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 16)\n"
    "  except OSError: pass",
    "its parent's memory": "import os\ntry: open(f'/proc/{os.getppid()}/mem', 'r+b')\nexcept OSError: pass",
    "removing its standard streams": "import os\nfor n in os.listdir('/dev/shm'): os.unlink('/dev/shm/' + n)",
    "flood of standard output": "while True: print('x' * 10**6)",
    "killing its parent": "import os\nos.kill(os.getppid(), 9)",
    "killing everything": "import os\nos.kill(-1, 9)",
    "endless loop": "while True: pass",
    "a child left behind": "import os, time\nif os.fork() == 0: time.sleep(99)\nprint(5)",
    "an answer on every descriptor": "import os\nfor d in range(3, 64):\n"
    '  try: os.write(d, b\'\\0\\0\\0\\x10{"written": "5"}\')\n  except OSError: pass',
    "an answer as its exit status": "raise SystemExit('5')",
    "closing standard output": "import sys\nsys.stdout.close()",
}
"""They write no answer, or do more than that."""


def reporting(body: str) -> str:
    """A program whose ``f()`` has this body, and returns the name of what is raised in it."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return (
        "import ctypes, os, sys\ndef _errno(result): return ctypes.get_errno() if result == -1 else result\n"
        f"def f(*_):\n    try:\n{lines}\n    except Exception as e: return type(e).__name__"
    )

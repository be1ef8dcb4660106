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
    "connecting to the net": ("import socket\nsocket.create_connection(('192.0.2.1', 80), 2)", "OSError"),
    "its ids and groups": (
        "return [os.getuid(), os.getgid(), 0 in os.getgroups()]",
        [65534, 65534, False],
    ),
    "killing process 1": ("os.kill(1, 9)\nreturn os.path.exists('/proc/1')", True),
    "other processes in /proc": ("return len([p for p in os.listdir('/proc') if p.isdigit()])", 2),
    "the terminal": ("return os.path.exists('/dev/tty') and open('/dev/tty')", "OSError"),
    "installed packages": ("import torch", "ModuleNotFoundError"),
}
"""What to do -> what ``reporting`` it gives, as it is out of reach."""

ENVIRONMENT = "return [{secret!r} in open(f'/proc/{{p}}/environ', 'rb').read() for p in (1, 'self')]"
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

OF_STANDARD_OUTPUT = {
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
        f"import os, sys\ndef f(*_):\n    try:\n{lines}\n    except Exception as e: return type(e).__name__"
    )

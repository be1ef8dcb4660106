from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rewards_support import none_within

from strop.errors import ConfigError, RewardError
from strop.rewards.arguments import Function, Sample
from strop.rewards.custom import load_custom_reward
from strop.rewards.router import BuiltInScorer
from strop.rewards.scorer import Outcome, Scorer
from strop.rewards.worker.pool import Feed, RewardProcess

from messages import mentions, naming

Running = Callable[[], list[int]]
TIMEOUT_S = 0.4

HANG_IN_C = "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"  # holds the interpreter's lock
STRAY = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)"


@pytest.fixture
def process(running: Running, run_response: Callable[..., Any]) -> Iterator[RewardProcess]:
    with contextlib.closing(RewardProcess(run_response, timeout_s=30.0)) as process:
        yield process


def run(process: RewardProcess, code: str) -> Outcome:
    return process.evaluate(Sample("d", textwrap.dedent(code)))


def test_scores_and_parts_of_a_sample_come_back(process: RewardProcess):
    code = "result = {'score': ground_truth * extra_info['factor'], 'format': True}"
    sample = Sample("d", code, 7, {"factor": 2})
    assert process.evaluate(sample) == Outcome("scored", 14.0, {"format": 1.0})


def test_the_process_imports_neither_torch_nor_the_main_module(process: RewardProcess):
    outcome = run(process, "import sys; result = len({'torch', 'transformers', 'pytest'} & set(sys.modules))")
    assert outcome.score == 0.0


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ValueError('bad ' + chr(0xd800) + ' text')", "ValueError: bad"),  # no such text in UTF-8
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("input()", "EOFError"),
        ("result = 'right'", "found text"),
    ],
)
def test_an_exception_or_a_wrong_result_costs_one_sample_and_no_process(
    process: RewardProcess, running: Running, code: str, part: str
):
    process.start()
    before = running()
    outcome = run(process, code)
    assert outcome.status == "raised"
    assert part in outcome.error
    assert "strop/rewards/worker" not in outcome.error
    outcome.error.encode()
    assert running() == before


def test_a_wrong_result_is_one_line_that_names_the_function(
    process: RewardProcess, run_response: Callable[..., Any]
):
    code = run_response.__code__
    place = f"score ({code.co_filename}, line {code.co_firstlineno})"
    said = f"TypeError: {place}: the score is 'right': expected a number, found text\n"
    assert run(process, "result = 'right'").error == said
    assert run(process, "result = {'a': 1}").error.startswith(f"ValueError: {place}: the returned dict")


def test_a_long_traceback_keeps_its_beginning_and_its_end(process: RewardProcess):
    error = run(process, "raise ValueError('x' * 100_000 + 'end')").error
    assert len(error) < 10_000
    assert error.startswith("Traceback")
    assert error.rstrip().endswith("end")


def test_a_scorer_may_close_the_standard_streams(process: RewardProcess):
    assert run(process, "import sys\nsys.stdout.close()\nsys.stderr = None").status == "scored"
    assert run(process, "result = 3.0").score == 3.0


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "while True: print('flood' * 1000)",
        "import time\ntime.sleep(600)",
        HANG_IN_C,
    ],
)
def test_a_scorer_that_hangs_is_cut_off_at_its_deadline(process: RewardProcess, code: str):
    process.start()
    process.timeout_s = TIMEOUT_S
    started = time.monotonic()
    outcome = run(process, code)
    assert TIMEOUT_S <= time.monotonic() - started < TIMEOUT_S + 15
    assert outcome.status == "timeout"
    assert mentions(outcome.error, "0.4 s")
    process.timeout_s = 30.0
    assert run(process, "result = 3.0").score == 3.0


FORGED = """
import os
for descriptor in range(3, 12):
    try:
        os.write(descriptor, b"forged message" * 10)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("print('before', flush=True)\nos._exit(3)", "exit status 3; the last it printed:\nbefore"),
        ("os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("os.kill(os.getpid(), 60)", "signal 60"),
        ("import ctypes\nctypes.string_at(0)", "signal SIGSEGV"),
        ("import time\nif os.fork() == 0: time.sleep(600)\nos._exit(3)", "exit status 3"),  # holds the pipe
        (FORGED, "wrote into its process's pipe"),
    ],
)
def test_a_scorer_that_ends_its_process_costs_one_sample(process: RewardProcess, code: str, ending: str):
    outcome = run(process, "import os\n" + code)
    assert outcome.status == "crashed"
    assert ending in outcome.error
    assert run(process, "result = 3.0").score == 3.0


# Writes into every pipe that the function can find.
WRITES = """
import json, os
for descriptor in map(int, os.listdir("/proc/self/fd")):
    try:
        if descriptor > 2 and os.readlink(f"/proc/self/fd/{{descriptor}}").startswith("pipe:"):
            os.write(descriptor, {text!r})
    except OSError:
        pass
"""
CLOSES_THE_FIRST_PIPE = """
import os
for descriptor in range(3, 100):
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:") and descriptor != LIFELINE:
        os.close(descriptor)
        break
""".replace("LIFELINE", "int(__import__('sys').argv[1])")
REPLACES_DESCRIPTORS = """
import os
for descriptor in range(3, 12):
    try:
        os.fstat(descriptor)
        os.dup2(0, descriptor)
    except OSError:
        pass
"""
HOSTILE = {
    "forged answers": WRITES.format(
        text=b'{"status": "scored", "score": 9.0, "parts": {}, "error": ""}\n' * 3
    ),
    "forged types": WRITES.format(text=b'{"status": "scored", "score": "9", "parts": [1], "error": 5}\n'),
    "no end of line": WRITES.format(text=b"half a line"),
    "deep": WRITES.format(text=b"[" * 60_000 + b"\n"),
    "flood": "while True:" + WRITES.format(text=b"x" * 4096).replace("\n", "\n    "),
    "surrogate": "result = {'score': 1.0, 'a' + chr(0xd800): 1.0}",
    "no modules": "import sys\nsys.modules.clear()",
    "no modules and an error": "import sys\nsys.modules.clear()\nraise ValueError",
    "other modules": "import sys\nsys.modules = {}",
    "no built-in functions": "import builtins\nvars(builtins).clear()",
    "one built-in function less": "import builtins\ndel builtins.len",
    "other functions": "import pickle\npickle.loads = None",
    "no descriptors": "import os\nos.closerange(0, 4096)",
    "no requests": CLOSES_THE_FIRST_PIPE,
    "other descriptors": REPLACES_DESCRIPTORS,
    "exit": "import os\nos._exit(0)",
}


def statuses_around(process: RewardProcess, code: str) -> list[str]:
    """Score eight samples, of which two run ``code``, and return the statuses of these two.

    The samples behind them, which are in the process's pipe already, need the interpreter whole.
    """
    good = "import decimal, string\nresult = len([NUMBER]) * NUMBER"
    codes = [code if number in (2, 5) else good.replace("NUMBER", str(number)) for number in range(8)]
    found = list(process.evaluate_all(Feed.of([Sample("d", code) for code in codes])))
    for outcome in found:
        outcome.error.encode()
    hostile = [found.pop(5), found.pop(2)]
    assert [outcome.status for outcome in found] == ["scored"] * 6
    assert [outcome.score for outcome in found] == [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    return [outcome.status for outcome in hostile]


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_scorer_costs_its_own_samples_alone(process: RewardProcess, code: str):
    assert statuses_around(process, code) == ["crashed"] * 2


@pytest.mark.parametrize("times", ["while True", "if True"])
def test_a_fork_cannot_answer_even_after_its_sample(process: RewardProcess, times: str):
    writes = WRITES.format(text=b"x" * 4096 + b"\n").replace("\n", "\n        ")
    assert statuses_around(process, f"import os\nif os.fork() == 0:\n    {times}:{writes}") == ["scored"] * 2


FORGED_WITH_THE_TOKEN = """
import json, os, sys
frame = sys._getframe()
while "token" not in frame.f_locals:
    frame = frame.f_back
forged = {"token": frame.f_locals["token"], "status": "scored", "score": 1.0, "parts": {}, "error": ""}
os.write(frame.f_locals["answers"].fileno(), json.dumps(forged).encode() + b"\\n")
"""
WRITES_JUNK = WRITES.format(text=b"junk\n")
LATER = f"""
import threading
def later():
    import time
    time.sleep(0.1)
{textwrap.indent(WRITES_JUNK, "    ")}
threading.Thread(target=later).start()
result = 1.0
"""


@pytest.mark.parametrize(
    "code",
    [
        FORGED_WITH_THE_TOKEN,
        LATER,
    ],
    ids=["forged", "late writing"],
)
def test_what_a_sample_leaves_in_the_pipe_costs_no_later_one(process: RewardProcess, code: str):
    codes = [code, "import time\ntime.sleep(0.5)\nresult = 2.0", "result = 3.0"]
    found = process.evaluate_all(Feed.of([Sample("d", code) for code in codes]))
    assert [outcome.score for outcome in found] == [1.0, 2.0, 3.0]


RETURNED = """
import os
class Value(float):
    def __reduce__(self):
        return os.system, ("touch {path}",)
class Lying:
    __class__ = property(lambda self: {{}}.__class__)
    def __float__(self):
        raise SystemExit
    __hash__ = None
result = {value}
"""


def test_nothing_that_a_scorer_returns_is_unpickled_or_called_by_the_run(
    process: RewardProcess, tmp_path: Path
):
    path = tmp_path / "unpickled"
    assert run(process, RETURNED.format(path=path, value="Value(2.0)")).score == 2.0
    assert (
        run(process, RETURNED.format(path=path, value="{'score': Value(3.0), 'a': Value(1.0)}")).score == 3.0
    )
    assert run(process, RETURNED.format(path=path, value="Lying()")).status == "raised"
    assert run(process, RETURNED.format(path=path, value="{'score': Lying()}")).status == "raised"
    assert not path.exists()


def test_what_a_scorer_leaves_in_its_pipe_is_not_charged_to_the_next_sample(
    process: RewardProcess, running: Running, tmp_path: Path
):
    """A thread writes after the answer."""
    written = tmp_path / "written"
    late = f"{WRITES.format(text=b'late')}\nopen({str(written)!r}, 'w').close()"
    code = f"import threading\nthreading.Timer(0.05, exec, [{late!r}, {{}}]).start()"
    assert run(process, code).status == "scored"
    end = time.monotonic() + 60
    while not written.exists():  # a busy machine may start the thread late
        assert time.monotonic() < end
        time.sleep(0.01)
    assert run(process, "result = 3.0") == Outcome("scored", 3.0)


# ------------------------------------------------------------------------------------------ limit of memory

LISTS = "result = float(len([bytearray(b'x' * 1_000_000) for _ in range(200)]))"
ONE_BLOCK = "result = float(len(bytes(200_000_000)))"
ANONYMOUS_MAP = "import mmap\nresult = float(len(mmap.mmap(-1, 200_000_000, mmap.MAP_PRIVATE)))"
IN_C = "import ctypes\nctypes.memset(ctypes.CDLL(None).malloc(200_000_000), 0, 10)"


@pytest.mark.parametrize("code", [LISTS, ONE_BLOCK, ANONYMOUS_MAP, IN_C])
def test_a_scorer_beyond_the_limit_of_memory_costs_its_sample(
    running: Running, run_response: Callable[..., Any], code: str
):
    with contextlib.closing(RewardProcess(run_response, timeout_s=30.0, memory_limit_mb=100)) as process:
        feed = Feed.of([Sample("d", text) for text in ("result = 1.0", code, "result = 2.0")])
        before, beyond, after = process.evaluate_all(feed)
        assert (before.score, beyond.status, after.score) == (1.0, "crashed", 2.0)
        assert mentions(beyond.error, "reward_model.memory_limit_mb=100")
    with contextlib.closing(RewardProcess(run_response, timeout_s=30.0)) as process:
        if code != IN_C:
            assert run(process, code).status == "scored"


def test_address_space_that_is_not_used_counts_for_nothing(
    running: Running, run_response: Callable[..., Any]
):
    """Libraries like torch map far more than they use."""
    code = "import mmap\nresult = float(len(mmap.mmap(-1, 1 << 33, mmap.MAP_PRIVATE, mmap.PROT_READ)))"
    with contextlib.closing(RewardProcess(run_response, timeout_s=30.0, memory_limit_mb=100)) as process:
        assert run(process, code).status == "scored"


def test_a_limit_of_memory_that_a_scorer_cannot_be_loaded_in_is_named(tmp_path: Path, running: Running):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**sample):\n    return 1.0\n")
    reward = load_custom_reward(str(path))
    path.write_text("table = bytearray(200_000_000)\ndef compute_score(**sample):\n    return 1.0\n")
    for limit in (1, 100):
        with pytest.raises(RewardError, match=naming(f"reward_model.memory_limit_mb={limit}")):
            RewardProcess(reward, memory_limit_mb=limit).start()


def test_the_machine_kills_a_scorer_before_the_run(process: RewardProcess):
    assert run(process, "result = float(open('/proc/self/oom_score_adj').read())").score == 1000.0


def test_a_flood_of_output_neither_blocks_nor_floods(
    process: RewardProcess, capsys: pytest.CaptureFixture[str]
):
    outcome = run(process, "for _ in range(20_000): print('flood ' * 20)\nresult = 5.0")
    assert outcome.score == 5.0
    assert run(process, "print('next')").status == "scored"
    process.close()
    text = capsys.readouterr().err
    assert text.startswith("flood flood")
    assert text.count("prints too much") == 1
    assert "next" in text
    assert len(text) < 20_000


def test_output_cannot_be_taken_for_an_answer(process: RewardProcess, capfd: pytest.CaptureFixture[str]):
    outcome = run(process, "import os, sys\nos.write(1, b'x' * 100)\nsys.__stdout__.write('y')\nresult = 5.0")
    assert outcome == Outcome("scored", 5.0)
    assert run(process, "result = 6.0").score == 6.0


def test_a_forked_child_does_not_answer_for_its_parent(process: RewardProcess):
    for number in (1.0, 2.0, 3.0):
        assert run(process, f"import os\nos.fork()\nresult = {number}").score == number


@pytest.mark.parametrize("ending", ["os._exit(2)", "while True: pass", "pass"])
def test_no_child_of_a_scorer_survives(process: RewardProcess, running: Running, ending: str):
    process.timeout_s = TIMEOUT_S if "while" in ending else 30.0
    run(process, f"import os\n{STRAY}\nif os.fork() == 0:\n    os.execlp('sleep', 'sleep', '600')\n{ending}")
    process.close()
    assert none_within(running, 60.0)


# It leaves its session and its environment, and is waited for, so that nothing is forked at the end.
STARTS = """
import glob, subprocess, time
subprocess.Popen({command}, env={{}})
def is_there():
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if open(path, "rb").read() == {line}:
                return True
        except OSError:
            pass
while not is_there():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize("ending", ["while True: pass", "pass"])
def test_no_descendant_in_a_separate_session_and_environment_survives(
    process: RewardProcess, shell: bool, ending: str
):
    seconds = f"600.{uuid.uuid4().int % 10**9}"  # other tests run the same program at the same time
    command = ["sh", "-c", f"setsid sleep {seconds}; true"] if shell else ["setsid", "sleep", seconds]
    line = f"sleep {seconds}"
    process.start()
    process.timeout_s = 2.0 if "while" in ending else 30.0
    run(process, STARTS.format(command=command, line=(line.replace(" ", "\0") + "\0").encode()) + ending)
    if ending == "pass":
        assert len(commands(line)) == 1
    process.close()
    assert commands(line) == set()


def commands(line: str) -> set[int]:
    """Ids of the living processes with this command line."""
    wanted = line.replace(" ", "\0").encode() + b"\0"
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if (entry / "cmdline").read_bytes() == wanted:
                found.add(int(entry.name))
    return found


def test_a_process_that_died_between_two_samples_is_not_charged_to_the_next(process: RewardProcess):
    code = "import os, threading\nthreading.Timer(0.05, os._exit, [1]).start()\nresult = float(os.getpid())"
    pid = int(run(process, code).score)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its environment in /proc is empty before it has ended
    assert run(process, "result = 3.0") == Outcome("scored", 3.0)


def test_a_closed_process_runs_exit_handlers_and_starts_again_when_needed(
    process: RewardProcess, running: Running, tmp_path: Path
):
    run(process, f"import atexit, pathlib\natexit.register(pathlib.Path({str(tmp_path / 'bye')!r}).touch)")
    process.close()
    process.close()
    assert (tmp_path / "bye").exists()
    assert running() == []
    assert run(process, "result = 3.0").score == 3.0


def test_garbage_collection_ends_the_process(run_response: Callable[..., Any], running: Running):
    process = RewardProcess(run_response)
    run(process, "pass")
    assert len(running()) == 1
    del process
    assert none_within(running, 60.0)


def test_a_function_that_cannot_be_pickled_is_refused_at_once_by_name():
    lock = threading.Lock()
    own, part = Function(lambda **sample: lock, "my function"), Function(lambda response: 0, "my part")
    with pytest.raises(ConfigError, match=naming("my function", "my part", "lock")):
        RewardProcess(Scorer(own, {"part": part}))


@pytest.mark.parametrize(
    ("code", "start_timeout_s", "message"),
    [
        ("import time\ntime.sleep(600)", 1.0, "1 s"),
        ("import os\nos._exit(7)", 60.0, "exit status 7"),
    ],
)
def test_a_module_that_misbehaves_in_the_process_stops_the_run(
    tmp_path: Path, running: Running, code: str, start_timeout_s: float, message: str
):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**sample):\n    return 1.0\n")
    reward = load_custom_reward(str(path))
    path.write_text(code)
    process = RewardProcess(reward, start_timeout_s=start_timeout_s)
    with pytest.raises(RewardError, match=message):
        process.start()


def test_a_process_that_is_killed_as_it_starts_is_started_again(tmp_path: Path, running: Running):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**sample):\n    return 1.0\n")
    reward = load_custom_reward(str(path))
    path.write_text(
        f"import os\nwith open({str(tmp_path / 'starts')!r}, 'a') as starts:\n    starts.write('x')\n"
        f"if os.path.getsize({str(tmp_path / 'starts')!r}) < 3:\n    os.kill(os.getpid(), 9)\n"
        "def compute_score(**sample):\n    return 2.0\n"
    )
    with contextlib.closing(RewardProcess(reward)) as process:
        assert process.evaluate(Sample("d", "")).score == 2.0


def test_a_custom_file_is_run_from_its_path(tmp_path: Path, running: Running):
    path = tmp_path / "reward.py"
    path.write_text("import os\ndef compute_score(**sample):\n    return {'score': 1, 'id': os.getpid()}\n")
    with contextlib.closing(RewardProcess(load_custom_reward(str(path)))) as process:
        assert process.evaluate(Sample("d", "")).parts["id"] not in (0, os.getpid())


SCRIPT = """
import os, sys
from strop.rewards.worker.pool import RewardProcess
from strop.rewards.arguments import Sample

def score(solution_str, **rest):
    exec(solution_str, {})
    return 4.0

process = RewardProcess(score, timeout_s=600)
print(process.evaluate(Sample("d", "")).score, flush=True)
"""


def start_script(tmp_path: Path, ending: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(ending))
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ending", ["", "sys.exit(1)", "1 / 0"])
def test_a_script_that_defines_its_scorer_leaves_no_process(tmp_path: Path, running: Running, ending: str):
    with start_script(tmp_path, ending) as script:
        assert script.stdout is not None
        assert script.stdout.read() == "4.0\n"
    assert none_within(running, 60.0)


@pytest.mark.parametrize("code", ["while True: pass", HANG_IN_C, "import os\nos.fork()\nwhile True: pass"])
def test_when_the_program_is_killed_the_scorer_goes_with_it(tmp_path: Path, running: Running, code: str):
    with start_script(tmp_path, f"process.evaluate(Sample('d', {code!r}))") as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "4.0\n"
        deadline = time.monotonic() + 60
        while len(running()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        script.send_signal(signal.SIGKILL)
    assert none_within(running, 60.0)


def test_a_fork_of_the_program_does_not_end_the_process(process: RewardProcess):
    run(process, "pass")
    child = os.fork()
    if child == 0:
        process.close()
        os._exit(0)
    os.waitpid(child, 0)
    before = process._child
    assert run(process, "result = 3.0").score == 3.0
    assert process._child is before


def test_imports_of_a_scorer_happen_before_the_deadline_of_the_first_sample(running: Running):
    """Many processes that load at once on few cores would otherwise all time out, and load again."""
    pytest.importorskip("math_verify")
    scorer = BuiltInScorer("math", {"method": "math-verify"})

    def look(scorer: BuiltInScorer = scorer, **sample: Any) -> float:
        return float("sympy" in sys.modules)

    with contextlib.closing(RewardProcess(look)) as process:
        assert process.evaluate(Sample("d", "")).score == 1.0


def test_output_cannot_control_the_terminal(process: RewardProcess, capsys: pytest.CaptureFixture[str]):
    assert run(
        process, r"print('\x1b[2J\x9b31m red'); print('\x1b]0;title\x07', file=__import__('sys').stderr)"
    )
    process.close()
    text = capsys.readouterr().err
    assert r"\x1b[2J\x9b31m red" in text
    assert not any(character in text for character in "\x1b\x9b\x07")

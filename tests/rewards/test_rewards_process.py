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
from strop.rewards.custom import load_custom_reward
from strop.rewards.process_tree import describe_exit
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Outcome, Sample

from messages import mentions, naming

Running = Callable[[], list[int]]
TIMEOUT_S = 0.4

HANG_IN_C = "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"  # holds the interpreter's lock
STRAY = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)"


@pytest.fixture
def process(running: Running, run_response: Callable[..., Any]) -> Iterator[RewardProcess]:
    with RewardProcess(run_response, timeout_s=30.0) as process:
        yield process


def run(process: RewardProcess, code: str) -> Outcome:
    return process.evaluate(Sample("d", textwrap.dedent(code)))


def test_scores_and_parts_come_back(process: RewardProcess):
    assert run(process, "result = 0.5") == Outcome("scored", 0.5)
    assert run(process, "result = {'score': 2, 'format': True}") == Outcome("scored", 2.0, {"format": 1.0})


def test_the_scorer_sees_the_ground_truth_and_the_extra_info(process: RewardProcess):
    sample = Sample("d", "result = ground_truth * extra_info['factor']", 7, {"factor": 2})
    assert process.evaluate(sample).score == 14.0


def test_one_process_serves_many_samples(process: RewardProcess, running: Running):
    run(process, "pass")
    first = running()
    assert len(first) == 1
    run(process, "1 / 0")
    assert running() == first


def test_the_process_imports_neither_torch_nor_the_main_module(process: RewardProcess):
    outcome = run(process, "import sys; result = len({'torch', 'transformers', 'pytest'} & set(sys.modules))")
    assert outcome.score == 0.0


def test_a_scorer_that_raises_is_told_with_its_traceback(process: RewardProcess):
    outcome = run(process, "1 / 0")
    assert outcome.status == "raised"
    assert "ZeroDivisionError: division by zero" in outcome.error


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(600)", HANG_IN_C])
def test_a_scorer_that_hangs_is_cut_off_at_its_deadline(process: RewardProcess, code: str):
    process.start()
    process.timeout_s = TIMEOUT_S
    started = time.monotonic()
    outcome = run(process, code)
    assert TIMEOUT_S <= time.monotonic() - started < TIMEOUT_S + 2
    assert outcome.status == "timeout"
    assert mentions(outcome.error, "0.4 s")
    process.timeout_s = 30.0
    assert run(process, "result = 3.0").score == 3.0


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import os\nos._exit(3)", "exit status 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "signal SIGSEGV"),
    ],
)
def test_a_scorer_that_ends_its_process_costs_one_sample(process: RewardProcess, code: str, ending: str):
    outcome = run(process, code)
    assert outcome.status == "crashed"
    assert ending in outcome.error
    assert run(process, "result = 3.0").score == 3.0


def test_a_crash_is_told_with_the_last_output(process: RewardProcess):
    outcome = run(process, "import os\nprint('just before', flush=True)\nos._exit(3)")
    assert outcome.error.endswith("exit status 3; the last it printed:\njust before")


def test_leaving_with_sys_exit_keeps_the_process(process: RewardProcess, running: Running):
    run(process, "pass")
    first = running()
    assert run(process, "import sys\nsys.exit(1)").status == "raised"
    assert running() == first


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


def test_an_endless_flood_is_a_timeout(process: RewardProcess):
    process.timeout_s = TIMEOUT_S
    assert run(process, "while True: print('flood' * 1000)").status == "timeout"
    process.timeout_s = 30.0
    assert run(process, "result = 3.0").score == 3.0


def test_output_cannot_be_taken_for_an_answer(process: RewardProcess, capfd: pytest.CaptureFixture[str]):
    outcome = run(process, "import os, sys\nos.write(1, b'x' * 100)\nsys.__stdout__.write('y')\nresult = 5.0")
    assert outcome == Outcome("scored", 5.0)
    assert run(process, "result = 6.0").score == 6.0


def test_the_scorer_finds_an_empty_standard_input(process: RewardProcess):
    assert "EOFError" in run(process, "input()").error


def test_a_forked_child_does_not_answer_for_its_parent(process: RewardProcess):
    for number in (1.0, 2.0, 3.0):
        assert run(process, f"import os\nos.fork()\nresult = {number}").score == number


def test_a_crash_is_seen_although_a_child_holds_the_pipe(process: RewardProcess):
    process.start()
    started = time.monotonic()
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nos._exit(3)"
    assert "exit status 3" in run(process, code).error
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("ending", ["os._exit(2)", "while True: pass", "pass"])
def test_no_child_of_a_scorer_survives(process: RewardProcess, running: Running, ending: str):
    process.timeout_s = TIMEOUT_S if "while" in ending else 30.0
    run(process, f"import os\n{STRAY}\nif os.fork() == 0:\n    os.execlp('sleep', 'sleep', '600')\n{ending}")
    process.close()
    assert none_within(running, 2.0)


# It leaves its session and its environment, and is waited for, so that nothing is forked when the end comes.
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
def test_no_descendant_in_a_session_and_an_environment_of_its_own_survives(
    process: RewardProcess, shell: bool, ending: str
):
    seconds = f"600.{uuid.uuid4().int % 10**9}"  # other tests run the same program at the same time
    command = ["sh", "-c", f"setsid sleep {seconds}; true"] if shell else ["setsid", "sleep", seconds]
    line = f"sleep {seconds}"
    process.start()
    process.timeout_s = 5.0 if "while" in ending else 30.0
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


def test_a_process_that_died_between_two_samples_is_not_charged_to_the_next(
    process: RewardProcess, running: Running
):
    run(process, "import os, threading\nthreading.Timer(0.05, os._exit, [1]).start()")
    assert none_within(running, 5.0)
    assert run(process, "result = 3.0") == Outcome("scored", 3.0)


def test_a_sample_that_cannot_be_sent_is_one_bad_sample(process: RewardProcess):
    outcome = process.evaluate(Sample("d", "pass", None, {"lock": threading.Lock()}))
    assert outcome.status == "raised"
    assert "cannot be sent" in outcome.error


def test_large_samples_pass(process: RewardProcess):
    sample = Sample("d", "result = len(extra_info)", None, "x" * 3_000_000)
    assert process.evaluate(sample).score == 3_000_000


def test_a_scorer_that_writes_into_the_pipe_costs_one_sample(process: RewardProcess):
    code = """
    import os
    for descriptor in range(3, 12):
        try:
            os.write(descriptor, b'forged message' * 10)
        except OSError:
            pass
    """
    assert run(process, code).status == "crashed"
    assert run(process, "result = 3.0").score == 3.0


def test_a_closed_process_starts_again_when_it_is_needed(process: RewardProcess, running: Running):
    run(process, "pass")
    process.close()
    process.close()
    assert running() == []
    assert run(process, "result = 3.0").score == 3.0


def test_exit_handlers_run_at_close(process: RewardProcess, tmp_path: Path):
    run(process, f"import atexit, pathlib\natexit.register(pathlib.Path({str(tmp_path / 'bye')!r}).touch)")
    process.close()
    assert (tmp_path / "bye").exists()


def test_a_dropped_object_takes_its_process_along(run_response: Callable[..., Any], running: Running):
    process = RewardProcess(run_response)
    run(process, "pass")
    assert len(running()) == 1
    del process
    assert none_within(running, 2.0)


def test_ctrl_c_while_waiting_does_not_mix_up_answers(
    process: RewardProcess, monkeypatch: pytest.MonkeyPatch
):
    process.start()
    with monkeypatch.context() as patch:

        def interrupt(*arguments: object) -> bytes:
            raise KeyboardInterrupt

        patch.setattr("strop.rewards.worker.process.wire.Lane.exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(process, "result = 1.0")
    assert run(process, "result = 2.0").score == 2.0


def test_a_function_that_cannot_be_pickled_is_refused_at_once():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=naming("lock")):
        RewardProcess(lambda **sample: lock)


def test_a_function_that_cannot_be_loaded_there_stops_the_run(tmp_path: Path, running: Running):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**sample):\n    return 1.0\n")
    reward = load_custom_reward(str(path))
    path.unlink()
    with (
        RewardProcess(reward) as process,
        pytest.raises(RewardError, match=naming("no such file")),
    ):
        process.evaluate(Sample("d", ""))


@pytest.mark.parametrize(
    ("code", "start_timeout_s", "message"),
    [
        ("import time\ntime.sleep(600)", 1.0, "1 s"),
        ("import os\nos._exit(7)", 60.0, "exit status 7"),
    ],
)
def test_a_module_that_misbehaves_there_stops_the_run(
    tmp_path: Path, running: Running, code: str, start_timeout_s: float, message: str
):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**sample):\n    return 1.0\n")
    reward = load_custom_reward(str(path))
    path.write_text(code)
    process = RewardProcess(reward, start_timeout_s=start_timeout_s)
    with pytest.raises(RewardError, match=message):
        process.start()


def test_a_custom_file_is_run_from_its_path(tmp_path: Path, running: Running):
    path = tmp_path / "reward.py"
    path.write_text("import os\ndef compute_score(**sample):\n    return {'score': 1, 'id': os.getpid()}\n")
    with RewardProcess(load_custom_reward(str(path))) as process:
        assert process.evaluate(Sample("d", "")).parts["id"] not in (0, os.getpid())


SCRIPT = """
import os, sys
from strop.rewards.worker.process import RewardProcess
from strop.rewards.worker.records import Sample

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
def test_a_script_with_its_own_function_ends_without_a_trace(tmp_path: Path, running: Running, ending: str):
    with start_script(tmp_path, ending) as script:
        assert script.stdout is not None
        assert script.stdout.read() == "4.0\n"
    assert none_within(running, 2.0)


@pytest.mark.parametrize("code", ["while True: pass", HANG_IN_C, "import os\nos.fork()\nwhile True: pass"])
def test_when_the_program_is_killed_the_scorer_goes_with_it(tmp_path: Path, running: Running, code: str):
    with start_script(tmp_path, f"process.evaluate(Sample('d', {code!r}))") as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "4.0\n"
        time.sleep(0.2)
        assert len(running()) >= 2
        script.send_signal(signal.SIGKILL)
    assert none_within(running, 5.0)


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


def test_exits_are_described():
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(-60) == "signal 60"

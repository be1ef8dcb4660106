from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest
from lock_holder import holding

from strop.cli import train as restart
from strop.errors import ConfigError
from strop.trainer.run_folder import LOCK_FILE, run_lock


def test_a_second_process_is_refused_with_the_folder_and_what_to_do(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with holding(tmp_path / "run"):
        for folder in (tmp_path / "run", tmp_path / "link"):
            with pytest.raises(ConfigError) as caught, run_lock(folder):
                raise AssertionError("two runs in one folder")
            message = str(caught.value)
            assert f"trainer.default_local_dir={tmp_path / 'run'}" in message
            assert "name another folder" in message
            assert "\n" not in message
    with run_lock(tmp_path / "run"):
        pass


def test_a_killed_process_leaves_it_free_also_when_its_children_live_on(tmp_path):
    children = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
if not (child := os.fork()):
    time.sleep(600)
print(child, flush=True)
"""
    with holding(tmp_path, children) as holder:
        pids = [int(holder.stdout.readline()) for _ in range(2)]
        try:
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
            with run_lock(tmp_path):
                pass
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_run_inside_a_command_takes_it_again_and_an_error_gives_it_back(tmp_path):
    tried = "from pathlib import Path; from strop.trainer.run_folder import run_lock\n"
    tried += f"with run_lock(Path({str(tmp_path)!r})): print('free')"

    def is_free() -> bool:
        return "free" in subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True).stdout

    with contextlib.suppress(KeyError), run_lock(tmp_path):
        with run_lock(tmp_path):
            pass
        assert not is_free()
        raise KeyError
    assert is_free()


def test_another_thread_is_another_run(tmp_path):
    refused = []

    def start() -> None:
        try:
            with run_lock(tmp_path):
                pass
        except ConfigError as error:
            refused.append(str(error))

    with run_lock(tmp_path):
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    (message,) = refused
    assert str(tmp_path) in message


@pytest.mark.parametrize("answer", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog, answer):
    def flock(*arguments):
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):  # nothing that would stop the next start is left behind
        caplog.clear()
        with run_lock(tmp_path):
            pass
        assert str(tmp_path) in caplog.text


def test_any_other_failure_is_raised_unchanged(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(IsADirectoryError), run_lock(tmp_path):
        pass


def test_no_attempt_is_made_in_a_folder_where_another_runs(tmp_path):
    from strop.config.load import load_config

    attempts = []
    with holding(tmp_path), pytest.raises(ConfigError, match=str(tmp_path)):
        restart.with_restarts(load_config([f"trainer.default_local_dir={tmp_path}"]), attempts.append)
    assert attempts == []

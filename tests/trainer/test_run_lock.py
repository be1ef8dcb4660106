from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lock_holder import holding

from strop.config.load import load_config
from strop.errors import ConfigError
from strop.trainer import commands, run_folder
from strop.trainer.run_folder import run_lock

import forked
from messages import naming


@pytest.fixture
def short_wait(monkeypatch):
    monkeypatch.setattr(run_folder, "_LOCK_WAIT_S", 0.1)


def _take(folder: Path) -> None:
    with run_lock(folder):
        pass


def test_a_killed_process_leaves_it_free_also_when_its_children_live_on(tmp_path):
    children = """
import os, subprocess
started = subprocess.Popen(["sleep", "600"]).pid
if not (child := os.fork()):
    time.sleep(600)
print(started, child, flush=True)
"""
    with holding(tmp_path, children) as holder:
        while len(lines := holder.stdout.splitlines()) < 2:
            time.sleep(0.02)
        pids = [int(number) for number in lines[1].split()]
        try:
            holder.kill()
            holder.wait()
            assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
            _take(tmp_path)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_run_inside_a_command_takes_it_again_and_an_error_releases_it(tmp_path):
    with contextlib.suppress(KeyError), run_lock(tmp_path):
        _take(tmp_path)
        assert forked.run(_take, tmp_path).returncode != 0
        raise KeyError
    assert forked.run(_take, tmp_path).returncode == 0


def test_another_thread_is_another_run_through_a_link_too(tmp_path, short_wait):
    (tmp_path / "link").symlink_to(tmp_path)
    with (
        run_lock(tmp_path),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ConfigError, match=naming(tmp_path)),
    ):
        pool.submit(_take, tmp_path / "link").result()


@pytest.mark.parametrize("answer", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog, answer):
    def flock(*arguments):
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):  # nothing that would stop the next start is left behind
        caplog.clear()
        _take(tmp_path)
        assert str(tmp_path) in caplog.text


def test_no_attempt_is_made_in_a_folder_where_another_runs(tmp_path, short_wait):
    attempts = []
    with holding(tmp_path), pytest.raises(ConfigError, match=str(tmp_path)):
        commands.with_restarts(load_config([f"trainer.default_local_dir={tmp_path}"]), attempts.append)
    assert attempts == []

"""Several processes and one download cache, over real HTTP: one download, and kill -9 in the middle of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CONTENT = bytes(range(256)) * 4096  # 1 MiB
DOWNLOAD = """
import sys
from strop.data.fetch import local_path
print(local_path(sys.argv[1], sys.argv[2]))
"""
WAIT_S = 60


class Server(ThreadingHTTPServer):
    """Serves CONTENT: the first half at once, the second when ``go_on`` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.downloads = 0
        self.half_way = threading.Event()
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/model.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.send_header("ETag", '"1"')
        self.end_headers()

    def do_GET(self) -> None:
        self.server.downloads += 1
        self.do_HEAD()
        half = len(CONTENT) // 2
        self.wfile.write(CONTENT[:half])
        self.wfile.flush()
        self.server.half_way.set()
        if self.server.go_on.wait(WAIT_S):
            self.wfile.write(CONTENT[half:])

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()


def start(server: Server, cache: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", DOWNLOAD, server.url, str(cache)],
        env={**os.environ, "no_proxy": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen) -> Path:
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    return Path(out.strip())


def test_two_processes_at_once_download_once(server, tmp_path):
    first = start(server, tmp_path)
    assert server.half_way.wait(WAIT_S)
    second = start(server, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the first one
        second.wait(timeout=2)
    server.go_on.set()
    path = finished(first)
    assert finished(second) == path
    assert path.read_bytes() == CONTENT
    assert server.downloads == 1


def test_a_process_killed_in_a_download_leaves_no_half_file_and_no_lock(server, tmp_path):
    killed = start(server, tmp_path)
    assert server.half_way.wait(WAIT_S)
    waiting = start(server, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=2)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(WAIT_S) == -signal.SIGKILL
    # Nothing that looks whole; the one that waited gets the lock and starts again.
    assert [path.name for path in tmp_path.rglob("model.bin") if ".partial" not in str(path.parent)] == []
    server.go_on.set()
    path = finished(waiting)
    assert path.read_bytes() == CONTENT
    assert server.downloads == 2
    assert list(tmp_path.rglob("*.partial")) == []
    assert finished(start(server, tmp_path)) == path
    assert server.downloads == 2

"""Local Hugging Face hub server, and hand-made hub caches."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_by_hand(cache: Path, name: str, model: Path, commit: str = COMMIT) -> Path:
    """Copy a model into a hub cache as a download by another program would; return the snapshot folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    shutil.copytree(model, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    return snapshot


class Hub(ThreadingHTTPServer):
    """Server of one model; ``requests`` lists all requests, ``files`` the downloaded files."""

    daemon_threads = True

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.content = name, files
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def files(self) -> list[str]:
        return sorted(path.split(COMMIT + "/")[1] for path in self.requests if path.startswith("GET /org"))


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve ``hub`` in a thread for the duration of the block."""
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.server
        hub.requests.append(f"{self.command} {path}")
        if path == f"/api/models/{hub.name}/revision/main":
            self._send(json.dumps({"_id": "0", "id": hub.name, "modelId": hub.name, "sha": COMMIT}).encode())
        elif path == f"/api/models/{hub.name}/tree/{COMMIT}":
            files = [
                {"type": "file", "path": file, "size": len(content), "oid": _digest(content)}
                for file, content in hub.content.items()
            ]
            self._send(json.dumps(files).encode())
        elif (file := path.removeprefix(f"/{hub.name}/resolve/{COMMIT}/")) in hub.content:
            self._send(hub.content[file])
        else:
            self._send(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})

    def _send(self, content: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        facts = {
            "Content-Length": str(len(content)),
            "ETag": f'"{_digest(content)}"',
            "X-Repo-Commit": COMMIT,
        }
        for key, value in {**facts, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()

"""Local Hugging Face hub servers, for downloads and for uploads, and hand-made hub caches."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
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
def serving(hub: Any) -> Iterator[Any]:
    """Serve ``hub`` in a thread for the duration of the block."""
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class UploadHub(ThreadingHTTPServer):
    """Server that takes repositories, branches and commits of whole files from one user.

    ``commits`` lists (repository, branch, message, {path: content}); ``refuse`` maps a part of a request's
    path to the status that refuses it.
    """

    daemon_threads = True

    def __init__(self, user: str = "ada", token: str = "hf_right") -> None:
        super().__init__(("127.0.0.1", 0), _UploadHandler)
        self.user, self.token = user, token
        self.requests: list[str] = []
        self.repositories: dict[str, dict] = {}
        self.branches: set[tuple[str, str]] = set()
        self.commits: list[tuple[str, str, str, dict[str, bytes]]] = []
        self.refuse: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _UploadHandler(BaseHTTPRequestHandler):
    server: UploadHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.server
        hub.requests.append(f"{self.command} {path}")
        for part, status in hub.refuse.items():
            if part in path:
                return self._send({"error": f"the hub refuses {part}"}, status)
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._send({"error": "Invalid credentials"}, 401)
        if path == "/api/whoami-v2":
            return self._send({"type": "user", "name": hub.user, "auth": {}})
        if path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or hub.user}/{wanted['name']}"
            known = name in hub.repositories
            hub.repositories.setdefault(name, wanted)
            return self._send({"url": f"{hub.url}/{name}", "id": name}, 409 if known else 200)
        _, _, _, owner, name, action, branch = path.split("/", 6)
        repository = f"{owner}/{name}"
        if action == "branch":
            known = (repository, branch) in hub.branches
            hub.branches.add((repository, branch))
            return self._send({}, 409 if known else 200)
        if branch != "main" and (repository, branch) not in hub.branches:
            return self._send({"error": "Invalid rev id"}, 404)
        if action == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self._send({"files": [{"path": name, **plain} for name in names]})
        assert action == "commit"
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        hub.commits.append((repository, branch, lines[0]["value"]["summary"], files))
        url = f"{hub.url}/{repository}/commit/{COMMIT}"
        return self._send({"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _send(self, content: dict, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_) -> None:
        pass


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

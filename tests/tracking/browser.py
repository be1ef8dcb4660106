"""A headless chromium, driven by chromedriver's WebDriver protocol over HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WAIT_S = 120


class Browser:
    """One tab; a context manager."""

    def __init__(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._url = f"http://127.0.0.1:{port}"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self._profile.name}"]
        flags += ["--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking"]
        options: dict[str, Any] = {"args": flags, "binary": CHROMIUM}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self._wait_for_driver()
            found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})
            self._url += f"/session/{found['sessionId']}"
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            self._cdp("Emulation.setDeviceMetricsOverride", metrics)
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            self._cdp("Emulation.setEmulatedMedia", {"features": scheme})
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        """End the tab, chromium and the driver."""
        try:
            if "/session/" in self._url:
                self._ask("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait()
            self._profile.cleanup()

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript with ``return``."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, expression: str) -> Any:
        """Wait until the JavaScript expression is true, and return it."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.run(f"return {expression}")):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {expression}\n{self.text()}\n{self.errors()}")
            time.sleep(0.1)
        return found

    def text(self) -> str:
        return self.run("return document.body.innerText")

    def errors(self) -> list[str]:
        """Return messages of the browser's console since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]",
            selector,
        )
        self._cdp("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": box[0], "y": box[1]})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot", None)))

    def _cdp(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: Any) -> Any:
        data = None if method in ("GET", "DELETE") else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                return self._ask("GET", "/status", None)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def url_of(server):
    """Return the address of a page's server, with its token."""
    return server.address.url + server.path

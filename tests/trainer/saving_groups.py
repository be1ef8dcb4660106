"""Worker groups for checkpoint tests: the state is a few numbers, the writing is real."""

from __future__ import annotations

import threading
from pathlib import Path

STATE = {"global_step": 3, "best_score": None, "seconds": 1.5}


class Group:
    """Group whose state is one number; a background save copies it, and writes when ``may_write`` is set."""

    def __init__(self, number: int, failure: Exception | None = None) -> None:
        self.number = number
        self.failure = failure
        self.may_write = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save_checkpoint(self, folder: Path, background: bool = False) -> None:
        if not background:
            self._write(folder, self.number)
            return
        assert self._thread is None, "two saves at once"
        self._thread = threading.Thread(target=self._write_later, args=(folder, self.number), daemon=True)
        self._thread.start()

    def save_is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish_save(self) -> None:
        if self._thread is not None:
            self.may_write.set()
            self._thread.join()
            self._thread = None
            self.may_write.clear()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load_checkpoint(self, folder: Path) -> None:
        self.number = int((folder / "state").read_text())

    def let_it_write(self) -> None:
        """Return when the background save, if any, is done."""
        self.may_write.set()
        if self._thread is not None:
            self._thread.join()

    def _write_later(self, folder: Path, number: int) -> None:
        self.may_write.wait()
        try:
            self._write(folder, number)
        except Exception as error:  # noqa: BLE001 - raised by finish_save
            self._error = error

    def _write(self, folder: Path, number: int) -> None:
        (folder / "huggingface").mkdir(parents=True)
        (folder / "huggingface" / "config.json").write_text("{}")
        (folder / "huggingface" / "model.safetensors").write_bytes(b"weights" * 100)
        (folder / "state").write_text(str(number))
        if self.failure is not None:
            raise self.failure

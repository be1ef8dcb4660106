"""What a sandboxed program may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox; all processes in it together, unless a line says "each"."""

    wall_s: float = 6.0
    """From the start of the sandbox; below a reward function's deadline, so that this one comes first."""
    memory_mb: int = 512
    """Of all processes together, and also the address space of each."""
    processes: int = 24
    """Processes and threads."""
    file_mb: int = 16
    """The size of a file, each; ``/tmp`` and ``/dev/shm`` hold as much in all."""
    open_files: int = 64
    """Each process."""
    output_bytes: int = 4 << 20
    """Of an answer to the tests, or of one program's standard output."""

    def guest_settings(self) -> dict[str, float]:
        """What the trusted start of a sandboxed process sets for itself, for good."""
        return {
            "cpu_s": max(1, int(self.wall_s + 1)),
            "memory_bytes": self.memory_mb << 20,
            "processes": self.processes,
            "file_bytes": self.file_mb << 20,
            "open_files": self.open_files,
            "output_bytes": self.output_bytes,
        }

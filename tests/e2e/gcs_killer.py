"""A tracker that kills the head of the private Ray cluster when the last iteration is logged."""

from __future__ import annotations

import psutil


class Killer:
    def __init__(self, run):
        self.last = run.total_steps

    def log(self, step, metrics):
        if step == self.last:
            [gcs] = [
                child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"
            ]
            gcs.kill()

    def close(self):
        pass

"""Whether all nodes see the folder that checkpoints are written to."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import CheckpointError

_PATIENCE_S = 5.0
_LOOK_AGAIN_S = 0.5


def require_shared_folder(
    folder: Path, groups: Mapping[str, Any], *, patience_s: float = _PATIENCE_S
) -> None:
    """``CheckpointError`` naming the nodes whose workers do not see a file that the driver writes there.

    To be called when the workers' processes run and before they load a model. ``patience_s``: network file
    systems may show a new file with a delay.
    """
    folder = folder.expanduser().absolute()
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("every worker must see this file\n")
    except OSError as error:
        with contextlib.suppress(OSError):  # on a full disk it is there, and empty
            probe.unlink(missing_ok=True)
        raise CheckpointError(f"trainer.default_local_dir={folder} cannot be written: {error}") from error
    try:
        deadline = time.monotonic() + patience_s
        while nodes := _nodes_without(probe, groups):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"trainer.default_local_dir={folder} is not shared: a file that the driver wrote there "
                    f"on {socket.gethostname()} is not seen on {', '.join(nodes)}. All processes write "
                    "their part of a checkpoint into one folder: set it to one on a file system that every "
                    "node mounts at the same path (NFS, Lustre, ...); trainer.default_hdfs_dir takes copies"
                )
            time.sleep(_LOOK_AGAIN_S)
    finally:
        probe.unlink(missing_ok=True)


def _nodes_without(path: Path, groups: Mapping[str, Any]) -> list[str]:
    return sorted({node for group in groups.values() for node in group.nodes_without(path)})

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from small_disk import small_disk

from strop.errors import CheckpointError
from strop.trainer.run_folder import require_shared_folder

from messages import mentions, naming


class Nodes:
    """Group whose nodes have their own disks: a node sees the files below its root."""

    def __init__(self, roots: dict[str, Path], delay: int = 0) -> None:
        self.roots = roots
        self.delay = delay
        self.probed = []

    def nodes_without(self, path: Path) -> list[str]:
        self.probed.append((path, path.exists()))
        if len(self.probed) <= self.delay:
            return list(self.roots)
        return [node for node, root in self.roots.items() if not path.is_relative_to(root)]


def test_a_folder_that_all_nodes_see_passes_and_nothing_is_left_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = Nodes({"a": tmp_path, "b": tmp_path})
    require_shared_folder(Path("run"), {"actor": group})
    ((probe, existed),) = group.probed
    assert existed
    assert probe.parent == tmp_path / "run"  # absolute: workers have other working directories
    assert list((tmp_path / "run").iterdir()) == []


def test_nodes_with_a_disk_of_their_own_are_named_with_the_path_and_the_remedy(tmp_path):
    groups = {
        "actor": Nodes({"gpu-1 (10.0.0.1)": tmp_path, "gpu-2 (10.0.0.2)": tmp_path / "other"}),
        "critic": Nodes({"gpu-3 (10.0.0.3)": tmp_path / "other"}),
    }
    with pytest.raises(CheckpointError) as caught:
        require_shared_folder(tmp_path / "run", groups, patience_s=0)
    message = str(caught.value)
    assert mentions(message, f"trainer.default_local_dir={tmp_path / 'run'}")
    assert mentions(message, socket.gethostname(), "gpu-2 (10.0.0.2)", "gpu-3 (10.0.0.3)")
    assert "every node mounts" in message
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_system_that_shows_new_files_late_is_given_time(tmp_path):
    group = Nodes({"a": tmp_path}, delay=1)
    require_shared_folder(tmp_path / "run", {"actor": group})
    assert len(group.probed) == 2


def test_a_probe_that_found_no_room_is_not_left_there(tmp_path):
    with small_disk(tmp_path / "disk", "4k") as disk:
        (disk / "fill").write_bytes(bytes(4096))
        with pytest.raises(CheckpointError, match=naming("No space left on device")):
            require_shared_folder(disk / "run", {})
        assert list((disk / "run").iterdir()) == []

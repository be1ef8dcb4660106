from __future__ import annotations

import errno
import json
import logging
import threading
import time
from pathlib import Path

import fsspec
import pyarrow.fs
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.memory import MemoryFileSystem
from saving_groups import STATE, Group

from strop.checkpoint import store as checkpoint
from strop.checkpoint.export import export
from strop.checkpoint.folder import verify
from strop.checkpoint.remote import RemoteCheckpoints, Uploader, download, find_checkpoint
from strop.checkpoint.store import Checkpoints
from strop.errors import CheckpointError, ConfigError, WorkerError

from messages import mentions, naming

REMOTE = "memory://bucket/run"


class ArrowLocal(ArrowFSWrapper):
    """The wrapper behind hdfs://, around a local disk: there is no Hadoop here."""

    protocol = "arrowlocal"

    def __init__(self, **options) -> None:
        super().__init__(pyarrow.fs.LocalFileSystem(), **options)


@pytest.fixture
def memory_fs():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


@pytest.fixture(params=["memory", "file", "arrowlocal", "plain"])
def url(request, memory_fs, tmp_path):
    fsspec.register_implementation("arrowlocal", ArrowLocal, clobber=True)
    folder = tmp_path / "remote"
    if request.param == "plain":
        return str(folder)
    return REMOTE if request.param == "memory" else f"{request.param}://{folder}"


def filesystem(url: str):
    return fsspec.core.url_to_fs(url)


def names(url: str) -> list[str]:
    fs, root = filesystem(url)
    return sorted(path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False))


def read(url: str, name: str) -> bytes:
    fs, root = filesystem(url)
    return fs.cat_file(f"{root}/{name}")


def latest(url: str) -> str:
    return read(url, "latest_checkpointed_iteration.txt").decode()


def run_of(*steps: int, folder: Path, url: str, keep: int | None = None) -> None:
    group = Group(0)
    with Checkpoints(folder, remote=url, max_to_keep=keep) as checkpoints:
        for step in steps:
            group.number = step
            checkpoints.save(step, {"actor": group}, {**STATE, "global_step": step})


def test_whole_checkpoints_are_copied_and_only_the_newest_are_kept(url, tmp_path):
    run_of(1, 2, 3, folder=tmp_path / "run", url=url, keep=2)
    assert names(url) == ["global_step_2", "global_step_3", "latest_checkpointed_iteration.txt"]
    assert latest(url) == "3\n"
    local = tmp_path / "run" / "global_step_3"
    for path in (path for path in local.rglob("*") if path.is_file()):
        assert read(url, f"global_step_3/{path.relative_to(local)}") == path.read_bytes()


def test_auto_falls_back_to_the_remote_checkpoint(url, tmp_path):
    run_of(1, 2, folder=tmp_path / "run", url=url)
    checkpoints = Checkpoints(tmp_path / "elsewhere", remote=url)
    found = checkpoints.find("auto")
    assert found == tmp_path / "elsewhere" / "global_step_2"
    group = Group(0)
    assert checkpoints.load(found, {"actor": group})["global_step"] == 2
    assert group.number == 2
    # And from then on it is a local one.
    assert Checkpoints(tmp_path / "elsewhere").find("auto") == found


def test_a_named_remote_checkpoint_is_downloaded_once(url, tmp_path, monkeypatch):
    if "://" not in url:
        url = f"file://{url}"
    run_of(1, 2, folder=tmp_path / "run", url=url)
    checkpoints = Checkpoints(tmp_path / "elsewhere")
    found = checkpoints.find(f"{url}/global_step_1/")
    verify(found)
    assert found.name == "global_step_1"
    assert found.is_relative_to(tmp_path / "elsewhere" / "downloaded")
    group = Group(0)
    checkpoints.load(found, {"actor": group})
    assert group.number == 1
    inode = (found / "trainer.pt").stat().st_ino
    assert checkpoints.find(f"{url}/global_step_1") == found
    assert (found / "trainer.pt").stat().st_ino == inode
    assert checkpoints.find(f"{url}/global_step_2").name == "global_step_2"
    assert not found.exists()


@pytest.mark.parametrize(
    "name",
    ["../../escaped", "/tmp/escaped", "actor/../../escaped", "escaped", "manifest.json", "a b/c"],
)
def test_a_manifest_cannot_write_elsewhere(memory_fs, tmp_path, name):
    run_of(1, folder=tmp_path / "run", url=REMOTE)
    checkpoint = "/bucket/run/global_step_1"
    files = json.loads(memory_fs.cat_file(f"{checkpoint}/manifest.json"))
    memory_fs.pipe_file(f"{checkpoint}/manifest.json", json.dumps({**files, name: 4}).encode())
    before = sorted(tmp_path.rglob("*"))
    for fetch in (
        lambda: Checkpoints(tmp_path / "new").find(f"{REMOTE}/global_step_1"),
        lambda: Checkpoints(tmp_path / "new", remote=REMOTE).find("auto"),
        lambda: export(f"{REMOTE}/global_step_1", tmp_path / "model"),
    ):
        with pytest.raises(CheckpointError, match=naming("manifest.json", repr(name))):
            fetch()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_flipped_bit_of_a_remote_checkpoint_is_named(memory_fs, tmp_path):
    run_of(1, folder=tmp_path / "run", url=REMOTE)
    state = "/bucket/run/global_step_1/actor/state"
    memory_fs.pipe_file(state, bytes([memory_fs.cat_file(state)[0] ^ 1]))
    for folder, mode in (("named", f"{REMOTE}/global_step_1"), ("auto", "auto")):
        with pytest.raises(CheckpointError, match=naming("global_step_1", "actor/state")):
            Checkpoints(tmp_path / folder, remote=REMOTE).find(mode)


def test_a_download_that_fails_is_retried_from_where_it_was(memory_fs, tmp_path, monkeypatch, caplog):
    run_of(1, folder=tmp_path / "run", url=REMOTE)
    fetched, get, cat = [], memory_fs.get_file, memory_fs.cat_file
    refusals = {"get": 2, "cat": 1}

    def failing(kind, original):
        def call(path, *arguments, **options):
            if kind == "get":
                fetched.append(path.rpartition("/")[2])
            if path.endswith(("state", "manifest.json")) and refusals[kind]:
                refusals[kind] -= 1
                raise OSError("the line went dead")
            return original(path, *arguments, **options)

        return call

    monkeypatch.setattr(memory_fs, "get_file", failing("get", get))
    monkeypatch.setattr(memory_fs, "cat_file", failing("cat", cat))
    monkeypatch.setattr("strop.checkpoint.remote._RETRY_AFTER_S", (0.0, 0.0, 0.0))
    for folder, mode in (("named", f"{REMOTE}/global_step_1"), ("auto", "auto")):
        fetched.clear()
        refusals |= {"get": 2, "cat": 1}
        verify(Checkpoints(tmp_path / folder, remote=REMOTE).find(mode))
        assert fetched.count("state") == 3
        assert len(fetched) == len(set(fetched)) + 2
    assert caplog.text.count("the line went dead") == 6
    refusals["get"] = 9
    with pytest.raises(CheckpointError, match=naming("global_step_1", "the line went dead")):
        download(f"{REMOTE}/global_step_1", tmp_path / "copy")
    assert refusals["get"] == 5


def test_an_upload_that_is_made_up_for_does_not_name_an_older_checkpoint(memory_fs, tmp_path):
    run_of(1, 2, 3, folder=tmp_path / "run", url=REMOTE)
    memory_fs.rm("/bucket/run/global_step_1", recursive=True)
    with Checkpoints(tmp_path / "run", remote=REMOTE) as checkpoints:
        checkpoints.load(checkpoints.find("auto"), {"actor": Group(0)})
    assert RemoteCheckpoints(REMOTE).is_whole(1)
    assert latest(REMOTE) == "3\n"


def test_an_empty_or_absent_remote_folder_is_a_fresh_start(url, tmp_path):
    assert Checkpoints(tmp_path / "run", remote=url).find("auto") is None


@pytest.mark.parametrize("cut_off", [True, False])
def test_a_remote_checkpoint_without_a_whole_manifest_does_not_count(url, tmp_path, cut_off):
    run_of(1, 2, folder=tmp_path / "run", url=url)
    fs, root = filesystem(url)
    manifest = f"{root}/global_step_2/manifest.json"
    whole = fs.cat_file(manifest)
    fs.rm(manifest)
    if cut_off:
        fs.pipe_file(manifest, whole[: len(whole) // 2])
    assert RemoteCheckpoints(url).latest() == 1
    with pytest.raises(CheckpointError, match=naming("global_step_2")):
        download(RemoteCheckpoints(url).url_of(2), tmp_path / "copy")


@pytest.mark.parametrize("hint", [b"", b"1", b"77\n", b"nonsense\n", b"\xb1\n"])
def test_a_name_that_was_cut_off_or_names_nothing_is_only_a_hint(memory_fs, tmp_path, hint):
    run_of(1, 12, folder=tmp_path / "run", url=REMOTE)
    memory_fs.pipe("/bucket/run/latest_checkpointed_iteration.txt", hint)
    assert RemoteCheckpoints(REMOTE).latest() == 12


def test_a_file_that_arrives_short_is_found(memory_fs, tmp_path):
    run_of(1, folder=tmp_path / "run", url=REMOTE)
    memory_fs.pipe("/bucket/run/global_step_1/actor/state", b"")
    with pytest.raises(CheckpointError, match=naming("actor/state", "0 bytes", "1")):
        Checkpoints(tmp_path / "elsewhere", remote=REMOTE).find("auto")
    assert not (tmp_path / "elsewhere" / "global_step_1").exists()


def test_the_manifest_comes_last_but_for_the_name_of_the_latest(memory_fs, tmp_path, monkeypatch):
    order = []

    def note(name: str, place: int) -> None:
        original = getattr(MemoryFileSystem, name)

        def noting(self, *args, **kwargs):
            order.append(args[place])
            return original(self, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, noting)

    note("put_file", 1)
    note("pipe_file", 0)
    run_of(4, folder=tmp_path / "run", url=REMOTE)
    sizes = json.loads((tmp_path / "run" / "global_step_4" / "manifest.json").read_text())
    assert [Path(path).name for path in order[-2:]] == ["manifest.json", "latest_checkpointed_iteration.txt"]
    assert sorted(order[:-2]) == sorted(f"/bucket/run/global_step_4/{name}" for name in sizes)


def breaking(monkeypatch, *, times: int) -> list[str]:
    """Let the next ``times`` uploads of a state file fail half-way; return the list of uploaded names."""
    put = []
    original = MemoryFileSystem.put_file

    def put_file(self, lpath, rpath, **kwargs):
        nonlocal times
        put.append(Path(rpath).name)
        if rpath.endswith("actor/state") and times > 0:
            times -= 1
            self.pipe_file(rpath, b"")
            raise ConnectionResetError("the line went dead")
        return original(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    return put


def uploader(retries: int, **options) -> Uploader:
    return Uploader(RemoteCheckpoints(REMOTE), retry_after_s=[0.0] * retries, **options)


def test_an_upload_that_fails_is_retried_from_where_it_was(memory_fs, tmp_path, monkeypatch, caplog):
    put = breaking(monkeypatch, times=2)
    folder = Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    upload = uploader(retries=2)
    upload.submit(3, folder)
    upload.close()
    assert put.count("state") == 3
    assert put.count("config.json") == 1
    assert caplog.text.count("the line went dead") == 2
    upload._thread.join(60)
    assert not upload._thread.is_alive()
    download("memory://bucket/run/global_step_3", tmp_path / "copy")
    assert (tmp_path / "copy" / "actor" / "state").read_bytes() == b"1"


def test_an_upload_that_fails_for_good_is_logged_at_once_and_raised_at_the_end(
    memory_fs, tmp_path, monkeypatch, caplog
):
    breaking(monkeypatch, times=2)
    folder = Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    later = Checkpoints(tmp_path).save(4, {"actor": Group(2)}, STATE)
    upload = uploader(retries=1)
    upload.submit(3, folder)
    upload.submit(4, later)
    with pytest.raises(CheckpointError, match=naming("global_step_3", "ConnectionResetError")):
        upload.close()
    assert mentions(caplog.text, "global_step_3")
    verify(folder)
    assert RemoteCheckpoints(REMOTE).latest() == 4


@pytest.mark.parametrize(
    ("error", "tries"), [(PermissionError("token expired"), 4), (OSError(errno.ENOSPC, "No space"), 1)]
)
def test_an_upload_is_retried_unless_the_disk_is_full(memory_fs, tmp_path, monkeypatch, caplog, error, tries):
    tried = []

    def put_file(self, *args, **kwargs):
        tried.append(args)
        raise error

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    folder = Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    upload = uploader(retries=3)
    upload.submit(3, folder)
    with pytest.raises(CheckpointError, match=naming("global_step_3", type(error).__name__)):
        upload.close()
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (len(tried), len(warned)) == (tries, tries)  # close may say that it waits


def test_an_upload_with_a_file_that_arrives_short_is_retried(memory_fs, tmp_path, monkeypatch, caplog):
    original, cut = MemoryFileSystem.put_file, []

    def put_file(self, lpath, rpath, **kwargs):
        original(self, lpath, rpath, **kwargs)
        if rpath.endswith("actor/state") and not cut:
            cut.append(rpath)
            self.pipe_file(rpath, b"")

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    folder = Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    upload = uploader(retries=1)
    upload.submit(3, folder)
    upload.close()
    assert mentions(caplog.text, "CheckpointError", "actor/state")
    assert RemoteCheckpoints(REMOTE).is_whole(3)


def test_a_queued_upload_is_cancelled_when_its_checkpoint_is_pruned(memory_fs, tmp_path, monkeypatch):
    go_on = threading.Event()
    original = MemoryFileSystem.put_file

    def waiting(self, *args, **kwargs):
        assert go_on.wait(60)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", waiting)
    with Checkpoints(tmp_path / "run", remote=REMOTE, max_to_keep=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"actor": Group(step)}, STATE)
            while checkpoints._uploader._current is None:  # the thread takes the first one
                time.sleep(0.01)
        here = sorted(path.name for path in (tmp_path / "run").glob("global_step_*"))
        assert here == ["global_step_1", "global_step_3"]  # the first one is being read
        go_on.set()
    assert names(REMOTE) == ["global_step_3", "latest_checkpointed_iteration.txt"]
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_3"]


def test_a_resumed_run_uploads_the_checkpoint_that_a_killed_one_could_not(memory_fs, tmp_path):
    Checkpoints(tmp_path).save(3, {"actor": Group(1)}, STATE)
    with Checkpoints(tmp_path, remote=REMOTE) as checkpoints:
        checkpoints.load(checkpoints.find("auto"), {"actor": Group(0)})
    assert RemoteCheckpoints(REMOTE).latest() == 3


def test_a_run_that_stops_uploads_its_last_checkpoint_by_time(memory_fs, tmp_path):
    with Checkpoints(tmp_path, remote=REMOTE) as checkpoints:
        checkpoints.save(3, {"actor": Group(1)}, STATE, by_time=True)
        assert RemoteCheckpoints(REMOTE).latest() is None
        checkpoints.copy(3)
    assert RemoteCheckpoints(REMOTE).latest() == 3


def test_a_run_that_saves_by_time_alone_uploads_the_last_two(memory_fs, tmp_path):
    """The machine may be lost, and with it what a stop would upload."""
    groups = {"actor": Group(1)}
    with Checkpoints(tmp_path, remote=REMOTE) as checkpoints:
        checkpoints.save(1, groups, {**STATE, "global_step": 1})
    with Checkpoints(tmp_path, remote=REMOTE, copies_by_time=True) as checkpoints:
        for step in (2, 3, 4):
            checkpoints.save(step, groups, {**STATE, "global_step": step}, by_time=True)
            checkpoints._uploader._changed.acquire()
            checkpoints._uploader._changed.wait_for(lambda: not checkpoints._uploader._left())
            checkpoints._uploader._changed.release()
    assert names(REMOTE) == [
        *(f"global_step_{step}" for step in (1, 3, 4)),
        "latest_checkpointed_iteration.txt",
    ]
    assert RemoteCheckpoints(REMOTE).latest() == 4


def test_a_run_that_saves_by_time_alone_uploads_what_a_killed_one_could_not(memory_fs, tmp_path):
    group = {"actor": Group(1)}
    Checkpoints(tmp_path).save(3, group, STATE, by_time=True)
    with Checkpoints(tmp_path, remote=REMOTE, copies_by_time=True) as checkpoints:
        checkpoints.load(checkpoints.find("auto"), group)
    assert RemoteCheckpoints(REMOTE).latest() == 3


def test_a_resumed_run_uploads_none_that_was_saved_by_time(memory_fs, tmp_path):
    group = {"actor": Group(1)}
    Checkpoints(tmp_path).save(2, group, {**STATE, "global_step": 2})
    Checkpoints(tmp_path).save(3, group, STATE, by_time=True)
    with Checkpoints(tmp_path, remote=REMOTE) as checkpoints:
        checkpoints.load(checkpoints.find("auto"), group)
    assert [RemoteCheckpoints(REMOTE).is_whole(step) for step in (2, 3)] == [True, False]


@pytest.mark.parametrize("dead_before_the_end", [True, False])
@pytest.mark.parametrize("uploads_fail", [True, False])
def test_uploads_are_waited_for_also_when_the_save_in_flight_fails(
    memory_fs, tmp_path, monkeypatch, caplog, uploads_fail, dead_before_the_end
):
    """Otherwise a restart would upload while this run still does."""
    breaking(monkeypatch, times=int(uploads_fail))
    checkpoints = Checkpoints(tmp_path, background=True, remote=REMOTE)
    checkpoints._uploader._retry_after_s = ()
    dead = WorkerError("rank 1 died")

    def run() -> None:
        with checkpoints:
            checkpoints.save(3, {"actor": Group(1)}, STATE)
            checkpoints.save(4, {"actor": Group(2, failure=dead)}, STATE)
            if dead_before_the_end:
                raise dead

    with pytest.raises(WorkerError, match=naming("rank 1")):
        run()
    checkpoints._uploader._thread.join(60)
    assert not checkpoints._uploader._thread.is_alive()
    if uploads_fail:
        assert mentions(caplog.text, REMOTE, "global_step_3", "ConnectionResetError")
    else:
        assert RemoteCheckpoints(REMOTE).latest() == 3


def test_an_upload_that_hangs_is_cancelled_after_an_interrupt(memory_fs, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "AFTER_AN_INTERRUPT_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *args, **kwargs: go_on.wait(60))

    def run() -> None:
        with Checkpoints(tmp_path, remote=REMOTE) as checkpoints:
            checkpoints.save(3, {"actor": Group(1)}, STATE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert mentions(caplog.text, REMOTE, "global_step_3")
    go_on.set()


def test_after_a_resume_from_an_earlier_checkpoint_a_later_copy_stays_and_is_not_the_latest(url, tmp_path):
    run_of(10, 20, 30, folder=tmp_path, url=url, keep=2)
    with Checkpoints(tmp_path, remote=url, max_to_keep=2) as checkpoints:
        found = checkpoints.find(str(tmp_path / "global_step_20"))
        checkpoints.load(found, {"actor": Group(0)})
        checkpoints.go_on_from(20, str(found))
        assert latest(url) == "20\n"
        checkpoints.save(22, {"actor": Group(22)}, STATE)
    copies = ["global_step_20", "global_step_22", "global_step_30"]
    assert names(url) == [*copies, "latest_checkpointed_iteration.txt"]
    assert latest(url) == "22\n"
    assert Checkpoints(tmp_path, remote=url).find("auto") == tmp_path / "global_step_22"


def test_auto_goes_on_from_a_later_copy_that_another_machine_has_made(url, tmp_path):
    """A machine whose folder has stayed behind must not train that part again, nor remove what is later."""
    run_of(1, folder=tmp_path / "first", url=url, keep=2)
    other = Checkpoints(tmp_path / "other", remote=url)
    assert other.find("auto") == tmp_path / "other" / "global_step_1"
    run_of(2, 3, 4, folder=tmp_path / "other", url=url, keep=2)
    checkpoints = Checkpoints(tmp_path / "first", remote=url)
    found = checkpoints.find("auto")
    assert found == tmp_path / "first" / "global_step_4"
    group = Group(0)
    assert checkpoints.load(found, {"actor": group})["global_step"] == group.number == 4
    assert Checkpoints(tmp_path / "first").find("auto") == found


def test_a_later_copy_of_another_run_replaces_nothing(url, tmp_path):
    run_of(1, folder=tmp_path / "own", url=str(tmp_path / "nowhere"))
    run_of(3, folder=tmp_path / "other", url=url)

    def require_same(checkpoint):
        assert checkpoint.parent == tmp_path / "own"
        raise ConfigError("of another model")

    checkpoints = Checkpoints(tmp_path / "own", remote=url)
    with pytest.raises(
        ConfigError, match=naming("trainer.default_hdfs_dir", "global_step_3", "of another model")
    ):
        checkpoints.find("auto", require_same)
    assert Checkpoints(tmp_path / "own").find("auto") == tmp_path / "own" / "global_step_1"


def test_an_earlier_checkpoint_that_the_user_has_named_as_the_latest_is_taken(url, tmp_path):
    run_of(1, 2, folder=tmp_path, url=url)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1\n")
    assert Checkpoints(tmp_path, remote=url).find("auto") == tmp_path / "global_step_1"


def test_auto_goes_on_from_its_own_checkpoint_where_the_remote_folder_does_not_answer(
    memory_fs, tmp_path, monkeypatch, caplog
):
    run_of(1, folder=tmp_path, url=REMOTE)

    def dead(self, *args, **kwargs):
        raise ConnectionResetError("the line went dead")

    monkeypatch.setattr(MemoryFileSystem, "ls", dead)
    monkeypatch.setattr("strop.checkpoint.remote._RETRY_AFTER_S", (0.0,))
    assert Checkpoints(tmp_path, remote=REMOTE).find("auto") == tmp_path / "global_step_1"
    assert mentions(caplog.text, REMOTE, "the line went dead", "global_step_1")


def test_a_remote_checkpoint_that_is_resumed_from_by_its_name_stays_there(url, tmp_path):
    run_of(1, 2, folder=tmp_path / "first", url=url)
    Checkpoints(tmp_path / "second", remote=url).archive_remote(1, f"{url}/global_step_1")
    assert names(url) == ["global_step_1", "global_step_2", "latest_checkpointed_iteration.txt"]
    assert RemoteCheckpoints(url).latest() == 1


def test_going_back_before_all_copies_moves_them_aside(url, tmp_path):
    run_of(10, 20, folder=tmp_path, url=url, keep=1)
    RemoteCheckpoints(url).go_back(15)
    assert names(url) == ["previous_1"]
    assert RemoteCheckpoints(f"{url}/previous_1").latest() == 20


def test_a_new_run_moves_another_ones_remote_checkpoints_aside(url, tmp_path):
    run_of(1, 20, folder=tmp_path / "first", url=url)
    Checkpoints(tmp_path / "second", remote=url).archive_remote(0, "disable")
    run_of(5, folder=tmp_path / "second", url=url, keep=1)
    assert names(url) == ["global_step_5", "latest_checkpointed_iteration.txt", "previous_1"]
    assert RemoteCheckpoints(f"{url}/previous_1").latest() == 20
    assert RemoteCheckpoints(url).latest() == 5


def test_a_copy_onto_itself_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=naming("trainer.default_local_dir")):
        Checkpoints(tmp_path, remote=f"file://{tmp_path}")


def test_a_remote_folder_that_does_not_answer_is_named(memory_fs, tmp_path, monkeypatch):
    def dead(self, *args, **kwargs):
        raise ConnectionResetError("the line went dead")

    monkeypatch.setattr(MemoryFileSystem, "ls", dead)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", dead)
    monkeypatch.setattr("strop.checkpoint.remote._RETRY_AFTER_S", (0.0,))
    with pytest.raises(CheckpointError, match=naming(REMOTE, "the line went dead")):
        Checkpoints(tmp_path, remote=REMOTE).find("auto")
    with pytest.raises(CheckpointError, match=naming("global_step_1", "the line went dead")):
        Checkpoints(tmp_path).find("memory://bucket/run/global_step_1")


def test_a_latest_checkpoint_that_was_deleted_is_named_with_what_to_do(tmp_path):
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("5\n")
    with pytest.raises(CheckpointError, match=naming(latest, "global_step_5", "start from the beginning")):
        find_checkpoint(tmp_path, "auto", None)
    with pytest.raises(CheckpointError, match=naming(latest, "global_step_5", f"latest of {REMOTE}")):
        find_checkpoint(tmp_path, "auto", RemoteCheckpoints(REMOTE))
    (kept := tmp_path / "global_step_2").mkdir()
    (kept / "manifest.json").touch()
    with pytest.raises(CheckpointError, match=naming(latest, "global_step_5", f"that is: {kept}")):
        find_checkpoint(tmp_path, "auto", None)
    latest.unlink()
    assert find_checkpoint(tmp_path, "auto", None) == kept


def test_a_later_upload_of_a_checkpoint_makes_good_for_one_that_failed(memory_fs, tmp_path, monkeypatch):
    breaking(monkeypatch, times=1)
    with Checkpoints(tmp_path, remote=REMOTE) as checkpoints:
        checkpoints._uploader._retry_after_s = ()
        checkpoints.save(3, {"actor": Group(1)}, STATE)
        checkpoints.copy(3)
    assert RemoteCheckpoints(REMOTE).is_whole(3)


def test_a_copy_of_the_same_iteration_of_another_continuation_is_replaced(memory_fs, tmp_path):
    run_of(4, folder=tmp_path / "left", url=REMOTE)
    with Checkpoints(tmp_path / "run") as checkpoints:  # killed before its upload
        checkpoints.save(4, {"actor": Group(9)}, {**STATE, "global_step": 4})
    with Checkpoints(tmp_path / "run", remote=REMOTE) as checkpoints:
        checkpoints.load(checkpoints.find("auto"), {"actor": Group(0)})
    here = (tmp_path / "run" / "global_step_4" / "manifest.json").read_bytes()
    assert read(REMOTE, "global_step_4/manifest.json") == here


def test_a_damaged_checkpoint_with_a_whole_copy_is_not_uploaded(memory_fs, tmp_path):
    run_of(2, 4, folder=tmp_path, url=REMOTE)
    (tmp_path / "global_step_2" / "manifest.json").unlink()
    before = read(REMOTE, "global_step_2/manifest.json")
    with Checkpoints(tmp_path, remote=REMOTE) as checkpoints:
        checkpoints.load(checkpoints.find("auto"), {"actor": Group(0)})
    assert read(REMOTE, "global_step_2/manifest.json") == before

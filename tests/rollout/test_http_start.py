"""Keys of rollout http, its preflight check, and the guard that ends its servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.config.backends import ROLLOUTS
from strop.config.checks.check import check
from strop.config.load import load_config
from strop.errors import ConfigError
from strop.rollout.http import start
from strop.rollout.http.kind import KIND, proxy_of, read_urls, transfer_folder, variables_of

from fake_vllm import FakeVLLM
from messages import naming

HTTP = "actor_rollout_ref.rollout.name=http"
URLS = "actor_rollout_ref.rollout.http.urls"
CPU = "trainer.device=cpu"
BROADCAST = "actor_rollout_ref.rollout.weight_transfer=broadcast"


def of(urls, **given):
    return SimpleNamespace(urls=urls, **{"token_env": None, "open_network": True, **given})


def findings(*options):
    result = check(load_config([HTTP, CPU, *options]))
    lines = [f"error: {line}" for line in result.errors] + [f"warning: {line}" for line in result.warnings]
    return "\n".join(
        line for line in lines if any(word in line for word in ("http", "weight_transfer", "penalty"))
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([f"{URLS}=[http://10.0.0.1:8000]"], ["error", "http://10.0.0.1:8000", "token_env"]),
        ([f"{URLS}=[10.0.0.1:8000,http://h:1]"], ["error", "'10.0.0.1:8000'", "http://HOST:PORT"]),
        ([f"{URLS}=['http://[bad','http://h:99999']"], ["error", "'http://[bad'", "'http://h:99999'"]),
        ([f"{URLS}=['http://127.0.0.1.example.org']"], ["error", "another machine", "token_env"]),
        ([f"{URLS}=['http://me:hidden@127.0.0.1:1']"], ["error", "127.0.0.1 has a login", "token_env"]),
        (["actor_rollout_ref.rollout.http.proxy=http://me:hidden@h:1"], ["error", "config.yaml", "variable"]),
        (["actor_rollout_ref.rollout.http.proxy=NO_SUCH"], ["error", "proxy=NO_SUCH", "variable"]),
        ([f"{URLS}=[no/such/file]"], ["error", "no/such/file", "No such file"]),
        (["actor_rollout_ref.rollout.http.min_servers=2"], ["error", "min_servers=2", "1 servers"]),
        (["actor_rollout_ref.rollout.http.token_env=NO_SUCH"], ["error", "token_env=NO_SUCH"]),
        (["trainer.async_steps=2", "environment.path=x.py:X"], ["error", "async_steps=2"]),
        (
            ["actor_rollout_ref.rollout.presence_penalty=1", "environment.path=x.py:X"],
            ["error", "presence_penalty", "environment"],
        ),
        (["trainer.n_gpus_per_node=2"], ["error", "2 processes", "hybrid_engine=False"]),
        (["actor_rollout_ref.rollout.seed_per_sample=False"], ["error", "seed_per_sample=False"]),
        (["trainer.device=cuda"], ["error", "GPUs", "CUDA_VISIBLE_DEVICES"]),
        (
            [
                f"{URLS}=[https://10.0.0.1:8000]",
                "actor_rollout_ref.rollout.http.open_network=True",
                "actor_rollout_ref.rollout.weight_transfer=memory",
            ],
            ["error", "weight_transfer=memory", "disk"],
        ),
        (
            [f"{URLS}=[http://127.0.0.1:1]", "actor_rollout_ref.rollout.max_num_batched_tokens=2048"],
            ["warning", "no effect", "max_num_batched_tokens"],
        ),
        (
            [f"{URLS}=[http://127.0.0.1:1]", "actor_rollout_ref.rollout.http.start.n=2"],
            ["warning", "start.n=2"],
        ),
    ],
    ids=lambda value: value[-1] if value[0] not in ("error", "warning") else "",
)
def test_what_cannot_work_is_refused_before_a_model_loads(options, named):
    found = findings(*options)
    assert all(word in found for word in named), found
    assert "hidden" not in found


@pytest.mark.parametrize(
    "options",
    [
        (),
        (f"{URLS}=['http://localhost:8000','https://[::1]:8001']",),
        (f"{URLS}=[http://10.0.0.1:8000]", "actor_rollout_ref.rollout.http.open_network=True"),
        ("trainer.async_steps=1", "actor_rollout_ref.hybrid_engine=False"),
        (f"{URLS}=[http://10.0.0.1:8000]", "actor_rollout_ref.rollout.http.open_network=True", BROADCAST),
    ],
)
def test_what_works_is_not(options):
    found = findings(*options)
    assert "error" not in found.replace("async_steps=1", "")
    assert "weight_transfer" not in found


def test_keys_of_http_are_reported_with_another_rollout():
    result = check(load_config(["actor_rollout_ref.rollout.name=hf", CPU, f"{URLS}=[http://127.0.0.1:1]"]))
    assert any("http.urls" in line and "only http honours it" in line for line in result.warnings)


def test_weights_go_by_memory_to_this_machine_and_else_by_disk(tmp_path):
    run = f"trainer.default_local_dir={tmp_path}"
    assert transfer_folder(load_config([HTTP, run])) is None
    assert transfer_folder(load_config([HTTP, run, f"{URLS}=[http://127.1.2.3:1]"])) is None
    network = "actor_rollout_ref.rollout.http.open_network=True"
    other = load_config([HTTP, run, network, f"{URLS}=[http://127.0.0.1:1,http://10.0.0.1:1]"])
    assert transfer_folder(other) == tmp_path / "weights"
    disk = "actor_rollout_ref.rollout.weight_transfer=disk"
    assert transfer_folder(load_config([HTTP, run, disk])) == tmp_path / "weights"
    assert transfer_folder(load_config([HTTP, run, f"{URLS}=[http://10.0.0.1:1]", BROADCAST])) is None


def test_a_file_of_urls_has_comments_and_empty_lines(tmp_path):
    (tmp_path / "urls").write_text("# ours\n\n http://a:1/ \nhttp://b:2\n")
    assert read_urls(of([str(tmp_path / "urls")])) == ["http://a:1", "http://b:2"]
    with pytest.raises(ConfigError, match=naming("missing", "No such file")):
        read_urls(of(["missing"]))
    (tmp_path / "urls").write_bytes(b"PAR1\xff")
    with pytest.raises(ConfigError, match=naming("urls", "utf-8")):
        read_urls(of([str(tmp_path / "urls")]))


def test_urls_of_a_file_are_under_the_rule_of_others_each_once(tmp_path):
    names = tmp_path / "urls"
    names.write_text("http://127.0.0.1:1\nhttp://127.0.0.1:1/\n")
    assert (
        KIND.slots(load_config([HTTP, f"{URLS}=[{names}]", "actor_rollout_ref.rollout.max_num_seqs=8"])) == 8
    )
    names.write_text("http://127.0.0.1:1\nhttp://10.0.0.1:1\n")
    with pytest.raises(ConfigError, match=naming("http://10.0.0.1:1", "token_env")):
        read_urls(of([str(names)], open_network=False))


def test_a_proxy_with_a_login_is_named_by_a_variable(monkeypatch):
    monkeypatch.setenv("OUR_PROXY", "http://me:hidden@h:1")
    config = load_config([HTTP, "actor_rollout_ref.rollout.http.proxy=OUR_PROXY"])
    assert proxy_of(config.actor_rollout_ref.rollout.http) == "http://me:hidden@h:1"
    assert "proxy" not in findings("actor_rollout_ref.rollout.http.proxy=OUR_PROXY")
    assert proxy_of(SimpleNamespace(proxy="http://h:1")) == "http://h:1"


def test_variables_that_keys_of_servers_name_are_handed_on(monkeypatch):
    for name in ("OUR_PROXY", "OF_OURS", "OF_THE_TEACHER", "ANOTHER"):
        monkeypatch.setenv(name, f"value of {name}")
    named = ["actor_rollout_ref.rollout.http.proxy=OUR_PROXY", "teacher.token_env=OF_THE_TEACHER"]
    assert variables_of(load_config([HTTP, *named, "actor_rollout_ref.rollout.http.token_env=OF_OURS"])) == {
        name: f"value of {name}" for name in ("OUR_PROXY", "OF_OURS", "OF_THE_TEACHER")
    }
    assert variables_of(load_config([HTTP, "actor_rollout_ref.rollout.http.proxy=http://h:1"])) == {}


def test_the_first_errors_of_a_servers_log_are_shown_before_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(start.subprocess, "Popen", lambda command, **options: None)
    monkeypatch.setattr(start.tempfile, "tempdir", str(tmp_path))
    server = start.OwnServer(["server"], "token", tmp_path / "log")
    lines = ["(Worker) RuntimeError: heads of 16", "(Worker) RuntimeError: heads of 16", *["  File x"] * 99]
    (tmp_path / "log").write_text("\n".join(lines))
    shown = server.last_lines().splitlines()
    assert shown[0] == "RuntimeError: heads of 16"
    assert len(shown) < 20


def test_the_preflight_check_asks_the_servers():
    good, other = FakeVLLM(max_model_len=4096), FakeVLLM(max_model_len=100)
    config = load_config([HTTP, CPU, f"{URLS}=[{good.url},{other.url},http://127.0.0.1:9]"])
    found = list(ROLLOUTS["http"].outside(config))
    assert [
        (level, url) for level, text in found for url in (other.url, "http://127.0.0.1:9") if url in text
    ] == [
        ("error", other.url),
        ("warning", "http://127.0.0.1:9"),
    ]
    assert "max_model_len is 100" in found[0].text
    assert list(ROLLOUTS["http"].outside(load_config([HTTP, CPU]))) == []


def test_a_servers_environment_has_nothing_of_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = start.environment("secret", tmp_path, "mark")
    assert not found.keys() & {"VLLM_LOGGING_LEVEL", "https_proxy", "RANK"}
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["STROP_TOKEN"] == "secret"


def test_arguments_are_vllms_options():
    line = start.command(
        {"max_num_seqs": 8, "enforce_eager": True, "hf_overrides": {"a": 1}}, ["--seed", "3"]
    )
    options = " ".join(line)
    assert '--max-num-seqs 8 --enforce-eager --hf-overrides {"a": 1}' in options
    assert options.endswith("--seed 3")
    assert "secret" not in options


SERVER = """
import multiprocessing.shared_memory, os, subprocess, sys, time
held = multiprocessing.shared_memory.SharedMemory(name="strop_test_" + sys.argv[1], create=True, size=4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2] + "/ready", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
GUARD = """
import sys
from pathlib import Path
from strop.rollout.http import start

def noting(processes, plain=start.shared_names):
    if found := plain(processes):
        Path(sys.argv[1], "names are known").touch()
    return found

start.shared_names = noting
start._guard(sys.argv[2], sys.argv[3:])
"""
RUN = """
import subprocess, sys, time
guard = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["the run is killed", "the server is killed"])
def test_a_guard_leaves_no_process_and_no_shared_memory(tmp_path, end):
    folder, name = tmp_path / "server", uuid.uuid4().hex
    folder.mkdir()
    guard = ["-P", "-c", GUARD, str(tmp_path), str(folder)]
    server = [sys.executable, "-c", SERVER, name, str(tmp_path)]
    run = subprocess.Popen([sys.executable, "-c", RUN, *guard, *server])
    processes = _started(tmp_path)
    shared = Path(f"/dev/shm/strop_test_{name}")
    assert shared.exists()
    _wait_for((tmp_path / "names are known").exists)
    if end == "the run is killed":
        run.kill()
    else:
        os.kill(processes[0], signal.SIGKILL)
    _wait_for(lambda: not (shared.exists() or folder.exists() or any(map(_runs, processes))))
    run.kill()
    run.wait()


def test_a_guard_that_is_killed_leaves_nothing_either(tmp_path):
    command = [sys.executable, "-c", SERVER, uuid.uuid4().hex, str(tmp_path)]
    server = start.OwnServer(command, "secret", tmp_path / "log")
    processes = _started(tmp_path)
    assert _runs(processes[1])
    server._guard.kill()
    server._guard.wait()
    _wait_for(lambda: not (server._folder.exists() or any(map(_runs, processes))))
    server.stop()
    Path(f"/dev/shm/strop_test_{os.getpid()}_own").unlink(missing_ok=True)  # of the process that ended first


def _wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _started(folder):
    """Return the processes of ``SERVER``."""
    file = folder / "ready"
    _wait_for(lambda: file.exists() and file.read_text())
    return [int(word) for word in file.read_text().split()]


def _runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

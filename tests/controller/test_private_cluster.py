"""The private cluster of a run: its start, its token, and a loss while a driver connects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from strop.controller import rendezvous
from strop.controller.ray import cluster
from strop.errors import ConfigError, WorkerError

from messages import naming

CONNECT = """
import ray
from strop.controller.ray import cluster

cluster.connect(1)
assert ray.get(ray.remote(lambda: 7).remote()) == 7
"""
FORK_AMONG_KILLS = """
import os, pathlib, subprocess
from strop.controller.ray import private

def fork_first(identity, number, kill=os.kill):
    if len(started) == 1:
        start()
    kill(identity, number)

def start():
    started.append(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

started = []
start()
os.kill = fork_first
private._Keeper(1, pathlib.Path("none"), 2)._watch()
"""
LOSE_THE_RAYLET = """
import psutil
import ray

init = ray.init


def kill_and_init(**options):
    for process in psutil.Process().children(recursive=True):
        if process.name() == "raylet":
            process.kill()
    init(**options)


ray.init = kill_and_init
"""


def drive(program, home, **authentication):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment |= {"HOME": str(home), "RAY_ADDRESS": "local", **authentication}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize("failures", [1, 2])
def test_a_cluster_that_does_not_start_is_started_once_more(monkeypatch, caplog, failures):
    connected = []

    class Cluster:
        def __init__(self, cpus):
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise WorkerError("Ray did not start: its process raylet died\nlast lines")

        def connect(self):
            connected.append(self)

    monkeypatch.setattr(cluster, "PrivateCluster", Cluster)
    monkeypatch.setattr(cluster, "_PRIVATE", [])
    if failures == 2:
        with pytest.raises(WorkerError, match="raylet died"):
            cluster._start(1)
    else:
        cluster._start(1)
        assert connected == cluster._PRIVATE != []
    assert caplog.messages == ["warning: Ray did not start: its process raylet died; starting it once more"]


def test_the_keeper_ends_what_is_forked_while_it_kills():
    """It was adopted, and the keeper waited for it."""
    done = subprocess.run([sys.executable, "-c", FORK_AMONG_KILLS], stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "authentication",
    [{"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_TOKEN": "0123456789" * 4}],
    ids=lambda names: next(iter(names)),
)
def test_nothing_is_written_to_the_home_folder_whatever_the_authentication(tmp_path, authentication):
    done = drive(CONNECT, tmp_path, **authentication)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_agents_that_start_slowly_do_not_end_the_cluster(tmp_path):
    """Ray's raylet waits 15 s for ports that its agents choose, and 30 s for a first answer."""
    slow = "import sys, time\ntime.sleep(40 * any(part.endswith('agent.py') for part in sys.orig_argv))\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = drive(CONNECT, tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "starting it once more" not in done.stderr


@pytest.mark.slow
def test_a_raylet_that_dies_while_the_driver_connects_is_named(tmp_path):
    """Ray's native code ends the driver then, so the process that started Ray has to report it."""
    done = drive(LOSE_THE_RAYLET + CONNECT, tmp_path)
    assert done.returncode != 0
    assert "WorkerError: Ray did not start on this machine: its process raylet (pid " in done.stderr


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001"])
def test_an_address_of_jobs_or_of_rays_client_is_refused(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=naming(f"RAY_ADDRESS={address}", "HOST:PORT")):
        cluster.connect(2)


def test_gloo_takes_the_interface_towards_the_others(monkeypatch):
    """The name of a machine may be 127.0.1.1, by which no other one reaches it."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(rendezvous, "address_toward", lambda host: "127.0.0.1")
    rendezvous.choose_interfaces("10.0.0.7")
    assert [*environment] == ["GLOO_SOCKET_IFNAME"]
    assert environment["GLOO_SOCKET_IFNAME"].startswith("lo")
    environment["GLOO_SOCKET_IFNAME"] = "ib0"
    rendezvous.choose_interfaces("10.0.0.7")
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0"}

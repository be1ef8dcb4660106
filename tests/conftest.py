"""Test environment, Ray sessions and the assignment of tests to xdist workers."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# One thread each: tests run in parallel, and numbers must not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network, or wait for it
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
torch.set_num_threads(1)
# A shell that starts tests in the background has SIGINT ignored, which the runs they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Duration of an example says nothing where other processes share the cores.
hypothesis.settings.register_profile("strop", deadline=None)
hypothesis.settings.load_profile("strop")

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


RAY_SLOTS = 8


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start one Ray session for all tests that use it; they share one xdist worker (see below)."""
    import ray

    import forked_ray

    with tempfile.TemporaryDirectory() as folder:
        forked_ray.use(folder)
        _start_ray()
        yield
        ray.shutdown()


def _start_ray() -> None:
    import ray

    ray.init(address="local", num_cpus=RAY_SLOTS, include_dashboard=False, logging_level="WARNING")


@pytest.fixture(scope="module")
def two_nodes(ray_session: None) -> Iterator[None]:
    """Replace the Ray session by a local cluster of two nodes with separate addresses and two slots each."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    ray.init(address=cluster.address, logging_level="WARNING")
    yield
    ray.shutdown()
    cluster.shutdown()
    _start_ray()


# Tests that mostly wait: for deadlines, or for processes that start and end.
_WAITING = ("tests/controller/", "tests/rewards/")
_LONGEST = (
    "Ray, waiting",
    "Ray",
    "tests/e2e/test_ray.py",
    "tests/rollout/test_vllm_rollout.py",
    "tests/e2e/test_resume.py",
    "tests/e2e/test_resume_async.py",
    "tests/models/test_ulysses.py",
    "tests/e2e/test_vllm_run.py",
    "tests/engines/test_sharded_engine.py",
    "tests/models/test_layouts.py",
)


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that wait, and group tests for ``--dist loadgroup``: by module, or by Ray session.

    With ``--no-loadscope-reorder`` groups start in the order of their first tests: sort the longest first, so
    that all workers finish at about the same time.
    """
    groups = {}
    for item in items:
        waits = item.nodeid.startswith(_WAITING)
        if waits:
            item.add_marker(pytest.mark.waits)
        if "ray_session" in getattr(item, "fixturenames", ()):
            group = "Ray, waiting" if waits else "Ray"
        else:
            group = item.nodeid.split("::")[0]
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
        groups[item] = group
    items.sort(key=lambda item: _LONGEST.index(groups[item]) if groups[item] in _LONGEST else len(_LONGEST))

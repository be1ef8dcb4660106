"""Test environment, Ray sessions and the assignment of tests to xdist workers."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# One thread each: tests run in parallel, and numbers must not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Runs would take the GPUs of the machine, and numbers and messages are those of CPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network, or wait for it
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Colours and widths of the terminal would be those of the outputs that tests compare.
# A proxy of the shell does not reach the servers of tests.
for _name in [*os.environ]:
    if _name.lower() in ("force_color", "columns", "http_proxy", "https_proxy", "all_proxy"):
        del os.environ[_name]
# A shell that starts tests in the background has SIGINT ignored, and nohup SIGHUP, which the runs they start
# would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Duration of an example says nothing where other processes share the cores. The same examples every time, so
# that a change fails by its own faults alone; ``make test-all`` draws new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("new", deadline=None)
hypothesis.settings.load_profile("same")

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


def pytest_configure(config: pytest.Config) -> None:
    """Import torch where tests run; the process that hands them to workers starts sooner without it."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)
    else:
        config.pluginmanager.register(_Failures(config))


class _Failures:
    """Name each failed test as it fails: pytest's own list comes after the last test, an hour later."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid} in its {report.when}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let random numbers of torch depend on no earlier test."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_outlives_its_module() -> Iterator[None]:
    """End the default process group that engines within this process have left, for modules that make one."""
    yield
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        if vllm := sys.modules.get("vllm.distributed.parallel_state"):
            vllm.cleanup_dist_env_and_memory()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def no_vllm_outlives_its_module() -> Iterator[None]:
    """End the process groups of vLLM's engines after a module, for the next one's."""
    yield
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


RAY_SLOTS = 8
_RAY_SESSION: list[bool] = []
"""Not empty while ``ray_session`` has started one in this process."""


@pytest.fixture(scope="module")
def ray_session(forked_workers: None) -> None:
    """Start a Ray session, if none is left of the module before; see ``pytest_runtest_teardown``."""
    import ray

    if not (_RAY_SESSION and ray.is_initialized()):
        ray.shutdown()  # of a run's private cluster, which has as many places as that run needed
        ray.init(address="local", num_cpus=RAY_SLOTS, include_dashboard=False, logging_level="WARNING")
    _RAY_SESSION.append(True)


@pytest.fixture(scope="session")
def forked_workers() -> Iterator[None]:
    """Fork the workers of Ray from one server."""
    import forked_ray

    with tempfile.TemporaryDirectory() as folder:
        forked_ray.use(folder)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: Any, nextitem: Any) -> Generator[None]:
    """End the Ray session of a module that the next one does not use: idle, it takes a tenth of a core."""
    yield
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and "ray_session" not in getattr(nextitem, "fixturenames", ()) and _RAY_SESSION:
        import ray

        ray.shutdown()
        _RAY_SESSION.clear()


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


_RAY_CONTROLLER = tuple(f"tests/controller/test_{name}.py" for name in ("failures", "nodes", "groups"))
_RAY_RUNS = (
    "tests/parity/test_ranks.py",
    "tests/parity/test_megatron_ranks.py",
    "tests/e2e/test_async_ranks.py",
    "tests/e2e/test_reference_documents.py",
    "tests/e2e/test_eval.py",
    "tests/e2e/test_external_lib.py",
    "tests/workers/test_reward_model.py",
    "tests/workers/test_workers_in_flight.py",
)
# Each of their runs starts a Ray cluster: on two cores several at once take minutes.
_RAY_CLUSTERS = (
    "tests/e2e/test_ray",
    "tests/e2e/test_stopped_on_ray.py",
    "tests/controller/test_private_cluster.py",
    "tests/e2e/test_async_failures.py",
)
# Tests that mostly wait, for deadlines or for processes that start and end, and tests with short limits of
# time, as they have the cores first.
_WAITING = (
    "tests/agents/",
    "tests/controller/",
    "tests/rewards/",
    "tests/tracking/",
    "tests/turns/",
    "tests/rollout/test_http_",
    "tests/e2e/test_stopped_runs.py",
    "tests/e2e/test_turn_runs.py",
    "tests/e2e/test_serve.py",
    "tests/trainer/test_lost_folder.py",
    "tests/test_process_tree.py",
    "tests/benchmarks/test_gpu.py",
    "tests/models/test_deferred.py",
    "tests/data/test_data_download_processes.py",
    "tests/data/test_data_hub.py",
    "tests/data/test_template_check.py",
    *_RAY_CLUSTERS,
    *_RAY_RUNS,
)
_VLLM = (
    "tests/rollout/test_vllm_rollout.py",
    "tests/rollout/test_vllm_in_flight.py",
    "tests/e2e/test_vllm_run.py",
)
_LONGEST = (
    "tests/rollout/test_http_servers.py",
    *_RAY_RUNS,
    "tests/e2e/test_ray.py",
    "tests/e2e/test_turn_settings.py",
    "tests/e2e/test_agent_settings.py",
    "tests/e2e/test_killed_turns.py",
    "tests/e2e/test_picture_runs.py",
    *_VLLM,
    "tests/e2e/test_resume.py",
    "tests/engines/test_sharded_engine.py",
    "tests/models/test_layouts.py",
    "tests/e2e/test_resume_async.py",
    "tests/models/test_ulysses.py",
    "tests/test_fuzz.py",
    *_RAY_CONTROLLER,
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of the other lane; see ``lanes.py``."""
    lane = os.environ.get("STROP_TEST_LANE")
    if lane is None or collection_path.suffix != ".py":
        return None
    waits = any(folder in collection_path.as_posix() for folder in _WAITING)
    return True if waits != (lane == "waiting") else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, as they share its runs, and those of one Ray session
    or one import of vLLM.

    ``--no-loadscope-reorder`` hands files out in the order of their first tests. (``--dist loadgroup`` groups
    nothing with pytest 9.2: pytest-xdist 3.8 writes a group into an attribute that pytest no longer reads.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # one Ray session each, one cluster after the other, one import of vLLM
            for group in (_RAY_CONTROLLER, _RAY_RUNS, _RAY_CLUSTERS, _VLLM):
                if nodeid.startswith(group):
                    return group[0]
            return nodeid.split("::")[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that all workers end at the same time."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.split("::")[0], len(ranks)))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(name: str) -> Generator[None, Any, Any]:
    """Mark as slow the cases of a test that its mark ``fast`` does not name.

    Here a test has all its cases; ``--lf``, or an id on the command line, leaves some out later.
    """
    cases = yield
    if isinstance(cases, list) and cases and (mark := cases[0].get_closest_marker("fast")):
        could_be = {case.callspec.id for case in cases if not case.get_closest_marker("slow")}
        if unknown := set(mark.args) - could_be:
            named = ", ".join(sorted(unknown))
            raise pytest.Collector.CollectError(f"{name}: fast names no case, or a slow one: {named}")
        for case in cases:
            if case.callspec.id not in mark.args:
                case.add_marker("slow")
    return cases


def pytest_collection_finish() -> None:
    """Keep imported modules out of later garbage collections, and parse each text of a configuration once.

    The modules are half a million objects, and a collection that visits them takes 0.25 s of CPU time. A
    configuration is loaded thousands of times, and half of its 65 ms are grammars that read the same texts.
    """
    import omegaconf.base

    from strop.config import overrides

    omegaconf.base.parse = functools.cache(omegaconf.base.parse)
    overrides._parse = functools.cache(overrides._parse)
    gc.collect()
    gc.freeze()
